"""Every cell of a notebook gives what is stored beside it."""

import ast
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs").rglob("*.ipynb"))


def _value_of(source: str, names: dict) -> object:
    """Run a cell, and return the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_cells_run_in_order_and_show_what_is_stored(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    compared = 0
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        value = _value_of("".join(cell["source"]), names)
        stored = [output["data"] for output in cell["outputs"]]
        assert bool(stored) is (value is not None)
        for data in stored:
            if "text/html" in data:
                page = value._repr_html_()
                assert page.startswith("<div")
                assert "".join(data["text/html"])[:40] == page[:40]
            else:
                assert "".join(data["text/plain"]) == repr(value)
            compared += 1
    assert compared >= 5
