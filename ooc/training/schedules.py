"""Schedules of the learning rate: a function of the cursor, so that a resumed run goes on with them to the bit.

The one that waits for validation, plateau, has two numbers in `ooc.training.mode.RunState`; see `ooc.training.run.Run.judge`.
"""

import math

from ooc.config.base import RunConfig


def scheduled(config: RunConfig, epoch: int, step: int, steps: int) -> float:
    """Return the factor of the learning rate of a step.

    Args:
        config: The run's; `lr_schedule` "cosine" and "step" have `lr_epochs`.
        epoch, step: The cursor, before the step.
        steps: Steps of an epoch.

    Returns:
        From 0 to 1. In the first `lr_warm_up` epochs it rises by the same amount every step, and cosine begins behind them.

    >>> scheduled(TrainConfig(store="a.ooc", out="run", lr_schedule="cosine", epochs=10), epoch=5, step=0, steps=8)
    0.5
    """
    done, warm = epoch + step / steps, config.lr_warm_up
    if done < warm:
        return min(1.0, (done + 1 / steps) / warm)
    every = config.lr_epochs or config.epochs
    if config.lr_schedule == "cosine":
        return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (done - warm) / (every - warm)))
    if config.lr_schedule == "step":
        return float(config.lr_factor ** (epoch // every))
    return 1.0
