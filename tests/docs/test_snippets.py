"""Every snippet of the documentation and the README does what the page says."""

import re
from pathlib import Path

import pytest
import torch

import statetree
from statetree.files import formats
from tests.docs.snippets import Page, Script
from tests.ranks import close_ranks

ROOT = Path(__file__).parents[2]
#: The pages whose blocks readers try, at a prompt or as a file: the tutorial and the how-tos' index say how.
TRIED = [
    path
    for pattern in ("README.md", "docs/tutorial.md", "docs/errors.md", "docs/howto/*.md")
    for path in sorted(ROOT.glob(pattern))
]
#: What is installed for `make integration` alone, which executes the blocks that import it.
ELSEWHERE = {"torchdata"}
#: torch 2.11's `DefaultStager` stages once: then it closes what it stages with, and raises `KeyError`.
STAGES_AGAIN = torch.__version__ >= "2.12"
REUSES_STAGER = "DefaultStager(StagingOptions("
SCRIPTS = [script for path in TRIED for script in Page(path).scripts() if not script.imported() & ELSEWHERE]
OTHERS = sorted({*(ROOT / "docs").rglob("*.md")} - {*TRIED})


@pytest.fixture(scope="module", autouse=True)
def _ranks_end_with_the_module():
    yield
    close_ranks()


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_snippet_runs(path, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    _skip_if_stager_is_reused(path.read_text())
    Page(path).run("page_" + re.sub(r"\W", "_", str(path.relative_to(ROOT))), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("script", [script for script in SCRIPTS if not script.can_be_typed()], ids=str)
def test_the_blocks_of_a_page_make_a_program(script, tmp_path):
    _skip_if_stager_is_reused("".join(block.text for block in script.blocks))
    script.execute(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.can_be_typed()], ids=str)
def test_the_blocks_of_a_page_can_be_typed(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _skip_if_stager_is_reused("".join(block.text for block in script.blocks))
    script.type()


def _skip_if_stager_is_reused(text: str) -> None:
    if REUSES_STAGER in text and not STAGES_AGAIN:
        pytest.skip("torch 2.11's DefaultStager cannot be used for two saves")


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


def _scripts(tmp_path: Path, *blocks: str) -> list[Script]:
    page = tmp_path / "page.md"
    page.write_text("\n".join(f"```python\n{block}```\n" for block in blocks))
    return Page(page).scripts()


@pytest.mark.parametrize(
    "block",
    [
        "def f():\n    a = 1\n\n    return a\n",
        "with open('new', 'w'):\n    pass\nx = 1\n",
        "try:\n    x = 1\nfinally:\n    x = 2\nprint(x)\n",
        "1 / 0\n",
    ],
    ids=["an empty line in a function", "no empty line after with", "none after try", "an exception"],
)
def test_what_cannot_be_typed_is_noticed(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (script,) = _scripts(tmp_path, block)
    with pytest.raises(AssertionError, match="the prompt says"):
        script.type()


def test_what_is_typed_prints_what_the_page_shows_and_no_values(tmp_path):
    (script,) = _scripts(tmp_path, "3\nif True:\n    x = 1\n", "x\n")
    script.type()
    (script,) = _scripts(tmp_path, "print(3)\n")
    with pytest.raises(AssertionError, match="expected output"):
        script.type()


def test_a_program_fails_with_its_error_and_other_output(tmp_path):
    (script,) = _scripts(tmp_path, "x = 1\n", "assert x == 2, 'not two'\n")
    with pytest.raises(AssertionError, match="not two"):
        script.execute(tmp_path)
    (script,) = _scripts(tmp_path, "x = 1\n", "print(x)\n")
    with pytest.raises(AssertionError, match="expected output"):
        script.execute(tmp_path)


def test_a_block_goes_into_a_file_of_its_own_where_the_text_above_it_says_so(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na = 1\n```\n\nThis goes into a file\nof its own:\n\n```python\nb = 1\n```\n\n"
        "And this does not:\n\n```python\nc = 1\n```\n"
    )
    assert [[block.text for block in script.blocks] for script in Page(page).scripts()] == [
        ["a = 1\n", "c = 1\n"],
        ["b = 1\n"],
    ]


def test_ranks_and_classes_are_not_for_the_prompt(tmp_path):
    blocks = ["from statetree.testing import run_ranks\n", "class A:\n    pass\n", "import torch\n"]
    assert [_scripts(tmp_path, block)[0].can_be_typed() for block in blocks] == [False, False, True]


def test_the_format_of_a_page_holds_what_it_says(tmp_path, monkeypatch):
    """Strided views and parameters as tensors; the rest is refused by its name."""
    page = (ROOT / "docs/howto/file_format.md").read_text()
    code = page.partition("```python\n")[2].partition("st.files.register_format")[0]
    space = {}
    exec(code, space)
    monkeypatch.setattr(formats, "_FORMATS", [space["Npz"](), *formats._FORMATS])
    numbers = torch.arange(6.0).view(2, 3)
    for name in ("a.npz", "B.NPZ"):
        statetree.save({"a": {"view": numbers.t(), "parameter": torch.nn.Parameter(numbers)}}, tmp_path / name)
        loaded = statetree.load(tmp_path / name)
        assert torch.equal(loaded["a.view"], numbers.t())
        assert torch.equal(loaded["a.parameter"], numbers)
    for value in (3, "x", numbers.bfloat16(), numbers.to_sparse()):
        with pytest.raises(statetree.CheckpointError, match=r"an \.npz file cannot hold a\.odd: "):
            statetree.save({"a": {"odd": value}}, tmp_path / "c.npz")
    for name in ("file", "allow_pickle"):  # NumPy's own, which would get lost
        with pytest.raises(statetree.CheckpointError, match=f"cannot name an array {name}"):
            statetree.save({name: numbers}, tmp_path / "c.npz")
    (tmp_path / "c.npz").write_bytes(b"no zip")
    with pytest.raises(statetree.CheckpointError, match=r"c\.npz: the format Npz cannot read it: BadZipFile"):
        statetree.load(tmp_path / "c.npz")
