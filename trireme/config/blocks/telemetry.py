"""`telemetry`: logs and metrics of the services themselves."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trireme.config.base import Block


class TelemetryConfig(Block):
    """Logs of the services."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Least severe level logged.")
