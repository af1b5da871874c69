"""Writes a test file for a transform: all laws that hold now must hold from then on, and the others are said."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from statetree.testing.arguments import refuse
from statetree.testing.snippets import merged, reference
from statetree.testing.transform_check import check_transform

if TYPE_CHECKING:
    from collections.abc import Sequence

_FILE = '''"""Tests of {name}, as written by `statetree ghostwrite`: change them as you like."""

{imports}


def test_laws():
    """What holds for every state."""
    check_transform(
        {called},
        laws=[
            {names},
        ],{ranks}
    )
'''
_BROKEN = """

@pytest.mark.xfail(reason="{statement}", strict=True)
{test}"""


def ghostwrite(target: str, *, ranks: Sequence[int] | None = None, examples: int = 200) -> str:
    """Return the text of a test file for a transform.

    It holds one test with all the laws that hold now. For each other one there is a test with the smallest state for
    which it does not hold, marked as expected to fail: take it out if the transform is not meant to keep that law, or
    mend the transform.

    Args:
        target: The function, as ``package.module:function``.
        ranks: As for ``check_transform``.
        examples: As for ``check_transform``.

    Returns:
        Code of Python.

    Raises:
        ValueError: If the target names no function.

    Example:
        >>> from statetree.testing.ghostwriter import ghostwrite
        >>> "laws.independent" in ghostwrite("copy:deepcopy", examples=20)
        True
    """
    transform = _imported(target)
    report = check_transform(transform, ranks=ranks, examples=examples)
    needed, called = reference(transform)
    imports = ["from statetree.testing import check_transform, laws", *needed]
    holding = [f"laws.{verdict.law.name}" for verdict in report.verdicts if verdict.holds]
    tests = []
    for verdict in report.verdicts:
        if verdict.holds is False:
            head, _, body = verdict.source.partition("\n\n\n")
            imports += head.splitlines()
            state = f"state_for_{verdict.law.name}"
            body = body.replace("def state():", f"def {state}():").replace(", state)", f", {state})")
            made, _, test = body.partition("\n\n\n")
            tests.append(f"\n\n{made}\n" + _BROKEN.format(statement=f"not so: {verdict.law.statement}", test=test))
    if tests:
        imports.append("import pytest")
    text = _FILE.format(
        name=target,
        imports="\n".join(merged(imports)),
        called=called,
        names=",\n            ".join(holding),
        ranks=f"\n        ranks={tuple(ranks)}," if ranks else "",
    )
    return text + "".join(tests)


def _imported(target: str) -> Any:
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        refuse("ghostwrite: target", "package.module:function", target)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        msg = f"ghostwrite: target: expected a function that can be imported, got {target!r}: {error}."
        raise ValueError(msg) from error
    if not callable(found):
        refuse("ghostwrite: target", "a function of a tree", found, TypeError)
    return found
