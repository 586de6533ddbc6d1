"""Rules across keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trireme.config.root import Config


def violations(config: Config) -> list[str]:
    """One sentence for each rule that is broken."""
    return []
