"""Publishing a policy: offer the bytes, record the manifest, tell every rollout server to load it.

A publish is complete once its manifest is in the registry: a server that cannot be told now, or that joins later,
catches up from there by itself. The weight version is the number of completed publishes of the run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

import grpc
import torch
from torch import Tensor

from trireme.contracts.grpc import channel
from trireme.contracts.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2
from trireme.registry import Registry
from trireme.weights.base import Transport
from trireme.weights.manifest import build

log = logging.getLogger(__name__)

# Gives (Hugging Face name, tensor) anew with each call, one at a time.
Tensors = Callable[[], Iterable[tuple[str, Tensor]]]

# A server that is gone or slow: it, or its successor, catches up from the manifest.
TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class PublishError(Exception):
    """Every rollout server refused the new weights."""


@dataclass(frozen=True)
class Failure:
    """Why a server did not take the weights. refused: it answered so, and waiting will not change its mind."""

    text: str
    refused: bool


@dataclass(frozen=True)
class PublishReport:
    """What one publish cost. Seconds: of gathering and offering the bytes, and until the last server answered."""

    version: int
    offer_s: float
    update_s: float
    updated: tuple[str, ...]
    failed: tuple[str, ...]

    def metrics(self) -> dict[str, float]:
        return {
            "timing/train/weight_offer": self.offer_s,
            "timing/train/weight_update": self.offer_s + self.update_s,
            "train/weight_version": self.version,
            "train/weight_update_failures": len(self.failed),
        }


class Publisher:
    """Publishes successive versions. `version` is that of the last completed publish (0: none yet); `dtype` the
    precision of the engine."""

    def __init__(
        self,
        run: str,
        registry: Registry,
        transport: Transport,
        *,
        version: int,
        dtype: torch.dtype,
        timeout_s: float,
        in_flight: bool,
    ) -> None:
        self.version, self._dtype = version, dtype
        self._run, self._registry, self._transport = run, registry, transport
        self._timeout_s, self._in_flight = timeout_s, in_flight
        self._known: weights_pb2.WeightManifest | None = None

    async def publish(self, tensors: Tensors, compute: Executor | None = None) -> PublishReport:
        """Publish what `tensors()` gives, called on `compute`, as the next version.

        Raises PublishError when servers exist and all refuse it. Those that cannot be reached are counted only: the
        prompts' minimum version keeps the step waiting for them.
        """
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        manifest = await loop.run_in_executor(compute, self._offer, self.version + 1, tensors)
        await self._registry.set_manifest(manifest.SerializeToString())
        self.version = manifest.version
        offered = time.monotonic()
        updated, failed = await self._tell_servers(manifest)
        texts = tuple(failure.text for failure in failed)
        if failed and not updated and all(failure.refused for failure in failed):
            raise PublishError(f"no rollout server took weight version {self.version}: {'; '.join(texts)}")
        return PublishReport(self.version, offered - started, time.monotonic() - offered, tuple(updated), texts)

    def _offer(self, version: int, tensors: Tensors) -> weights_pb2.WeightManifest:
        """The model is never held a second time: room is made by the sizes that the first publish has seen, and bytes
        go to it tensor by tensor."""
        if self._known is None:
            self._known = build(version, self._run, self._cast(tensors()))
        manifest = weights_pb2.WeightManifest()
        manifest.CopyFrom(self._known)
        manifest.version = version
        return self._transport.offer(manifest, self._cast(tensors()))

    def _cast(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.to(self._dtype)) for name, tensor in tensors)

    async def _tell_servers(self, manifest: weights_pb2.WeightManifest) -> tuple[list[str], list[Failure]]:
        servers = await self._registry.list("rollout")
        outcomes = await asyncio.gather(*(self._update(server.address, manifest) for server in servers))
        failed = [
            Failure(f"{server.name} at {server.address}: {error.text}", error.refused)
            for server, error in zip(servers, outcomes, strict=True)
            if error
        ]
        for failure in failed:
            # The server has left rotation by itself and will catch up from the registry's manifest.
            log.warning("weight update failed", extra={"server": failure.text, "version": manifest.version})
        return [s.name for s, error in zip(servers, outcomes, strict=True) if not error], failed

    async def _update(self, address: str, manifest: weights_pb2.WeightManifest) -> Failure | None:
        """None, or why the server did not update."""
        request = rollout_pb2.UpdateWeightsRequest(manifest=manifest, in_flight=self._in_flight)
        async with channel(address) as target:
            try:
                await rollout_pb2_grpc.RolloutServiceStub(target).UpdateWeights(request, timeout=self._timeout_s)
            except grpc.aio.AioRpcError as error:
                return Failure(f"{error.code().name}: {error.details()}", error.code() not in TRANSIENT)
        return None
