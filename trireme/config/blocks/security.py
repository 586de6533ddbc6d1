"""`security`: who may speak to the services."""

from __future__ import annotations

from pydantic import Field

from trireme.config.base import Block


class SecurityConfig(Block):
    """Encryption and authentication of the services' APIs."""

    tls: bool = Field(False, description="Encrypt gRPC and HTTP.")
    tokens: list[str] = Field(default_factory=list, description="Bearer tokens that clients may present.")
