"""What the documentation is made with: pictures, tables, and the reading of docstrings."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="the documentation's own tools: install the group docs")

DOCS = Path(__file__).parents[2] / "docs"


def loaded(path: str):
    """Import a module of the documentation, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{Path(path).stem}", DOCS / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_pictures_are_those_that_the_script_draws():
    drawn = loaded("pictures/draw.py").drawn()
    assert {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")} == drawn


def test_a_row_of_the_benchmarks_says_what_was_measured():
    extension = loaded("_ext/benchmark_results.py")
    row = {
        "name": "copy_",
        "role": "floor",
        "median_s": 0.0123456,
        "us_per_leaf": 1.5,
        "gb_per_s": 3.25,
        "times_ours": 0.5,
    }
    assert extension.row_cells(row) == ("copy_ (floor)", "12.35", "1.50", "3.25", "0.50")
    assert extension.row_cells({**row, "role": "peer", "gb_per_s": None})[::3] == ("copy_", "")
    aim = {"text": "twice as fast", "value": 1.9, "reached": False}
    assert extension.aim_text(aim) == "Not reached: twice as fast (1.90)."


def test_the_recorded_benchmarks_can_be_shown():
    extension = loaded("_ext/benchmark_results.py")
    results = json.loads(extension.RESULTS.read_text(encoding="utf-8"))
    assert results["versions"]["torch"] in extension.measured_on(results)
    for row in results["rows"]:
        assert extension.row_cells(row["contenders"][0])[0] == "statetree"


def test_a_profile_is_shown_in_parts():
    extension = loaded("_ext/benchmark_results.py")
    row = {"title": "copy_into", "median_s": 0.002, "phases_s": {"flatten": 0.001, "bytes": 0.003}}
    assert extension.profile_cells([row]) == [
        ("", "median, ms", "flatten", "bytes"),
        ("copy_into", "2.00", "25%", "75%"),
    ]


def test_prose_with_a_colon_is_not_taken_for_a_type():
    docstring = ["Do it.", "", "Returns:", "    Both: this and that.", "    And more.", "", "Raises:", "    No: never."]
    loaded("_ext/prose_returns.py").keep_together(None, "", "", None, None, docstring)
    assert docstring[3] == "    : Both: this and that."
    assert docstring[4:] == ["    And more.", "", "Raises:", "    No: never."]


def test_every_page_is_in_a_table_of_contents():
    listed = {"index"}
    for page in DOCS.rglob("*.md"):
        inside = False
        for line in page.read_text(encoding="utf-8").split("\n"):
            if line.startswith("```{toctree}"):
                inside = True
            elif line.startswith("```"):
                inside = False
            elif inside and line and not line.startswith(":"):
                listed.add(str((page.parent / line).relative_to(DOCS)))
    assert {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")} == listed


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("bool", "https://docs.python.org/3/library/functions.html#bool"),
        ("ValueError", "https://docs.python.org/3/library/exceptions.html#ValueError"),
        ("typing.Any", "https://docs.python.org/3/library/typing.html#typing.Any"),
        ("Sequence", "https://docs.python.org/3/library/collections.abc.html#collections.abc.Sequence"),
        ("torch.Tensor", "https://docs.pytorch.org/docs/stable/tensors.html#torch.Tensor"),
        ("torch.dtype", "https://docs.pytorch.org/docs/stable/tensor_attributes.html#torch-dtype"),
        ("statetree.stager.stager.T", None),
    ],
)
def test_names_of_python_and_torch_are_links(name, address):
    assert loaded("_ext/outside_names.py").address_of(name) == address
