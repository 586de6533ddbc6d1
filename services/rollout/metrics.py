"""What /metrics says about this service, beside vLLM's own `vllm:*` metrics in the same registry."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from trireme.contracts.v1 import sample_pb2

GENERATED_TOKENS = Counter("trireme_rollout_generated_tokens_total", "Response tokens of finished samples")
SAMPLES = Counter("trireme_rollout_samples_total", "Finished samples by finish reason", ["finish_reason"])
GROUPS = Counter("trireme_rollout_groups_total", "Groups by outcome", ["outcome"])
GROUPS_RUNNING = Gauge("trireme_rollout_groups_running", "Groups of the prompt stream in work")
WEIGHT_VERSION = Gauge("trireme_rollout_weight_version", "Weight version that is sampled from")
IN_ROTATION = Gauge("trireme_rollout_in_rotation", "1 while prompts are taken, 0 after a failed weight update")
UPDATES = Counter("trireme_rollout_weight_updates_total", "Weight updates by outcome", ["outcome"])
UPDATE_SECONDS = Histogram(
    "trireme_rollout_weight_update_seconds",
    "Duration of a weight update, fetch and load",
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
)


def count_sample(sample: sample_pb2.Sample) -> None:
    """Count one finished sample."""
    GENERATED_TOKENS.inc(len(sample.response_token_ids))
    reason = sample_pb2.FinishReason.Name(sample.finish_reason).removeprefix("FINISH_REASON_").lower()
    SAMPLES.labels(reason).inc()
