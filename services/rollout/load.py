"""The engine's load as vLLM reports it after every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from services.rollout.engine import Pressure

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import StatLoggerBase


class EngineLoad:
    """Keeps the latest load. vLLM's own loggers, and with them its Prometheus metrics, stay in force."""

    def __init__(self) -> None:
        self.latest = Pressure()

    def logger(self, vllm_config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        """The factory that vLLM asks for a stat logger."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        keeper = self

        class LoadLogger(StatLoggerBase):
            def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
                """Nothing to set up."""

            def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is not None:
                    keeper.latest = Pressure(
                        running=scheduler_stats.num_running_reqs,
                        waiting=scheduler_stats.num_waiting_reqs,
                        cache_usage=scheduler_stats.kv_cache_usage,
                    )

            def log_engine_initialized(self) -> None:
                """Nothing to say."""

        return LoadLogger(vllm_config, engine_index)
