"""Parsing and formatting of byte sizes."""

import re

from ooc.stores.errors import ConfigError

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4, "KI": 1024, "MI": 1024**2, "GI": 1024**3, "TI": 1024**4}


def parse_bytes(text: str | int, name: str = "") -> int:
    """Parse a size such as `"2GB"`, `"1.5 GiB"`, `"512MB"` or a plain number; decimal units are powers of 1000.

    name: the argument that it is given as, for the message. Raises ConfigError if the text is not a positive size, or without
    a unit not a whole one: 2.5 bytes were meant as something else.

    >>> parse_bytes("2GB"), parse_bytes("1KiB")
    (2000000000, 1024)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?\s*", str(text).upper())
    size = float(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else 0.0
    if not 1 <= size < 2**63 or (match and not match[2] and size % 1):
        where = f"`{name}`: " if name else ""
        raise ConfigError(f"{where}{str(text)[:60]!r} is not a size in bytes: write it like 2GB, 512MB or 1.5GiB")
    return int(size)


def format_bytes(count: float) -> str:
    """Format a size: `format_bytes(2_500_000)` is `'2.5 MB'`."""
    for unit in ("B", "kB", "MB", "GB"):
        if round(abs(count)) < 1000:  # 999.6 would be written 1e+03
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB" if round(abs(count)) < 1000 else f"{count:.0f} TB"


def format_seconds(seconds: float) -> str:
    """Format a duration: `format_seconds(172_000)` is `'47.8 h'`."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 5400:
        return f"{seconds / 60:.2g} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:,.1f} days"
