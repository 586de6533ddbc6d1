"""/metrics (Prometheus) and /healthz of one service, on a port of its own, beside whatever else its loop does."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.exposition import choose_encoder

log = logging.getLogger(__name__)

# What is wrong or at work, as JSON, and whether the service is fit to be used.
Health = Callable[[], tuple[bool, dict[str, object]]]
STOP_TIMEOUT_S = 5


class HttpServer:
    """A server that runs until `stop`."""

    def __init__(self, server: uvicorn.Server, task: asyncio.Task[None]) -> None:
        self._server = server
        self._task = task

    async def stop(self) -> None:
        """End it; open requests have a few seconds."""
        self._server.should_exit = True
        await self._task


async def serve_http(
    host: str, port: int, health: Health, registry: CollectorRegistry = REGISTRY
) -> tuple[HttpServer, int]:
    """Serve `registry` and `health`; the server, and the port it listens on (0: any free).

    /healthz answers 200 when `health` says so, else 503, with its dict; 503 too when it raises.
    Raises OSError naming host and port when it cannot listen there.
    """
    listener = _listen(host, port)
    quiet = uvicorn.Config(app(health, registry), log_config=None, access_log=False, lifespan="off")
    quiet.timeout_graceful_shutdown = STOP_TIMEOUT_S
    server = _Server(quiet)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not task.done():
        await asyncio.sleep(0.01)
    if task.done():
        await task
    return HttpServer(server, task), int(listener.getsockname()[1])


def app(health: Health, registry: CollectorRegistry = REGISTRY) -> FastAPI:
    """The two endpoints, without a server around them."""
    api = FastAPI(title="trireme", docs_url=None, redoc_url=None, openapi_url=None)

    @api.get("/metrics")
    def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    @api.get("/healthz")
    async def healthz() -> JSONResponse:  # async: `health` looks at what the loop owns, so it runs there
        try:
            healthy, facts = health()
        except Exception as error:  # whatever a probe runs into, the service is not healthy
            log.exception("health probe failed")
            healthy, facts = False, {"error": f"{type(error).__name__}: {error}"}
        return JSONResponse({"healthy": healthy, **facts}, status_code=200 if healthy else 503)

    return api


class _Server(uvicorn.Server):
    """Signals belong to the service, which stops this server among other things."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        hint = "; another process listens there" if error.errno == errno.EADDRINUSE else ""
        raise OSError(error.errno, f"cannot listen on {host}:{port} for metrics: {error.strerror}{hint}") from error
