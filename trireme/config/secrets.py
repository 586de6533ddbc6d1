"""Which values are secrets, and how they are shown."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

MASK = "***"
SECRET_KEYS = ("redis.url", "security.tokens")


def is_secret(key: str) -> bool:
    """Whether the value of a key may hold a secret."""
    return key.startswith(SECRET_KEYS)


def masked(plain: dict[str, Any]) -> dict[str, Any]:
    """The same tree of a whole configuration with its secrets hidden."""
    hidden = {**plain, "redis": dict(plain["redis"]), "security": dict(plain["security"])}
    hidden["redis"]["url"] = mask_value(plain["redis"]["url"])
    hidden["security"]["tokens"] = [MASK for _ in plain["security"]["tokens"]]
    return hidden


def mask_value(value: Any) -> Any:
    """A URL without its password; any other text or list hidden whole; null as it is."""
    if not isinstance(value, str):
        return value if value is None else MASK
    try:
        parts = urlsplit(value)
    except ValueError:  # not a URL at all, so that nobody can say which part of it is the password
        return MASK
    if "@" not in parts.netloc:
        return value if parts.scheme and not parts.query else MASK
    user = f"{parts.username}:" if parts.username and parts.password else ":" if parts.password else ""
    return urlunsplit(parts._replace(netloc=f"{user}{MASK}@{parts.netloc.rpartition('@')[2]}"))
