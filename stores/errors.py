"""Errors a user can act on: one line saying what, where and what to do.

The command line prints such an error as that one line and exits with code 2; a library caller catches `OocError`.
`assert` is kept for invariants, never for input.
"""


class OocError(Exception):
    """Base of every error that is the input's, the disk's or the configuration's, not the program's."""


class InputError(OocError):
    """Input data is wrong: names the file, the row and the value."""


class StoreError(OocError):
    """A store cannot be used: absent, truncated, damaged, of a newer format, or already there."""


class ConfigError(OocError):
    """A setting is unknown, malformed, or does not fit another one."""


class BudgetError(OocError):
    """The work does not fit the memory given: names the cheapest fix."""
