"""`stream`: delivery of prompts and samples between services."""

from __future__ import annotations

from pydantic import Field

from trireme.config.base import Block


class StreamConfig(Block):
    """Leases and redelivery of stream entries."""

    lease_s: float = Field(
        120.0, gt=0, description="Seconds without renewal after which an entry goes to another consumer."
    )
    max_deliveries: int = Field(3, ge=1, description="Deliveries after which an entry goes to the dead-letter stream.")
