"""A pipeline of threads: output in input order, memory bounded in bytes, no thread outlives it.

Each stage has its own threads; numpy, numba and system calls release the GIL, so future batches are sampled, read and collated
while the model computes. One stage, the one that allocates, is the gate: an item's bytes are reserved there in step order, so
the oldest item always gets its bytes and the pipeline cannot deadlock. (As in torchdata.nodes and DGL GraphBolt, which bound
items instead of bytes.)

Handing an item to another thread costs two switches and what is cached of it, which counts where the model needs the same
cores. So a thread is woken only for an item that it can have, and where all other items wait for the consumer and no further
one may be begun, the thread that has the last one takes it through the next stages itself.
"""

import atexit
import contextlib
import heapq
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ooc.runtime.clock import Clock, noting_waits, waiting

SOURCE = "source"
CONSUMER = "consumer"
SIGNAL_SECONDS = 0.5
"""a waiting consumer notices Ctrl-C within this time"""
STOPPED_SECONDS = 2.0
"""a thread that is about to wait when a collection in this very thread stops the pipeline notices it within this time"""


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: `run(item)`, in `threads` threads, returns the next stage's item.

    `nbytes` makes it the gate: `nbytes(item)`, called before `run`, is the item's size until the consumer drops it.
    """

    name: str
    run: Callable[[Any], Any]
    threads: int = 1
    nbytes: Callable[[Any], int] | None = None


@dataclass
class _Item:
    step: int
    value: Any = None
    nbytes: int = 0
    error: BaseException | None = None
    where: str = ""


class _Alive:
    """Counts the running threads of chained pipelines; the last one to end calls the `on_end` callbacks."""

    def __init__(self) -> None:
        self._count = 0
        self._ends: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def start(self, on_end: Callable[[], None] | None = None) -> None:
        """Add one, until its `end`."""
        with self._lock:
            self._count += 1
            self._ends += [] if on_end is None else [on_end]

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            ends, self._ends = (self._ends, []) if self._count == 0 else ([], self._ends)
        for on_end in ends:
            on_end()


@dataclass
class _State:
    """State shared by the threads; it has no reference to the `Pipeline`, so that one can be collected."""

    source: Iterator[Any]
    stages: Sequence[Stage]
    gate: int
    max_bytes: int
    max_items: int
    max_ahead: int
    clocks: dict[str, Clock]
    lock: Any = field(default_factory=threading.RLock)  # a collection in the middle of anything may call `stop`
    idle: list[threading.Condition] = field(default_factory=list)  # by position, and last the consumer's
    called: list[int] = field(default_factory=list)  # threads that were woken and have not claimed yet, by position
    running: list[int] = field(default_factory=list)  # items being worked on, by position
    ready: list[list[tuple[int, _Item]]] = field(default_factory=list)  # by position, and last the consumer's
    pulled: int = 0
    admitted: int = 0
    delivered: int = 0
    in_flight: int = 0
    peak: int = 0
    consumer_bytes: int = 0
    last: int | None = None  # one past the last step, once known
    stopped: bool = False
    threads: list[threading.Thread] = field(default_factory=list)
    before: "_State | None" = None  # state of the pipeline that feeds the source
    alive: _Alive = field(default_factory=_Alive)
    on_stop: Callable[[], None] | None = None
    niceness: int = 0

    def __post_init__(self) -> None:
        positions = len(self.stages) + 1
        self.idle = [threading.Condition(self.lock) for _ in range(positions + 1)]
        self.called, self.running = [0] * positions, [0] * positions
        self.ready = [[] for _ in range(positions + 1)]

    def name(self, position: int) -> str:
        return SOURCE if position == 0 else self.stages[position - 1].name

    def may_claim(self, position: int) -> bool:
        """Whether a thread has work to do at this position."""
        if position == 0:
            ahead = self.gate > 0 and self.pulled - self.admitted >= self.max_ahead
            return self.running[0] == 0 and self.last is None and not self.full and not ahead
        if self.running[position] == self.stages[position - 1].threads:
            return False
        heap = self.ready[position]
        if not heap or (self.last is not None and heap[0][0] >= self.last):
            return False
        step, item = heap[0]
        fits = self.in_flight == 0 or self.in_flight + item.nbytes <= self.max_bytes
        return position != self.gate or (step == self.admitted and fits)

    @property
    def full(self) -> bool:
        """Whether as many items are between source and consumer as may be."""
        return self.pulled - self.delivered >= self.max_items

    def wake(self) -> None:
        """Wake those who sleep and have work now: a thread of each position, which wakes the next one, and the consumer."""
        for position, called in enumerate(self.called):
            if not called and self.may_claim(position):
                self.idle[position].notify()
                self.called[position] = 1
        if self._may_take():
            self.idle[-1].notify_all()

    def claim(self, position: int) -> _Item | None:
        """Wait for the next item for a thread of this position; None when the pipeline has stopped."""
        start = time.perf_counter()
        with self.lock:
            while not (self.stopped or self.may_claim(position)):
                self.called[position] = 0
                self.idle[position].wait(STOPPED_SECONDS)
            self.called[position] = 0
            if self.stopped:
                return None
            self.clocks[self.name(position)].wait_s += time.perf_counter() - start
            return self._claimed(position)

    def _claimed(self, position: int) -> _Item:
        """The next item of this position, which may be claimed."""
        self.running[position] += 1
        if position == 0:
            item = _Item(self.pulled)
            self.pulled += 1
        else:
            _, item = heapq.heappop(self.ready[position])
        if position == self.gate and position:
            self.admitted += 1
            self.in_flight += item.nbytes
            self.peak = max(self.peak, self.in_flight)
        self.wake()
        return item

    def work(self, position: int, item: _Item) -> int | None:
        """Run the source or a stage on an item and pass it on, or record its failure.

        Returns the next position where the thread is to take the item there itself: it is claimed.
        """
        start = time.perf_counter()
        name = self.name(position)
        try:
            with noting_waits() as waits:
                value = next(self.source) if position == 0 else self.stages[position - 1].run(item.value)
                if position + 1 == self.gate:
                    name, size_of = self.name(self.gate), self.stages[position].nbytes
                    assert size_of is not None
                    item.nbytes = int(size_of(value))
            item.value = value
        except StopIteration as error:
            self._end(position, item, _stray(error) if position else None, name)
            return None
        except BaseException as error:  # re-raised at the consumer
            self._end(position, item, error, name)
            return None
        with self.lock:
            self.clocks[self.name(position)].worked(item.step, start, time.perf_counter(), waits)
            self.clocks[self.name(position)].items += 1
            self.running[position] -= 1
            heapq.heappush(self.ready[position + 1], (item.step, item))
            if self._goes_on(position, item):
                self._claimed(position + 1)
                return position + 1
            self.wake()
        return None

    def _goes_on(self, position: int, item: _Item) -> bool:
        """Whether the thread that has worked on the item takes it to the next stage, too: where it is the last one in work, all
        others wait for the consumer, and none can be begun.

        Not from the source, as samplers keep tables in each thread in which they work.
        """
        following = position + 1
        others = self.pulled - self.delivered - 1
        if not (0 < position < len(self.stages) and self.full and not self.stopped and len(self.ready[-1]) == others):
            return False
        return self.may_claim(following) and self.ready[following][0][1] is item

    def _end(self, position: int, item: _Item, error: BaseException | None, where: str) -> None:
        """Stop after this step, because the source is exhausted or a stage failed on it."""
        with self.lock:
            self.running[position] -= 1
            self.last = item.step if self.last is None else min(self.last, item.step)
            if error is not None:
                item.value, item.error, item.where = None, error, where
                heapq.heappush(self.ready[-1], (item.step, item))
            self.wake()

    def take(self) -> Any:
        """Return the consumer's next item and release the previous one's bytes."""
        with self.lock:
            self.in_flight -= self.consumer_bytes
            self.consumer_bytes = 0
            self.wake()
            # A signal just before the wait does not interrupt it, so wait in short intervals.
            while not self._may_take():
                self.idle[-1].wait(SIGNAL_SECONDS)
            heap = self.ready[-1]
            if self.stopped or not heap or heap[0][0] != self.delivered:
                raise StopIteration
            _, item = heapq.heappop(heap)
            if item.error is not None:
                if self.before is None or item.where != SOURCE:  # otherwise the earlier pipeline added its note
                    item.error.add_note(f"in stage {item.where!r} at step {item.step} of the pipeline")
                raise item.error
            self.delivered += 1
            self.consumer_bytes = item.nbytes
            self.wake()
            value, item.value = item.value, None
            return value

    def _may_take(self) -> bool:
        heap = self.ready[-1]
        arrived = bool(heap) and heap[0][0] == self.delivered
        # A failed step stays in the heap, so `last` ends the iteration only if the source was exhausted.
        return self.stopped or arrived or (self.last is not None and self.delivered >= self.last)

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            for idle in self.idle:
                idle.notify_all()
        if self.on_stop is not None:
            self.on_stop()
        if self.before is not None:
            self.before.stop()  # our source may be waiting for it

    def begin(self, thread: threading.Thread) -> None:
        self.alive.start()
        try:
            thread.start()
        except RuntimeError:  # no more threads available
            self.alive.end()
            raise

    def join(self) -> None:
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join()
        for heap in self.ready:
            heap.clear()
        if self.before is not None:
            self.before.join()


def _stray(error: StopIteration) -> RuntimeError:
    """What a consumer gets in place of a stage's StopIteration, which it would take for the end.

    Not made in `_State.work`, whose frame is in the error's traceback: a local name for it there would keep the thread's batch
    in memory.
    """
    stray = RuntimeError("a stage raised StopIteration")
    stray.__cause__ = error
    return stray


def _serve(state: _State, position: int) -> None:
    try:
        if state.niceness and sys.platform == "linux":  # elsewhere it would be the whole process's
            with contextlib.suppress(OSError):  # a sandbox may refuse it
                os.nice(state.niceness)
        while (item := state.claim(position)) is not None:
            at: int | None = position
            while at is not None:
                at = state.work(at, item)
            del item  # a waiting thread must not keep a batch alive
    finally:
        state.alive.end()


_RUNNING: "weakref.WeakSet[Pipeline]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close running pipelines at exit, because threads in native code must not outlive the interpreter."""
    for pipeline in list(_RUNNING):
        pipeline.close()


class Pipeline:
    """Iterates over `stages` applied to `source`, in order, computed ahead by threads.

    The first failure, in step order, is raised at the consumer with its own type and a note of stage and step, and closes the
    pipeline; so do its end, an interrupt while waiting, `close()`, and garbage collection of a partly consumed pipeline. A
    consumer that keeps its last item while requesting the next one holds both.

    `source` yields cheap items (cursors, seeds); at most one stage has `nbytes`. `max_bytes` limits the reserved bytes, the
    consumer's item included (a larger item is admitted only alone), `max_items` the items between source and consumer. `clocks`
    of earlier pipelines are added to. `before` feeds `source`; it stops and closes with this one. `on_stop` is called, possibly
    often, to end what a stage waits for, `on_end` once, by the last thread of this and the preceding pipelines. `niceness` is
    added to that of the threads on Linux (see nice(1)): they take the processor's time that the consumer leaves.

    >>> with Pipeline(range(3), [Stage("square", lambda i: i * i, threads=2)], max_bytes=1 << 20) as squares:
    ...     list(squares)
    [0, 1, 4]
    """

    def __init__(
        self,
        source: Iterable[Any],
        stages: Sequence[Stage],
        max_bytes: int,
        max_items: int = 16,
        clocks: dict[str, Clock] | None = None,
        before: "Pipeline | None" = None,
        on_stop: Callable[[], None] | None = None,
        on_end: Callable[[], None] | None = None,
        niceness: int = 0,
    ) -> None:
        gates = [position for position, stage in enumerate(stages, 1) if stage.nbytes is not None]
        if len(gates) > 1 or max_bytes < 1 or max_items < 1 or any(stage.threads < 1 for stage in stages):
            raise ValueError("a pipeline takes at most one gate, and at least 1 byte, 1 item and 1 thread per stage")
        gate = gates[0] if gates else 0
        self.clocks = {} if clocks is None else clocks
        for name in (SOURCE, *(stage.name for stage in stages), CONSUMER):
            self.clocks.setdefault(name, Clock())
        state = _State(
            source=iter(source),
            stages=tuple(stages),
            gate=gate,
            max_bytes=max_bytes,
            max_items=max_items,
            max_ahead=max(1, sum(stage.threads for stage in stages[: gate - 1])),
            clocks=self.clocks,
            before=None if before is None else before._state,
            alive=_Alive() if before is None else before._state.alive,
            on_stop=on_stop,
            niceness=niceness,
        )
        self._state: _State = state
        self._delivered_at = 0.0
        # Only signal the threads: a collection may run in one of them.
        weakref.finalize(self, state.stop).atexit = False
        state.threads = [
            threading.Thread(target=_serve, args=(state, position), name=f"ooc-{state.name(position)}", daemon=True)
            for position, count in enumerate([1, *(stage.threads for stage in stages)])
            for _ in range(count)
        ]
        _RUNNING.add(self)
        state.alive.start(on_end)  # until all threads have started
        try:
            for thread in state.threads:
                state.begin(thread)
        except BaseException:  # no more threads available, or Ctrl-C
            state.threads = [thread for thread in state.threads if thread.is_alive()]
            self.close()  # a thread that is just starting ends by itself before taking an item
            raise
        finally:
            state.alive.end()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        requested = time.perf_counter()
        clock = self.clocks[CONSUMER]
        if self._delivered_at:
            clock.worked(self._state.delivered - 1, self._delivered_at, requested, [])
        try:
            with waiting():
                value = self._state.take()
        except BaseException:
            self.close()
            raise
        finally:
            self._delivered_at = time.perf_counter()
            clock.wait_s += self._delivered_at - requested
        clock.items += 1
        return value

    def times(self) -> dict[str, dict[str, float]]:
        """Each stage's `Clock.sums`, with source and consumer. Where the consumer waits, the bottleneck is the stage that works
        longest for its threads: one that waits little may be one whose items other threads take on."""
        return {name: clock.sums() for name, clock in self.clocks.items()}

    @property
    def peak_bytes(self) -> int:
        """Most bytes ever reserved at once."""
        return self._state.peak

    def close(self) -> None:
        """Stop and join all threads after the work in progress; idempotent."""
        self._state.stop()
        self._state.join()
        _RUNNING.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
