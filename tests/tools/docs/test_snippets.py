"""Every block of code in README.md and docs/ runs, in order, page by page."""

import fcntl
import shutil
from pathlib import Path

import pytest

import ooc
from tests.forked import python
from tools.docs.snippets import ROOT, blocks, continues, pages, run_page

PAGE = """# A page

```bash
echo 3 > n.txt
```

Text, and a file of the reader's:

```python
# my_words.py
WORD = "three"
```

```python
import my_words

words = {3: my_words.WORD}
```

<!-- not run: there is no such program -->
```bash
no-such-program
```

```text
not code
```

```python
open("word.txt", "w").write(words[int(open("n.txt").read())])
```
"""


def finished(page: Path, folder: Path) -> Path:
    """The files that a page's blocks leave, made once for all tests and processes."""
    done = folder / page.relative_to(ROOT).as_posix().replace("/", "-")
    with open(f"{done}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.is_dir():
            work = run(page, folder, folder / f"{done.name}.unfinished")
            work.rename(done)
    return done


def run(page: Path, folder: Path, work: Path) -> Path:
    """Run a page's blocks in `work`, with the files of the page it continues."""
    shutil.rmtree(work, ignore_errors=True)
    before = continues(page)
    shutil.copytree(finished(before, folder), work) if before else work.mkdir()
    done = python("-m", "tests.tools.docs.forked_ooc", page, work)
    assert done.returncode == 0, f"{page}\n{done.stdout}\n{done.stderr}"
    return work


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(each, id=str(each.relative_to(ROOT))) for each in pages()])
def test_every_block_of_a_page_runs(page: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if base.name.startswith("popen-") else base  # that of all workers
    finished(page, folder)


def test_blocks_run_in_order_and_share_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, work = tmp_path / "page.md", tmp_path / "work"
    page.write_text(PAGE)
    work.mkdir()
    monkeypatch.syspath_prepend(str(work))
    assert run_page(page, work) == 4
    assert (work / "word.txt").read_text() == "three"


def test_every_ooc_of_a_page_is_a_process_of_its_own(tmp_path: Path) -> None:
    """With its exit code, folder, pipes and files, though it is forked."""
    page, work = tmp_path / "page.md", tmp_path / "work"
    page.write_text("# A page\n\n```bash\nooc --version | cat > version.txt\nooc info no.ooc || echo $? > code.txt\n```\n")
    work.mkdir()
    done = python("-m", "tests.tools.docs.forked_ooc", page, work)
    assert done.returncode == 0, done.stderr
    assert "there is no store at no.ooc" in done.stderr
    assert (work / "version.txt").read_text().split() == ["ooc", ooc.__version__]
    assert (work / "code.txt").read_text() == "2\n"
    page.write_text("# A page\n\n```bash\nooc info no.ooc\n```\n")
    done = python("-m", "tests.tools.docs.forked_ooc", page, work)
    assert (done.returncode, "this block ended with exit code 2" in done.stderr) == (1, True)


def test_a_block_that_fails_is_named_by_page_and_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```bash\nexit 3\n```\n")
    with pytest.raises(RuntimeError, match=r"page\.md:4: this block ended with exit code 3"):
        run_page(page, tmp_path)


def test_every_block_has_a_language_and_every_reason_is_one() -> None:
    """A block without a language would be left out in silence."""
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for block in blocks(path.read_text()):
            assert block.language, f"{path}:{block.line}: this block has no language"
            assert block.not_run is None or len(block.not_run) > 10
