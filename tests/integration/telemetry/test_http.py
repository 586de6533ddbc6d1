"""/metrics and /healthz over a real socket."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from trireme.telemetry import serve_http


async def get(port: int, path: str) -> tuple[int, str]:
    def fetch() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(fetch)


async def test_metrics_are_prometheus_text() -> None:
    registry = CollectorRegistry()
    Counter("trireme_entries", "Entries taken.", registry=registry).inc(3)
    server, port = await serve_http("127.0.0.1", 0, lambda: (True, {}), registry)
    status, text = await get(port, "/metrics")
    await server.stop()
    assert status == 200
    assert "trireme_entries_total 3.0" in text.splitlines()


async def test_health_follows_the_service() -> None:
    healthy = [True]
    server, port = await serve_http("127.0.0.1", 0, lambda: (healthy[0], {"weight_version": 4}))
    fine = await get(port, "/healthz")
    healthy[0] = False
    ill = await get(port, "/healthz")
    await server.stop()
    assert (fine[0], json.loads(fine[1])) == (200, {"healthy": True, "weight_version": 4})
    assert (ill[0], json.loads(ill[1])["healthy"]) == (503, False)


async def test_a_probe_that_raises_is_ill_health() -> None:
    def probe() -> tuple[bool, dict[str, object]]:
        raise KeyError("engine")

    server, port = await serve_http("127.0.0.1", 0, probe)
    status, text = await get(port, "/healthz")
    await server.stop()
    assert status == 503
    assert json.loads(text) == {"healthy": False, "error": "KeyError: 'engine'"}


async def test_taken_port_is_named_and_stop_frees_it() -> None:
    server, port = await serve_http("127.0.0.1", 0, lambda: (True, {}))
    with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1:{port} for metrics: .*another process"):
        await serve_http("127.0.0.1", port, lambda: (True, {}))
    await server.stop()
    again, same = await serve_http("127.0.0.1", port, lambda: (True, {}))
    await again.stop()
    assert same == port


async def test_signals_stay_with_the_service() -> None:
    """uvicorn takes SIGINT and SIGTERM for itself, and then a service would not drain."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    server, _ = await serve_http("127.0.0.1", 0, lambda: (True, {}))
    during = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    await server.stop()
    assert during == before
