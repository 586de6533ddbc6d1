"""What each service of a run would be given: for `--dry-run`."""

from __future__ import annotations

from typing import Any

from trireme.config.root import Config

SHARED = ("run", "redis", "stream", "security", "telemetry")
BLOCKS = {
    "reward": ("reward", "data", "env"),
    "rollout": ("rollout", "policy", "weights", "staleness", "grpo"),
    "trainer": (
        *("trainer", "cluster", "grpo", "loss_fn", "policy", "data", "env"),
        *("weights", "staleness", "checkpointing", "logger"),
    ),
}
# What a rollout server reads of the policy: the model and its sampling, not its training.
SAMPLING = ("model_name", "tokenizer", "precision", "generation")


def dry_run(config: Config) -> dict[str, Any]:
    """For each service in the order of start: how many processes, and the resolved blocks it reads; secrets hidden."""
    tree = config.to_tree(mask=True)
    counts = {"reward": config.reward.replicas, "rollout": config.rollout.replicas, "trainer": config.world_size}
    embedded = config.redis.url is None
    plan: dict[str, Any] = {"redis": {"processes": int(embedded), "config": {"embedded": embedded, **tree["redis"]}}}
    for name, blocks in BLOCKS.items():
        plan[name] = {"processes": counts[name], "config": {block: tree[block] for block in (*SHARED, *blocks)}}
    plan["rollout"]["config"]["policy"] = {key: tree["policy"][key] for key in SAMPLING}
    return plan
