"""What is said where the memory of a GPU is full: what was asked for, what is free, what the plan booked, and what would do."""

import re

from ooc.runtime.memory_plan import DevicePlan
from ooc.stores.sizes import format_bytes

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = rf"([\d.]+) ({'|'.join(_UNITS)})"
_FOUND = {
    "asked": re.compile(rf"Tried to allocate {_SIZE}"),
    "total": re.compile(rf"total capacity of {_SIZE}"),
    "free": re.compile(rf"of which {_SIZE} is free"),
    "torch": re.compile(rf"{_SIZE} is allocated by PyTorch"),
}
"""in the message of torch's OutOfMemoryError, which has the numbers of the moment"""


def device_full(error: BaseException, plan: DevicePlan | None, instead: str) -> str:
    """The message for an OutOfMemoryError of torch. plan: of the device, where there is one; instead: what would do.

    >>> device_full(error, None, "a smaller `hidden`")
    'the GPU has no memory left: 2.15 GB were asked for, and 1.2 GB of 85 GB are free; give a smaller `hidden`'
    """
    sizes = {name: _bytes(pattern.search(str(error))) for name, pattern in _FOUND.items()}
    words = {name: "" if size is None else format_bytes(size) for name, size in sizes.items()}
    said = ["the GPU has no memory left"]
    if words["asked"] and words["free"]:
        of = f" of {words['total']}" if words["total"] else ""
        said = [f"{said[0]}: {words['asked']} were asked for, and {words['free']}{of} are free"]
    else:
        said = [f"{said[0]} ({str(error).split('. ')[0]})"]
    if words["torch"]:
        said.append(f"torch has {words['torch']} in use")
    if plan is not None:
        parts = [*plan.parts().items()][1:]  # behind all that there is
        booked = [f"{name.strip().removeprefix('GPU ')} {format_bytes(size)}" for name, size in parts if size]
        said.append(f"of {format_bytes(plan.memory)} {plan.origin} the plan booked {', '.join(booked) or 'nothing'}")
    return "; ".join([*said, f"give {instead}"])


def _bytes(found: re.Match[str] | None) -> int | None:
    return None if found is None else round(float(found[1]) * _UNITS[found[2]])
