"""What follows from a completion of the uring engine: a pure function, over all it may meet."""

import errno

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ooc.stores.io.engines.uring import AGAIN, DONE, FAILED, MORE, TRIES, judge

PAGE = 4096


@given(
    st.integers(1, 40_000),
    st.lists(st.one_of(st.integers(0, 50_000), st.sampled_from([-errno.EAGAIN, -errno.EINTR, -errno.EIO]))),
)
@settings(max_examples=300, deadline=None)
def test_a_piece_ends_when_its_bytes_are_here_or_it_cannot_be_read(wanted: int, results: list[int]) -> None:
    """Against a plain account of which bytes a disk that answers so has handed over."""
    asked = -(-wanted // PAGE) * PAGE
    done, tries, here = 0, 0, np.zeros(asked, bool)
    for result in results:
        result = min(result, asked - done)
        before = done
        here[done : done + max(result, 0)] = True
        action, done = judge(result, done, wanted, tries)
        assert done % PAGE == 0 or done == wanted
        assert here[:done].all()
        tries += action == AGAIN
        if action == AGAIN:
            assert result in (-errno.EAGAIN, -errno.EINTR)
            assert done == before
        elif action == MORE:
            assert before < done < wanted
        elif action == DONE:
            assert done == wanted
            assert here[:wanted].all()
            return
        else:
            assert action == FAILED
            assert result == -errno.EIO or (0 <= result < PAGE and not here[:wanted].all())
            return


@pytest.mark.parametrize(
    ("result", "done", "wanted", "tries", "what"),
    [
        (4096, 0, 4096, 0, (DONE, 4096)),
        (100, 0, 100, 0, (DONE, 100)),  # the file's last bytes: fewer than asked for, all that count
        (4096, 0, 100, 0, (DONE, 100)),
        (4096, 0, 8192, 0, (MORE, 4096)),
        (5000, 4096, 16384, 0, (MORE, 8192)),  # the next read must begin on a page too
        (4095, 0, 8192, 0, (FAILED, 0)),
        (0, 4096, 8192, 0, (FAILED, 4096)),
        (-errno.EAGAIN, 4096, 8192, TRIES - 1, (AGAIN, 4096)),
        (-errno.EAGAIN, 4096, 8192, TRIES, (FAILED, 4096)),
        (-errno.EINTR, 0, 8192, 0, (AGAIN, 0)),
        (-errno.EIO, 4096, 8192, 0, (FAILED, 4096)),
    ],
)
def test_what_follows_from_a_completion(result: int, done: int, wanted: int, tries: int, what: tuple[int, int]) -> None:
    assert judge(result, done, wanted, tries) == what
