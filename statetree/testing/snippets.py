"""Counter-examples as source code: a state, and a test to paste."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from statetree.testing import laws
from statetree.testing.plans import code_of
from statetree.testing.source_code import code

if TYPE_CHECKING:
    from collections.abc import Callable

#: How many lines a test has at most.
MAX_LINES = 15


def snippet(law: laws.Law, transform: Callable[..., Any], plan: Any, world_size: int | None = None) -> str:
    """Return a test that fails because a law does not hold for the tree of a plan."""
    head, _, made = code_of(plan).source().partition("def state():")
    needed, called = reference(transform)
    law_needed, law_called = _law_reference(law)
    own = [*(["laws"] if law_called.startswith("laws.") else []), *(["run_ranks"] if world_size else [])]
    imports = merged(
        [*head.split("\n"), *(f"from statetree.testing import {name}" for name in own), *needed, *law_needed]
    )
    name = "".join(letter if letter.isalnum() else "_" for letter in f"{called.rpartition('.')[2]}_{law.name}")
    ranks = (
        f"run_ranks({world_size}, {law_called}, {called}, state)" if world_size else f"{law_called}({called}, state)"
    )
    return "\n".join([*imports, "", "", f"def state():{made}", "", "", f"def test_{name}():", f"    {ranks}", ""])


def merged(lines: list[str]) -> list[str]:
    """Return lines of imports in their order, with one for each module."""
    names: dict[str, dict[str, None]] = {}
    for line in filter(None, lines):
        head, _, listed = line.partition(" import ")
        names.setdefault(head, {}).update(dict.fromkeys(filter(None, listed.split(", "))))
    ordered = sorted(names, key=lambda head: (head.startswith("from statetree"), not head.startswith("from"), head))
    return [
        f"{head} import {', '.join(sorted(names[head], key=str.lower))}" if names[head] else head for head in ordered
    ]


def reference(function: Any) -> tuple[list[str], str]:
    """Return the imports that a function needs, and how it is called after them.

    What cannot be imported is called by its name, for whoever pastes the test next to it.
    """
    if isinstance(function, functools.partial):
        needed, called = reference(function.func)
        options = [*map(code, function.args), *(f"{name}={code(value)}" for name, value in function.keywords.items())]
        return ["from functools import partial", *needed], f"partial({', '.join([called, *options])})"
    name = getattr(function, "__qualname__", "")
    short = name.rpartition(".")[2]
    if getattr(sys.modules["statetree"], short, None) is function:
        return ["import statetree as st"], f"st.{short}"
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is not None and module.__name__ != "__main__" and getattr(module, name, None) is function:
        return [f"from {module.__name__} import {name}"], name
    return [], short if short.isidentifier() else "transform"


def _law_reference(law: laws.Law) -> tuple[list[str], str]:
    if getattr(laws, law.name, None) is law:
        return [], f"laws.{law.name}"
    check = law.check
    if isinstance(check, functools.partial) and check.func is laws.makes_again:
        needed, called = reference(check.args[0])
        return needed, f"laws.round_trip({called})"
    return reference(check)
