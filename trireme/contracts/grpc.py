"""How services talk: one set of limits and keepalive settings for both sides, channels, and a server that is complete.

Client and server must agree: a server that allows fewer pings than its clients send closes their connections
("too_many_pings"), and a message limit raised on one side only still fails on the other.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
KEEPALIVE_TIME_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 20_000
# What a server tolerates; well under what clients do, since timers on a busy machine fire unevenly.
MIN_PING_INTERVAL_MS = KEEPALIVE_TIME_MS // 3

# Deadlines in seconds, for calls whose length no configuration key sets.
STATUS_DEADLINE_S = 5.0
HEALTH_DEADLINE_S = 2.0
DRAIN_DEADLINE_S = 30.0
# What ends a call whose caller forgot a deadline. Long enough never to end one that is at work.
LONGEST_CALL_S = 3600.0

# The published type stubs of the health package leave its asyncio half out.
HealthServicer: Any = health.aio.HealthServicer  # type: ignore[attr-defined]

Adder = Callable[[Any, Any], None]
Service = tuple[Adder, Any, str]  # (add_XServicer_to_server, servicer, full name as in the .proto)


def options(
    *,
    keepalive_time_ms: int = KEEPALIVE_TIME_MS,
    min_ping_interval_ms: int = MIN_PING_INTERVAL_MS,
    longest_call_s: float = LONGEST_CALL_S,
) -> tuple[tuple[str, Any], ...]:
    """Channel arguments that client and server share; each side ignores what is meant for the other."""
    fallback_deadline = {"methodConfig": [{"name": [{}], "timeout": f"{longest_call_s}s"}]}
    return (
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", keepalive_time_ms),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", min_ping_interval_ms),
        ("grpc.so_reuseport", 0),  # two servers on one port would otherwise share its connections silently
        ("grpc.enable_http_proxy", 0),  # a proxy set for downloads must not swallow calls to 127.0.0.1
        ("grpc.service_config", json.dumps(fallback_deadline)),
    )


OPTIONS = options()


def channel(address: str) -> grpc.aio.Channel:
    """An asyncio channel to `host:port`. Connects when first used; belongs to the running event loop."""
    return grpc.aio.insecure_channel(address, options=OPTIONS)


def sync_channel(address: str) -> grpc.Channel:
    """A blocking channel to `host:port`, which refuses to be used after a fork, where it would hang."""
    return grpc.intercept_channel(grpc.insecure_channel(address, options=OPTIONS), _SameProcess(address))


async def serve(
    services: Sequence[Service],
    host: str,
    port: int,
    *,
    health_servicer: Any | None = None,
) -> tuple[grpc.aio.Server, int]:
    """Start a server with standard health and reflection on; the server, and the port it listens on (0: any free).

    All services are reported SERVING, unless the caller passes its own `health_servicer` (a HealthServicer) and
    says so itself.
    Raises OSError naming host and port when it cannot listen there.
    """
    server = grpc.aio.server(options=OPTIONS)
    for add, servicer, _ in services:
        add(servicer, server)
    names = [name for _, _, name in services]
    await _add_health(server, names, health_servicer)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    bound = _bind(server, host, port)
    await server.start()
    return server, bound


async def _add_health(server: grpc.aio.Server, names: Sequence[str], given: Any | None) -> None:
    servicer = given or HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    if given is None:
        for name in ("", *names):
            await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:  # gRPC keeps the reason to itself
        reason = bind_error(host, port)
        raise reason or OSError(errno.EADDRNOTAVAIL, f"cannot listen on {address}: {error}") from error


def bind_error(host: str, port: int) -> OSError | None:
    """Why nothing can listen on host:port, as an OSError that names them; None when something could."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        hint = "; another process listens there" if error.errno == errno.EADDRINUSE else ""
        return OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}{hint}")
    return None


class _SameProcess(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Turns a call over a channel that crossed a fork, which would never return, into an error."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._pid = os.getpid()

    def _call(self, proceed: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"the channel to {self._address} was made in process {self._pid} before a fork: "
                "make it in the child, or start the child with multiprocessing's 'spawn'"
            )
        return proceed(details, request)

    # The stubs fix the parameter names of each, which gRPC itself passes by position.
    intercept_unary_unary = _call  # type: ignore[assignment]
    intercept_unary_stream = _call  # type: ignore[assignment]
    intercept_stream_unary = _call  # type: ignore[assignment]
    intercept_stream_stream = _call  # type: ignore[assignment]
