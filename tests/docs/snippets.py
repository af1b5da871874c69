"""Runs the code of a Markdown page as a reader would: block after block, in one module, comparing what it prints.

- ``python`` blocks are executed. ``if __name__ == "__main__":`` holds, so that pages can show scripts; only there, and
  in functions, may ranks be started, because every rank imports what a page defines.
- A ``text`` block is what the block before it prints. A block that prints has one.
- Lines of ``console`` blocks that begin with ``$ statetree`` are commands, the others are what they print.
- ``sh`` blocks and blocks without a language are not executed: installations, and ``make``.
- Readers put the Python blocks of a page into one file, except a block of which the paragraph above says that it goes
  "into a file of its own". ``Page.scripts`` are these files.

``...`` in expected output stands for anything.
"""

from __future__ import annotations

import ast
import code
import contextlib
import doctest
import io
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import click

from statetree.cli.app import main
from tests.pace import units

EXECUTED = ("python", "console")
NOT_EXECUTED = ("sh", "")
ALONE = "into a file of its own"
_CHECKER = doctest.OutputChecker()


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the number of its first line of text, its text, and what it is to print."""

    language: str
    line: int
    text: str
    output: str = ""


class Script:
    """Python blocks of a page, which a reader puts into one file or types one after the other."""

    def __init__(self, path: Path, blocks: list[Block]) -> None:
        self.path = path
        self.blocks = blocks
        self.statements = [statement for block in blocks for statement in ast.parse(block.text).body]

    def __str__(self) -> str:
        return f"{self.path.stem}:{self.blocks[0].line}"

    def imported(self) -> set[str]:
        """Return the packages that it imports."""
        names = [node.module or "" for node in self.statements if isinstance(node, ast.ImportFrom)]
        names += [alias.name for node in self.statements if isinstance(node, ast.Import) for alias in node.names]
        return {name.partition(".")[0] for name in names}

    def can_be_typed(self) -> bool:
        """Return whether Python's prompt takes it: ranks import what they run, and an empty line ends a class."""
        names = {alias.name for node in self.statements if isinstance(node, ast.ImportFrom) for alias in node.names}
        return "run_ranks" not in names and not any(isinstance(node, ast.ClassDef) for node in self.statements)

    def type(self) -> None:
        """Type the lines at a prompt, with an empty one after each block."""
        console = _Prompt()
        for block in self.blocks:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                for line in [*block.text.split("\n"), ""]:
                    console.push(line)
            if console.complaints:
                raise AssertionError(f"{self.path}:{block.line}: the prompt says: {''.join(console.complaints)}")
            compare(self.path, block.line, block.output, printed.getvalue())

    def execute(self, folder: Path) -> None:
        """Run the file in a folder, as a program."""
        file = folder / "example.py"
        file.write_text("\n\n".join(block.text for block in self.blocks), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, file.name], cwd=folder, capture_output=True, text=True, timeout=units(120), check=False
        )
        if done.returncode != 0:
            raise AssertionError(f"{self.path}: as a file it fails:\n{done.stderr}")
        compare(self.path, self.blocks[0].line, "".join(block.output for block in self.blocks), done.stdout)


class Page:
    """A Markdown file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.blocks = list(_with_outputs(path, fenced(self.text)))

    def definitions(self) -> str:
        """Return what ranks need of the page: imports, functions, classes and constants."""
        statements = [
            statement
            for block in self.blocks
            if block.language == "python"
            for statement in ast.parse(block.text).body
            if _defines(statement)
        ]
        return ast.unparse(ast.Module(statements, []))

    def scripts(self) -> list[Script]:
        """Return the files into which a reader puts the Python blocks."""
        lines = self.text.split("\n")
        together, alone = [], []
        for block in self.blocks:
            if block.language == "python":
                above = "\n".join(lines[: block.line - 1]).removesuffix("```python").rstrip().split("\n\n")[-1]
                (alone if ALONE in " ".join(above.split()) else together).append(block)
        return [Script(self.path, blocks) for blocks in (together, *([block] for block in alone)) if blocks]

    def run(self, name: str, folder: Path) -> None:
        """Execute the page as a module of this name.

        Args:
            name: A name that no other module has.
            folder: Where the module goes; it is on the path on which the ranks import.
        """
        (folder / f"{name}.py").write_text(self.definitions(), encoding="utf-8")
        module = types.ModuleType(name)
        sys.modules[name] = module
        try:
            for block in self.blocks:
                self._check(block, _run_python(block, module, self.path) if block.language == "python" else None)
        finally:
            del sys.modules[name]

    def _check(self, block: Block, printed: str | None) -> None:
        if block.language == "console":
            for command, expected, line in _commands(block):
                compare(self.path, line, expected, _run_command(command))
        elif printed is not None:
            compare(self.path, block.line, block.output, printed)


def compare(path: Path, line: int, expected: str, printed: str) -> None:
    """Fail if something else was printed than a page says."""
    if not _CHECKER.check_output(expected, printed, doctest.ELLIPSIS):
        raise AssertionError(f"{path}:{line}: expected output:\n{expected}\ngot:\n{printed}")


def fenced(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page, directives of MyST excepted."""
    inside: list[str] | None = None
    fence, language, start = "", "", 0
    for number, line in enumerate(text.split("\n"), 1):
        marks = line[: len(line) - len(line.lstrip("`:"))]
        if inside is not None:
            if line.strip() == fence:
                if not language.startswith("{"):
                    yield Block(language, start, "".join(f"{content}\n" for content in inside))
                inside = None
            else:
                inside.append(line)
        elif len(marks) >= 3:
            inside, fence, language, start = [], marks, line[len(marks) :].strip(), number + 1
    if inside is not None:
        raise AssertionError(f"the block that begins at line {start - 1} is not closed")


def _with_outputs(path: Path, blocks: Iterator[Block]) -> Iterator[Block]:
    last: Block | None = None
    for block in blocks:
        if block.language == "text":
            if last is None or last.language != "python":
                raise AssertionError(f"{path}:{block.line}: a text block has to be what the Python before it prints")
            yield Block(last.language, last.line, last.text, block.text)
            last = None
            continue
        if block.language not in EXECUTED + NOT_EXECUTED:
            raise AssertionError(f"{path}:{block.line}: nobody executes {block.language!r}")
        if last is not None:
            yield last
        last = block
    if last is not None:
        yield last


def _run_python(block: Block, module: types.ModuleType, path: Path) -> str:
    tree = ast.parse("\n" * (block.line - 1) + block.text, filename=str(path))
    body: list[ast.stmt] = []
    for statement in tree.body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'":
            body += statement.body
        elif _starts_ranks(statement):
            raise AssertionError(f"{path}:{statement.lineno}: every rank would run this: guard it by __main__")
        else:
            body.append(statement)
    tree.body = body
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, str(path), "exec"), vars(module))
    return printed.getvalue()


class _Prompt(code.InteractiveConsole):
    """Python's prompt: it keeps what it complains of, and does not show what calls return."""

    def __init__(self) -> None:
        super().__init__({"__name__": "__main__"})
        self.complaints: list[str] = []

    def write(self, data: str) -> None:
        self.complaints.append(data)

    def push(self, line: str) -> bool:
        hooks = {"displayhook": lambda _: None, "excepthook": sys.__excepthook__}  # process groups leave one of theirs
        with mock.patch.multiple(sys, **hooks):
            return super().push(line)


def _defines(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)


def _starts_ranks(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return False
    calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return any("run_ranks" in ast.unparse(func) for func in calls)


def _commands(block: Block) -> Iterator[tuple[str, str, int]]:
    """Yield each command of a console block, what it is to print, and its line."""
    lines = block.text.split("\n")[:-1]
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    assert starts[:1] == [0], f"a console block begins with a command, at line {block.line}"
    for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield lines[start][2:], "".join(f"{line}\n" for line in lines[start + 1 : stop]), block.line + start


_statuses: list[int] = [0]


class _Terminal(io.StringIO):
    """What is printed in a page's consoles is meant for a reader."""

    def isatty(self) -> bool:
        return True


def _run_command(command: str) -> str:
    if command == "echo $?":
        return f"{_statuses[-1]}\n"
    name, *arguments = shlex.split(command)
    assert name == "statetree", f"nobody executes {command!r}"
    screen, notes = _Terminal(), io.StringIO()
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(notes):
        _statuses.append(main(arguments))
    shown = click.unstyle(screen.getvalue()) + notes.getvalue()
    return "".join(f"{line.rstrip()}\n" for line in shown.splitlines())
