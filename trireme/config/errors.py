"""The one exception of this package, written for the person who wrote the file."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """A configuration that cannot be run. `problems` has one sentence for each thing that is wrong."""

    def __init__(self, problems: str | Sequence[str], source: str | None = None) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.source = source
        super().__init__(self._text())

    def _text(self) -> str:
        where = f"{self.source}: " if self.source else ""
        if len(self.problems) == 1:
            return f"{where}{self.problems[0]}"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        return f"{where}{len(self.problems)} problems\n{lines}"
