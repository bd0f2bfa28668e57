"""The pipeline against a plain loop: order, byte bound, failures, and no thread left behind."""

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.runtime.pipeline import Pipeline, Stage
from ooc.stores.errors import InputError
from tests.waiting import NoMoreThreads, consumer_waits, eventually

_others: set[threading.Thread] = set()
"""threads of pools that something else in this process has open"""


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("ooc-") and each not in _others]


def at_rest(pipeline: Pipeline) -> bool:
    """Whether nothing happens any more before the consumer takes an item: none is in work, and no thread may claim one."""
    state = pipeline._state
    with state.lock:
        busy = state.pulled - state.delivered - sum(map(len, state.ready))
        return busy == 0 and not any(map(state.may_claim, range(len(state.stages) + 1)))


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    _others.clear()
    _others.update(threads())
    yield
    assert not threads()


class Ledger:
    """Bytes alive from the gate to the moment the consumer asks for the next item."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.alive: dict[int, int] = {}
        self.overrun: list[dict[int, int]] = []
        self.order: list[int] = []

    def admit(self, step: int, nbytes: int, bound: int) -> None:
        with self.lock:
            self.alive[step] = nbytes
            holding = [size for size in self.alive.values() if size]
            if sum(holding) > bound and len(holding) > 1:  # more than the bound only alone (or beside items of no bytes)
                self.overrun.append(dict(self.alive))

    def release(self, step: int) -> None:
        with self.lock:
            self.alive.pop(step, None)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 150), max_size=25),
    counts=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3)),
    failure=st.none() | st.tuples(st.integers(0, 24), st.sampled_from(["sample", "read", "collate", "source"])),
    max_items=st.integers(1, 8),
    naps=st.randoms(use_true_random=False),
)
def test_any_pipeline_is_the_plain_loop(sizes, counts, failure, max_items, naps):
    bound, ledger = 100, Ledger()
    delays = {(stage, step): naps.choice([0, 0, 1e-4, 1e-3]) for stage in range(3) for step in range(25)}

    def source():
        for step, size in enumerate(sizes):
            if failure == (step, "source"):
                raise InputError("bad")
            yield step, size

    def run(stage: int, name: str, item: tuple[int, int]) -> tuple[int, int]:
        step, size = item
        if name == "read":
            ledger.admit(step, size, bound)
        time.sleep(delays[stage, step])
        if failure == (step, name):
            raise InputError("bad")
        return step, size

    stages = [
        Stage("sample", lambda item: run(0, "sample", item), counts[0]),
        Stage("read", lambda item: run(1, "read", item), counts[1], nbytes=lambda item: item[1]),
        Stage("collate", lambda item: run(2, "collate", item), counts[2]),
    ]
    fails = failure is not None and failure[0] < len(sizes)
    expected = list(enumerate(sizes))[: failure[0] if fails else None]
    got, error = [], None
    with Pipeline(source(), stages, max_bytes=bound, max_items=max_items) as pipeline:
        try:
            while True:
                if got:
                    ledger.release(got[-1][0])
                got.append(next(pipeline))
        except StopIteration:
            pass
        except InputError as caught:
            error = caught
    assert got == expected
    assert (error is not None) == fails
    if fails:
        assert error.__notes__ == [f"in stage {failure[1]!r} at step {failure[0]} of the pipeline"]
    assert not ledger.overrun
    assert not threads()


def test_a_failure_of_nbytes_names_its_stage():
    def nbytes(item):
        raise ZeroDivisionError("no size")

    pipeline = Pipeline([1], [Stage("read", lambda item: item, nbytes=nbytes)], max_bytes=1)
    with pytest.raises(ZeroDivisionError) as caught:
        next(pipeline)
    assert caught.value.__notes__ == ["in stage 'read' at step 0 of the pipeline"]
    with pytest.raises(StopIteration):
        next(pipeline)


def test_the_end_of_the_source_keeps_nothing_in_memory():
    """No error of it refers to itself, which only Python's garbage collector would find."""

    class Source:
        def __iter__(self):
            return self

        def __next__(self):
            raise StopIteration

    source = Source()
    alive = weakref.ref(source)
    gc.collect()
    gc.disable()
    try:
        with Pipeline(source, [Stage("read", lambda item: item)], max_bytes=1) as pipeline:
            assert list(pipeline) == []
        del pipeline, source
        assert alive() is None
    finally:
        gc.enable()


def test_a_stray_stop_iteration_is_not_taken_for_the_end():
    def run(item):
        raise StopIteration

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        next(Pipeline([1], [Stage("read", run)], max_bytes=1))


def test_steps_before_a_failure_are_delivered_and_later_ones_are_not_worked_on():
    seen = []

    def run(item: int) -> int:
        seen.append(item)
        if item == 2:
            raise OSError("disk")
        return item

    got = []
    with pytest.raises(OSError, match="disk"):
        got.extend(Pipeline(range(100), [Stage("read", run)], max_bytes=1, max_items=50))
    assert seen == [0, 1, 2]


def test_the_source_is_pulled_no_further_than_the_bounds():
    pulled: list[int] = []

    def source() -> Iterator[int]:
        for step in range(100):
            pulled.append(step)
            yield step

    stages = [Stage("sample", lambda item: item, 2), Stage("read", lambda item: item, nbytes=lambda _: 40)]
    with Pipeline(source(), stages, max_bytes=100, max_items=50) as pipeline:
        assert next(pipeline) == 0
        # One item is held and one more fits: 2 are admitted, and 2 sampled ones may wait at the gate.
        assert eventually(lambda: at_rest(pipeline))
        assert pulled == [0, 1, 2, 3]
        assert pipeline.peak_bytes == 80


def test_close_is_idempotent_and_ends_a_half_consumed_pipeline():
    pipeline = Pipeline(range(1000), [Stage("work", lambda item: item, 3)], max_bytes=1)
    assert [next(pipeline), next(pipeline)] == [0, 1]
    pipeline.close()
    pipeline.close()
    assert list(pipeline) == []


def test_a_collected_pipeline_leaves_no_thread():
    pipeline = Pipeline(range(1000), [Stage("work", lambda item: item, 3)], max_bytes=1)
    assert next(pipeline) == 0
    assert threads()
    del pipeline
    gc.collect()
    assert eventually(lambda: not threads())


def test_a_collection_in_a_thread_that_is_about_to_wait_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind its last look at what has changed: `wait` makes a lock first, which may begin a collection."""
    wait, stopped = threading.Condition.wait, threading.Event()

    def collected(self: threading.Condition, timeout: float | None = None) -> bool:
        if any(self is each for each in pipeline._state.idle[:-1]) and not stopped.is_set():
            stopped.set()
            pipeline._state.stop()
        return wait(self, timeout)

    pipeline = Pipeline(range(1000), [Stage("work", lambda item: item)], max_bytes=1, max_items=1)
    assert eventually(lambda: at_rest(pipeline))
    monkeypatch.setattr(threading.Condition, "wait", collected)
    next(pipeline)
    assert stopped.wait(60)
    assert eventually(lambda: not threads())


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("at", range(5))
def test_a_pipeline_that_cannot_begin_leaves_no_thread_and_has_ended(monkeypatch, at, error):
    """Nor the one before it."""
    ended, held = [], []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread, start=NoMoreThreads(at, error): start(thread))
        with pytest.raises(type(error)) as caught:  # noqa: PT012
            first = Pipeline(range(9), [Stage("sample", lambda item: item)], max_bytes=1, on_end=lambda: ended.append(1))
            held.append(first)
            Pipeline(first, [Stage("read", held.append, 2)], max_bytes=1, before=first, on_end=lambda: ended.append(2))
    assert eventually(lambda: not threads())
    assert eventually(lambda: sorted(ended) == ([1] if at < 2 else [1, 2]))
    assert caught.traceback is not None  # which holds what was made


def test_an_interrupt_of_the_waiting_consumer_closes_the_pipeline():
    begun, release = threading.Event(), threading.Event()

    def run(item: int) -> int:
        begun.set()
        release.wait(60)
        return item

    def interrupt() -> None:
        if begun.wait(60) and eventually(consumer_waits):
            signal.pthread_kill(main, signal.SIGINT)  # as Ctrl-C does
            stopped.append(eventually(lambda: pipeline._state.stopped))
        release.set()

    main, stopped = threading.main_thread().ident, []
    pipeline = Pipeline(range(10), [Stage("work", run)], max_bytes=1)
    hand = threading.Thread(target=interrupt)
    hand.start()
    with pytest.raises(KeyboardInterrupt):
        next(pipeline)
    assert not threads()
    hand.join()
    assert stopped == [True]  # by the interrupt, before the item came


def test_threads_of_a_stage_work_at_the_same_time():
    together = threading.Barrier(3, timeout=60)
    stage = Stage("read", lambda item: (together.wait(), item)[1], threads=3)
    assert list(Pipeline(range(6), [stage], max_bytes=1)) == list(range(6))


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_niceness_is_added_to_the_threads_and_the_consumer_keeps_its_own():
    own = os.getpriority(os.PRIO_PROCESS, 0)
    stage = Stage("tell", lambda _: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), threads=2)
    with Pipeline(range(4), [stage], 1, niceness=3) as told:
        assert set(told) == {min(19, own + 3)}
    with Pipeline(range(4), [stage], 1) as told:
        assert set(told) == {own}
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_no_thread_keeps_a_delivered_item_alive():
    class Batch:
        pass

    made: list[weakref.ref[Batch]] = []

    def run(item: int) -> Batch:
        batch = Batch()
        made.append(weakref.ref(batch))
        return batch

    with Pipeline(range(3), [Stage("make", run, 2), Stage("pass", lambda item: item, 2)], 1, max_items=1) as pipeline:
        for step in range(2):
            batch = next(pipeline)
            assert made[step]() is batch
            del batch
            gc.collect()
            assert made[step]() is None


def test_times_count_every_stage(monkeypatch):
    """On a clock that each thread moves on by itself alone."""
    own = threading.local()

    def now() -> float:
        return getattr(own, "now", 1.0)

    def spend(seconds: float, item: int) -> int:
        own.now = now() + seconds
        return item

    monkeypatch.setattr("ooc.runtime.pipeline.time", SimpleNamespace(perf_counter=now))
    source = (spend(8, item) for item in range(5))
    pipeline = Pipeline(source, [Stage("a", lambda item: spend(4, item), 2), Stage("b", lambda item: spend(2, item))], 1)
    for item in pipeline:
        spend(1, item)
    times = pipeline.times()
    assert list(times) == ["source", "a", "b", "consumer"]
    assert [stage["work_s"] for stage in times.values()] == [40, 20, 10, 5]
    assert all(stage["items"] == 5 and stage["wait_s"] == 0 for stage in times.values())


def test_waiting_is_counted():
    started = time.perf_counter()
    pipeline = Pipeline(range(5), [Stage("a", lambda item: time.sleep(0.002) or item)], max_bytes=1)
    assert list(pipeline) == list(range(5))
    times = pipeline.times()
    assert times["a"]["work_s"] >= 0.01
    assert 0 < times["consumer"]["wait_s"] <= time.perf_counter() - started


def test_an_empty_source_and_no_stages():
    assert list(Pipeline([], [Stage("a", lambda item: item)], max_bytes=1)) == []
    assert list(Pipeline([3, 1], [], max_bytes=1)) == [3, 1]


@pytest.mark.parametrize("bad", [{"max_bytes": 0}, {"max_items": 0}, {"stages": [Stage("a", abs, 0)]}])
def test_nonsense_is_refused(bad):
    with pytest.raises(ValueError, match="at least 1 byte"):
        Pipeline(**{"source": [], "stages": [], "max_bytes": 1, **bad})


@pytest.mark.parametrize("ahead", [1, 4])
def test_the_last_item_that_may_be_begun_stays_in_its_thread(ahead: int) -> None:
    """Where more may be begun, threads work at the same time; see `test_threads_of_a_stage_work_at_the_same_time`."""
    at: list[list[int]] = [[], [], []]
    stages = [
        Stage(name, lambda item, own=own: (own.append(threading.get_ident()), item)[1])
        for name, own in zip("abc", at, strict=True)
    ]
    with Pipeline(range(100), stages, max_bytes=1, max_items=ahead) as pipeline:
        for _ in range(12):
            assert eventually(lambda: at_rest(pipeline))
            next(pipeline)
    last = slice(ahead, None)  # from when on the pipeline is full but for the item that was taken
    assert at[0][last] == at[1][last] == at[2][last] != []


def test_an_item_that_is_not_the_last_one_in_work_is_left_to_the_next_stage() -> None:
    """Though no other may be begun: its thread is wanted once the consumer has the item before."""
    begun, at = (threading.Event(), threading.Event()), list[int]()

    def first(item: int) -> int:
        at.append(threading.get_ident())
        assert item == 0 or begun[0].wait(5)
        return item

    def then(item: int) -> bool:
        begun[item].set()
        return begun[1].wait(60) and threading.get_ident() not in at

    stages = [Stage("a", first), Stage("b", then, threads=2)]
    assert list(Pipeline(range(2), stages, max_bytes=1, max_items=2)) == [True, True]


def test_a_thread_is_woken_for_what_it_can_do_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each change: two wake-ups an item, of the source and of the first stage."""
    woken: list[threading.Condition] = []
    notify = threading.Condition.notify

    def counted(self: threading.Condition, n: int = 1) -> None:
        woken.extend([self] * bool(self._waiters))  # type: ignore[attr-defined]
        notify(self, n)

    monkeypatch.setattr(threading.Condition, "notify", counted)
    stages = [Stage("sample", lambda item: item), Stage("read", lambda item: item, 2), Stage("collate", lambda item: item)]
    with Pipeline(range(100), stages, max_bytes=1, max_items=1) as pipeline:
        idle = set(map(id, pipeline._state.idle))
        for _ in range(50):
            assert eventually(lambda: at_rest(pipeline))
            next(pipeline)
        assert sum(id(each) in idle for each in woken) <= 2 * 51
