"""Logs are one JSON object a line, whatever is logged."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trireme.telemetry.logs import setup_logging


@pytest.fixture(autouse=True)
def root_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def written(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_has_service_message_and_extras(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "reward.log"
    setup_logging("reward", "INFO", file)
    logging.getLogger("a.b").info("took %d entries", 3, extra={"stream": "samples", "path": tmp_path})
    logging.getLogger("a.b").debug("not this")
    (line,) = written(file)
    assert line | {"time": ""} == {
        "time": "",
        "level": "INFO",
        "service": "reward",
        "logger": "a.b",
        "message": "took 3 entries",
        "stream": "samples",
        "path": str(tmp_path),
    }
    assert line["time"].endswith("+00:00")


def test_exceptions_and_line_breaks_stay_on_one_line(tmp_path: Path) -> None:
    setup_logging("x", file=tmp_path / "x.log")
    try:
        raise KeyError("no\nsuch")
    except KeyError:
        logging.getLogger().exception("two\nlines")
    (line,) = written(tmp_path / "x.log")
    assert line["message"] == "two\nlines"
    assert "KeyError" in line["exception"]


def test_passwords_of_redis_urls_are_hidden(tmp_path: Path) -> None:
    setup_logging("x", file=tmp_path / "x.log")
    logging.getLogger().warning("at redis://user:s3cret@host:1/0", extra={"url": "rediss://:s3cret@h:1"})
    text = (tmp_path / "x.log").read_text()
    assert "s3cret" not in text
    assert "redis://user:***@host:1/0" in text


def test_a_second_call_replaces_the_first(tmp_path: Path) -> None:
    setup_logging("x", file=tmp_path / "first.log")
    setup_logging("x", file=tmp_path / "second.log")
    logging.getLogger().warning("once")
    assert written(tmp_path / "first.log") == []
    assert len(written(tmp_path / "second.log")) == 1


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="'LOUD' is unknown: use DEBUG, INFO"):
        setup_logging("x", "LOUD")
