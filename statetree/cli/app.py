"""The ``statetree`` command: its arguments.

What a command does is imported when it is called, so that help and completion do not wait for it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from statetree.cli.process import DIFFERENT, FAILED, SAME, run
from statetree.files.remote import RemotePath, is_url, located, refuse_url
from statetree.files.untrusted import printable, refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from statetree.files.checkpoint import OpenedCheckpoint

_SIZE: Final = re.compile(r"([0-9]+) *([kmgt]?)(i?)b?", re.IGNORECASE)


def _bytes(text: str) -> int:
    """Read a number of bytes, such as ``500M`` or ``5GiB``."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or not int(found[1]) or (found[3] and not found[2]):
        raise click.BadParameter(f"{text!r} is no size: expected 500M or 5GiB, for example")
    return int(found[1]) * int((1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " "))


def _dtype(name: str) -> torch.dtype:
    import torch

    from statetree.leaves.casting import castable

    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype) or not found.is_floating_point or not castable(torch.float32, found):
        raise click.BadParameter(f"{name!r} is no floating-point dtype: expected bfloat16 or float32, for example")
    return found


def _rule(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals or not old:
        raise click.BadParameter(f"{text!r} is no rule: expected OLD=NEW, for example 'model.**=**'")
    return old, new


def _tolerance(text: str) -> float:
    if not float(text) >= 0:  # nor is NaN
        raise click.BadParameter(f"{text!r} is no tolerance: expected a number from 0 on")
    return float(text)


class _LocalPath(click.Path):
    """A path. A URL is refused while it has both slashes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        refuse_url("statetree", value)
        return super().convert(value, param, ctx)


class _PathOrUrl(click.Path):
    """A path, or a URL that fsspec knows."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return located(value) if is_url(value) else super().convert(value, param, ctx)


class _Checkpoint(_PathOrUrl):
    """A checkpoint to read. That it is missing is said before torch is imported, which takes longer than all else."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if not value or (not isinstance(path, RemotePath) and not os.path.lexists(path)):
            refuse(value or "''", "there is no such file or directory", "Check the name.")
        return path


_CHECKPOINT = _Checkpoint(path_type=Path)
_DESTINATION = _PathOrUrl(path_type=Path)
_match = click.option(
    "--match", "patterns", multiple=True, metavar="GLOB",
    help="Only entries that match: * is a part of a key between dots, ** any number of parts (several times).",
)  # fmt: skip
_exclude = click.option("--exclude", "excluded", multiple=True, metavar="GLOB", help="No entries that match.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_html = click.option(
    "--html", "page", type=_LocalPath(path_type=Path), metavar="FILE", help="Write a page to look at, too."
)
_follow_links = click.option(
    "--follow-links", is_flag=True,
    help="Follow symbolic links in an index (needed for Hugging Face's cache).",
)  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="statetree", message="%(version)s")
def cli() -> None:
    """Look into checkpoints, compare and convert them.

    A checkpoint is a torch file or safetensors (one file, the index of several, or a folder of Hugging Face), or a
    directory of torch.distributed.checkpoint. The format is detected from the content. Files are not trusted: nothing
    in them is executed.

    The exit status is 0, or 2 after an error (diff: 1 if they differ); 130, 143 or 129 if it was interrupted,
    terminated or hung up; and 141 if whoever read its output stopped.
    """


@cli.command()
@click.argument("file", type=_CHECKPOINT)
@click.option("--depth", type=click.IntRange(1), metavar="N", help="Sum up what is nested deeper than N levels.")
@click.option(
    "--sort", type=click.Choice(["file", "name", "size"]), default="file", show_default=True,
    help="The order of entries.",
)  # fmt: skip
@_match
@_exclude
@_json
@_html
@click.option("--stats", is_flag=True, help="Read elements: min, max, mean, std, and how many are NaN, inf and zero.")
@click.option("--verify", "is_verified", is_flag=True, help="Compare all bytes with the stored checksums, too.")
@_follow_links
def show(
    file: Path,
    patterns: Sequence[str],
    excluded: Sequence[str],
    page: Path | None,
    is_verified: bool,
    follow_links: bool,
    **options: Any,
) -> int:
    """Show what FILE holds: dtypes, shapes, sizes, and which tensors share bytes.

    Of a folder that a Checkpointer fills, the steps are listed: when they were saved, their size, metric and metadata.
    --verify compares the checksums of each; the exit status is 2 if one is damaged.

    Only headers are read, so that it takes no longer for a large file. On a terminal, and with --depth, entries are
    shown as a tree; otherwise one a line, under their whole keys.

    \b
    Examples:
      statetree show model.pt
      statetree show --depth 2 --sort size run/step-00001000
      statetree show --match '**.weight' --stats model.safetensors
      statetree show --verify model.pt
      statetree show run
    """
    from statetree.cli.entries import Choice
    from statetree.cli.show import ShowOptions, verified
    from statetree.cli.show import show as write
    from statetree.cli.steps import is_run, show_steps

    if is_run(file):
        if patterns or excluded or page or options["stats"] or options["depth"]:
            msg = "show: a run's folder takes --json and --verify: expected one of its steps for other options."
            raise click.UsageError(msg)
        return SAME if show_steps(file, as_json=options["as_json"], verify=is_verified) else FAILED
    (checkpoint,) = _opened(file, follow_links=follow_links)
    verdict = verified(checkpoint) if is_verified else ""
    write(file, checkpoint, Choice("show", patterns, excluded), ShowOptions(**options))
    if page is not None:
        from statetree.files.page import to_html

        to_html(checkpoint.tree, page, values=options["stats"])
    if verdict:
        click.echo(verdict, err=options["as_json"])
    return SAME


@cli.command()
@click.argument("left", type=_CHECKPOINT)
@click.argument("right", type=_CHECKPOINT)
@click.option("--values/--no-values", default=True, help="Compare the elements of tensors and plain values, too.")
@click.option(
    "--rtol", type=_tolerance, default=0.0, metavar="FLOAT", help="Tolerance relative to the larger of two elements."
)
@click.option("--atol", type=_tolerance, default=0.0, metavar="FLOAT", help="Absolute tolerance.")
@_match
@_exclude
@_json
@_html
@click.option("-q", "--quiet", is_flag=True, help="Print nothing: the exit status tells.")
@_follow_links
def diff(
    left: Path,
    right: Path,
    patterns: Sequence[str],
    excluded: Sequence[str],
    page: Path | None,
    follow_links: bool,
    rtol: float,
    atol: float,
    **options: Any,
) -> int:
    """Show where LEFT and RIGHT differ: structure, dtypes, shapes, ties, elements and plain values.

    They may be of different formats. Elements that differ most, relative to their size, come first. With --no-values
    only headers are read. The exit status is 0 if they are the same, 1 if they differ, and 2 if a checkpoint cannot be
    read, if nothing matches, or if one holds objects of classes that are not loaded and may differ in their values.

    \b
    Examples:
      statetree diff before.pt after.pt
      statetree diff --rtol 1e-5 model.pt model.safetensors
      statetree diff --no-values --exclude 'optimizer.**' a.ckpt b.ckpt
    """
    from statetree.cli.diff import DiffOptions
    from statetree.cli.diff import diff as compare
    from statetree.cli.entries import Choice
    from statetree.spans.element_differences import Tolerance

    if not options["values"] and rtol + atol > 0:
        raise click.UsageError("diff: a tolerance is for values: expected --rtol and --atol without --no-values.")
    if options["quiet"] and options["as_json"]:
        raise click.UsageError("diff: --quiet prints nothing: expected it without --json.")
    one, other = _opened(left, right, follow_links=follow_links)
    options |= {"tolerance": Tolerance(rtol, atol), "page": page}
    differ = compare((left, right), one, other, DiffOptions(Choice("diff", patterns, excluded), **options))
    return FAILED if differ is None else DIFFERENT if differ else SAME


@cli.command()
@click.argument("source", type=_CHECKPOINT)
@click.argument("destination", type=_DESTINATION)
@_match
@_exclude
@click.option(
    "--cast", "dtype", type=_dtype, metavar="DTYPE",
    help="Convert all floating-point tensors to a dtype, also counters such as an optimizer's step (bfloat16 cannot "
    "hold 257).",
)  # fmt: skip
@click.option(
    "--rename", "rules", type=_rule, multiple=True, metavar="OLD=NEW",
    help="Rename keys: {name} and * stand for a part between dots, ** for any number of parts (several times).",
)  # fmt: skip
@click.option(
    "--rules", "rules_file", type=_CHECKPOINT, metavar="FILE.toml",
    help="Convert names and tensors by the rules of a file: [[rules]] with left, right and pattern; [sizes]; ignore; "
    "strict.",
)  # fmt: skip
@click.option("--inverse", is_flag=True, help="Apply the rules from right to left.")
@click.option(
    "--shard-bytes", type=_bytes, metavar="SIZE",
    help="Begin a new file after so many bytes (5GB, 500MiB). X.safetensors is then written as "
    "X.safetensors.index.json and X-00001-of-….safetensors.",
)  # fmt: skip
@click.option("--drop-values", is_flag=True, help="Leave out plain values that the format cannot hold, and list them.")
@click.option("--force", is_flag=True, help="Replace a checkpoint that is there already.")
@_follow_links
def convert(
    source: Path,
    destination: Path,
    patterns: Sequence[str],
    excluded: Sequence[str],
    rules_file: Path | None,
    inverse: bool,
    follow_links: bool,
    **options: Any,
) -> None:
    """Write SOURCE to DESTINATION, in the format that its suffix stands for.

    It appears whole or not at all. Checksums that SOURCE has are compared first. Tensors that share bytes go on doing
    so in torch files; other formats hold each of them.

    \b
    Examples:
      statetree convert model.pt model.safetensors
      statetree convert --match 'model.**' --rename 'model.**=**' run.ckpt weights.safetensors
      statetree convert --rules llama.toml --inverse hub/ mine/model.safetensors
      statetree convert --cast bfloat16 --shard-bytes 5GB run/step-00001000 model.safetensors
    """
    from statetree.cli.convert import ConvertOptions
    from statetree.cli.convert import convert as write
    from statetree.cli.entries import Choice
    from statetree.cli.rules_file import read_rules

    if rules_file is not None:
        options["conversion"] = read_rules(rules_file, inverse=inverse)
    elif inverse:
        raise click.UsageError("convert: --inverse is for --rules: expected a file of rules, got none.")
    (checkpoint,) = _opened(source, follow_links=follow_links)
    given = ConvertOptions(Choice("convert", patterns, excluded), **options)
    for note in write(source, checkpoint, destination, given):
        click.echo(f"note: {note}", err=True)


@cli.command("prove-resume", context_settings={"ignore_unknown_options": True})
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--kill-at", type=click.IntRange(1), required=True, metavar="N", help="Kill it before its first save from N on."
)
def prove_resume(script: Path, arguments: Sequence[str], kill_at: int) -> int:
    """Run SCRIPT whole, then kill and resume it, and say what it forgot to save.

    It must save with a Checkpointer, in one process; its checkpoints go to a temporary folder. The exit status is 0 if
    all later saves have the same bits, and 1 if not.
    """
    from statetree.cli.prove_resume import prove_resume as prove

    return prove(script, arguments, kill_at)


@cli.command()
@click.argument("name", metavar="PACKAGE.MODULE:FUNCTION")
@click.option("--as", "kind", type=click.Choice(["stager", "copy", "gather", "save", "transform"]), help="What it is.")
@click.option("--load", metavar="PACKAGE.MODULE:FUNCTION", help="The load of a save: a function of a path.")
def doctor(name: str, kind: str | None, load: str | None) -> int:
    """Examine a stager, a copy, a gather, a transform of states, or a save with its load, and say what is wrong.

    A stager is a class, or a function that makes one; a save is a function of a state and a path. Without --as, the
    kind is guessed. A transform may break a law on purpose: that is yours to judge. It needs the extra testing. The
    exit status is 0 if nothing is wrong, 1 if something is, and 2 if it takes none of the states.

    \b
    Examples:
      statetree doctor copy:deepcopy
      statetree doctor torch.distributed._state_dict_utils:_copy_state_dict
      statetree doctor my.checkpoints:save --load my.checkpoints:load
    """
    from statetree.cli.doctor import doctor as examine

    return examine(name, kind, load)


def _opened(*paths: Path, follow_links: bool) -> list[OpenedCheckpoint]:
    from statetree.files.formats import opened

    found = [opened(path, skip_foreign=True, follow_links=follow_links) for path in paths]
    names = sorted({printable(name) for checkpoint in found for name in checkpoint.foreign})
    if names:
        listed = ", ".join(names[:10]) + ", …" * (len(names) > 10)
        click.echo(f"note: objects of these classes are not loaded: {listed}", err=True)
    return found


def main(args: Sequence[str] | None = None) -> int:
    """Run the command with arguments, by default the process'. Returns its exit status."""
    return run(cli, args)
