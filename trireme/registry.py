"""Who is where: services announce themselves in Redis, and are forgotten when they stop doing so. No torch."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from redis.asyncio import Redis
from redis.asyncio.lock import Lock
from redis.exceptions import LockError

from trireme.streams.connection import Link
from trireme.streams.errors import StreamsError
from trireme.streams.redis import key
from trireme.tasks import end

log = logging.getLogger(__name__)

Kind = Literal["rollout", "reward", "trainer"]
# Announce at least this often; three missed announcements and a service is gone.
ANNOUNCE_EVERY_S = 5.0
RECORD_TTL_S = 15
LOCK_TTL_S = 30.0
LOCK_SLACK_S = 5.0  # whoever starts a killed trainer again waits this much longer than that
# The lock is lost when somebody else has it. Nobody can take it from a Redis that answers nobody, and who takes it
# while this trainer is cut off keeps it from publishing: so a pause of Redis is waited out.
SILENCE_S = 300.0

# KEYS record, index; ARGV pid, started. Leaves the record of a successor of the same name alone.
_WITHDRAW = """
local text = redis.call('GET', KEYS[1])
if not text then return 0 end
local record = cjson.decode(text)
if tostring(record.pid) ~= ARGV[1] or record.started_unix_s ~= tonumber(ARGV[2]) then return 0 end
redis.call('SREM', KEYS[2], KEYS[1])
return redis.call('DEL', KEYS[1])
"""

# KEYS lock, manifest; ARGV token of the caller's lock ('' without one), manifest. Returns another holder of the lock.
_SET_MANIFEST = """
local holder = redis.call('GET', KEYS[1])
if ARGV[1] ~= '' and holder and holder ~= ARGV[1] then return holder end
redis.call('SET', KEYS[2], ARGV[2])
return false
"""


class RunLocked(StreamsError):
    """The run has a trainer already."""


@dataclass(frozen=True)
class ServiceRecord:
    """One service as it describes itself. `address` and `metrics_address` are host:port; `state` is for people."""

    kind: Kind
    name: str
    address: str
    metrics_address: str
    pid: int
    weight_version: int
    state: str
    started_unix_s: float
    model: str = ""


class Registry:
    """The services of one run, its newest weights, and its lock. Raises StreamsError when Redis does not answer."""

    def __init__(self, client: Redis, run: str) -> None:
        self._run = run
        self._link = Link(client)
        self._redis: Any = client
        self._index = key(run, "services")
        self._manifest = key(run, "manifest")
        self._lock = key(run, "lock")
        self._token = ""
        self._withdraw = client.register_script(_WITHDRAW)
        self._replace_manifest = client.register_script(_SET_MANIFEST)

    async def announce(self, record: ServiceRecord, ttl_s: int = RECORD_TTL_S) -> None:
        """Be found for `ttl_s` seconds; repeat it sooner. A record of the same kind and name is replaced."""
        name = self._key(record)

        async def write() -> None:
            async with self._redis.pipeline(transaction=True) as both:
                both.set(name, json.dumps(asdict(record)), ex=ttl_s)
                both.sadd(self._index, name)
                await both.execute()

        await self._link.call(write)

    async def withdraw(self, record: ServiceRecord) -> None:
        """No longer be found. A later process that took over the name stays."""
        args: tuple[str | int, ...] = (record.pid, repr(record.started_unix_s))
        await self._link.call(lambda: self._withdraw(keys=[self._key(record), self._index], args=args))

    async def list(self, kind: Kind | None = None) -> list[ServiceRecord]:
        """All services that announced themselves lately, by kind and name. One of them may have died since."""
        names = sorted(await self._link.call(lambda: self._redis.smembers(self._index)))
        if not names:
            return []
        texts = await self._link.call(lambda: self._redis.mget(names))
        gone = [name for name, text in zip(names, texts, strict=True) if text is None]
        if gone:  # an announcement that comes in between puts itself back the next time
            await self._link.call(lambda: self._redis.srem(self._index, *gone))
        records = [_record(text) for text in texts if text is not None]
        return [record for record in records if kind in (None, record.kind)]

    async def set_manifest(self, manifest: bytes) -> None:
        """Make this serialized WeightManifest the newest one.

        Raises RunLocked if this was the run's trainer and another has taken over: one that was suspended for longer
        than its lock lives must not publish beside its successor, not even before it hears of it.
        """
        keys, args = [self._lock, self._manifest], (self._token, manifest)
        holder = await self._link.call(lambda: self._replace_manifest(keys=keys, args=args))
        if holder is not None:
            raise RunLocked(f"run {self._run!r} was taken over by {holder.decode()}; this trainer publishes no more")

    async def get_manifest(self) -> bytes | None:
        """The newest serialized WeightManifest; None before the first publish."""
        return await self._link.call(lambda: self._redis.get(self._manifest))  # type: ignore[no-any-return]

    @asynccontextmanager
    async def lock(self, holder: str, wait_s: float = 0.0, ttl_s: float = LOCK_TTL_S) -> AsyncIterator[asyncio.Event]:
        """Be the run's one trainer while the body runs; yields an event that is set if that stops being true.

        After a trainer was killed its lock stays for `ttl_s`; `wait_s` longer than that lets a restart in.
        Raises RunLocked naming the present holder.
        """
        lock = Lock(self._redis, self._lock, timeout=ttl_s, thread_local=False)
        token = f"{holder} ({secrets.token_hex(4)})"
        await self._acquire(lock, token, wait_s)
        self._token, lost = token, asyncio.Event()
        keeping = asyncio.create_task(self._keep(lock, token, ttl_s, lost))
        try:
            yield lost
        finally:
            await end(keeping)
            with suppress(StreamsError):  # lost or unreachable: it ends by itself
                await self._link.call(lock.release, patience_s=0.0)

    async def require_no_trainer(self, patience_s: float) -> None:
        """Return once nobody holds the run's lock; one that was killed leaves it for a while. Raises RunLocked."""
        deadline = asyncio.get_running_loop().time() + patience_s
        while present := await self._link.call(lambda: self._redis.get(self._lock)):
            if asyncio.get_running_loop().time() >= deadline:
                raise _locked(self._run, present.decode())
            await asyncio.sleep(0.5)

    async def _acquire(self, lock: Lock, token: str, wait_s: float) -> None:
        if await self._link.call(lambda: lock.acquire(blocking_timeout=wait_s, token=token)):
            return
        present = (await self._link.call(lambda: self._redis.get(lock.name)) or b"one that just ended").decode()
        if present != token:  # the same: only the answer was lost
            raise _locked(self._run, present)

    async def _keep(self, lock: Lock, token: str, ttl_s: float, lost: asyncio.Event) -> None:
        """Renew the lock until it is somebody else's, or may be."""

        async def renew() -> bool:
            with suppress(LockError):
                return await lock.reacquire()
            return await lock.acquire(blocking=False, token=token)  # a restarted server may have forgotten it

        now = asyncio.get_running_loop().time
        renewed = now()
        while now() - renewed < max(ttl_s, SILENCE_S):
            await asyncio.sleep(ttl_s / 3)
            try:
                if not await self._link.call(renew, patience_s=0.0):
                    break
                renewed = now()
            except StreamsError as error:
                log.warning("could not renew the lock of the run", extra={"run": self._run, "error": str(error)})
        log.error("the lock of the run is lost", extra={"run": self._run})
        lost.set()

    def _key(self, record: ServiceRecord) -> str:
        return key(self._run, f"service:{record.kind}:{record.name}")


def _locked(run: str, holder: str) -> RunLocked:
    return RunLocked(f"run {run!r} has a trainer already: {holder}. Stop it, or choose another run.name")


def _record(text: bytes) -> ServiceRecord:
    """Fields that a newer service added are left out."""
    known = {field.name for field in fields(ServiceRecord)}
    return ServiceRecord(**{name: value for name, value in json.loads(text).items() if name in known})
