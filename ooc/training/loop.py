"""What the training loops share: finite losses and Ctrl-C."""

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch import Tensor

from ooc.training.run import Run
from stores.errors import OocError


def finite(loss: Tensor, epoch: int, step: int) -> float:
    """The loss as a number. Raises OocError where it is none any more."""
    value = loss.item()
    if not math.isfinite(value):
        raise OocError(
            f"the loss is {value} at epoch {epoch} step {step}: lower --lr, set --grad-clip, or use --precision fp32"
        )
    return value


@contextmanager
def interruptible(job: Run) -> Iterator[None]:
    """Ctrl-C finishes the step, takes a checkpoint and raises KeyboardInterrupt; a second one raises at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(_number: int, _frame: FrameType | None) -> None:
        job.interrupted = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
