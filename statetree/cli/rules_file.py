"""Rules of a conversion in a file, and what lies beside a checkpoint and goes along when it is converted."""

from __future__ import annotations

import shutil
import tomllib
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from statetree.errors import CheckpointError
from statetree.files.untrusted import printable
from statetree.transforms.conversions.rule_set import Conversion

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The ends of names of files that hold weights, in any library's format.
_WEIGHTS: Final = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json", ".distcp", ".metadata"),
    *(".gguf", ".h5", ".msgpack", ".onnx", ".npz"),
)
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
    sizes, ignore = given.get("sizes", {}), given.get("ignore", [])
    if not isinstance(sizes, dict) or not isinstance(ignore, list):
        raise _refused(path, "expected a table as sizes, and a list of globs as ignore")
    if not isinstance(given.get("strict", True), bool):
        raise _refused(path, f"expected true or false as strict, got {given['strict']!r}")
    try:
        rows = [(rule["left"], rule["right"], rule.get("pattern")) for rule in rules]
        conversion = Conversion(rows, sizes=sizes, ignore=ignore, strict=given.get("strict", True))
    except (TypeError, ValueError) as error:
        raise _refused(path, str(error).removeprefix("Conversion: ")) from None
    return conversion.inverse if inverse else conversion


def _refused(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"convert: {path} holds no valid rules: {what}")


@contextmanager
def others_copied(source: Path, destination: Path, *, follow_links: bool, force: bool) -> Iterator[list[str]]:
    """Copy what lies beside a checkpoint, and is neither weights nor hidden: configuration, tokenizer. Yields notes.

    The copies get their names when the block has ended, if it did not fail.
    """
    folder, target = source if source.is_dir() else source.parent, destination.parent
    notes: list[str] = []
    if not target.is_dir():  # whoever writes there says so
        yield notes
        return
    with TemporaryDirectory(prefix=".others.partial-", dir=target) as made:
        for file in sorted(folder.iterdir()):
            is_hidden = file.name.startswith(".") or not file.is_file()
            if is_hidden or file.name.lower().endswith(_WEIGHTS) or file.name == destination.name:
                continue
            place = target / file.name
            if file.is_symlink() and not follow_links:
                notes.append(f"{printable(file.name)}: a link, is not copied without --follow-links")
            elif place.exists() and not force:
                notes.append(f"{printable(file.name)}: is there already, and stays without --force")
            elif not (place.exists() and place.samefile(file)):
                shutil.copyfile(file, Path(made, file.name))
        yield notes
        for copy in sorted(Path(made).iterdir()):
            copy.replace(target / copy.name)
