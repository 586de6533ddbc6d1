"""What the stand-ins share."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trireme.config import Config, load_config
from trireme.contracts.grpc import Service, serve
from trireme.registry import Registry, ServiceRecord
from trireme.streams.connection import open_client

CRASH_CODE = 7


def arguments(kind: str) -> tuple[Config, str]:
    """(configuration, name), as the real entry points take them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--name", default=kind)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    return load_config(given.config, given.overrides), given.name


def note(config: Config, text: str) -> None:
    """Append to the run's events.txt, by which tests know who started and stopped when."""
    with (Path(config.run.dir) / "events.txt").open("a") as file:
        file.write(f"{text}\n")


async def run(kind: str, services: list[Service], config: Config, name: str, work: asyncio.Task[int] | None) -> int:
    """Serve until SIGTERM, or until `work` is done; its result is the exit code."""
    trouble, _, seconds = os.environ.get(f"FAKE_{name.upper().replace('-', '_')}", "").partition(":")
    note(config, f"start {name}")
    print(f"{name} says hello", flush=True)
    # A descendant in a session of its own, as torchrun and vLLM have them.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    if trouble == "exit":
        print("this is the last line", flush=True)
        return int(seconds)
    stop = asyncio.Event()
    on_term = (lambda: None) if trouble == "refuse" else stop.set
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_term)
    block = getattr(config, kind)
    server, port = await serve(services, block.host, block.port)
    registry = Registry(open_client(config.redis.url or ""), config.run.name)
    record = ServiceRecord(kind, name, f"127.0.0.1:{port}", "", os.getpid(), 1, "serving", time.time())
    waiting = {asyncio.ensure_future(stop.wait()), *([work] if work else [])}
    if trouble != "silent":
        waiting.add(asyncio.ensure_future(announce(registry, record)))
    if trouble == "crashes" or (trouble == "crash" and first_life(config, name)):
        waiting.add(asyncio.ensure_future(crash(float(seconds))))
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if work in done:
        stop.set()
    await server.stop(None)
    await registry.withdraw(record)
    note(config, f"stop {name}")
    return work.result() if work and work in done else 0


async def announce(registry: Registry, record: ServiceRecord) -> None:
    while True:
        await registry.announce(record)
        await asyncio.sleep(0.5)


def first_life(config: Config, name: str) -> bool:
    return (Path(config.run.dir) / "events.txt").read_text().splitlines().count(f"start {name}") == 1


async def crash(seconds: float) -> None:
    await asyncio.sleep(seconds)
    print("about to crash", flush=True)
    os._exit(CRASH_CODE)
