"""Settings of the process that a run changes, restored for the program that called it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ooc.runtime.memory import block_policy_restored


@contextmanager
def settings_restored() -> Iterator[None]:
    """Restore, also after an exception, what runs set for the whole process.

    These are torch's random generators, its number of threads, its choice of deterministic algorithms, TF32, the limits at
    which the C library returns memory, `CUBLAS_WORKSPACE_CONFIG`, and the working directory in `sys.path`, from which models
    are imported.

    >>> with settings_restored():
    ...     torch.manual_seed(0)
    """
    with (
        _generators_restored(),
        _algorithms_restored(),
        block_policy_restored(),
        _environment_restored(),
        working_directory_left(),
    ):
        yield


@contextmanager
def _generators_restored() -> Iterator[None]:
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        elif torch.cuda.is_available():  # CUDA begins with the seed of `torch.manual_seed`
            torch.cuda.manual_seed_all(torch.initial_seed())


@contextmanager
def _algorithms_restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.set_float32_matmul_precision(precision)


@contextmanager
def _environment_restored() -> Iterator[None]:
    name = "CUBLAS_WORKSPACE_CONFIG"
    before = os.environ.get(name)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


@contextmanager
def working_directory_left() -> Iterator[None]:
    """Remove the working directory from `sys.path` afterwards, if it was not there before."""
    here = os.getcwd()
    was_there = here in sys.path
    try:
        yield
    finally:
        if not was_there and here in sys.path:
            sys.path.remove(here)
