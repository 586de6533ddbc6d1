"""Run a module as in an environment with only a lock's packages: `python restricted.py LOCK MODULE ARGUMENTS...`.

The packages that the lock does not hold are there, but cannot be imported. MODULE may be `-c` with a statement.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

OWN = "trireme-rl"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(lock: Path) -> set[str]:
    """Names of the distributions that `lock` installs."""
    text = lock.read_text(encoding="utf-8")
    return {normal(name) for name in re.findall(r"^(?:# with )?([A-Za-z0-9._-]+)==", text, re.MULTILINE)}


class Only:
    """An import finder that shows what another one finds, as far as it belongs to the allowed distributions."""

    def __init__(self, finder: Any, allowed: set[str]) -> None:
        owners = metadata.packages_distributions()
        self._finder, self._allowed = finder, allowed
        self._hidden = {module for module, names in owners.items() if not {normal(n) for n in names} & allowed}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        hidden = name.partition(".")[0] in self._hidden
        return None if hidden else self._finder.find_spec(name, path, target)

    def find_distributions(self, *arguments: Any) -> Iterator[metadata.Distribution]:
        found = getattr(self._finder, "find_distributions", lambda *_: ())(*arguments)
        return (one for one in found if normal(one.metadata["Name"]) in self._allowed)


def main() -> None:
    lock, module, *arguments = sys.argv[1:]
    allowed = locked(Path(lock)) | {OWN}
    sys.meta_path[:] = [Only(finder, allowed) for finder in sys.meta_path]
    sys.path.insert(0, str(Path.cwd()))
    if module == "-c":
        exec(arguments[0], {"__name__": "__main__"})
        return
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
