"""Hugging Face weights to Megatron's and back, tensor by tensor, under any layout of ranks.

Every parameter is written exactly once: what is missing, left over or of another shape is an error that names it.
Memory holds one whole tensor at a time (for experts, one of each expert-parallel rank).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from services.trainer.backends.megatron.families import Architecture
from services.trainer.backends.megatron.folder import Folder
from services.trainer.backends.megatron.model import PolicyModel
from services.trainer.backends.megatron.rules import (
    EMBEDDING,
    EXPERT,
    HEAD,
    LAYER,
    find_rule,
    pad_rows,
    shapes_of,
    shard,
    unshard,
)

# In some older folders, though they are computed and not weights.
IGNORED = re.compile(r"rotary_emb\.inv_freq$|\.attention\.(masked_)?bias$")
LOCAL_EXPERT = re.compile(r"\.experts\.(?:local_experts\.(\d+)\.(\w+\.\w+)|(\w+\.(?:weight|bias))(\d+))$")


@dataclass(frozen=True)
class Share:
    """A parameter's place among the ranks that hold the rest of it. whole: the shape of all of it, with padding.
    group: None where this rank holds all of it."""

    dim: int
    group: dist.ProcessGroup | None
    whole: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.group.rank() if self.group else 0

    @property
    def ranks(self) -> int:
        return self.group.size() if self.group else 1


def named_parameters(chunks: Sequence[PolicyModel]) -> Iterator[tuple[str, nn.Parameter]]:
    """This rank's parameters; layers and experts are numbered as in the whole model."""
    for model in chunks:
        for name, parameter in model.named_parameters():
            layer = LAYER.match(name)
            if layer:
                number = model.decoder.layers[int(layer[1])].layer_number - 1
                name = f"decoder.layers.{number}.{LOCAL_EXPERT.sub(_global_expert(model), layer[2])}"
            yield name, parameter


def _global_expert(model: PolicyModel) -> Callable[[re.Match[str]], str]:
    """The substitution of an expert's name, which is of one form here and of another with grouped GEMM."""
    first = parallel_state.get_expert_model_parallel_rank() * local_experts(model)

    def name(found: re.Match[str]) -> str:
        number, weight = (found[1], found[2]) if found[1] else (found[4], found[3])
        return f".experts.{first + int(number)}.{weight}"

    return name


def local_experts(model: PolicyModel) -> int:
    """How many experts of each layer this rank holds; 0 for a dense model."""
    return (model.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()


@torch.no_grad()
def load(chunks: Sequence[PolicyModel], architecture: Architecture, folder: Path) -> None:
    """Write every parameter of this rank's `chunks` from `folder`, cast to its own dtype. Collective.

    Raises ValueError naming a tensor that is missing, of the wrong shape, written twice or not used.
    """
    used, shapes = set[str](), shapes_of(architecture)
    with Folder(folder) as source:
        for name, parameter in named_parameters(chunks):
            # A tied embedding is held twice where the first and the last pipeline stage are not the same.
            rule, names = find_rule(architecture.name, EMBEDDING if name == HEAD and architecture.tied else name)
            if twice := used.intersection(names):
                raise ValueError(f"tensor {sorted(twice)[0]} would be written twice, the second time to {name}")
            used.update(names)
            whole = rule.join([source.read(part) for part in names], shapes)
            _write(parameter, name, whole, rule.stacked, f"{folder}: {' + '.join(names)}", chunks[0].vocab_size)
        _refuse_unused(source, _by_any_rank(used), architecture.tied)


def _write(parameter: nn.Parameter, name: str, whole: Tensor, stacked: int, what: str, words: int) -> None:
    """This rank's part of `whole`."""
    share = _share(name, parameter)
    expected = (words, *share.whole[1:]) if name in (HEAD, EMBEDDING) else share.whole
    if whole.shape != expected:
        raise ValueError(f"{what} has shape {tuple(whole.shape)}, not {tuple(expected)}")
    parameter.copy_(shard(pad_rows(whole, share.whole[0]), share.dim, stacked, share.rank, share.ranks))


def _share(name: str, parameter: nn.Parameter) -> Share:
    if EXPERT.search(name):
        # Transformer Engine is not told how experts are shared: only their names say it.
        dim, group = int("linear_fc2" in name), parallel_state.get_expert_tensor_parallel_group()
    elif getattr(parameter, "tensor_model_parallel", False):
        dim, group = parameter.partition_dim, parallel_state.get_tensor_model_parallel_group()  # type: ignore[attr-defined]
    else:
        return Share(0, None, tuple(parameter.shape))
    whole = list(parameter.shape)
    whole[dim] *= group.size()
    return Share(dim, group, tuple(whole))


def _by_any_rank(used: set[str]) -> set[str]:
    if dist.get_world_size() == 1:
        return used
    found: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(found, used)
    return set().union(*found)


def _refuse_unused(source: Folder, used: set[str], tied: bool) -> None:
    unused = {name for name in source.names() - used if not IGNORED.search(name)}
    if tied and "lm_head.weight" in unused:
        head, embedding = source.read("lm_head.weight"), source.read("model.embed_tokens.weight")
        if not torch.equal(head, embedding):
            raise ValueError(f"{source.folder}: tie_word_embeddings is true but lm_head.weight is not the embedding")
        unused.discard("lm_head.weight")
    if unused:
        raise ValueError(f"{source.folder} has tensors that this model does not use: {', '.join(sorted(unused)[:5])}")


@torch.no_grad()
def export(
    chunks: Sequence[PolicyModel], architecture: Architecture, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The weights under Hugging Face names, one at a time, on the CPU; valid until the model changes.

    Collective, and the same on every rank: all must exhaust it.
    """
    shapes = shapes_of(architecture)
    for name, whole in _whole_parameters(chunks, architecture, dtype):
        rule, names = find_rule(architecture.name, name)
        if name in (HEAD, EMBEDDING):
            whole = whole[: chunks[0].vocab_size]
        for part, tensor in zip(names, rule.split(whole, shapes), strict=True):
            yield part, tensor.to("cpu", dtype)


def _whole_parameters(
    chunks: Sequence[PolicyModel], architecture: Architecture, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Stage by stage, each parameter of each stage, from whichever ranks have it."""
    model = chunks[0]
    own = [(name, each) for name, each in named_parameters(chunks) if name != HEAD or not architecture.tied]
    group, rank = parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_pipeline_model_parallel_rank()
    plan = [(_names_over_experts(name, model), _share(name, each).whole) for name, each in own]
    plans = [plan] * group.size()
    if group.size() > 1:
        dist.all_gather_object(plans, plan, group=group)
    for stage, entries in enumerate(plans):
        for index, (names, shape) in enumerate(entries):
            held = _gathered(*own[index], architecture.name, dtype) if stage == rank else [None] * len(names)
            for name, tensor in zip(names, held, strict=True):
                yield name, _from_stage(tensor, shape, stage, group, dtype, model)


def _names_over_experts(name: str, model: PolicyModel) -> list[str]:
    """The parameter's name on each expert-parallel rank."""
    found = EXPERT.search(name)
    if not found:
        return [name]
    count = local_experts(model)
    numbers = range(int(found[1]) % count, model.config.num_moe_experts, count)
    return [f"{name[: found.start(1)]}{number}{name[found.end(1) :]}" for number in numbers]


def _gathered(name: str, parameter: nn.Parameter, architecture: str, dtype: torch.dtype) -> list[Tensor]:
    """The whole parameter; of an expert, those of all expert-parallel ranks in order."""
    share, own = _share(name, parameter), parameter.detach().to(dtype)
    whole = unshard(_all_gather(own, share.group), share.dim, find_rule(architecture, name)[0].stacked)
    return _all_gather(whole, parallel_state.get_expert_model_parallel_group() if EXPERT.search(name) else None)


def _all_gather(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    if group is None or group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def _from_stage(
    tensor: Tensor | None,
    shape: tuple[int, ...],
    stage: int,
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    model: PolicyModel,
) -> Tensor:
    """The tensor that pipeline stage `stage` holds, on every stage."""
    if group.size() > 1:
        tensor = (
            torch.empty(shape, dtype=dtype, device=model.inv_freq.device) if tensor is None else tensor.contiguous()
        )
        dist.broadcast(tensor, dist.get_global_rank(group, stage), group)
    assert tensor is not None
    return tensor
