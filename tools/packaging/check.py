"""Checks a wheel and an sdist before they are released, and that tag, version and changelog agree.

    python -m tools.packaging.check dist [--tag v0.2.0]

Both must hold `ooc.stores` as files (in the repository `ooc/stores` is a link), the marker of types and the page of the report;
nothing may stand at the top level beside `ooc`.
"""

import argparse
import re
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_IN_STORES = ("__init__.py", "dataset.py", "py.typed")
NEEDED = ["ooc/__init__.py", "ooc/py.typed", "ooc/cli/main.py", "ooc/report/page.html.jinja"]
NEEDED += [f"ooc/stores/{name}" for name in _IN_STORES]


def version() -> str:
    """The version in pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def faults_of_wheel(path: Path) -> list[str]:
    """What is wrong with a wheel; nothing if it may be released."""
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
    others = sorted({name.split("/")[0] for name in names} - {"ooc", f"ooc-{version()}.dist-info"})
    return [f"{path.name}: {each} stands at the top level" for each in others] + _missing(path, names)


def faults_of_sdist(path: Path) -> list[str]:
    """What is wrong with an sdist; nothing if it may be released."""
    with tarfile.open(path) as sdist:
        members = sdist.getmembers()
    links = [f"{path.name}: {each.name} is a link" for each in members if each.issym() or each.islnk()]
    return links + _missing(path, [each.name.split("/", 1)[-1] for each in members])


def _missing(path: Path, names: list[str]) -> list[str]:
    return [f"{path.name}: {each} is missing" for each in NEEDED if each not in names]


def faults_of_tag(tag: str, changelog: str) -> list[str]:
    """What keeps a tag from being released: another version, or a version that the changelog does not have."""
    faults = [] if tag == f"v{version()}" else [f"the tag is {tag}, pyproject.toml has version {version()}"]
    if not re.search(rf"^## {re.escape(tag.removeprefix('v'))}\b", changelog, re.MULTILINE):
        faults.append(f"CHANGELOG.md has no heading '## {tag.removeprefix('v')}'")
    return faults


def main() -> int:
    """Print what is wrong, a line each; exit code 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="folder with one wheel and one sdist")
    parser.add_argument("--tag", help="tag to be released, such as v0.2.0")
    a = parser.parse_args()
    wheels, sdists = list(a.dist.glob("*.whl")), list(a.dist.glob("*.tar.gz"))
    faults = [] if len(wheels) == len(sdists) == 1 else [f"{a.dist} must hold one wheel and one sdist: remove the others"]
    faults += [fault for each in wheels for fault in faults_of_wheel(each)]
    faults += [fault for each in sdists for fault in faults_of_sdist(each)]
    faults += faults_of_tag(a.tag, (ROOT / "CHANGELOG.md").read_text()) if a.tag else []
    print(*faults, sep="\n", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
