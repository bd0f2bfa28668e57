"""Where a run is: the part of a checkpoint that every mode shares."""

from dataclasses import dataclass


@dataclass
class RunState:
    """Where a run stands: with model, optimizer and what else a run keeps all that a checkpoint holds."""

    epoch: int = 0
    step: int = 0
    """batches done in this epoch"""
    total_steps: int = 0
    loss_sum: float = 0.0
    """of this epoch's steps"""
    best_score: float | None = None
    best_epoch: int | None = None
    stale: int = 0
    """evaluations since the best one"""
