"""The HTML report of a run, its charts, and tables for the terminal."""

from typing import TYPE_CHECKING

from ooc.runtime.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from ooc.report.page import write_report

__all__ = ["write_report"]
__getattr__ = lazy_exports(__name__, dict.fromkeys(__all__, "ooc.report.page"))
