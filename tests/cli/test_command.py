"""The command as users start it: in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from statetree.cli.app import main
from tests.cli.hostile import bomb
from tests.cli.states import bits, write
from tests.pace import units


def started(*args, **options):
    command = [sys.executable, "-m", "statetree", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=units(60), check=False, **options)


@pytest.fixture
def files(tmp_path):
    one = write({"w": bits(3), "x": bits(4)}, tmp_path / "a.pt")
    other = write({"w": bits(3), "x": bits(4, start=1)}, tmp_path / "b.pt")
    return one, other


@pytest.mark.slow
def test_the_statuses(files):
    one, other = files
    assert started("diff", "--no-values", one, other).returncode == 0
    ran = started("diff", "--values", one, other)
    assert (ran.returncode, ran.stderr) == (1, "")
    assert "~ x: value" in ran.stdout
    ran = started("show", one.parent / "none.pt")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error: read: ")
    assert "Traceback" not in ran.stderr


def test_a_missing_file_is_named_before_torch_is_imported(tmp_path):
    code = (
        "import sys; from statetree.cli.app import main\n"
        "status = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(status)"
    )
    for args in (["show"], ["diff", __file__], ["convert"]):
        more = ["new.pt"] * (args == ["convert"])
        command = [sys.executable, "-c", code, *args, str(tmp_path / "none.pt"), *more]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=units(60), check=False)
        assert ran.returncode == 2, ran.stderr
        assert "none.pt: there is no such file or directory. Check the name." in ran.stderr


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(files):
    with subprocess.Popen(
        [sys.executable, "-m", "statetree", "show", files[0]], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.wait(timeout=units(60))
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize("command", [["show"], ["show", "--json"], ["diff", "--values"], ["--help"], ["nonsense"]])
def test_nobody_reading_is_not_a_difference(command, files):
    paths = {"show": files[:1], "diff": [files[0], files[0]]}.get(command[0], [])
    read, write_end = os.pipe()
    os.close(read)
    ran = subprocess.run(
        [sys.executable, "-m", "statetree", *command, *map(str, paths)],
        stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=units(60), check=False,
    )  # fmt: skip
    os.close(write_end)
    assert ran.returncode == (2 if command == ["nonsense"] else 141)
    assert "Traceback" not in ran.stderr
    assert "Exception ignored" not in ran.stderr


@pytest.mark.slow
def test_what_cannot_be_written_out_is_a_failure(files):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "statetree", "show", str(files[0])]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=units(60), check=False)
    assert ran.returncode == 2
    assert "No space left on device" in ran.stderr
    assert "Exception ignored" not in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("closed", [1, 2])
def test_closed_streams(closed, files):
    for paths, status in (((files[0], files[0]), 0), (files, 1), ((files[0], "none.pt"), 2)):
        command = f"{sys.executable} -m statetree diff --values {paths[0]} {paths[1]} {closed}>&-"
        ran = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=units(60), check=False)
        assert ran.returncode == status
        assert "fault" not in ran.stderr


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_the_extra_is_named_when_it_is_missing(missing, files):
    code = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['statetree', 'show', {str(files[0])!r}]\n"
        "from statetree.__main__ import main; sys.exit(main())"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=units(60), check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert f"the command needs the extra cli ({missing} is missing): pip install 'statetree[cli]'" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("command", [[], ["show"], ["diff"], ["convert"]])
def test_help_has_examples(command, statetree):
    ran = statetree(*command, "--help")
    assert ran.status == 0
    assert ("Examples:" in ran.out and f"statetree {command[0]} " in ran.out) if command else "Commands:" in ran.out


def test_completion_is_that_of_click(tmp_path):
    """``_STATETREE_COMPLETE`` gives the script, which in turn asks for completions."""
    pytest.importorskip("click")
    script = started(env={**os.environ, "_STATETREE_COMPLETE": "bash_source"})
    assert script.returncode == 0
    assert "_STATETREE_COMPLETE=bash_complete" in script.stdout
    for words, expected in {
        "statetree ": {"show", "diff", "convert", "prove-resume", "doctor"},
        "statetree diff --m": {"--match"},
    }.items():
        env = {"_STATETREE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        lines = started(env={**os.environ, **env}).stdout.splitlines()
        assert {line.partition(",")[2] for line in lines} == expected


def test_the_entry_point_is_declared():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"statetree": "statetree.__main__:main"}
    installed = [point for point in entry_points(group="console_scripts") if point.name == "statetree"]
    assert all(point.value == project["scripts"]["statetree"] for point in installed)


def test_the_version(statetree):
    assert statetree("--version").status == 0


LIMITED = """
import json, resource, sys
from pathlib import Path
from statetree.cli.app import main
import statetree.cli.convert, statetree.cli.show, statetree.dcp.stored_directory, statetree.files
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
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=units(150), check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["b.pt", "b.safetensors", "b"])
def test_converting_takes_little_memory_however_large_the_file(name, tmp_path):
    """320 MiB of tensors, one of them 256 MiB, in 224 MiB of memory (address space, of which 64 to 118 MiB suffice)."""
    state = {"large": torch.arange(2**26, dtype=torch.int32), **{f"w{i}": bits(2**20, start=i) for i in range(16)}}
    source = write(state, tmp_path / "a.pt")
    cast = ["--cast", "float64"] if name == "b.pt" else []
    mapped = source.stat().st_size  # address space that a file takes, and no memory
    ran = limited((224 << 20) + mapped, "convert", *cast, source, tmp_path / name)
    assert ran.returncode == 0, ran.stderr
    mapped += sum(file.stat().st_size for file in [tmp_path / name, *(tmp_path / name).glob("*")] if file.is_file())
    ran = limited((224 << 20) + mapped, "diff", "--values", source, tmp_path / name)
    assert ran.returncode == bool(cast), ran.stdout + ran.stderr


@pytest.mark.slow
def test_lies_about_sizes_take_no_memory(tmp_path):
    ran = limited(64 << 20, "show", bomb(tmp_path / "a.pt", 256 << 20))
    assert ran.returncode == 2
    assert "is compressed" in ran.stderr


def test_faults_of_our_own_are_no_differences(files, tmp_path, statetree, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("statetree.files.ranges.FileRange.fill", broken)
    ran = statetree("diff", "--values", files[0], files[1])
    assert ran.status == 2
    assert "Please report this" in ran.err
    assert "ZeroDivisionError: oops" in ran.err


@pytest.mark.slow
def test_terminals_of_few_characters(tmp_path):
    path = write({"gewöhnlich": bits(1)}, tmp_path / "a.pt")
    ran = started("show", path, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert ran.returncode == 0
    assert "gew\\xf6hnlich" in ran.stdout


def test_interrupts_end_quietly(files, tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("statetree.files.ranges.FileRange.fill", interrupted)
    assert main(["convert", str(files[0]), str(tmp_path / "c.pt")]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"
    assert not (tmp_path / "c.pt").exists()


def refuse_constant(name):
    pytest.fail(f"{name} is no JSON")


def test_json_is_json_whatever_the_names_and_values(tmp_path, statetree):
    values = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "large": 2**70}
    path = write({'"\n\x00é\u202e': bits(1), **values}, tmp_path / "a.pt")
    found = json.loads(statetree("show", "--json", path).out, parse_constant=refuse_constant)
    assert [entry["key"] for entry in found["entries"]] == ['"\n\x00é\u202e', *values]
    shown = [entry["value"] for entry in found["entries"][1:]]
    assert shown == ["nan", "inf", "-inf", 2**70]


#: What was written is synchronized, and if the command is stopped there, removed.
STOPPED = """
import os, shutil, signal, sys, time
import statetree.files.publishing as publishing
from statetree.cli.app import main
sync, remove = publishing.sync, shutil.rmtree
def synchronized(path):
    {synchronizing}
    return sync(path)
def removed(*args, **options):
    {removing}
    remove(*args, **options)
publishing.sync, shutil.rmtree = synchronized, removed
sys.exit(main(sys.argv[1:]))
"""

#: Whoever starts the tests may ignore signals, as a shell does for what runs in its background.
LISTENING = """
import signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "numbers", "status"),
    [
        ("b.pt", [signal.SIGINT], 130),
        ("b.safetensors", [signal.SIGTERM], 143),
        ("b", [signal.SIGHUP], 129),
        ("b", [signal.SIGINT, signal.SIGINT, signal.SIGTERM], 130),
    ],
)
def test_signals_leave_nothing_behind(name, numbers, status, tmp_path):
    source = write({f"w{number}": bits(100, start=number) for number in range(200)}, tmp_path / "a.pt")
    read, write_end = os.pipe()
    code = LISTENING + STOPPED.format(
        synchronizing="os.write(3, b'reached'); time.sleep(600)",
        removing=f"for number in {list(map(int, numbers[1:]))}: os.kill(os.getpid(), number)",
    )
    command = [sys.executable, "-c", code, "convert", source, tmp_path / name]
    with subprocess.Popen(
        ["bash", "-c", 'exec "$@" 3>&$0', str(write_end), *command],
        pass_fds=[write_end], stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert os.read(read, 7) == b"reached"
        assert any(".partial-" in path.name for path in tmp_path.iterdir())
        process.send_signal(numbers[0])
        _, err = process.communicate(timeout=units(60))
    os.close(read)
    os.close(write_end)
    assert process.returncode == status, err
    assert err.strip() == ("interrupted" if status == 130 else f"stopped by {signal.Signals(status - 128).name}")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.slow
def test_signals_that_are_ignored_stay_ignored(files, tmp_path):
    """As under ``nohup``."""
    stopped = STOPPED.format(synchronizing="os.kill(os.getpid(), signal.SIGHUP)", removing="pass")
    code = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{stopped}"
    ran = subprocess.run(
        [sys.executable, "-c", code, "convert", files[0], tmp_path / "c.pt"], timeout=units(60), check=False
    )
    assert ran.returncode == 0


def test_handlers_of_signals_are_put_back(files, statetree):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert statetree("show", files[0]).status == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_are_left_out_where_they_are_not_wanted(name, value, files, statetree, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    commands = [("show", files[0]), ("diff", "--values", *files)]
    assert all("\x1b" in statetree(*command).out for command in commands)
    monkeypatch.setenv(name, value)
    assert not any("\x1b" in statetree(*command).out for command in commands)
