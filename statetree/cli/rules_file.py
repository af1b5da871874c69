"""Rules of a conversion in a file."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any, Final

from statetree.errors import CheckpointError
from statetree.transforms.conversions.rule_set import Conversion

if TYPE_CHECKING:
    from pathlib import Path

_KEYS: Final = {"rules", "sizes", "ignore", "strict"}
_RULE_KEYS: Final = {"left", "right", "pattern"}


def read_rules(path: Path, *, inverse: bool) -> Conversion:
    """Return the conversion that a TOML file describes: ``[[rules]]``, ``[sizes]``, ``ignore`` and ``strict``."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise _refused(path, f"it cannot be read: {reason}") from None
    rules: Any = given.get("rules")
    if not isinstance(rules, list) or not all(
        isinstance(rule, dict) and {"left", "right"} <= rule.keys() for rule in rules
    ):
        raise _refused(path, "expected [[rules]], each with left and right")
    unknown = sorted({*given} - _KEYS | {key for rule in rules for key in rule.keys() - _RULE_KEYS})
    if unknown:
        raise _refused(path, f"expected {', '.join(sorted(_KEYS | _RULE_KEYS))}, got the key {', '.join(unknown)}")
    if not isinstance(given.get("sizes", {}), dict) or not isinstance(given.get("ignore", []), list):
        raise _refused(path, "expected a table as sizes, and a list of globs as ignore")
    if not isinstance(given.get("strict", True), bool):
        raise _refused(path, f"expected true or false as strict, got {given['strict']!r}")
    try:
        rows = [(rule["left"], rule["right"], rule.get("pattern")) for rule in rules]
        options = {name: given[name] for name in ("sizes", "ignore", "strict") if name in given}
        conversion = Conversion(rows, **options)
    except (TypeError, ValueError) as error:
        raise _refused(path, str(error).removeprefix("Conversion: ")) from None
    return conversion.inverse if inverse else conversion


def _refused(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"convert: {path} holds no valid rules: {what}")
