"""Computing items ahead of their consumer in threads."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(pool: ThreadPoolExecutor, run: Callable[[Item], Result], items: Iterable[Item], depth: int) -> Iterator[Result]:
    """Yield the results of `run` in the order of `items`, with at most `depth` in progress or waiting.

    Waits for work in progress at the end.

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
    """Yield the results of `run` in order, with at most two alive: the caller's and the next one.

    >>> list(one_ahead(pool, str, range(3)))
    ['0', '1', '2']
    """
    under_way: Future[Result] | None = None
    try:
        for number in range(len(items)):
            result = (under_way or pool.submit(run, items[number])).result()
            under_way = pool.submit(run, items[number + 1]) if number + 1 < len(items) else None
            yield result
            del result  # the caller drops it before requesting the next one
    finally:
        if under_way is not None and not under_way.cancel():
            wait([under_way])
