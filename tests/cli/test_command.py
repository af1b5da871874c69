"""The command as users start it: in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from statetree.cli.app import main
from tests.cli.hostile import bomb
from tests.cli.states import bits, write


def started(*args, **options):
    command = [sys.executable, "-m", "statetree", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


@pytest.fixture
def files(tmp_path):
    one = write({"w": bits(3), "x": bits(4)}, tmp_path / "a.pt")
    other = write({"w": bits(3), "x": bits(4, start=1)}, tmp_path / "b.pt")
    return one, other


def test_the_statuses(files):
    one, other = files
    assert started("diff", one, other).returncode == 0
    ran = started("diff", "--values", one, other)
    assert (ran.returncode, ran.stderr) == (1, "")
    assert "~ x: value" in ran.stdout
    ran = started("show", one.parent / "none.pt")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error: read: ")
    assert "Traceback" not in ran.stderr


def test_a_reader_that_goes_away_is_no_error(files):
    with subprocess.Popen(
        [sys.executable, "-m", "statetree", "show", files[0]], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.wait(timeout=120)
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


def test_the_extra_is_named_when_it_is_missing(files):
    code = (
        "import sys; sys.modules['click'] = None; sys.argv = ['statetree', 'show', 'x.pt']\n"
        "from statetree.__main__ import main; sys.exit(main())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 2
    assert "pip install 'statetree[cli]'" in ran.stderr


@pytest.mark.parametrize("command", [[], ["show"], ["diff"], ["convert"], ["completion"]])
def test_help_has_examples(command, statetree):
    ran = statetree(*command, "--help")
    assert ran.status == 0
    assert ("Examples:" in ran.out and f"statetree {command[0]} " in ran.out) if command else "Commands:" in ran.out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell, statetree):
    ran = statetree("completion", shell)
    assert ran.status == 0
    assert "_STATETREE_COMPLETE" in ran.out


def test_completion_completes():
    env = {"_STATETREE_COMPLETE": "bash_complete", "COMP_WORDS": "statetree con", "COMP_CWORD": "1", "PATH": ""}
    code = "from statetree.cli.app import cli; cli(prog_name='statetree')"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert "convert" in ran.stdout


def test_the_entry_point_is_declared():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"statetree": "statetree.__main__:main"}
    installed = [point for point in entry_points(group="console_scripts") if point.name == "statetree"]
    assert all(point.value == project["scripts"]["statetree"] for point in installed)


def test_the_version(statetree):
    assert statetree("--version").status == 0


def test_progress_is_shown_on_terminals_only(files, tmp_path, statetree, monkeypatch):
    assert statetree("convert", files[0], tmp_path / "c.pt").err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "writing c.pt" in statetree("convert", "--force", files[0], tmp_path / "c.pt").err


LIMITED = """
import json, resource, sys
from pathlib import Path
from statetree.cli.app import main
import statetree.cli.convert, statetree.cli.show, statetree.dcp, statetree.cli.formats.dcp_writer
import statetree.cli.formats.safetensors_writer, statetree.cli.formats.torch_file, statetree.cli.formats.torch_writer
import torch
torch.zeros(10).add(1)
main(["--help"])
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + int(sys.argv[1]), -1))
sys.exit(main(sys.argv[2:]))
"""


def limited(extra_bytes, *args):
    """Run the command with little memory beyond what its modules take."""
    command = [sys.executable, "-c", LIMITED, str(extra_bytes), *map(str, args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}  # an arena reserves 64 MiB for a thread
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("name", ["b.pt", "b.safetensors", "b"])
def test_converting_takes_little_memory_however_large_the_file(name, tmp_path):
    """320 MiB of tensors, one of them 256 MiB, in 224 MiB of memory (address space, of which 64 to 118 MiB suffice)."""
    state = {"large": torch.arange(2**26, dtype=torch.int32), **{f"w{i}": bits(2**20, start=i) for i in range(16)}}
    source = write(state, tmp_path / "a.pt")
    cast = ["--cast", "float64"] if name == "b.pt" else []
    ran = limited(224 << 20, "convert", *cast, source, tmp_path / name)
    assert ran.returncode == 0, ran.stderr
    ran = limited(224 << 20, "diff", "--values", source, tmp_path / name)
    assert ran.returncode == bool(cast), ran.stdout + ran.stderr


def test_lies_about_sizes_take_no_memory(tmp_path):
    ran = limited(64 << 20, "show", bomb(tmp_path / "a.pt", 256 << 20))
    assert ran.returncode == 2
    assert "is compressed" in ran.stderr


def test_faults_of_our_own_are_no_differences(files, tmp_path, statetree, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("statetree.cli.stored.FileStorage.read", broken)
    ran = statetree("diff", "--values", files[0], files[1])
    assert ran.status == 2
    assert "Please report this" in ran.err
    assert "ZeroDivisionError: oops" in ran.err


def test_terminals_of_few_characters(tmp_path):
    path = write({"gewöhnlich": bits(1)}, tmp_path / "a.pt")
    ran = started("show", path, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert ran.returncode == 0
    assert "gew\\xf6hnlich" in ran.stdout


def test_interrupts_end_quietly(files, tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("statetree.cli.stored.FileStorage.read", interrupted)
    assert main(["convert", str(files[0]), str(tmp_path / "c.pt")]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"
    assert not (tmp_path / "c.pt").exists()


def test_json_is_json_whatever_the_names(tmp_path):
    path = write({'"\n\x00é\u202e': bits(1), "nan": float("nan"), "inf": float("inf")}, tmp_path / "a.pt")
    found = json.loads(started("show", "--json", path).stdout)
    assert [entry["key"] for entry in found["entries"]] == ['"\n\x00é\u202e', "nan", "inf"]
