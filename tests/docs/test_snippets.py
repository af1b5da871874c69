"""Every snippet of the documentation and the README does what the page says."""

import re
from pathlib import Path

import pytest

from statetree.testing import close_ranks
from tests.docs.snippets import Page

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module", autouse=True)
def _ranks_end_with_the_module():
    yield
    close_ranks()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_snippet_runs(path, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Page(path).run("page_" + re.sub(r"\W", "_", str(path.relative_to(ROOT))), tmp_path)


def _run(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    Page(page).run("page_of_a_test", tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nprint(1)\n```\n```text\n2\n```\n", "expected output"),
        ("```python\nprint(1)\n```\n", "expected output"),
        ("```python\n1\n```\n```text\n1\n```\n", "expected output"),
        ("```python\nassert False, 'no'\n```\n", "no"),
        ("```python\nif __name__ == '__main__':\n    assert False, 'no'\n```\n", "no"),
        ("```python\nrun_ranks(2, print)\n```\n", "guard it"),
        ("```text\n1\n```\n", "has to be what"),
        ("```pycon\n>>> 1\n```\n", "nobody executes"),
        ("```python\n1\n", "is not closed"),
        ("```console\n$ ls\n```\n", "nobody executes"),
        ("```console\n$ statetree --version\n0\n```\n", "expected output"),
    ],
    ids=lambda value: value[:40],
)
def test_a_page_that_is_wrong_fails(text, message, tmp_path):
    with pytest.raises(AssertionError, match=message):
        _run(text, tmp_path)


def test_blocks_share_a_module_and_keep_their_lines(tmp_path):
    text = (
        "# Title\n\n```python\nx = 1\n```\n\n```{note}\nAsides are not code.\n```\n\n"
        "```python\nprint(x, [2, 3])\n```\n\n```text\n1 ...\n```\n"
    )
    _run(text, tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text + "```python\nraise KeyError('no')\n```\n")
    with pytest.raises(KeyError, match="no") as caught:
        Page(page).run("page_of_a_test", tmp_path)
    assert caught.traceback[-1].lineno + 1 == 19
