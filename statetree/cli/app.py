"""The ``statetree`` command: its arguments.

What a command does is imported when it is called, so that help and completion do not wait for it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from statetree.cli.process import DIFFERENT, FAILED, SAME, run
from statetree.errors import CheckpointError
from statetree.files.untrusted import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from statetree.cli.selecting import Rename

_SIZE: Final = re.compile(r"([0-9]+) *([kmgt]?)(i?)b?", re.IGNORECASE)


def _bytes(text: str) -> int:
    """Read a number of bytes, such as ``500M`` or ``5GiB``."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or not int(found[1]) or (found[3] and not found[2]):
        msg = f"{text!r} is no size: expected 500M or 5GiB, for example"
        raise click.BadParameter(msg)
    exponent = " kmgt".index(found[2].lower() or " ")
    return int(found[1]) * int((1024 if found[3] else 1000) ** exponent)


def _dtype(name: str) -> torch.dtype:
    """Read a floating-point dtype."""
    import torch

    from statetree.cli.casting import is_castable

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not is_castable(found):
        msg = f"{name!r} is no floating-point dtype: expected bfloat16 or float32, for example"
        raise click.BadParameter(msg)
    return found


def _rename(text: str) -> Rename:
    """Read ``REGEX=REPL``."""
    from statetree.cli.selecting import Rename

    try:
        return Rename.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


_CHECKPOINT = click.Path(path_type=Path)
_match = click.option(
    "--match",
    "patterns",
    multiple=True,
    metavar="GLOB",
    help="Only entries whose key matches (may be given several times).",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_follow_links = click.option(
    "--follow-links",
    is_flag=True,
    help="Let the files that an index lists be links to elsewhere, as in Hugging Face's cache.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="statetree", message="%(version)s")
def cli() -> None:
    """Look into checkpoints, compare and convert them.

    A checkpoint is a torch file (.pt, .pth, .ckpt), a safetensors file or the index of several
    (.safetensors, .safetensors.index.json), or a directory of torch.distributed.checkpoint (no suffix).
    Files are not trusted: nothing in them is executed.

    The exit status is 0, or 2 after an error (diff: 1 if they differ); 130, 143 or 129 if it was interrupted,
    terminated or hung up; and 141 if whoever read its output stopped.
    """


@cli.command()
@click.argument("file", type=_CHECKPOINT)
@click.option("--depth", type=click.IntRange(1), metavar="N", help="Sum up what is nested deeper than N levels.")
@click.option(
    "--sort",
    type=click.Choice(["file", "name", "size"]),
    default="file",
    show_default=True,
    help="The order of entries.",
)
@_match
@_json
@click.option("--verify", "is_verified", is_flag=True, help="Check the stored checksums and digests of all bytes, too.")
@_follow_links
def show(
    file: Path,
    depth: int | None,
    sort: str,
    patterns: Sequence[str],
    as_json: bool,
    is_verified: bool,
    follow_links: bool,
) -> None:
    """Show what FILE holds: dtypes, shapes, sizes, and which tensors share bytes.

    Only headers are read, so that it takes no longer for a large file. On a terminal, entries are shown as a tree;
    otherwise one a line, under their whole keys.

    \b
    Examples:
      statetree show model.pt
      statetree show --depth 2 --sort size run/step-00001000
      statetree show --match '*.weight' --json model.safetensors
      statetree show --verify model.pt
    """
    from statetree.cli.opening import opened
    from statetree.cli.show import show as show_checkpoint

    with opened(file, follow_links=follow_links) as checkpoint:
        _warn_of_foreign(checkpoint.foreign)
        verdict = ""
        if is_verified:
            from statetree.cli.digests import verify, why_nothing

            verdict = verify(checkpoint, follow_links=follow_links)
            if not verdict:
                raise CheckpointError(why_nothing(checkpoint))
        show_checkpoint(checkpoint, depth=depth, sort=sort, patterns=patterns, as_json=as_json)
        if verdict:
            click.echo(verdict, err=as_json)


@cli.command()
@click.argument("left", type=_CHECKPOINT)
@click.argument("right", type=_CHECKPOINT)
@click.option("--values", is_flag=True, help="Compare the elements of tensors and plain values, too.")
@_match
@_json
@_follow_links
def diff(left: Path, right: Path, values: bool, patterns: Sequence[str], as_json: bool, follow_links: bool) -> int:
    """Show where LEFT and RIGHT differ: structure, dtypes, shapes, ties and, with --values, elements.

    They may be of different formats. The exit status is 0 if they are the same, 1 if they differ, and 2 if a
    checkpoint cannot be read, if nothing matches, or if one holds objects of classes that are not loaded and may
    differ in their --values.

    \b
    Examples:
      statetree diff before.pt after.pt
      statetree diff --values model.pt model.safetensors
      statetree diff --values --match 'model.*' --json a.ckpt b.ckpt
    """
    from statetree.cli.diff import diff as compare
    from statetree.cli.opening import opened

    with opened(left, follow_links=follow_links) as one, opened(right, follow_links=follow_links) as other:
        _warn_of_foreign([*one.foreign, *other.foreign])
        differ = compare(one, other, patterns=patterns, values=values, as_json=as_json)
        return FAILED if differ is None else DIFFERENT if differ else SAME


@cli.command()
@click.argument("source", type=_CHECKPOINT)
@click.argument("destination", type=_CHECKPOINT)
@_match
@click.option(
    "--cast", "dtype", type=_dtype, metavar="DTYPE",
    help="Convert all floating-point tensors to a dtype, also counters such as an optimizer's step (bfloat16 cannot "
    "hold 257). --match does not limit it, but leaves entries out.",
)  # fmt: skip
@click.option(
    "--rename", "renames", type=_rename, multiple=True, metavar="REGEX=REPL",
    help="Replace in keys what matches (may be given several times; \\1 is a group).",
)  # fmt: skip
@click.option(
    "--shard-bytes", type=_bytes, metavar="SIZE",
    help="Begin a new file after so many bytes (5GB, 500MiB). X.safetensors is then written as "
    "X.safetensors.index.json and X-00001-of-….safetensors.",
)  # fmt: skip
@click.option("--digest", is_flag=True, help="Write SHA-256 digests beside it, for show --verify.")
@click.option("--drop-values", is_flag=True, help="Leave out plain values that the format cannot hold, and list them.")
@click.option("--force", is_flag=True, help="Replace a checkpoint that is there already.")
@_follow_links
def convert(
    source: Path,
    destination: Path,
    patterns: Sequence[str],
    dtype: torch.dtype | None,
    renames: Sequence[Rename],
    shard_bytes: int | None,
    digest: bool,
    drop_values: bool,
    force: bool,
    follow_links: bool,
) -> None:
    """Write SOURCE to DESTINATION, in the format that its suffix stands for.

    It is written a piece at a time, and appears whole or not at all. Tensors that share bytes go on doing so in torch
    files; other formats hold each of them. Whoever may not read SOURCE may not read DESTINATION, either.

    \b
    Examples:
      statetree convert model.pt model.safetensors
      statetree convert --match 'model.*' --rename '^model\\.=' run.ckpt weights.safetensors
      statetree convert --cast bfloat16 --shard-bytes 5GB run/step-00001000 model.safetensors
      statetree convert --digest model.safetensors.index.json model.pt
    """
    from statetree.cli.convert import Options
    from statetree.cli.convert import convert as write
    from statetree.cli.opening import opened

    with opened(source, follow_links=follow_links) as checkpoint:
        _warn_of_foreign(checkpoint.foreign)
        options = Options(patterns, renames, dtype, shard_bytes, digest, drop_values, force)
        for note in write(checkpoint, destination, options):
            click.echo(f"note: {note}", err=True)


@cli.command()
@click.argument("target", metavar="PACKAGE.MODULE:FUNCTION")
@click.option(
    "--ranks", type=click.IntRange(1), multiple=True, help="Call it on so many ranks (several times: in turn)."
)
def ghostwrite(target: str, ranks: Sequence[int]) -> None:
    """Write a test file for a transform of states, to standard output.

    The function is imported and called with some hundred states: unlike files, it is trusted. Laws that hold now must
    hold from then on; for each that does not there is a test with the smallest state for which it does not.

    \b
    Example:
      statetree ghostwrite mypackage.mymodule:myfunction > test_myfunction.py
    """
    import sys

    from statetree.testing.ghostwriter import ghostwrite as written

    sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it
    try:
        click.echo(written(target, ranks=ranks or None), nl=False)
    except (ValueError, TypeError) as error:
        raise click.BadParameter(str(error)) from None


def _warn_of_foreign(names: Sequence[str]) -> None:
    if names:
        listed = ", ".join(sorted({*map(printable, names)})[:10]) + ", …" * (len({*names}) > 10)
        click.echo(f"note: not loaded, since torch.load(weights_only=True) would refuse it: {listed}", err=True)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status.

    Args:
        args: Its arguments; by default the process'.
    """
    return run(cli, args)
