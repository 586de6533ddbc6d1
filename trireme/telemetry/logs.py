"""Structured logs: one JSON object a line, with the service's name and whatever a call passes as `extra`."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

_PASSWORD = re.compile(r"((?:rediss?|unix)://[^:@/\s]*):[^@\s]*@|([?&]password=)[^&\s\"]*")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_NOISE = frozenset({"vllm_process_name"})  # vLLM adds it to every record of a process that imports it


def setup_logging(service: str, level: str = "INFO", file: Path | None = None) -> None:
    """Send all logs of this process to `file` (appended; folders are made), or to stderr. Replaces earlier settings.

    Raises ValueError on an unknown level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level {level!r} is unknown: use DEBUG, INFO, WARNING or ERROR")
    handler = _handler(file)
    handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=number, handlers=[handler], force=True)
    logging.captureWarnings(True)


def _handler(file: Path | None) -> logging.Handler:
    if file is None:
        return logging.StreamHandler(sys.stderr)
    file.parent.mkdir(parents=True, exist_ok=True)
    return logging.FileHandler(file, encoding="utf-8")


def _hide(found: re.Match[str]) -> str:
    return f"{found[1]}:***@" if found[1] is not None else f"{found[2]}***"


class JsonFormatter(logging.Formatter):
    """time, level, service, logger, message; then the extras, and `exception` with a traceback."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD | _NOISE}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _PASSWORD.sub(_hide, json.dumps(line, default=str, ensure_ascii=False))
