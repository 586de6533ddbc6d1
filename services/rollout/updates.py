"""Which weights the engine has, and how it gets newer ones: from UpdateWeights, or by itself from the registry.

Updates run one at a time and never end halfway: a caller that gives up does not stop the one it waits for. A server
whose update failed is out of rotation (`serving` is false) until one succeeds; it tries by itself, from the newest
manifest in the registry, as does a server that joins late or missed a call.

One failure leaves rotation as it is: bytes that cannot be fetched in an attempt of its own. The publisher of that
manifest may be gone, as when a run is resumed, and its successor waits for this server to be healthy. Until then the
server is merely `behind`: it takes no prompts from the stream, and answers who demands no newer weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from services.rollout.engine import Engine, EngineDeadError, EngineError
from trireme.contracts.v1.weights_pb2 import WeightManifest
from trireme.streams.errors import StreamsError
from trireme.weights.base import Transport
from trireme.weights.manifest import WeightsError
from trireme.weights.segment import Segment

log = logging.getLogger(__name__)

CATCH_UP_EVERY_S = 2.0

GetManifest = Callable[[], Awaitable[bytes | None]]


class StaleVersion(ValueError):
    """An update to weights older than those that the engine has."""


class UpdateFailed(RuntimeError):
    """An update did not succeed; the server has left rotation until one does."""


class NotCaughtUp(RuntimeError):
    """The weights that a prompt demands did not arrive in time."""


@dataclass(frozen=True)
class Update:
    """A finished update; seconds of fetching and verifying the bytes, and of loading them (waiting included)."""

    version: int
    fetch_s: float = 0.0
    load_s: float = 0.0


class WeightKeeper:
    """Owns the engine's weights. `in_flight`: how updates that it starts by itself are loaded."""

    def __init__(
        self, engine: Engine, transport: Transport, run: str, *, timeout_s: float, in_flight: bool = False
    ) -> None:
        self._engine, self._transport, self._run = engine, transport, run
        self._timeout_s, self._in_flight = timeout_s, in_flight
        self._turn = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._wanted = asyncio.Event()
        self._running: dict[int, asyncio.Task[Update]] = {}
        self._latest = 0
        self.problem: str | None = None

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def serving(self) -> bool:
        """Whether prompts may be generated here: the last update succeeded."""
        return self.problem is None

    @property
    def behind(self) -> bool:
        """Whether the weights heard of last are newer than those that the engine has."""
        return self._latest > self.version

    async def changes(self) -> AsyncIterator[None]:
        """Yields now, and whenever version or rotation may have changed."""
        while True:
            yield
            async with self._changed:
                await self._changed.wait()

    async def update(self, manifest: WeightManifest, *, in_flight: bool, asked: bool = True) -> Update:
        """Take the manifest's version; at once when the engine has it already, or joining who is at it.

        `asked`: somebody counts on it, so that any failure takes this server out of rotation.
        Raises StaleVersion, ValueError (another run's weights) or UpdateFailed.
        """
        self._check(manifest)
        version = manifest.version
        self._latest = version
        if version == self.version and self.serving:
            return Update(version)
        if version not in self._running:
            task = asyncio.create_task(self._take_turn(manifest, in_flight, asked))
            self._running[version] = task
            task.add_done_callback(lambda _: self._running.pop(version, None))
        # Shielded: a caller's deadline must not leave the engine paused, or half loaded.
        return await asyncio.shield(self._running[version])

    async def wait_for(self, version: int, timeout_s: float) -> None:
        """Return once the engine has at least `version`. Raises NotCaughtUp naming both after `timeout_s`."""
        if self.version >= version and self.serving:
            return
        self._wanted.set()
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.version >= version and self.serving)
        except TimeoutError as error:
            problem = f" ({self.problem})" if self.problem else ""
            raise NotCaughtUp(
                f"the prompt demands weight version {version}, this server has {self.version}{problem}"
            ) from error

    async def catch_up(self, get_manifest: GetManifest) -> None:
        """Take the newest published version, if it is not the engine's. Raises UpdateFailed or StreamsError."""
        data = await get_manifest()
        if data is None:
            return
        manifest = WeightManifest.FromString(data)
        if manifest.version > self.version or (manifest.version == self.version and not self.serving):
            await self.update(manifest, in_flight=self._in_flight, asked=False)

    async def keep_up(self, get_manifest: GetManifest) -> None:
        """Catch up for ever: every few seconds, and at once when somebody begins to wait for a version."""
        while True:
            self._wanted.clear()
            try:
                await self.catch_up(get_manifest)
            except (UpdateFailed, StreamsError, ValueError) as error:
                log.warning("cannot catch up with the newest weights: %s", error)
                await asyncio.sleep(CATCH_UP_EVERY_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(CATCH_UP_EVERY_S):
                    await self._wanted.wait()

    def _check(self, manifest: WeightManifest) -> None:
        if manifest.run != self._run:
            raise ValueError(f"manifest.run is {manifest.run!r}; this server belongs to run {self._run!r}")
        if manifest.version < self.version:
            raise StaleVersion(f"weight version {manifest.version} is older than version {self.version}, loaded here")

    async def _take_turn(self, manifest: WeightManifest, in_flight: bool, asked: bool) -> Update:
        async with self._turn:
            self._check(manifest)  # a newer one may have come while this one waited
            if manifest.version == self.version and self.serving:
                return Update(manifest.version)
            started = time.monotonic()
            segment = await self._stage(manifest, asked)
            fetched = time.monotonic()
            await self._load(manifest.version, segment, in_flight)
        done = Update(manifest.version, fetched - started, time.monotonic() - fetched)
        log.info("weights updated", extra=asdict(done))
        return done

    async def _stage(self, manifest: WeightManifest, asked: bool) -> Segment:
        try:
            return await asyncio.to_thread(self._transport.stage, manifest, self._timeout_s)
        except (WeightsError, OSError) as error:
            if asked:
                await self._note(f"weight version {manifest.version}: {error}")
            raise UpdateFailed(f"weight version {manifest.version}: {error}") from error

    async def _load(self, version: int, segment: Segment, in_flight: bool) -> None:
        try:
            await self._engine.load(version, segment, in_flight=in_flight)
        except EngineError as error:
            await self._note(f"weight version {version}: {error}")
            if isinstance(error, EngineDeadError):
                raise
            raise UpdateFailed(f"weight version {version}: {error}") from error
        finally:
            segment.close()
        await self._note(None)

    async def _note(self, problem: str | None) -> None:
        """Leave rotation, or be back in it."""
        if problem:
            log.error("out of rotation: %s", problem)
        async with self._changed:
            self.problem = problem
            self._changed.notify_all()
