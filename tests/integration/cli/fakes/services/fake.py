"""What the stand-ins share."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from trireme.contracts.grpc import Service, serve
from trireme.registry import Registry, ServiceRecord
from trireme.streams.connection import open_client


@dataclass(frozen=True)
class Settings:
    """What a stand-in needs of the resolved configuration, read without the second that checking all of it takes."""

    run: str
    directory: Path
    host: str
    port: int
    max_steps: int


def arguments(kind: str) -> tuple[Settings, str]:
    """(settings, name), from the same command line as the real entry points take."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--name", default=kind)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    found = yaml.safe_load(Path(given.config).read_text())
    ports = [int(item.partition("=")[2]) for item in given.overrides if item.startswith(f"{kind}.port=")]
    settings = Settings(
        run=found["run"]["name"],
        directory=Path(found["run"]["dir"]),
        host=found.get(kind, {}).get("host", "127.0.0.1"),
        port=[found.get(kind, {}).get("port", 0), *ports][-1],
        max_steps=found["grpo"]["max_num_steps"],
    )
    return settings, given.name


def note(settings: Settings, text: str) -> None:
    """Append to the run's events.txt, by which tests know who started and stopped when."""
    with (settings.directory / "events.txt").open("a") as file:
        file.write(f"{text}\n")


async def run(kind: str, services: list[Service], settings: Settings, name: str, work: asyncio.Task[int] | None) -> int:
    """Serve until SIGTERM, or until `work` is done; its result is the exit code."""
    trouble, _, code = os.environ.get(f"FAKE_{name.upper().replace('-', '_')}", "").partition(":")
    note(settings, f"start {name}")
    print(f"{name} says hello", flush=True)
    # A descendant in a session of its own, as torchrun and vLLM have them.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    if trouble == "exit":
        print("this is the last line", flush=True)
        return int(code)
    stop = asyncio.Event()
    on_term = (lambda: None) if trouble == "refuse" else stop.set
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_term)
    server, port = await serve(services, settings.host, settings.port)
    registry = Registry(open_client(os.environ["TRIREME_REDIS_URL"]), settings.run)
    record = ServiceRecord(kind, name, f"127.0.0.1:{port}", "", os.getpid(), 1, "serving", time.time())
    waiting = {asyncio.ensure_future(stop.wait()), *([work] if work else [])}
    if trouble != "silent":
        waiting.add(asyncio.ensure_future(announce(registry, record)))
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if work in done:
        stop.set()
    await server.stop(2.0)  # with no grace, an answer under way can keep asyncio from ever closing
    await registry.withdraw(record)
    note(settings, f"stop {name}")
    return work.result() if work and work in done else 0


async def announce(registry: Registry, record: ServiceRecord) -> None:
    while True:
        await registry.announce(record)
        await asyncio.sleep(0.5)
