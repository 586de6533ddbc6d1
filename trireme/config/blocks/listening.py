"""What every service's block says about where it listens."""

from __future__ import annotations

import socket

from pydantic import Field

from trireme.config.base import Block

ANY_ADDRESS = frozenset({"0.0.0.0", "::"})


class Listening(Block):
    """Where a service listens, and under which name the other services find it."""

    host: str = Field("127.0.0.1", min_length=1, description="Address that the server binds to.")
    advertise_host: str | None = Field(
        None,
        min_length=1,
        description="Name or address under which other services reach it; null takes host, "
        "or the machine's own name where host is every interface (0.0.0.0 or ::).",
    )
    port: int = Field(0, ge=0, le=65535, description="Port of the gRPC API; 0 takes any free one.")
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of /metrics and /healthz; 0 takes any free one.")

    @property
    def reachable_host(self) -> str:
        """The host that this service announces to the others."""
        return self.advertise_host or (socket.gethostname() if self.host in ANY_ADDRESS else self.host)
