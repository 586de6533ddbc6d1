"""Which values are secrets, and how they are shown."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

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
    return mask_url(value) if "://" in value else MASK


def mask_url(url: str) -> str:
    """`url` without a password and without a query, which may hold one. What is between `://` and the last `@` counts
    as the password, even where an unescaped `/` in it says otherwise; what is no URL at all is hidden whole."""
    try:
        urlsplit(url)
    except ValueError:
        return MASK
    scheme, _, rest = url.partition("://")
    access, at, host = rest.rpartition("@")
    place, question, _ = host.partition("?")
    shown = f"{access.partition(':')[0]}:{MASK}" if ":" in access else MASK
    return f"{scheme}://{shown + at if at else ''}{place}{question + MASK if question else ''}"
