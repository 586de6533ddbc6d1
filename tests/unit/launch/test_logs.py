"""The end of a log."""

from __future__ import annotations

import logging
from pathlib import Path

from trireme.launch.logs import last_lines
from trireme.telemetry.logs import JsonFormatter


def test_structured_lines_are_unfolded_and_others_kept(tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "x.log")
    handler.setFormatter(JsonFormatter("rollout-0"))
    logger = logging.getLogger("test-launch-logs")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        raise ValueError("out of memory")
    except ValueError:
        logger.exception("the engine died", extra={"step": 3})
    handler.close()
    with (tmp_path / "x.log").open("a") as file:
        file.write("Segmentation fault\n{not json}\n[1, 2]\n")
    lines = last_lines(tmp_path / "x.log", 20)
    assert lines[0] == "ERROR the engine died (step=3)"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-4:] == ["ValueError: out of memory", "Segmentation fault", "{not json}", "[1, 2]"]


def test_only_the_end_and_only_from_the_start_given(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("".join(f"line {n}\n" for n in range(100_000)))
    assert last_lines(path, 2) == ["line 99998", "line 99999"]
    assert last_lines(path, 5, start=path.stat().st_size - len("line 99999\n")) == ["line 99999"]
    assert last_lines(tmp_path / "none.log", 5) == []
