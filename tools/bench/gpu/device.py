"""The device of a benchmark, waits of the host for it, and where results go."""

import json
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tools.bench.lib.machine import describe

_WAITS = "called a synchronizing CUDA operation"


def device_of(name: str) -> torch.device:
    """The device, "cuda" or "cpu", which stands for it in tests; exits where it is not here."""
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here: run this on a machine with a GPU")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


class Waits:
    """Operations of the main thread that made the host wait for the device, as torch reports them."""

    count = 0


@contextmanager
def counted_waits(device: torch.device) -> Iterator[Waits]:
    """Count them in the block; waits for events, which a step makes none of, are not reported. None are on the CPU."""
    found = Waits()
    if device.type != "cuda" or not hasattr(torch._C, "_cuda_set_sync_debug_mode"):
        yield found
        return

    def seen(message: Any, *rest: Any, **more: Any) -> None:
        if _WAITS in str(message) and threading.current_thread() is threading.main_thread():
            found.count += 1

    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = seen
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def write(out: Path, name: str, device: torch.device, figures: dict[str, Any], table: Sequence[str]) -> None:
    """Write OUT/NAME.json, and print a table and where that is."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    found = {"machine": describe(), "gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda, **figures}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")
    print(*table, sep="\n")
    print(f"written: {out / name}.json", file=sys.stderr)
