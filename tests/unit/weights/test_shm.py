"""The shared-memory transport, on the real /dev/shm and, where files are inspected, on a folder of our own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trireme.weights import segment as segments
from trireme.weights.base import boot_id
from trireme.weights.manifest import WeightsError, build, verify
from trireme.weights.segment import NoRoomError, Segment
from trireme.weights.shm import ShmTransport
from trireme.weights.store import SHM, prefix

Named = list[tuple[str, Tensor]]
RUN = f"test-{os.getpid()}"


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[ShmTransport]:
    made = ShmTransport(RUN, directory=tmp_path)
    yield made
    made.close()


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_another_process_sees_the_same_tensors(tensors: Named) -> None:
    """Bit for bit, through the real /dev/shm."""
    transport = ShmTransport(RUN)
    try:
        offered = transport.offer(build(1, RUN, tensors), tensors)
        assert offered.transport == "shm" and Path(offered.location).parent == SHM and offered.host == boot_id()
        code = (
            "import sys; from trireme.weights.shm import ShmTransport;"
            "from trireme.contracts.v1.weights_pb2 import WeightManifest; from trireme.weights.manifest import verify;"
            "m = WeightManifest.FromString(bytes.fromhex(sys.argv[1]));"
            "got = list(ShmTransport(m.run).fetch(m, 5)); [verify(m, n, t) for n, t in got];"
            "print(len(got), float(dict(got)['model.embed_tokens.weight'].double().sum()))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, offered.SerializeToString().hex()], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == [str(len(tensors)), str(float(tensors[0][1].double().sum()))]
    finally:
        transport.close()
    assert not list(SHM.glob(f"{prefix(RUN)}*"))


def test_the_offer_is_a_copy(transport: ShmTransport, tensors: Named) -> None:
    """The trainer steps on while servers still fetch."""
    before = tensors[0][1].clone()
    offered = transport.offer(build(1, RUN, tensors), tensors)
    tensors[0][1].zero_()
    assert torch.equal(dict(transport.fetch(offered, 1))["model.embed_tokens.weight"], before)


def test_writing_to_a_fetched_tensor_changes_nobody_elses(transport: ShmTransport, tensors: Named) -> None:
    offered = transport.offer(build(1, RUN, tensors), tensors)
    dict(transport.fetch(offered, 1))["model.embed_tokens.weight"].zero_()
    assert torch.equal(dict(transport.fetch(offered, 1))["model.embed_tokens.weight"], tensors[0][1])


def test_damage_is_found_and_named(transport: ShmTransport, tensors: Named) -> None:
    """One flipped bit in one tensor."""
    offered = transport.offer(build(1, RUN, tensors), tensors)
    with open(offered.location, "r+b") as file, Segment.open(Path(offered.location), offered) as segment:
        file.seek(segment.offsets[1])
        byte = file.read(1)
        file.seek(segment.offsets[1])
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(WeightsError, match=r"'model\.layers\.0\.q\.weight' of version 1: checksum"):
        transport.stage(offered, 1)


def test_a_cut_file_is_found(transport: ShmTransport, tensors: Named) -> None:
    offered = transport.offer(build(1, RUN, tensors), tensors)
    os.truncate(offered.location, 100)
    with pytest.raises(WeightsError, match="has 100 bytes, the manifest says"):
        transport.stage(offered, 1)


def test_the_version_before_stays_and_older_ones_go(transport: ShmTransport, tensors: Named, tmp_path: Path) -> None:
    offers = [transport.offer(build(v, RUN, tensors), tensors) for v in (1, 9, 3)]
    assert len(files(tmp_path)) == 2
    with pytest.raises(WeightsError, match="version 1.*gone"):
        transport.stage(offers[0], 1)
    transport.stage(offers[1], 1).close()
    transport.withdraw(9)
    assert transport.published(9) is None and transport.published(3) is not None
    assert len(files(tmp_path)) == 1


def test_a_reader_finishes_although_the_version_is_withdrawn(transport: ShmTransport, tensors: Named) -> None:
    offered = transport.offer(build(1, RUN, tensors), tensors)
    reading = transport.fetch(offered, 1)
    first = next(reading)
    transport.withdraw(1)
    read = [first, *reading]
    assert [name for name, _ in read] == [name for name, _ in tensors]
    for name, tensor in read:
        verify(offered, name, tensor)  # raises for another checksum


def test_nothing_is_left_of_an_offer_that_fails(transport: ShmTransport, tensors: Named, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="tensor number 0 is 'model.layers.0.q.weight'"):
        transport.offer(build(1, RUN, tensors), tensors[1:])
    with pytest.raises(WeightsError, match="6 tensors for a manifest of 7"):
        transport.offer(build(1, RUN, tensors), tensors[:-1])
    assert files(tmp_path) == []


def test_one_tensor_at_a_time_is_held(transport: ShmTransport, tensors: Named) -> None:
    """Of a model of any size; the checksums are those of what was written."""
    alive, most = weakref.WeakSet[Tensor](), 0

    def fresh() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for name, tensor in tensors:
            copy = tensor.clone()
            alive.add(copy)
            most = max(most, len(alive))
            yield name, copy
            del copy

    manifest = build(1, RUN, fresh())
    for info in manifest.tensors:
        info.checksum = "of another version"
    offered = transport.offer(manifest, fresh())
    assert most <= 2
    assert [info.checksum for info in offered.tensors] == [info.checksum for info in build(1, RUN, tensors).tensors]


def test_a_tensor_of_another_shape_or_dtype_is_named(transport: ShmTransport, tensors: Named, tmp_path: Path) -> None:
    (name, first), *rest = tensors
    for other in (first[:1], first.double()):
        with pytest.raises(WeightsError, match=f"tensor '{name}' is torch.*, the manifest says"):
            transport.offer(build(1, RUN, tensors), [(name, other), *rest])
    assert files(tmp_path) == []


def test_no_room_says_how_much_is_needed(tensors: Named) -> None:
    """On the real /dev/shm: more than it can ever hold is refused before a byte is written."""
    manifest = build(1, RUN, tensors)
    manifest.tensors[0].shape[:] = [1 << 44]
    manifest.tensors[0].nbytes = 4 << 44
    transport = ShmTransport(RUN)
    with pytest.raises(NoRoomError, match=r"version 1 need \d{14} bytes in /dev/shm, \d+ are free"):
        transport.offer(manifest, tensors)
    assert not list(SHM.glob(f"{prefix(RUN)}*"))


def test_segments_of_a_killed_publisher_are_cleaned_and_those_of_a_living_one_not(
    tensors: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of a publisher; the next one of the same run takes its place."""
    monkeypatch.setattr(segments, "UNLOCKED_GRACE_S", 0.0)
    code = (
        "import sys, time, torch; from pathlib import Path; from trireme.weights.shm import ShmTransport;"
        "from trireme.weights.manifest import build; t = [('w', torch.ones(3))];"
        "ShmTransport(sys.argv[1], directory=Path(sys.argv[2])).offer(build(1, sys.argv[1], t), t);"
        "print('offered', flush=True); time.sleep(60)"
    )
    publisher = subprocess.Popen([sys.executable, "-c", code, RUN, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert publisher.stdout is not None and publisher.stdout.readline() == "offered\n"
    (theirs,) = files(tmp_path)
    with_living = ShmTransport(RUN, directory=tmp_path)
    with_living.offer(build(2, RUN, tensors), tensors)
    assert theirs in files(tmp_path)
    with_living.close()
    publisher.send_signal(signal.SIGKILL)
    publisher.wait(10)
    assert files(tmp_path) == [theirs]
    successor = ShmTransport(RUN, directory=tmp_path)
    successor.offer(build(2, RUN, tensors), tensors)
    assert theirs not in files(tmp_path)
    successor.close()


def test_files_of_other_runs_go_when_nobody_holds_them(
    tensors: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each demo is a run of its own: nobody else would ever delete what a killed one left."""
    monkeypatch.setattr(segments, "UNLOCKED_GRACE_S", 0.0)
    dead, foreign = tmp_path / f"{prefix('dead')}v1-1-00000000.weights", tmp_path / "psm_1.weights"
    with closing(ShmTransport("living", directory=tmp_path)) as living:
        held = Path(living.offer(build(1, "living", tensors), tensors).location)
        for path in (dead, foreign, held):
            path.touch()
            os.utime(path, (0, 0))
        with closing(ShmTransport(RUN, directory=tmp_path)) as next_run:
            next_run.offer(build(1, RUN, tensors), tensors)
            assert not dead.exists()
            assert held.exists() and foreign.exists()


@pytest.mark.parametrize("location", ["/etc/passwd", "{dir}/../x.weights", "{dir}/trireme-other-v1.weights"])
def test_a_location_that_is_no_segment_of_the_run_is_refused(
    transport: ShmTransport, tensors: Named, tmp_path: Path, location: str
) -> None:
    manifest = build(1, RUN, tensors)
    manifest.transport, manifest.location = "shm", location.format(dir=tmp_path)
    with pytest.raises(WeightsError, match="not a weights segment of run"):
        transport.stage(manifest, 1)


def test_shared_memory_counts_only_where_it_is_the_publishers(transport: ShmTransport, tensors: Named) -> None:
    offered = transport.offer(build(1, RUN, tensors), tensors)
    assert transport.available(offered)
    offered.host = "another-machine"
    assert not transport.available(offered)


def test_a_model_of_many_megabytes_moves_in_a_moment(transport: ShmTransport) -> None:
    """Guards against an accidental element-wise path: 64 MiB in well under five seconds."""
    big = [("w", torch.zeros(16, 1 << 20))]
    started = time.monotonic()
    offered = transport.offer(build(1, RUN, big), big)
    transport.stage(offered, 1).close()
    assert time.monotonic() - started < 5
