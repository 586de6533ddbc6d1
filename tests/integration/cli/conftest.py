"""Whole runs with stand-in services: real processes, signals, Redis, registry and gRPC; only the work is missing."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from tests.unit.config.support import NO_TENSORS
from trireme.launch.rundir import RunDirectory

FAKES = Path(__file__).parent / "fakes"
MARK = "TRIREME_TEST_MARK"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 2,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "vocab_size": 32,
    "max_position_embeddings": 4096,
}
CONFIG = """\
run: {{name: {name}, dir: {directory}}}
grpo: {{num_prompts_per_step: 2, num_generations_per_prompt: 2, max_num_steps: 3}}
policy:
  model_name: {model}
  train_global_batch_size: 4
  megatron_cfg: {{enabled: true}}
  generation: {{max_new_tokens: 8}}
data: {{dataset_name: reasoning_gym/chain_sum}}
cluster: {{gpus_per_node: 1, num_nodes: 1}}
"""


@dataclass
class Bench:
    """A configuration, its run directory, and a mark by which every process that stems from a test is found."""

    config: Path
    run_dir: Path
    mark: str
    started: list[subprocess.Popen[str]]

    def environment(self, **trouble: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key != "TRIREME_REDIS_URL"}
        return {**kept, "PYTHONPATH": str(FAKES), MARK: self.mark, "COLUMNS": "120", **trouble}

    def trireme(self, *words: str, **trouble: str) -> subprocess.Popen[str]:
        """Start a `trireme` command; `trouble` goes into its environment."""
        process = subprocess.Popen(
            [sys.executable, "-m", "trireme", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment(**trouble),
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def up(self, *overrides: str, **trouble: str) -> subprocess.Popen[str]:
        return self.trireme("up", str(self.config), *overrides, **trouble)

    def finish(self, process: subprocess.Popen[str], timeout_s: float = 150) -> tuple[int, str]:
        """(exit code, output) of a command that ends by itself."""
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, output

    def events(self) -> list[str]:
        """What the stand-ins noted, in order."""
        file = self.run_dir / "events.txt"
        return file.read_text().splitlines() if file.exists() else []

    def alive(self) -> set[int]:
        """All living processes that stem from this test, however far they removed themselves from their parents."""
        return set(marked(self.mark))

    def service(self, kind: str) -> int:
        """Process id of the one service of that kind (not of its guardian)."""
        words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in self.alive()}
        module = f"services.{kind}".encode()
        [found] = [pid for pid, words_ in words.items() if module in words_ and b"trireme.launch.guard" not in words_]
        return found

    def redis_pid(self) -> int:
        """Of the embedded Redis, which overwrites its environment with its title and so loses the mark."""
        url = RunDirectory(self.run_dir).load_state().redis_url
        return int(redis.Redis.from_url(url).info("server")["process_id"])

    def wait(self, true: Callable[[], object], timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < deadline, f"still not so after {timeout_s} s; events: {self.events()}"
            time.sleep(0.05)


def marked(mark: str) -> Iterator[int]:
    """Process ids whose environment carries the mark. A zombie's environment is empty."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                yield int(entry.name)
        except OSError:  # gone meanwhile, or not ours
            continue


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """At the end nothing may be left; what is, is killed so that one failing test does not disturb the next."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    (model / "model.safetensors").write_bytes(NO_TENSORS)
    (model / "tokenizer.json").touch()
    name, run_dir, config = f"test-{secrets.token_hex(4)}", tmp_path / "run", tmp_path / "run.yaml"
    config.write_text(CONFIG.format(name=name, directory=run_dir, model=model))
    made = Bench(config, run_dir, secrets.token_hex(8), [])
    yield made
    left = made.alive()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    for process in made.started:
        process.communicate()
    assert not left, f"processes left behind: {left}"
