"""The transforms that the how-to "Write a new transform" shows obey the laws of what they do not mean to change."""

import ast
import re
from pathlib import Path

import pytest

from statetree.declare import is_leafwise
from statetree.testing import check_transform

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "write_transform.md"
COPIES = ["accepts", "pure", "independent", "separate", "stable", "structure", "idempotent", "streams"]
#: Each with the functions that it is made of, and the laws that hold.
SHOWN = {
    "without_nan": (["clean"], [*COPIES, "ties", "geometry"]),
    "contiguous": ([], COPIES),
    "shards_of_next_rank": (["shifted"], ["accepts", "pure", "stable", "structure", "geometry", "values", "streams"]),
}


@pytest.fixture(scope="module")
def page():
    """What the page defines before it composes."""
    text = PAGE.read_text().partition("## Compose")[0]
    source = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    found = {"__name__": "page"}
    exec(compile(source, str(PAGE), "exec"), found)
    lengths = {
        node.name: node.end_lineno - min([node.lineno, *(line.lineno for line in node.decorator_list)]) + 1
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }
    return found, lengths


@pytest.mark.parametrize("name", SHOWN)
def test_ten_lines_are_enough_and_stream(page, name):
    found, lengths = page
    helpers, _ = SHOWN[name]
    assert sum(lengths[each] for each in [name, *helpers]) <= 10
    assert is_leafwise(found[name])


@pytest.mark.parametrize("name", SHOWN)
def test_the_laws_hold(page, name):
    check_transform(page[0][name], laws=SHOWN[name][1], examples=60)
