"""How far a step came, kept beside its values on disk: a killed step goes on from its last log entry."""

import io
import time
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from ooc.fullgraph.ops import Statistics, StepModules
from ooc.layerwise.layerwise_pass import digest
from ooc.models.dropout import STREAM
from ooc.runtime.transfer import on_host
from ooc.stores.io.atomic import sync_dir, write_file

NOTE = "step.pt"
LEAST_SECONDS = 5.0
"""between two entries: each waits for the disk"""


@dataclass
class StepPosition:
    """Op number `op` is done up to node `next`. made, begun: values on disk, whole or as far as they are; keys: of dropout;
    statistics: of norms over all nodes, by layer: mean, variance, and their gradients so far; moments: those that are being
    gathered; halves: which file of a gradient that is added to holds what was added last."""

    op: int = 0
    next: int = 0
    loss: float = 0.0
    made: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    keys: dict[str, list[int]] = field(default_factory=dict)
    statistics: dict[int, list[Tensor | None]] = field(default_factory=dict)
    moments: list[Any] | None = None
    halves: dict[str, int] = field(default_factory=dict)

    def put_back(self, parts: StepModules) -> None:
        """Let a step's parts go on as they were: its draws, its statistics, and torch's generator behind the draws."""
        parts.draws.keys.update(self.keys)
        for _ in range(sum(map(len, self.keys.values()))):
            torch.randint(1 << 62, ())
        for index, (mean, var, *grads) in self.statistics.items():
            assert mean is not None
            assert var is not None
            found = Statistics(mean.requires_grad_(), var.requires_grad_())
            found.mean.grad, found.var.grad = grads
            parts.statistics[index] = found


def statistics_of(parts: StepModules) -> dict[int, list[Tensor | None]]:
    """A step's statistics so far, as of `StepPosition`."""
    return {
        index: [each.mean.detach(), each.var.detach(), each.mean.grad, each.var.grad]
        for index, each in parts.statistics.items()
    }


class StepLog:
    """Keeps the last `StepPosition` of a model's step in `folder`, with the gradients so far and the buffers. key: identifies
    the step, see `key_of`."""

    def __init__(self, folder: Path, model: nn.Module, key: str) -> None:
        self._path, self._model, self._key = folder / NOTE, model, key
        self._last = time.monotonic()

    def due(self) -> bool:
        """Whether it is time for one."""
        return time.monotonic() - self._last >= LEAST_SECONDS

    def keep(self, state: StepPosition) -> None:
        """Once all that it speaks of is durable."""
        grads = {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}
        content = io.BytesIO()
        buffers = dict(self._model.named_buffers())
        torch.save({"key": self._key, "state": vars(state), "grads": grads, "buffers": buffers}, content)
        write_file(self._path, content.getvalue())
        self._last = time.monotonic()

    def found(self) -> StepPosition | None:
        """The state to go on from, the model's gradients and buffers as they were; None where there is none of this step."""
        if not self._path.exists():
            return None
        try:
            kept = torch.load(io.BytesIO(self._path.read_bytes()), weights_only=True)
            if kept["key"] != self._key:
                return None
            state = StepPosition(**kept["state"])
        except (RuntimeError, ValueError, KeyError, TypeError, EOFError, UnpicklingError):
            return None  # not whole, or of another version
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                buffer.copy_(kept["buffers"][name])
            for name, parameter in self._model.named_parameters():
                parameter.grad = kept["grads"][name].to(parameter.device) if name in kept["grads"] else None
        return state

    def forget(self) -> None:
        """Before what it speaks of is changed otherwise."""
        if self._path.exists():
            self._path.unlink()
            sync_dir(self._path.parent)


def key_of(model: nn.Module, data: str) -> str:
    """Of the parameters and buffers as they are, the gradients that a step adds to, what dropout draws, and the data."""
    named = [*model.state_dict().items(), *((f"{n} grad", p.grad) for n, p in model.named_parameters() if p.grad is not None)]
    known = on_host(sorted(named, key=lambda item: item[0]))
    return digest(f"{data} {model} {STREAM}", [*known, ("generator", torch.get_rng_state())])
