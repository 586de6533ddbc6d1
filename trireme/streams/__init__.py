"""The queues between the services: a port (`base`), Redis behind it (`redis`), a server of our own (`embedded`)."""

from trireme.streams.base import DeadLetter, Entry, Stream
from trireme.streams.errors import AccessDenied, StreamsError, Unreachable, WritesRefused, WrongServer
from trireme.streams.redis import RedisStreams

__all__ = [
    "AccessDenied",
    "DeadLetter",
    "Entry",
    "RedisStreams",
    "Stream",
    "StreamsError",
    "Unreachable",
    "WritesRefused",
    "WrongServer",
]
