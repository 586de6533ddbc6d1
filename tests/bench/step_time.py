"""Seconds per GRPO step, ours through the real services and TRL's GRPOTrainer, on the same work in the same run.

    make bench      or      python tests/bench/step_time.py --model FOLDER --peer .venv-peers/bin/python

Medians over the measured steps, after one that warms up. `reward` is the time spent in verifiers: ours overlaps with
generation, so the phases of ours may add up to more than the step. The last line is JSON.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent))
from work import LEARNING_RATE, NEW_TOKENS, PROMPTS_PER_STEP, SAMPLES_PER_PROMPT, TOKENS_PER_STEP, write_rows

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TIMEOUT_S = 1800
PHASES = {
    "total": "timing/train/total_step_time",
    "generation": "timing/train/generation",
    "training": "timing/train/policy_training",
    "weight update": "timing/train/weight_update",
}


def native_bf16() -> bool:
    """Whether this CPU multiplies bf16 natively; emulated, it is several times slower than float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return bool(re.search(r"\b(avx512_bf16|amx_bf16)\b", flags))


def environment(threads: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, str(threads)), "HF_HUB_OFFLINE": "1"}


class VerifierSeconds(threading.Thread):
    """Reads the reward server's own measure of time in verifiers, as long as it runs."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._url, self._done = f"http://127.0.0.1:{port}/metrics", threading.Event()
        self.seconds = self.scored = 0.0

    def run(self) -> None:
        while not self._done.wait(0.5):
            try:
                text = urllib.request.urlopen(self._url, timeout=2).read().decode()
            except OSError:
                continue
            self.seconds, self.scored = _summed(text, "sum"), _summed(text, "count")

    def per_step(self) -> float:
        """Seconds for the samples of one step."""
        self._done.set()
        self.join()
        per_sample = self.seconds / self.scored if self.scored else float("nan")
        return per_sample * PROMPTS_PER_STEP * SAMPLES_PER_PROMPT


def _summed(text: str, part: str) -> float:
    found = re.findall(rf"^trireme_reward_score_seconds_{part}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def ours(given: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Our step, by `trireme up` as a user runs it."""
    port = given.metrics_port
    command = [sys.executable, "-m", "trireme", "up", str(HERE / "step_time.yaml"), "--no-progress"]
    overrides = {
        "run.name": "bench",
        "run.dir": folder / "run",
        "policy.model_name": given.model.resolve(),
        "policy.precision": given.precision,
        "data.dataset_name": folder / "rows.jsonl",
        "grpo.max_num_steps": given.steps + 1,
        "reward.metrics_port": port,
    }
    verifiers = VerifierSeconds(port)
    verifiers.start()
    arguments = [f"{key}={value}" for key, value in overrides.items()] + given.overrides
    variables = {**environment(given.threads), "PYTHONPATH": str(HERE)}  # where the verifier is
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=variables, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"our run failed with exit code {done.returncode}; its logs: {folder / 'run' / 'logs'}")
    return measured(folder / "run" / "metrics.jsonl") | {"reward": verifiers.per_step()}


def measured(path: Path) -> dict[str, float]:
    """Medians of the step records after the first. Raises SystemExit when a step did other work than asked for."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if PHASES["total"] in record][1:]
    generated = [step["train/generated_tokens"] for step in steps]
    if any(tokens != TOKENS_PER_STEP for tokens in generated):
        raise SystemExit(f"we generated {generated} tokens a step, not {TOKENS_PER_STEP}")
    return {name: median(step[key] for step in steps) for name, key in PHASES.items()}


def trl(given: argparse.Namespace, folder: Path) -> dict[str, float]:
    """TRL's step, in its own environment."""
    command = [given.peer, str(HERE / "trl_peer.py"), "--model", str(given.model.resolve())]
    command += ["--rows", str(folder / "rows.jsonl"), "--precision", given.precision]
    command += ["--steps", str(given.steps), "--threads", str(given.threads)]
    done = subprocess.run(
        command, env=environment(given.threads), timeout=TIMEOUT_S, check=False, stdout=subprocess.PIPE, text=True
    )
    sys.stdout.write(done.stdout)
    if done.returncode:
        raise SystemExit(f"TRL failed with exit code {done.returncode}; {given.peer} is made by `make peers`")
    return {**json.loads(done.stdout.splitlines()[-1]), "weight update": 0.0}


def table(sides: dict[str, dict[str, float]]) -> str:
    lines = [f"{'seconds per step':<18}" + "".join(f"{name:>10}" for name in sides)]
    for phase in ("generation", "reward", "training", "weight update", "total"):
        lines.append(f"{phase:<18}" + "".join(f"{side[phase]:>10.2f}" for side in sides.values()))
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--peer", default=str(ROOT / ".venv-peers" / "bin" / "python"), help="TRL's Python")
    parser.add_argument("--precision", choices=("auto", "bf16", "float32"), default="auto")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--metrics-port", type=int, default=19402, help="a free port, for the reward server's metrics")
    parser.add_argument("--only", choices=("ours", "trl"), help="one side only; no ratio then")
    parser.add_argument("overrides", nargs="*", help="key=value for our side")
    given = parser.parse_args()
    if given.precision == "auto" and not native_bf16():
        print("This CPU has no bf16 instructions (avx512_bf16, amx_bf16): both sides run in float32.")
    wanted = {"auto": "bfloat16" if native_bf16() else "float32", "bf16": "bfloat16"}
    given.precision = wanted.get(given.precision, given.precision)
    return given


def main() -> None:
    given = parse()
    print(
        f"{PROMPTS_PER_STEP} prompts × {SAMPLES_PER_PROMPT} samples × {NEW_TOKENS} new tokens, {given.precision}, "
        f"{given.threads} threads, learning rate {LEARNING_RATE:g}, median of {given.steps} steps",
        flush=True,
    )
    sides: dict[str, dict[str, float]] = {}
    with TemporaryDirectory(prefix="trireme-bench-", ignore_cleanup_errors=True) as name:
        write_rows(Path(name) / "rows.jsonl", PROMPTS_PER_STEP * (given.steps + 8))
        for side, run in (("ours", ours), ("trl", trl)):
            if given.only in (None, side):
                started = time.monotonic()
                sides[side] = run(given, Path(name))
                print(f"{side}: {time.monotonic() - started:.0f} s in all", flush=True)
    print(table(sides))
    result: dict[str, object] = {f"{side}_s": round(figures["total"], 3) for side, figures in sides.items()}
    if len(sides) == 2:
        result["ratio"] = round(sides["trl"]["total"] / sides["ours"]["total"], 3)
    split = {side: {phase: round(seconds, 3) for phase, seconds in figures.items()} for side, figures in sides.items()}
    print(json.dumps({**result, "precision": given.precision, "split": split}))


if __name__ == "__main__":
    main()
