"""Training of a learned importance beside the model: see `ooc.sampling.learned`.

The batches of a period are sampled ahead with the parameters that it began with, so they are a function of the cursor and of
these. At its end the pipeline is empty, and the parameters take a step by Adam. A checkpoint has them, the moments, and what
the period has added up so far: a run that goes on inside a period ends it as it would have been ended.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ooc.runtime.keyed_random import Purpose, key
from ooc.sampling.learned import Policy, sketch_of
from ooc.stores.dataset import Dataset
from ooc.stores.errors import ConfigError

PERIODS = 8
"""steps of the parameters in an epoch, about"""
LEARNING_RATE = 0.02
KEPT = 0.9
"""share of the baseline that a batch's loss leaves"""


class LearnedSampling:
    """A policy, and how it learns. seed: of the run."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        x = dataset.rows("x")
        if len(x.shape) != 2:
            raise ConfigError(f"sampler = learned sees feature vectors, and those of {dataset.path} are {list(x.shape[1:])}")
        self.policy = Policy.begun(sketch_of(x, key(seed, Purpose.POLICY)), key(seed, Purpose.POLICY, 1))
        self._parameters = torch.from_numpy(self.policy.parameters)  # the same memory
        self._optimizer = torch.optim.Adam([self._parameters], LEARNING_RATE)
        self._gradient = torch.zeros_like(self._parameters)
        self._batches, self._baseline = 0, 0.0
        self._begun = False

    def periods(self, step: int, stop: int, each: int) -> Iterator[tuple[int, int]]:
        """Ranges of steps that are sampled with the same parameters, which take a step before a new period. each: steps of an
        epoch."""
        period = -(-each // PERIODS)
        while step < stop:
            if step % period == 0:
                self._update()
            end = min(stop, step - step % period + period)
            yield step, end
            step = end

    def learn(self, score: Tensor | None, loss: float) -> None:
        """Add what a batch says. score: see `Policy.score`; None where all sources were taken."""
        if score is not None:
            if self._begun:
                self._gradient += (loss - self._baseline) * score.cpu()
            self._batches += 1
        self._baseline = KEPT * self._baseline + (1 - KEPT) * loss if self._begun else loss
        self._begun = True

    def _update(self) -> None:
        if self._batches:
            self._parameters.grad = self._gradient / self._batches
            self._optimizer.step()
            self._gradient.zero_()
            self._batches = 0

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        own = {"batches": self._batches, "baseline": self._baseline, "begun": self._begun}
        tensors = {"parameters": self._parameters.clone(), "gradient": self._gradient.clone()}
        return {**own, **tensors, "optimizer": self._optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._parameters.copy_(state["parameters"])
        self._gradient.copy_(state["gradient"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._batches, self._baseline, self._begun = state["batches"], state["baseline"], state["begun"]
