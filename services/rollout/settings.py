"""What the rollout service takes from a run's configuration, and what vLLM needs in the environment on a CPU."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from trireme.config import Config

# What makes sampled log-probs those of the policy, and updates possible: rule vllm-kwargs keeps others out.
FIXED = {
    "logprobs_mode": "processed_logprobs",
    "generation_config": "vllm",
    "worker_extension_cls": "services.rollout.worker_extension.WeightReceiver",
}
# GiB of KV cache on a CPU when neither the environment nor vllm_kwargs say: the machine's memory is shared with
# the trainer there, so a share of it (vLLM's default) would be too much.
DEFAULT_CPU_CACHE_GIB = 2
# Tokens in a cache block on a CPU: the smallest that its kernels do well. Only whole blocks of a prompt are shared by
# a group, and vLLM's 128 would compute most prompts once for each sample.
CPU_BLOCK_SIZE = 32
# Tokens of one forward pass on a CPU: prompts of a step's groups fit, activations stay small.
CPU_BATCHED_TOKENS = 4096


@dataclass(frozen=True)
class EngineSettings:
    """Arguments of one vLLM engine; `extra` is handed to vLLM as it is."""

    model: str
    tokenizer: str
    dtype: str
    max_model_len: int
    enforce_eager: bool = False
    seed: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    gpu_memory_utilization: float = 0.6
    extra: dict[str, Any] = field(default_factory=dict)

    def engine_args(self, *, cpu: bool) -> dict[str, Any]:
        """Keyword arguments of vllm.AsyncEngineArgs."""
        own = {k: v for k, v in self.__dict__.items() if k != "extra"}
        return {"enable_prefix_caching": True, **(self._cpu_defaults() if cpu else {}), **own, **self.extra, **FIXED}

    def _cpu_defaults(self) -> dict[str, Any]:
        """Small blocks, and prompts that are never prefilled in parts.

        After a partial prefill vLLM rewinds the request's random generator, which a generator on a CPU cannot do: the
        engine would die on the first seeded request that does not fit into a batch any more.
        """
        return {
            "block_size": CPU_BLOCK_SIZE,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, self.max_model_len),
        }


def engine_settings(config: Config) -> EngineSettings:
    """What the configuration says of the engine."""
    generation, vllm = config.policy.generation, config.policy.generation.vllm_cfg
    return EngineSettings(
        model=config.policy.model_name,
        tokenizer=config.policy.tokenizer.name,
        dtype=vllm.precision,
        max_model_len=vllm.max_model_len,
        enforce_eager=vllm.enforce_eager,
        seed=config.grpo.seed,
        tensor_parallel_size=vllm.tensor_parallel_size,
        pipeline_parallel_size=vllm.pipeline_parallel_size,
        gpu_memory_utilization=vllm.gpu_memory_utilization,
        extra={key: value for key, value in generation.vllm_kwargs.items() if value is not None},
    )


def set_cpu_environment(
    extra: dict[str, Any], *, eager: bool, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Fill in what vLLM's CPU backend reads from the environment, where it is not set. Before an engine starts.

    An eager engine compiles nothing at all: vLLM would still compile a helper that counts log-probs, which takes a C++
    compiler, and the engine would die at its first sample on a machine without one.

    Threads are not bound: vLLM's own choice takes one thread per physical core, minus one.
    """
    environment.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if eager:
        environment.setdefault("TORCH_COMPILE_DISABLE", "1")
    if "kv_cache_memory_bytes" not in extra:
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(DEFAULT_CPU_CACHE_GIB))
