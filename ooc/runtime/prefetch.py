"""One item computed ahead of its consumer, in a thread."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")


Result = TypeVar("Result")


def ahead(pool: ThreadPoolExecutor, run: Callable[[Item], Result], items: Iterable[Item], depth: int) -> Iterator[Result]:
    """The results of `run`, in the order of `items`; at most `depth` of them are worked on or wait, besides the one that the
    caller has: one fewer while it works. Waits for what is under way at its end.

    >>> list(ahead(pool, str, range(3), depth=2))
    ['0', '1', '2']
    """
    under_way: deque[Future[Result]] = deque()
    todo = iter(items)
    try:
        while True:
            while len(under_way) < depth and (item := next(todo, None)) is not None:
                under_way.append(pool.submit(run, item))
            if not under_way:
                return
            yield under_way.popleft().result()
    finally:
        wait([future for future in under_way if not future.cancel()])


def one_ahead(pool: ThreadPoolExecutor, run: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """The same, where no more than two results may be there at a time: the caller's, and the next one, made meanwhile.

    >>> list(one_ahead(pool, str, range(3)))
    ['0', '1', '2']
    """
    under_way: Future[Result] | None = None
    try:
        for number in range(len(items)):
            result = (under_way or pool.submit(run, items[number])).result()
            under_way = pool.submit(run, items[number + 1]) if number + 1 < len(items) else None
            yield result
            del result  # the caller's, who lets it go before it asks for the next one
    finally:
        if under_way is not None and not under_way.cancel():
            wait([under_way])
