"""Results of a campaign of many cases, kept on disk, so that a campaign that is stopped goes on where it was."""

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ooc.stores.io.working import remove

NAME = "results.jsonl"


def clear(work: Path, *kept: str) -> None:
    """Remove what an earlier process left in a campaign's folder, except its results and what is `kept`."""
    for path in work.iterdir():
        if path.name not in (NAME, *kept):
            remove(path)


class Results:
    """One line of JSON a case, in `folder`; a later line of the same case replaces an earlier one.

    A case with findings is not done: it is run again when the campaign goes on, which shows whether it was mended.

    >>> results = Results(work)
    >>> if "flip 7" not in results:
    ...     results.add("flip 7", "harmless")
    """

    def __init__(self, folder: Path, every: int = 20) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._every = folder / NAME, every
        self._began, self._new = time.monotonic(), 0
        self._cases: dict[str, dict[str, Any]] = {}
        for line in self._path.read_text().splitlines() if self._path.exists() else []:
            case = json.loads(line)
            self._cases[case["case"]] = case

    def __contains__(self, case: str) -> bool:
        return case in self._cases and not self._cases[case]["findings"]

    def __len__(self) -> int:
        """Number of cases with a result."""
        return len(self._cases)

    def add(self, case: str, outcome: str, findings: list[str] | None = None, **more: Any) -> None:
        """Record a case, print its findings, and now and then how far the campaign is. more: what to count by."""
        line = {"case": case, "outcome": outcome, "findings": findings or [], **more}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._cases[case] = line
        self._new += 1
        for finding in line["findings"]:
            print(f"{case}: {finding}", file=sys.stderr, flush=True)
        if self._new % self._every == 0:
            seconds = time.monotonic() - self._began
            print(
                f"{len(self)} cases, {len(self.findings)} findings, {seconds / self._new:.2f} s each",
                file=sys.stderr,
                flush=True,
            )

    @property
    def findings(self) -> list[str]:
        """Findings of all cases, a line each."""
        return [f"{name}: {finding}" for name, case in self._cases.items() for finding in case["findings"]]

    def counts(self, of: str = "outcome") -> dict[str, int]:
        """Number of cases by a field of their lines."""
        return dict(sorted(Counter(case[of] for case in self._cases.values() if of in case).items()))

    def total(self, of: str, **only: str) -> int:
        """Sum of a field over the cases, of those with certain fields."""
        chosen = (case for case in self._cases.values() if all(case.get(name) == value for name, value in only.items()))
        return sum(case[of] for case in chosen)
