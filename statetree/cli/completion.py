"""Scripts that complete the command's arguments by themselves: starting Python and torch at every TAB takes seconds."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final, NamedTuple

import click

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

SHELLS: Final = ("bash", "zsh", "fish")

# $2 is the word at the cursor and $3 the one before it; bash and zsh number arrays differently.
_BASH: Final = """\
_{name}() {{
    local word command= IFS=$'\\n'
    for word in "${{COMP_WORDS[@]}}"; do
        case "$word" in
            {commands}) command=$word; break ;;
        esac
    done
    case "$command:$3:$2" in
{cases}
        *) COMPREPLY=( $(compgen -f -- "$2") ) ;;
    esac
}}
complete {options}-F _{name} {name}
"""
_LINE: Final = "\\n"
_CASE: Final = '        {pattern}) COMPREPLY=( $(compgen -W {words} -- "$2") ) ;;'


class _Parameter(NamedTuple):
    names: Sequence[str]
    help: str
    choices: Sequence[str]
    is_flag: bool


def completion_script(shell: str, name: str, group: click.Group) -> str:
    """Return a script for a shell.

    Args:
        shell: One of ``SHELLS``.
        name: What the command is called.
        group: The command.
    """
    if shell == "fish":
        return "\n".join(_fish_lines(name, group)) + "\n"
    fields = {"name": name, "commands": "|".join(group.commands), "cases": "\n".join(_bash_cases(group))}
    if shell == "bash":
        return _BASH.format(**fields, options="-o filenames ")
    return "autoload -U +X bashcompinit && bashcompinit\n" + _BASH.format(**fields, options="")


def _parameters(command: click.Command) -> Iterator[_Parameter]:
    """Return the options of a command, and those arguments (without names) that are one of a few words."""
    context = click.Context(command, help_option_names=["-h", "--help"])
    for each in command.get_params(context):
        choices = tuple(each.type.choices) if isinstance(each.type, click.Choice) else ()
        if isinstance(each, click.Option):
            text = (each.help or "").split(". ")[0].removesuffix(".")
            yield _Parameter(tuple(each.opts), text, choices, each.is_flag)
        elif choices:
            yield _Parameter((), "", choices, is_flag=False)


def _bash_cases(group: click.Group) -> Iterator[str]:
    """Return cases of command, word before the cursor and word at it: the more special ones first."""
    yield _CASE.format(pattern="::*|:*:[!-]*|:*:", words=_words(group.commands))
    for name, command in {"": group, **group.commands}.items():
        found = list(_parameters(command))
        for each in found:
            if each.choices and each.names:
                pattern = "|".join(f"{name}:{option}:*" for option in each.names)
                yield _CASE.format(pattern=pattern, words=_words(each.choices))
        options = [option for each in found for option in each.names]
        yield _CASE.format(pattern=f"{name}:*:-*", words=_words(options))
        for each in found:
            if each.choices and not each.names:
                yield _CASE.format(pattern=f"{name}:*", words=_words(each.choices))


def _words(words: Iterable[str]) -> str:
    """Return words, which need no quotes, as one text that is divided by lines: names of files may have spaces."""
    return f"$'{_LINE.join(words)}'"


def _fish_lines(name: str, group: click.Group) -> Iterator[str]:
    for command, sub in group.commands.items():
        text = shlex.quote(sub.get_short_help_str(80))
        yield f"complete -c {name} -n __fish_use_subcommand -f -a {command} -d {text}"
        for each in _parameters(sub):
            words = [f"complete -c {name} -n '__fish_seen_subcommand_from {command}'"]
            words += [f"-{'l' if option.startswith('--') else 's'} {option.lstrip('-')}" for option in each.names]
            words += ["-r"] * (bool(each.names) and not each.is_flag)
            words += [f"-f -a {shlex.quote(' '.join(each.choices))}"] * bool(each.choices)
            words += [f"-d {shlex.quote(each.help)}"] * bool(each.help)
            yield " ".join(words)
