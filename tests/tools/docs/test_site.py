"""The documentation builds without warnings, and its reference pages have what the code has."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ooc
from ooc.config.modes import classes
from tools.docs.reference import api_page, cli_page
from tools.docs.snippets import ROOT


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", ROOT / "docs", tmp_path / "site"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(list(map(str, words)), env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "reference" / "api.html").is_file()


def test_the_page_of_the_command_line_has_every_verb_and_every_flag() -> None:
    page = cli_page()
    for verb in (
        "ingest",
        "append",
        "compact",
        "info",
        "verify",
        "train",
        "plan",
        "report",
        "machine",
        "infer",
        "rank",
        "embed",
    ):
        assert f"## ooc {verb}\n" in page
    flags = {name.replace("_", "-") for mode in classes().values() for name in mode.model_fields}
    assert not [name for name in flags - {"store"} if f"`--{name}" not in page]


def test_the_page_of_the_api_has_every_public_name() -> None:
    page = api_page()
    assert not [name for name in ooc.__all__ if not re.search(rf":: ooc\.{name}(\(|$)", page, re.MULTILINE)]
    assert "`fanout = []`" in page
