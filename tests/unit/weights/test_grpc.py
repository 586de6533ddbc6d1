"""The gRPC transport against a real server, and the choice between the two transports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from torch import Tensor

from tests.unit.weights.conftest import FetchServicer
from trireme.contracts.grpc import serve
from trireme.contracts.v1 import trainer_pb2_grpc
from trireme.contracts.v1.weights_pb2 import WeightManifest
from trireme.weights.base import Transport
from trireme.weights.choose import AutoTransport, make_transport, receiver
from trireme.weights.grpc import GrpcTransport
from trireme.weights.manifest import WeightsError, build, verify
from trireme.weights.shm import ShmTransport

Named = list[tuple[str, Tensor]]
RUN = "grpc-test"


@asynccontextmanager
async def serving(transport: Transport, chunk_bytes: int = 100) -> AsyncIterator[tuple[FetchServicer, str]]:
    servicer = FetchServicer(transport, chunk_bytes)
    add = trainer_pb2_grpc.add_TrainerServiceServicer_to_server
    server, port = await serve([(add, servicer, "trireme.v1.TrainerService")], "127.0.0.1", 0)
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def at(manifest: WeightManifest, address: str) -> WeightManifest:
    manifest.location = address
    return manifest


async def test_every_tensor_arrives_in_chunks(tensors: Named, tmp_path: Path) -> None:
    publisher = GrpcTransport(RUN, directory=tmp_path)
    async with serving(publisher, chunk_bytes=1000) as (servicer, address):
        manifest = at(publisher.offer(build(4, RUN, tensors), tensors), address)
        got = await asyncio.to_thread(lambda: list(GrpcTransport(RUN).fetch(manifest, 10)))
    assert [name for name, _ in got] == [name for name, _ in tensors]
    for name, tensor in got:
        verify(manifest, name, tensor)
    assert servicer.sent == sum(-(-info.nbytes // 1000) for info in manifest.tensors)
    publisher.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_version_that_is_not_on_offer_is_not_found(tensors: Named, tmp_path: Path) -> None:
    publisher = GrpcTransport(RUN, directory=tmp_path)
    async with serving(publisher) as (_, address):
        for version in (1, 2, 3):
            manifest = at(publisher.offer(build(version, RUN, tensors), tensors), address)
        manifest.version = 1
        with pytest.raises(WeightsError, match=f"version 1 from {address}: NOT_FOUND"):
            await asyncio.to_thread(GrpcTransport(RUN, directory=tmp_path).stage, manifest, 10)
    publisher.close()


async def test_damage_on_the_way_is_found_and_leaves_nothing(tensors: Named, tmp_path: Path) -> None:
    publisher, inbox = GrpcTransport(RUN, directory=tmp_path), tmp_path / "inbox"
    inbox.mkdir()
    async with serving(publisher) as (_, address):
        manifest = at(publisher.offer(build(1, RUN, tensors), tensors), address)
        manifest.tensors[2].checksum = "0" * 32
        with pytest.raises(WeightsError, match="'model.layers.0.transposed' of version 1: checksum"):
            await asyncio.to_thread(GrpcTransport(RUN, directory=inbox).stage, manifest, 10)
    assert list(inbox.iterdir()) == []
    publisher.close()


class Stuck(FetchServicer):
    """A trainer that stops sending."""

    async def FetchWeights(self, request: object, context: object) -> AsyncIterator[object]:
        await asyncio.sleep(60)
        yield None


async def test_a_stuck_trainer_does_not_hold_a_server_longer_than_the_deadline(tensors: Named, tmp_path: Path) -> None:
    add = trainer_pb2_grpc.add_TrainerServiceServicer_to_server
    server, port = await serve([(add, Stuck(None, 1), "trireme.v1.TrainerService")], "127.0.0.1", 0)
    manifest = build(1, RUN, tensors)
    manifest.transport, manifest.location = "grpc", f"127.0.0.1:{port}"
    with pytest.raises(WeightsError, match="DEADLINE_EXCEEDED"):
        await asyncio.to_thread(GrpcTransport(RUN, directory=tmp_path).stage, manifest, 0.3)
    await server.stop(None)


async def test_a_trainer_that_sends_too_little_is_noticed(tensors: Named, tmp_path: Path) -> None:
    publisher = GrpcTransport(RUN, directory=tmp_path)
    async with serving(publisher) as (_, address):
        publisher.offer(build(1, RUN, tensors[:2]), tensors[:2])
        manifest = build(1, RUN, tensors)
        manifest.transport, manifest.location = "grpc", address
        with pytest.raises(WeightsError, match=r"version 1 from .*: \d+ of \d+ bytes came"):
            await asyncio.to_thread(GrpcTransport(RUN, directory=tmp_path).stage, manifest, 10)
    publisher.close()


async def test_auto_falls_back_to_grpc_when_shared_memory_is_full(
    tensors: Named, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`auto` publishes over gRPC and says so in the log; `shm` alone would have failed."""
    full = ShmTransport(RUN, directory=tmp_path / "missing")
    auto = AutoTransport(RUN, full, GrpcTransport(RUN, directory=tmp_path))
    with caplog.at_level(logging.WARNING):
        async with serving(auto) as (_, address):
            manifest = at(auto.offer(build(1, RUN, tensors), tensors), address)
            got = await asyncio.to_thread(lambda: list(receiver(RUN).fetch(manifest, 10)))
    assert manifest.transport == "grpc" and len(got) == len(tensors)
    assert "publishing over gRPC" in caplog.text
    with pytest.raises(FileNotFoundError):
        full.offer(build(1, RUN, tensors), tensors)
    auto.close()


async def test_a_server_elsewhere_gets_over_grpc_what_was_published_in_shared_memory(
    tensors: Named, tmp_path: Path
) -> None:
    publisher = ShmTransport(RUN, directory=tmp_path)
    async with serving(publisher) as (servicer, address):
        manifest = publisher.offer(build(1, RUN, tensors), tensors)
        manifest.host, manifest.fallback_address = "another-machine", address
        got = await asyncio.to_thread(lambda: list(receiver(RUN).fetch(manifest, 10)))
    assert servicer.sent > 0
    for name, tensor in got:
        verify(manifest, name, tensor)
    publisher.close()


def test_without_an_address_the_error_says_so(tensors: Named) -> None:
    manifest = build(5, RUN, tensors)
    manifest.transport, manifest.host = "shm", "another-machine"
    with pytest.raises(WeightsError, match="version 5 were published by shm on another host"):
        receiver(RUN).stage(manifest, 1)


@pytest.mark.parametrize(("kind", "made"), [("auto", AutoTransport), ("shm", ShmTransport), ("grpc", GrpcTransport)])
def test_the_setting_decides_the_transport(kind: str, made: type) -> None:
    assert isinstance(make_transport(kind, RUN, "127.0.0.1:1"), made)  # type: ignore[arg-type]
