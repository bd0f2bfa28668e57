"""Pieces of a file in a device's memory: the file's bytes in any order of use, and the faster way chosen.

On the CPU, and on a pretended CUDA device, where an engine that fills the device's buffers stands for kvikio.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ooc.runtime import device_reads
from ooc.runtime.device_reads import (
    PIECE_BYTES,
    DeviceReadRates,
    DeviceRing,
    describe_gpu,
    engine_into,
    measure_device_reads,
    pinned_copy_rate,
)
from ooc.stores.io.engines import gds, open_engine
from ooc.stores.io.engines.pread import PreadEngine
from ooc.stores.io.read_plan import ReadPlan, plan_reads
from ooc.stores.io.segments import Segments
from tests.pretended_cuda import COPIED, PAGEABLE, REGISTERED, SYNC, pretended_cuda

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
DATA = np.random.default_rng(0).integers(0, 256, 70 * 4096).astype(np.uint8)


class Reaching(PreadEngine):
    """Stands for the engine gds: its reads land in a device's memory."""

    name, reaches_device = "gds", True
    registrations = 0

    def read(self, plan: ReadPlan, buffer: Any) -> int:
        if not isinstance(buffer, Tensor):
            return super().read(plan, buffer)
        own = np.zeros(plan.nbytes, np.uint8)
        nbytes = super().read(plan, own)
        torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage(), buffer.storage_offset(), (len(own),), (1,)).data.copy_(
            torch.from_numpy(own).to(buffer.device)
        )
        return nbytes

    @contextmanager
    def registered(self, buffer: Any) -> Iterator[None]:
        self.registrations += 1
        yield
        self.registrations -= 1


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> Segments:
    path = tmp_path_factory.mktemp("pieces") / "data"
    path.write_bytes(DATA.tobytes())
    return Segments((path,), np.array([len(DATA)]))


def plans_of(runs: list[tuple[int, int]]) -> list[ReadPlan]:
    """Pages first:first + count each."""
    return [plan_reads(np.arange(first, min(70, first + count)), 4096, count=70) for first, count in runs]


def bytes_of(plan: ReadPlan) -> np.ndarray:
    parts = [DATA[at : at + n] for at, n in zip(plan.offset.tolist(), plan.length.tolist(), strict=True)]
    return np.concatenate([np.zeros(0, np.uint8), *parts])


RUNS = st.lists(st.tuples(st.integers(0, 69), st.integers(1, 16)), max_size=12)


@given(RUNS, st.integers(0, 12))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_are_the_file_s_bytes_and_may_be_left_early(
    segments: Segments, runs: list[tuple[int, int]], wanted: int
) -> None:
    with closing(open_engine("pread", segments)) as engine, closing(DeviceRing(engine, CPU, 2**16)) as ring:
        plans = plans_of(runs)
        for _ in range(2):  # left early, and taken up again
            pieces = ring.pieces(plans)
            for number, (plan, piece) in zip(range(wanted), pieces, strict=False):
                assert plan is plans[number]
                np.testing.assert_array_equal(piece.numpy(), bytes_of(plan))
            pieces.close()
        assert not ring.direct


@pytest.mark.parametrize("kind", [PreadEngine, Reaching])
def test_on_a_gpu_no_copy_is_pageable_and_the_host_does_not_wait(segments: Segments, kind: type[PreadEngine]) -> None:
    plans = plans_of([(7 * number % 60, 1 + number % 9) for number in range(20)])
    with pretended_cuda() as device, closing(kind(segments)) as engine:
        ring, kept = DeviceRing(engine, CUDA, 2**16), []
        registered = device.counts[REGISTERED]
        assert registered == (3 if kind is PreadEngine else 0)
        assert getattr(engine, "registrations", 3) == 3
        before = device.counts.number.copy()
        for _, piece in ring.pieces(plans):
            kept.append(piece.clone())  # a kernel on the current stream
        counts = {kind: device.counts[kind] - before[kind] for kind in (SYNC, PAGEABLE, REGISTERED, COPIED)}
        if kind is PreadEngine:
            assert counts == {SYNC: 0, PAGEABLE: 0, REGISTERED: 0, COPIED: 20}, device.counts.told(SYNC)
        assert counts[SYNC] == 0
        found = [each.cpu().numpy() for each in kept]
        ring.close()
        ring.close()
        assert getattr(engine, "registrations", 0) == 0
    for plan, each in zip(plans, found, strict=True):
        np.testing.assert_array_equal(each, bytes_of(plan))


def test_a_failed_read_is_raised_in_its_place_and_the_ring_goes_on(segments: Segments) -> None:
    class Failing(PreadEngine):
        left = 3

        def read(self, plan: ReadPlan, buffer: Any) -> int:
            self.left -= 1
            if self.left == 0:
                raise OSError("no more")
            return super().read(plan, buffer)

    plans = plans_of([(first, 2) for first in range(6)])
    with closing(Failing(segments)) as engine, closing(DeviceRing(engine, CPU, 2**16)) as ring:
        taken = []
        with pytest.raises(OSError, match="no more"):
            taken += [None for _ in ring.pieces(plans)]
        taken = [bytes_of(plan).tolist() == piece.tolist() for plan, piece in ring.pieces(plans)]
    assert taken == [True] * 6


@pytest.mark.parametrize(("kvikio", "faster"), [(None, "uring"), (1e9, "uring"), (1.04e9, "uring"), (1.2e9, "gds")])
def test_kvikio_is_chosen_where_it_is_clearly_faster(kvikio: float | None, faster: str) -> None:
    rates = DeviceReadRates("uring", 1e9, kvikio, "there is no GPU" if kvikio is None else None)
    assert rates.faster == faster
    text = str(rates)
    assert "through page-locked memory (uring): 1 GB/s" in text
    assert ("not here, because there is no GPU" in text) if kvikio is None else ("GPUDirect is active" in text)
    assert text.endswith(f"by the engine {faster}")


def test_both_ways_are_measured_where_there_are_two(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = measure_device_reads(segments, CPU, "pread", rounds=1)
    assert (alone.engine, alone.kvikio, alone.why_not) == ("pread", None, "the device is no GPU")
    assert alone.through_host > 0
    monkeypatch.setattr(gds, "unavailable", lambda: None)
    monkeypatch.setattr(gds, "why_not_direct", lambda: "it is pretended")
    real = open_engine
    monkeypatch.setattr(device_reads, "open_engine", lambda name, own: Reaching(own) if name == "gds" else real(name, own))
    with pretended_cuda():
        both = measure_device_reads(segments, CUDA, "pread", rounds=2)
        assert both.kvikio is not None
        assert both.why_not == "it is pretended"
        monkeypatch.setattr(device_reads, "measure_device_reads", lambda *_: DeviceReadRates("pread", 1e9, 2e9))
        with closing(engine_into(CUDA, segments)) as engine:
            assert engine.name == "gds"
            assert engine.note == "auto: into GPU memory kvikio reads 2 GB/s, pread through page-locked memory 1 GB/s"
        with closing(engine_into(CUDA, segments, "pread")) as engine:
            assert engine.name == "pread"
    with closing(engine_into(CPU, segments)) as engine:
        assert engine.name != "gds"


def test_the_rate_of_copies_is_measured_anywhere() -> None:
    assert PIECE_BYTES % 4096 == 0
    assert pinned_copy_rate(CPU, 2**16, rounds=1) > 0


def test_the_gpu_is_described(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    path = segments.paths[0]
    if not torch.cuda.is_available():
        assert describe_gpu(path).startswith("GPU: torch ")
    monkeypatch.setattr(device_reads, "large_file", nullcontext)
    monkeypatch.setattr(device_reads, "_COPY_BYTES", 2**16)
    monkeypatch.setattr(gds, "unavailable", lambda: "kvikio cannot be imported: pip install 'ooc[gds]'")
    with pretended_cuda():
        first, copies, through, kvikio, chosen = describe_gpu(path, "pread", rounds=1).splitlines()
    assert first.startswith("GPU: pretended, 10 GB of memory, 8 GB of it free; CUDA")
    assert copies.startswith("copies from page-locked memory: ")
    assert through.startswith("from the disk through page-locked memory (pread): ")
    assert kvikio == "kvikio: not here, because kvikio cannot be imported: pip install 'ooc[gds]'"
    assert chosen == "so GPU memory is filled by the engine pread"
