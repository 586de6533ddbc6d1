"""Run a module as in an environment with only a lock's packages: `python restricted.py LOCK MODULE ARGUMENTS...`.

The packages that the lock does not hold are there, but cannot be imported. MODULE may be `-c` with a statement.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

OWN = "trireme-rl"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(lock: Path) -> set[str]:
    """Names of the distributions that `lock` installs."""
    text = lock.read_text(encoding="utf-8")
    return {normal(name) for name in re.findall(r"^(?:# with )?([A-Za-z0-9._-]+)==", text, re.MULTILINE)}


class Missing:
    """An import finder that makes modules of other distributions look as if they were not installed."""

    def __init__(self, allowed: set[str]) -> None:
        owners = metadata.packages_distributions()
        self._hidden = {module for module, names in owners.items() if not {normal(n) for n in names} & allowed}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self._hidden:
            raise ModuleNotFoundError(f"No module named {name!r} (not in the lock)", name=name)
        return None


def main() -> None:
    lock, module, *arguments = sys.argv[1:]
    sys.meta_path.insert(0, Missing(locked(Path(lock)) | {OWN}))
    sys.path.insert(0, str(Path.cwd()))
    if module == "-c":
        exec(arguments[0], {"__name__": "__main__"})
        return
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
