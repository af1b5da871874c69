"""``statetree show`` of a run's folder: its checkpoints, one a line."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from math import isfinite
from typing import TYPE_CHECKING, Any

from statetree.cli.table import OutputLine, write_lines
from statetree.files.untrusted import human, printable

if TYPE_CHECKING:
    from pathlib import Path

#: What is wrong with a folder of a step that is no checkpoint.
_INCOMPLETE = "no complete checkpoint: files are missing, or the manifest is damaged"


def is_run(directory: Path) -> bool:
    """Whether a path is a folder of steps, and no checkpoint itself."""
    try:
        is_checkpoint = (directory / ".metadata").exists() or not directory.is_dir()
        return not is_checkpoint and any(each.is_dir() for each in directory.iterdir() if each.name.startswith("step-"))
    except OSError:  # whoever opens it says so
        return False


def show_steps(directory: Path, *, as_json: bool, verify: bool = False) -> bool:
    """Print the steps of a run: when they were saved, their bytes, metric and metadata.

    With ``verify`` the checksums of each are compared, too. Returns whether none was found damaged then.
    """
    steps = _steps_in(directory, verify=verify)
    is_sound = not (verify and any("error" in step for step in steps))
    if as_json:
        found = {"run": str(directory), "steps": [_strict(step) for step in steps]}
        sys.stdout.write(f"{json.dumps(found, indent=2)}\n")
        return is_sound
    total = human(sum(step["bytes"] for step in steps))
    complete = sum(step.get("error") != _INCOMPLETE for step in steps)
    sys.stdout.write(f"{printable(str(directory))}: {complete} complete checkpoints, {total}\n")
    lines = []
    for step in steps:
        about = ", ".join([f"{key}={json.dumps(value)}" for key, value in step["metadata"].items()])
        metric = "" if step["metric"] is None else f"metric {step['metric']:g}"
        saved = step["saved"] and datetime.fromisoformat(step["saved"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        notes = ", ".join(filter(None, [printable(step.get("error", about)), step.get("verified", "")]))
        lines.append(OutputLine(step["name"], saved, metric, human(step["bytes"]), "", notes))
    write_lines(lines)
    return is_sound


def _steps_in(directory: Path, *, verify: bool) -> list[dict[str, Any]]:
    from statetree.cli.show import verified
    from statetree.dcp.file_manifest import read_manifest
    from statetree.errors import CheckpointError
    from statetree.files.formats import opened

    found = []
    complete, others = _checkpoints_in(directory)
    for number, path in sorted([*complete.items(), *others.items()]):
        step = {"step": number, "name": path.name, "saved": "", "bytes": 0, "metric": None, "metadata": {}}
        if number not in complete:
            found.append({**step, "error": _INCOMPLETE})
            continue
        try:
            step["saved"], step["bytes"] = _saved(path)
            manifest = read_manifest(path)
            step |= {} if manifest is None else {"metric": manifest.metric, "metadata": dict(manifest.about)}
            step |= {"verified": verified(opened(path, skip_foreign=True))} if verify else {}
        except FileNotFoundError:
            continue  # it was removed meanwhile
        except (CheckpointError, OSError) as error:
            step["error"] = str(error)
        found.append(step)
    return found


def _checkpoints_in(directory: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the steps of a run, or of its mirror, and where they lie: the complete ones, and others.

    In a mirror, what has no metadata is none: it may be on its way.
    """
    from statetree.dcp.metadata import METADATA
    from statetree.dcp.mirror import steps_at
    from statetree.dcp.series import Series, folders_in, name_of
    from statetree.files.remote import RemotePath

    folders = folders_in(directory)  # before: what appears meanwhile is complete
    if not isinstance(directory, RemotePath):
        complete = {found.step: directory / found.name for found in Series(directory).complete()}
        return complete, {step: path for step, path in folders.items() if step not in complete}
    there, unknown = steps_at(directory)
    complete = {step: directory / name_of(step) for step in there.keys() | unknown}
    others = {step: folder for step, folder in folders.items() if step not in complete}
    return complete, {step: folder for step, folder in others.items() if (folder / METADATA).is_file()}


def _strict(value: Any) -> Any:
    """Return a value as JSON has it: numbers that it has none of as texts."""
    if isinstance(value, dict):
        return {key: _strict(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(_strict, value))
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _saved(path: Any) -> tuple[str, int]:
    """Return when a checkpoint was saved, which a server may not tell, and its bytes."""
    from statetree.dcp.metadata import METADATA
    from statetree.dcp.series import bytes_in

    seconds = (path / METADATA).stat().st_mtime
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else "", bytes_in(path)
