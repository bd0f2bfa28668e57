"""Errors a user can act on: one line that says what, where and what to do.

The command line prints such an error as one line and exits with code 2; library callers catch `OocError`. `assert` is for
invariants, never for input.

Messages name arguments as Python has them, in backticks: `memory` or `drop_missing=True`. The command line shows its flags in
their place (`ooc.cli.messages`).
"""


class OocError(Exception):
    """Base of all errors caused by the input, the disk or the configuration, not by the program."""


class InputError(OocError):
    """Input data is wrong; names the file, the row and the value."""


class StoreError(OocError):
    """A store is missing, truncated, damaged, of a newer format, or exists already."""


class ConfigError(OocError):
    """A setting is unknown, malformed, or conflicts with another one."""


class BudgetError(OocError):
    """The work does not fit the given memory; names the cheapest fix."""


class OocWarning(UserWarning):
    """A setting that changes nothing, or something that is left out; the command line prints it as one line."""
