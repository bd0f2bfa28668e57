"""Compression of the gradients that processes exchange: the communication hooks of `DistributedDataParallel`.

PowerSGD (Vogels et al., 2019) sends two thin matrices in place of each gradient that is one, and keeps what it left out for the
next step, on each rank its own. That and its matrices are in checkpoints, so that a run goes on as it would have.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from ooc.config.base import RunConfig
from ooc.runtime.ranks import Ranks
from ooc.stores.errors import ConfigError

if TYPE_CHECKING:  # the hooks are imported where a run has them: few do
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

WHOLE_STEPS = 10
"""optimizer steps before PowerSGD begins, as the first gradients change fastest (and DDP asks for two)"""


def check_compression(config: RunConfig, ranks: Ranks, device: torch.device) -> None:
    """Raise ConfigError for compression in one process, which sends no gradients, or of a kind that DDP has for GPUs only."""
    how = getattr(config, "compress_gradients", "none")
    if how != "none" and ranks.alone:
        raise ConfigError(
            f"compress_gradients = {how} is of what processes send to each other, and there is one: leave it out, or start "
            "several with torchrun"
        )
    if how == "bf16" and device.type != "cuda":
        raise ConfigError("compress_gradients = bf16 is for GPUs, whose processes NCCL joins: use fp16 or powersgd on the CPU")


class CompressedGradients:
    """The compression of a run; without effect unless its configuration asks for one.

    >>> compressed = CompressedGradients(config, ranks)
    >>> compressed.register(DistributedDataParallel(module))
    """

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        self._how, self._ranks = getattr(config, "compress_gradients", "none"), ranks
        self._powersgd: PowerSGDState | None = None
        if self._how == "powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

            rank = getattr(config, "powersgd_rank", 1)
            self._powersgd = powerSGD_hook.PowerSGDState(ranks.group, rank, WHOLE_STEPS, random_seed=config.seed % 2**32)

    def register(self, module: DistributedDataParallel) -> None:
        """Have `module` exchange gradients so."""
        if self._powersgd is not None:
            module.register_comm_hook(self._powersgd, _in_order)
        elif self._how != "none":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
            module.register_comm_hook(self._ranks.group, hooks[self._how])

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint holds, the same on all ranks: what each of them left out is gathered. None where there is none."""
        state = self._powersgd
        if state is None:
            return None
        _, words, position, *_ = state.rng.get_state()
        return {
            "iter": state.iter,
            "random": (torch.from_numpy(np.asarray(words, np.int64)), int(position)),
            "p": _on_host(state.p_memory_dict),
            "q": _on_host(state.q_memory_dict),
            "left_out": self._ranks.gather(_on_host(state.error_dict)),
        }

    def load(self, saved: Mapping[str, Any] | None, device: torch.device) -> None:
        """Take up a checkpoint's state. In another number of processes each has the mean of what all had left out, so that
        the next mean of gradients is the one that there would have been."""
        state = self._powersgd
        if state is None or saved is None:
            return
        words, position = saved["random"]
        state.rng.set_state(("MT19937", words.numpy().astype(np.uint32), position, 0, 0.0))
        state.iter = saved["iter"]
        left_out = saved["left_out"]
        if len(left_out) == self._ranks.world_size:
            own = left_out[self._ranks.rank]
        else:
            own = {bucket: sum(each[bucket] for each in left_out) / len(left_out) for bucket in left_out[0]}
        held = ((state.p_memory_dict, saved["p"]), (state.q_memory_dict, saved["q"]), (state.error_dict, own))
        for into, tensors in held:
            into.update({bucket: tensor.to(device) for bucket, tensor in tensors.items()})


def _in_order(
    state: "PowerSGDState",
    bucket: distributed.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """The hook, done when it returns: it sends in several steps, and those of ranks must not mix with what DDP sends itself
    (which parameters were used), as gloo matches collectives by their order."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    future = powerSGD_hook(state, bucket)
    future.wait()
    return future


def _on_host(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {bucket: tensor.detach().cpu().clone() for bucket, tensor in tensors.items()}
