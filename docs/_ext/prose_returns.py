"""Keeps the prose of ``Returns:`` sections together.

Napoleon takes what comes before a colon on their first line for a type. Here types are in signatures only, and a colon
is a colon: one in front of the line leaves the type empty.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_BEFORE_NAPOLEON = 400
_SECTIONS = ("Returns:", "Yields:")


def keep_together(_app: Sphinx, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Put the colon in front of the first lines of such sections."""
    for index, (head, first) in enumerate(list(pairwise(lines)), 1):
        if head.strip() in _SECTIONS:
            indent = len(first) - len(first.lstrip())
            lines[index] = f"{first[:indent]}: {first[indent:]}"


def setup(app: Sphinx) -> dict[str, Any]:
    """Have it called before napoleon is."""
    app.connect("autodoc-process-docstring", keep_together, priority=_BEFORE_NAPOLEON)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
