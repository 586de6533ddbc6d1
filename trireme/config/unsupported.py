"""What the schema has and the product does not, yet: ONE table. Lift a row when its feature works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trireme.config.root import Config


@dataclass(frozen=True)
class Unsupported:
    """A key, the values of it that are refused, and what to write in their place."""

    key: str
    refused: Callable[[Any], bool]
    instead: str


def _on(value: Any) -> bool:
    return bool(value)


def _above_one(value: Any) -> bool:
    return bool(value > 1)


def _given(value: Any) -> bool:
    return value is not None


MEGATRON = "policy.megatron_cfg"
VLLM = "policy.generation.vllm_cfg"

TABLE: tuple[Unsupported, ...] = (
    Unsupported("dpo", _given, "a grpo block"),
    Unsupported("sft", _given, "a grpo block"),
    Unsupported("grpo.max_rollout_turns", _above_one, "1"),
    Unsupported("policy.dtensor_cfg.enabled", _on, "false, with policy.megatron_cfg.enabled=true"),
    Unsupported(f"{MEGATRON}.distributed_data_parallel_config.use_custom_fsdp", _on, "false"),
    # Megatron shards the state of Adam only, and an unsharded one would need checkpoints of its own.
    Unsupported(f"{MEGATRON}.optimizer.optimizer", lambda value: value != "adam", "adam"),
    Unsupported(f"{MEGATRON}.optimizer.use_distributed_optimizer", lambda value: not value, "true"),
    # Their gradients would have to be scaled to a loss that is divided by the whole batch's tokens beforehand.
    Unsupported(f"{MEGATRON}.moe_router_load_balancing_type", lambda value: value != "none", "none"),
    Unsupported(f"{MEGATRON}.moe_aux_loss_coeff", _on, "0"),
    Unsupported(f"{MEGATRON}.moe_router_bias_update_rate", _on, "0"),
    Unsupported("policy.precision", lambda value: value == "float16", "bfloat16 or float32"),
    Unsupported(f"{VLLM}.tensor_parallel_size", _above_one, "1, with more rollout.replicas"),
    Unsupported(f"{VLLM}.pipeline_parallel_size", _above_one, "1, with more rollout.replicas"),
    Unsupported("cluster.num_nodes", _above_one, "1"),
    Unsupported("weights.delta", _on, "false"),
    Unsupported("security.tls", _on, "false"),
    Unsupported("security.tokens", _on, "[]"),
)


def violations(config: Config) -> list[str]:
    """One sentence for each key that asks for something that is not there yet."""
    return [
        f"{row.key}{_value(config, row.key)} is not yet supported; use {row.instead}"
        for row in TABLE
        if row.refused(_get(config, row.key))
    ]


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _value(config: Config, key: str) -> str:
    """The value behind the key, unless it is a whole block or a secret."""
    value = _get(config, key)
    if key in ("dpo", "sft", "security.tokens"):
        return ""
    return f"={str(value).lower() if isinstance(value, bool) else value}"
