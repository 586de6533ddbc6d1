"""Rules between a configuration and the model that it names: they read the model's config.json and nothing else."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trireme.config import model_features
from trireme.config.errors import ConfigError
from trireme.config.model_weights import WeightsError, find_tensors

if TYPE_CHECKING:
    from trireme.config.root import Config

SIZES = ("num_attention_heads", "hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
DEMO_MODEL = "SmolLM2-135M-Instruct"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
TP = "policy.megatron_cfg.tensor_model_parallel_size"
PP = "policy.megatron_cfg.pipeline_model_parallel_size"
EP = "policy.megatron_cfg.expert_model_parallel_size"
EXPERT_TP = "policy.megatron_cfg.expert_tensor_parallel_size"


def check_model_folder(config: Config) -> dict[str, Any] | None:
    """Find the files of a configuration; read and check its model; its config.json.

    None for a Hugging Face name that is not on this machine: nothing can be said before it is downloaded.
    Raises ConfigError.
    """
    _check_data_files(config)
    folder = find_model(config.policy.model_name)
    if folder is None:
        return None
    hf_config = read_hf_config(folder)
    check_model(config, hf_config)
    try:
        find_tensors(folder)
    except WeightsError as error:
        raise ConfigError(f"policy.model_name: {error}") from error
    _check_tokenizer(config.policy.tokenizer.name)
    return hf_config


def _check_data_files(config: Config) -> None:
    data = config.data
    for key in ("train_file", "validation_file", "dataset_name"):
        name = getattr(data, key)
        if name and Path(str(name)).suffix in (".jsonl", ".json") and not Path(str(name)).is_file():
            raise ConfigError(f"data.{key}: no file {Path(str(name)).absolute()}")


def _check_tokenizer(name: str) -> None:
    folder = find_model(name, "policy.tokenizer.name")
    if folder is not None and not any((folder / file).is_file() for file in TOKENIZERS):
        raise ConfigError(f"policy.tokenizer.name: {folder} has no tokenizer ({', '.join(TOKENIZERS)})")


def find_model(name: str, key: str = "policy.model_name") -> Path | None:
    """The folder of a model given by path or by Hugging Face name; None for a name that is not in the local cache.

    Raises ConfigError for a path that is no folder.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not _is_hub_name(name):
        if DEMO_MODEL in name:
            raise ConfigError(f"{key}: there is no {name} yet; make it with: trireme model smollm2 {name}")
        raise ConfigError(
            f"{key}: no folder {folder.absolute()}; give the folder of a Hugging Face model, or owner/name"
        )
    return _cached(name)


def _is_hub_name(name: str) -> bool:
    """owner/name, unless a folder of the owner's name, or `models`, says that a path was meant."""
    owner = name.partition("/")[0]
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name)) and owner != "models" and not Path(owner).is_dir()


def _cached(name: str) -> Path | None:
    """The newest snapshot of a model in the Hugging Face cache."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    snapshots = (hub / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json")
    return max((path.parent for path in snapshots), key=lambda path: path.stat().st_mtime, default=None)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder. Raises ConfigError where it is missing or not a JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"policy.model_name: {folder} has no config.json, so it is not a Hugging Face model folder")
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"policy.model_name: {path} is not readable as JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"policy.model_name: {path} is not a JSON object")
    return loaded


def check_model(config: Config, hf_config: dict[str, Any]) -> None:
    """Check a configuration against a parsed config.json. Raises ConfigError with everything that does not fit."""
    problems = list(_features(config, hf_config)) or list(_sizes(config, hf_config))
    if not problems:
        problems = [
            text for check in (_heads, _layers, _experts, _context, _stop_tokens) for text in check(config, hf_config)
        ]
    if problems:
        raise ConfigError(problems)


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """The rows of the embedding when it is shared over TP ranks: the next multiple of their number."""
    return -(-vocab_size // tensor_parallel_size) * tensor_parallel_size


def _features(config: Config, hf_config: dict[str, Any]) -> Iterator[str]:
    for problem in model_features.unsupported(hf_config):
        yield f"policy.model_name: {config.policy.model_name}/config.json: {problem}"


def _sizes(config: Config, hf_config: dict[str, Any]) -> Iterator[str]:
    for name in SIZES:
        size = hf_config.get(name)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            yield f"policy.model_name: {name} in {config.policy.model_name}/config.json is {size!r}, no positive number"


def _heads(config: Config, hf_config: dict[str, Any]) -> Iterator[str]:
    tensor = config.policy.megatron_cfg.tensor_model_parallel_size
    queries = hf_config["num_attention_heads"]
    groups = hf_config.get("num_key_value_heads") or queries
    width = hf_config.get("intermediate_size") or 0
    head = hf_config.get("head_dim") or hf_config["hidden_size"] // queries
    rows = (queries + 2 * groups) * head
    legal = [
        size
        for size in range(1, queries + 1)
        # With fewer KV heads than ranks, Megatron shares the rows of their projection evenly.
        if queries % size == 0 and _shares(groups, size) and width % size == 0 and (size <= groups or rows % size == 0)
    ]
    if tensor not in legal:
        yield (
            f"rule attention-heads: {TP} is {tensor}, but the model has num_attention_heads={queries}, "
            f"num_key_value_heads={groups} and intermediate_size={width}: "
            f"tensor_model_parallel_size={min(legal, key=lambda size: abs(size - tensor))} (possible: {legal})"
        )


def _shares(groups: int, tensor: int) -> bool:
    """Whether KV heads divide over the ranks, or the ranks over the KV heads (each is then replicated)."""
    return groups % tensor == 0 or tensor % groups == 0


def _layers(config: Config, hf_config: dict[str, Any]) -> Iterator[str]:
    """Layers are dealt evenly to the stages, but for the first and the last where these say how many they have."""
    megatron, layers = config.policy.megatron_cfg, hf_config["num_hidden_layers"]
    stages, virtual = megatron.pipeline_model_parallel_size, megatron.virtual_pipeline_model_parallel_size or 1
    given = [megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage]
    fixed = [count for count in given if count is not None]
    rest, others = layers - sum(fixed), stages - len(fixed)
    chunks = [*fixed, *([rest // others] if others else [])]
    fits = (rest == 0) if others == 0 else (rest >= others and rest % others == 0)
    if not fits or any(count % virtual for count in chunks):
        yield (
            f"rule pipeline-stages: {layers} layers do not divide over {PP}={stages} stages of {virtual} chunks"
            f"{_said(*given)}: {' or '.join(_possible_stages(layers, stages, virtual))}"
        )


def _said(first: int | None, last: int | None) -> str:
    """What is set of the layers at the ends."""
    given = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    return "".join(f" with {name}={count}" for name, count in given.items() if count is not None)


def _possible_stages(layers: int, stages: int, virtual: int) -> Iterator[str]:
    """Layouts that are near: with as many stages, and evenly with another number of them."""
    units = layers // virtual if layers % virtual == 0 else 0  # what each stage has a whole number of
    middle = -(-units // stages)
    ends = units - middle * (stages - 2)
    if ends >= 2:
        first, last = ends // 2 * virtual, (ends - ends // 2) * virtual
        yield f"num_layers_in_first_pipeline_stage={first} and num_layers_in_last_pipeline_stage={last}"
    even = [size for size in range(1 if virtual == 1 else 2, layers + 1) if layers % (size * virtual) == 0]
    if even:
        yield f"{min(even, key=lambda size: abs(size - stages))} stages that have as many each"
    if virtual > 1:
        yield "virtual_pipeline_model_parallel_size=null"


def _experts(config: Config, hf_config: dict[str, Any]) -> Iterator[str]:
    count = next((hf_config[name] for name in EXPERTS if hf_config.get(name)), 0)
    megatron = config.policy.megatron_cfg
    tensor, ranks = megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size
    if not count:
        for key, size in ((EP, ranks), (EXPERT_TP, megatron.expert_tensor_parallel_size)):
            if size > 1:
                yield f"rule experts: {key} is {size}, but the model has no experts: {key.rpartition('.')[2]}=1"
        return
    if count % ranks:
        yield (
            f"rule experts: {EP} is {ranks}, which does not divide the model's {count} experts: "
            f"expert_model_parallel_size={_nearest_divisor(count, ranks)}"
        )
    yield from _expert_tensors(config, hf_config)
    if tensor > 1 and not megatron.sequence_parallel:
        yield f"rule experts: {TP} > 1 on a mixture of experts needs policy.megatron_cfg.sequence_parallel=true"


def _expert_tensors(config: Config, hf_config: dict[str, Any]) -> Iterator[str]:
    """How the matrices of one expert are shared."""
    megatron = config.policy.megatron_cfg
    tensor, shares = megatron.tensor_model_parallel_size, megatron.expert_tensor_parallel_size
    width = hf_config.get("moe_intermediate_size") or hf_config.get("intermediate_size") or 0
    if megatron.expert_model_parallel_size == 1 and shares != tensor:
        yield (
            f"rule experts: {EXPERT_TP} is {shares} but {TP} is {tensor}; without expert parallelism they must agree: "
            f"expert_tensor_parallel_size={tensor}, or {EP} above 1"
        )
    if width % shares:
        yield (
            f"rule experts: {EXPERT_TP} is {shares}, which does not divide the {width} columns of an expert: "
            f"{_nearest_divisor(width, shares)}"
        )


def _nearest_divisor(total: int, size: int) -> int:
    return min((each for each in range(1, total + 1) if total % each == 0), key=lambda each: abs(each - size))


def _context(config: Config, hf_config: dict[str, Any]) -> Iterator[str]:
    context, positions = config.policy.generation.vllm_cfg.max_model_len, hf_config["max_position_embeddings"]
    if context > positions:
        yield (
            f"rule prompt-and-response-fit-context: policy.generation.vllm_cfg.max_model_len ({context}) is longer "
            f"than max_position_embeddings of the model ({positions}): at most {positions}"
        )


def _stop_tokens(config: Config, hf_config: dict[str, Any]) -> Iterator[str]:
    vocabulary = hf_config["vocab_size"]
    outside = [i for i in config.policy.generation.stop_token_ids or [] if not 0 <= i < vocabulary]
    if outside:
        yield f"policy.generation.stop_token_ids {outside} are not all below vocab_size of the model, {vocabulary}"
