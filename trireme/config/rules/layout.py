"""Rules about backends, parallel layouts and how batches are laid out over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trireme.config.rules.registry import Rule, nearest_multiple, rule_into

if TYPE_CHECKING:
    from trireme.config.blocks.megatron import MegatronConfig
    from trireme.config.root import Config

RULES: list[Rule] = []
rule = rule_into(RULES)
MEGATRON = "policy.megatron_cfg"
STAGE_KEYS = (
    "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)


@rule("one-backend")
def _one_backend(config: Config) -> Iterator[str]:
    """Exactly one of megatron_cfg and dtensor_cfg is enabled."""
    megatron, dtensor = config.policy.megatron_cfg.enabled, config.policy.dtensor_cfg.enabled
    if megatron == dtensor:
        state = "both true" if megatron else "both false"
        change = "policy.dtensor_cfg.enabled=false" if megatron else "policy.megatron_cfg.enabled=true"
        yield (f"{MEGATRON}.enabled and policy.dtensor_cfg.enabled are {state}; exactly one must be true: {change}")


@rule("packing-or-dynamic-batching")
def _packing_or_dynamic(config: Config) -> Iterator[str]:
    """Packing and dynamic batching exclude each other; dynamic batching needs one pipeline stage."""
    if config.policy.sequence_packing.enabled and config.policy.dynamic_batching.enabled:
        yield (
            "policy.sequence_packing.enabled and policy.dynamic_batching.enabled are both true; they exclude each "
            "other: policy.dynamic_batching.enabled=false"
        )
    stages = config.policy.megatron_cfg.pipeline_model_parallel_size
    if config.policy.dynamic_batching.enabled and stages > 1:
        yield (
            f"policy.dynamic_batching.enabled needs {MEGATRON}.pipeline_model_parallel_size=1, not {stages}; or use "
            "policy.sequence_packing.enabled=true in its place"
        )


@rule("context-parallel-needs-packing")
def _context_parallel(config: Config) -> Iterator[str]:
    """Context parallelism needs packing."""
    size = config.policy.megatron_cfg.context_parallel_size
    if size > 1 and not config.policy.sequence_packing.enabled:
        yield (
            f"{MEGATRON}.context_parallel_size is {size} but policy.sequence_packing.enabled is false: "
            "policy.sequence_packing.enabled=true, or context_parallel_size=1"
        )


@rule("world-size")
def _world_size(config: Config) -> Iterator[str]:
    """The ranks are a multiple of TP x CP x PP."""
    sizes = "tensor_model_parallel_size x context_parallel_size x pipeline_model_parallel_size"
    yield from _indivisible(config.world_size, config.policy.megatron_cfg.model_parallel_size, sizes)


@rule("expert-world-size")
def _expert_world_size(config: Config) -> Iterator[str]:
    """With expert parallelism, the ranks are a multiple of its sizes times PP."""
    megatron = config.policy.megatron_cfg
    sizes = "expert_tensor_parallel_size x expert_model_parallel_size x pipeline_model_parallel_size"
    experts = megatron.expert_tensor_parallel_size * megatron.expert_model_parallel_size
    if megatron.expert_model_parallel_size > 1:
        yield from _indivisible(config.world_size, experts * megatron.pipeline_model_parallel_size, sizes)


def _indivisible(world: int, part: int, sizes: str) -> Iterator[str]:
    if world % part:
        yield (
            f"trainer.nproc x cluster.num_nodes is {world}, no multiple of {MEGATRON}.{sizes} = {part}: "
            f"{nearest_multiple(world, part)} ranks, or a smaller layout"
        )


@rule("sequence-parallel-needs-tensor-parallel")
def _sequence_parallel(config: Config) -> Iterator[str]:
    """Sequence parallelism needs tensor parallelism."""
    megatron, dtensor = config.policy.megatron_cfg, config.policy.dtensor_cfg
    if megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        yield (
            f"{MEGATRON}.sequence_parallel is true but {MEGATRON}.tensor_model_parallel_size is 1: "
            "sequence_parallel=false, or tensor_model_parallel_size=2"
        )
    if dtensor.sequence_parallel and dtensor.tensor_parallel_size == 1:
        yield (
            "policy.dtensor_cfg.sequence_parallel is true but policy.dtensor_cfg.tensor_parallel_size is 1: "
            "sequence_parallel=false, or tensor_parallel_size=2"
        )


@rule("sequence-length-multiple")
def _sequence_length_multiple(config: Config) -> Iterator[str]:
    """make_sequence_length_divisible_by, if given, is a multiple of (2·CP if CP>1)·(TP if sequence-parallel)."""
    needed = sequence_length_multiple(config.policy.megatron_cfg)
    given = config.policy.make_sequence_length_divisible_by
    if given is not None and given % needed:
        yield (
            f"policy.make_sequence_length_divisible_by is {given}, but {MEGATRON}.context_parallel_size and "
            f"{MEGATRON}.tensor_model_parallel_size with sequence_parallel need a multiple of {needed}: "
            f"{nearest_multiple(given, needed)}"
        )


def sequence_length_multiple(megatron: MegatronConfig) -> int:
    """What each sequence's length must be a multiple of, in tokens: (2·CP if CP>1)·(TP if sequence-parallel)."""
    context, tensor = megatron.context_parallel_size, megatron.tensor_model_parallel_size
    return (2 * context if context > 1 else 1) * (tensor if megatron.sequence_parallel else 1)


@rule("pipeline-stage-layers")
def _stage_layers(config: Config) -> Iterator[str]:
    """Virtual stages, and layers of the first and last stage, are set only where there are stages."""
    megatron = config.policy.megatron_cfg
    if megatron.pipeline_model_parallel_size > 1:
        return
    for name in STAGE_KEYS:
        if getattr(megatron, name) is not None:
            yield (
                f"{MEGATRON}.{name} is {getattr(megatron, name)} but {MEGATRON}.pipeline_model_parallel_size is 1: "
                f"{name}=null, or pipeline_model_parallel_size=2"
            )


@rule("shared-prefix-needs-whole-sequences")
def _shared_prefix(config: Config) -> Iterator[str]:
    """A prompt is shared only where no sequence is cut over context-parallel ranks."""
    size = config.policy.megatron_cfg.context_parallel_size
    if config.trainer.shared_prefix is True and size > 1:
        yield f"trainer.shared_prefix is true, but {MEGATRON}.context_parallel_size is {size}: shared_prefix=auto"
