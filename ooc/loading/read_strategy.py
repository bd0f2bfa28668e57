"""How the rows of batches are read: from memory, superbatch by superbatch, or in shared scans of the file.

A `ReadStrategy` says which batches are read together; at work on one epoch it is a `ReadSession`, which `chained` runs as three
pipelines: sample batches -> read groups of them -> collate batches. `ooc.loading.choose_read_strategy` chooses.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

from ooc.loading.batch_bytes import BatchSize
from ooc.loading.collate import SampledBatch
from ooc.loading.feature_cache import Stopped
from ooc.loading.load_stage import on_disk
from ooc.loading.sample_stage import SampleStage
from ooc.loading.stages import BatchStages
from ooc.runtime.clock import Clock
from ooc.runtime.keyed_random import Cursor
from ooc.runtime.memory_plan import MemoryPlan
from ooc.runtime.pipeline import CONSUMER, SOURCE, Pipeline, Stage
from ooc.stores.arrays.rows import Rows

AHEAD = 1
"""Batches collated before the model asks for them"""
FIRST_ALONE_BYTES = 2**26
"""Of rows on disk, from which on the first batch that a loader gives is read by itself: a pass over fewer takes no time"""
NICENESS = 10
"""Of the threads that make batches from rows in memory. On few cores they would interrupt products of the model, whose threads
wait for each other, and idle while the model uses one thread. From disk threads keep their priority, as reads are to go on"""

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class ReadStrategy(ABC):
    """Plans which batches' rows are read together, reads them and serves each batch its own."""

    stages: BatchStages

    @property
    def disk_rows(self) -> Rows | None:
        """The feature rows of nodes that are read from disk; None where they are in memory, or where there are none."""
        x = self.stages.load.x
        return x if on_disk(x) else None

    @property
    def reads_disk(self) -> bool:
        """Whether rows of nodes or edges are read from disk."""
        return bool(self.stages.disk_arrays)

    @property
    def reserves_blocks(self) -> bool:
        """Whether there is memory for freed blocks that the C library keeps."""
        return False

    def cache_bytes(self, budget: MemoryPlan) -> int:
        """Most bytes of nodes' feature rows that stay in memory for the next epoch."""
        return 0

    def pool(self, budget: MemoryPlan) -> int:
        """Bytes for all batches and groups of them that are alive at once."""
        return budget.batches

    @abstractmethod
    def pipeline(self, cursors: Iterator[Cursor], budget: MemoryPlan, prefetch: int, clocks: dict[str, Clock]) -> Pipeline:
        """(steps done, batch) in the order of `cursors`; `pool` bounds the bytes alive.

        prefetch: batches made in advance, where rows are in memory. clocks: of all stages; those missing are added.
        """

    def apart(self) -> Self:
        """The same strategy with counters and buffers of its own."""
        return replace(self, stages=self.stages.apart())

    def over(self, rows: Rows) -> Self:
        return replace(self, stages=self.stages.over(rows))


@dataclass(frozen=True)
class InMemory(ReadStrategy):
    """Rows in memory, or none at all: each batch by itself; `read_threads` gather rows."""

    memory: BatchSize
    read_threads: int = 2

    def pipeline(self, cursors: Iterator[Cursor], budget: MemoryPlan, prefetch: int, clocks: dict[str, Clock]) -> Pipeline:
        sample, load = self.stages.sample, self.stages.load.begun()
        split = sample.split_seeds
        stages = [] if split else [Stage("sample", sample.sample, sample.threads)]
        stages.append(Stage("read", load.load, self.read_threads, nbytes=self.memory.nbytes))
        stages.append(Stage("collate", self.stages.collate.collate))
        source: Iterator[Any] = sample.batches(cursors) if split else cursors
        return Pipeline(source, stages, budget.in_flight, prefetch, clocks, on_stop=load.stop, niceness=NICENESS)


@dataclass(frozen=True)
class ReadGroup:
    """Batches that were read together, the first `done` of them; error: what the next one failed on."""

    done: int
    error: Exception | None


class ServedBatch(NamedTuple):
    """Batch number k of a group."""

    group: Any
    k: int


class ReadSession(ABC):
    """A strategy at work on one epoch.

    Each method is called by one thread, in the order of the batches; `stop` by any, at any time.
    """

    stage: ClassVar[str]
    """what `read` is called in times and failures"""
    sample: SampleStage
    prepare: Callable[[SampledBatch], Any] | None = None
    """done to each sampled batch before `plan` has it, by the threads that sample"""

    @abstractmethod
    def plan(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Groups of consecutive batches to read together; none left out."""

    @abstractmethod
    def read(self, group: Any) -> ReadGroup:
        """Read a group's rows; where that fails, batch by batch as far as it goes."""

    def begin(self, turn: int) -> None:  # noqa: B027
        """The batches of group `turn` are about to be served: the consumer has asked for all before."""

    @abstractmethod
    def collate(self, served: ServedBatch) -> tuple[int, Any]:
        """(steps done with this batch, the batch)."""

    @abstractmethod
    def stop(self) -> None:
        """End all waiting, because nothing more is to be read; batches that were read may still be asked for. Idempotent."""

    @abstractmethod
    def closing(self) -> None:
        """Nobody asks for batches any more, so that `end` comes as soon as the work in progress is done; idempotent."""

    @abstractmethod
    def end(self) -> None:
        """Give back what the epoch had; idempotent, called when all threads have ended."""


def chained(session: ReadSession, cursors: Iterator[Cursor], clocks: dict[str, Clock]) -> Pipeline:
    """The pipelines of a session; where one cannot be made, those before it have ended. clocks: of all stages."""
    with ExitStack() as unfinished:
        unfinished.callback(session.end)
        sampled = sampled_batches(session.sample, session.prepare, cursors, clocks["sample"])
        unfinished.callback(sampled.close)
        filled = Pipeline(
            session.plan(sampled),
            [Stage(session.stage, session.read)],
            max_bytes=1,  # the session's memory is the gate
            max_items=2,
            clocks={SOURCE: clocks["group"], session.stage: clocks[session.stage]},
            before=sampled,
            on_stop=session.stop,
        )
        unfinished.callback(filled.close)
        # The last to end: its threads stop when all before them have.
        served = Pipeline(
            serve(filled, session.stage, session.begin),
            [Stage("collate", session.collate)],
            max_bytes=1,
            max_items=AHEAD,
            clocks={name: clocks[name] for name in ("collate", CONSUMER)},
            before=filled,
            on_stop=session.closing,
            on_end=session.end,
        )
        unfinished.pop_all()
        return served


def first_alone(arrays: Iterable[Rows], reads: Clock) -> bool:
    """Whether the next batch is to be read by itself, as nothing was read before: the disk would wait until the batches of a
    whole group are sampled, and the model until they are read. reads: the clock of a loader's reads."""
    return reads.items == 0 and sum(rows.shape[0] * rows.row_bytes for rows in arrays) >= FIRST_ALONE_BYTES


def clocks_of(clocks: dict[str, Clock], stages: Sequence[str]) -> dict[str, Clock]:
    """The clocks of these stages and of the consumer; those missing are added."""
    return {name: clocks.setdefault(name, Clock()) for name in (*stages, CONSUMER)}


def sampled_batches(
    sample: SampleStage, prepare: Callable[[SampledBatch], Any] | None, cursors: Iterator[Cursor], clock: Clock
) -> Pipeline:
    """Batches sampled and, unless that is None, prepared. Not a gate: bounded in items, which a group counts."""
    source: Iterator[Any] = cursors if sample.one_by_one else sample.batches(cursors)
    run: Callable[[Any], Any] | None = prepare
    if sample.one_by_one:
        run = sample.sample if prepare is None else lambda cursor: prepare(sample.sample(cursor))
    stages = [] if run is None else [Stage("sample", run, sample.threads)]
    return Pipeline(source, stages, max_bytes=1, max_items=sample.threads, clocks={"sample" if stages else SOURCE: clock})


def serve(groups: Iterator[ReadGroup], stage: str, begin: Callable[[int], None]) -> Iterator[ServedBatch]:
    """The batches of groups, one after the other; a group's failure comes after those that were read."""
    step = 0
    for turn in count():
        begin(turn)
        group = next(groups, None)
        if group is None:
            return
        for k in range(group.done):
            yield ServedBatch(group, k)
        step += group.done
        if group.error is not None:
            group.error.add_note(f"in stage {stage!r} at step {step} of the pipeline")
            raise group.error
        del group  # while the next one is waited for


def read_all_or_each(
    batches: int, read_all: Callable[[], None], read_one: Callable[[int], None]
) -> tuple[int, Exception | None]:
    """Read a group whole or, where that fails, batch by batch: (batches that were read, what the next one failed on)."""
    try:
        read_all()
    except Stopped:
        raise
    except Exception as failure:
        if batches == 1:
            return 0, failure
        for done in range(batches):
            try:
                read_one(done)
            except Stopped:
                raise
            except Exception as error:
                return done, error
    return batches, None


class Deferred(Generic[Batch]):
    """Iterates over `source` as far as it goes; what it failed on is raised by `check`, after the items before it."""

    def __init__(self, source: Iterator[Batch]) -> None:
        self._source = source
        self._failure: BaseException | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        try:
            return next(self._source)
        except StopIteration:
            raise
        except BaseException as error:
            self._failure = error
            raise StopIteration from None

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure


class GroupEnds(Protocol):
    """Where groups end, if several processes are to group alike."""

    def begin(self) -> None:
        """The next group begins."""

    def goes_on(self, taken: int) -> bool:
        """Whether the group has more than so many batches, where another process ended it before."""

    @property
    def most_full(self) -> float:
        """The part of its memory that a group may take, if it has several batches."""

    def as_good_as_full(self, taken: int) -> bool:
        """Whether the group, which has no room for another batch, ends here: not where another process has more already."""

    def full(self, taken: int) -> None:
        """The group ended with so many batches, because no more fit."""


def grouped(batches: Iterator[Any], drafts: Iterator[Any], ends: GroupEnds | None = None) -> Iterator[Any]:
    """Groups of consecutive batches, none left out; a failure comes after the group of the batches before it.

    drafts: groups in the making. `add(batch)` takes a batch in, the first always; it is False where the group is full, and then
    `finish()` makes it. `fill` is the part of its memory that is taken. ends: None where groups are as large as the memory
    allows; else they end a little earlier, so that what one process has in a group others can have too.
    """
    source, draft, taken, filled = Deferred(batches), None, 0, 0.0
    for batch in source:
        goes_on = draft is not None and (ends is None or ends.goes_on(taken))
        if draft is not None and not (goes_on and draft.add(batch)):
            if goes_on and ends is not None:
                ends.full(taken)
            group = draft.finish()
            draft = None  # what a generator refers to stays in memory while the group is under way
            yield group
            del group
        if draft is None:
            draft, taken, filled = next(drafts), 0, 0.0
            if ends is not None:
                ends.begin()
            draft.add(batch)
        del batch
        taken, last, filled = taken + 1, filled, draft.fill
        if ends is not None and taken > 1 and 2 * filled - last > ends.most_full and ends.as_good_as_full(taken):
            group = draft.finish()
            draft = None
            yield group
            del group
    if draft is not None:
        yield draft.finish()
    source.check()
