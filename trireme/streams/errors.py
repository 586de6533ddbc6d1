"""What goes wrong with a queue, told apart by what somebody can do about it."""


class StreamsError(RuntimeError):
    """Anything below, or an answer that nothing here expects."""


class Unreachable(StreamsError):
    """Nothing answers at the address, or stopped answering for longer than we wait."""


class WrongServer(StreamsError):
    """What answers is not Redis, or too old a Redis."""


class AccessDenied(StreamsError):
    """The password or the user's permissions are wrong."""


class WritesRefused(StreamsError):
    """The server takes no writes: its disk is full, its memory is full, or it is a replica. Nothing was written."""
