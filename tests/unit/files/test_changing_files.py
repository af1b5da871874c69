"""Files that change while they are read: whatever reads them says so, and no mixture goes on without a word."""

import os
from functools import partial

import pytest
import torch

import statetree as st
import statetree.dcp
from statetree.errors import CheckpointError
from statetree.files.ranges import FileRange, OpenFiles
from statetree.files.stored import StoredTensor
from tests.cli.states import bits, write

NAMES = ["a.pt", "a.safetensors", "a"]
STATE = {"w": torch.arange(4000.0).view(40, 100)}  # a second tensor would be looked at before it is read


def empty():
    return {key: torch.zeros_like(tensor) for key, tensor in STATE.items()}


def staged_later(tree):
    with st.Stager() as stager:
        return stager.stage_async(tree).result()


def told(report):
    """Similarity is total: a tensor that cannot be read is a difference, which says why."""
    if "it was changed while it was read" in str(report):
        raise CheckpointError(str(report))


VERBS = {
    "read": lambda tree, _: tree["w"].read(),
    "read a box": lambda tree, _: tree["w"].read((slice(3, 9),)),
    "read_into": lambda tree, _: tree["w"].read_into((0, 0), empty()["w"]),
    "offload": lambda tree, _: st.offload(tree),
    "offload without copies": lambda tree, _: st.offload(tree, copy=False, share_memory=True),
    "copy_into": lambda tree, _: st.copy_into(tree, empty()),
    "similarity": lambda tree, _: told(st.similarity(tree, empty())),
    "cast": lambda tree, _: st.offload(st.cast(tree, torch.bfloat16)),
    "map_leaves": lambda tree, _: st.map_leaves(torch.neg, tree),
    "stage": lambda tree, _: st.Stager().stage(tree),
    "stage_async": lambda tree, _: staged_later(tree),
    "digest": lambda tree, _: st.digest(tree),
    "gather": lambda tree, _: st.gather(tree),
    "reshard": lambda tree, _: st.reshard(tree, empty()),
    "delta": lambda tree, _: st.delta(tree, empty()),
    "chain": lambda tree, _: st.chain(st.offload, partial(st.cast, dtype=torch.bfloat16))(tree),
    "stream": lambda tree, _: list(st.stream(tree, st.offload)),
    "save .pt": lambda tree, folder: st.save(tree, folder / "b.pt"),
    "save .safetensors": lambda tree, folder: st.save(tree, folder / "b.safetensors"),
    "save a directory": lambda tree, folder: st.save(tree, folder / "b"),
    "dcp.save": lambda tree, folder: st.save(tree, folder / "b"),
}
LOADS = {
    "load": lambda path: st.load(path, empty()),
    "load with where": lambda path: st.load(path, empty(), where="w"),
    "load in place": lambda path: st.load(path, empty(), in_place=True),
    "load whole": st.load,
    "load and cast": lambda path: st.load(path, {**empty(), "w": torch.zeros(40, 100).bfloat16()}, cast=True),
}


def data_of(path):
    return path / "__0_0.distcp" if path.is_dir() else path


@pytest.fixture(params=NAMES)
def path(request, tmp_path):
    made = write(STATE, tmp_path / request.param)
    for file in [made, *made.glob("*")] if made.is_dir() else [made]:
        os.utime(file, (1e9, 1e9))  # times are kept in steps, of which a test may take less than one
    return made


@pytest.fixture
def writer(path, monkeypatch):
    """Have somebody write into the file as soon as elements were read (not a header), or a verb has them mapped."""
    file, calls = data_of(path), []

    def written_after(cls, name, original):
        def wrapped(*args):
            result = original(*args)
            if not calls and (name != "fill" or len(args[1]) >= 2000):
                calls.append(name)
                with file.open("r+b") as handle:
                    handle.seek(-2000, os.SEEK_END)
                    handle.write(b"\x07" * 3)
            return result

        monkeypatch.setattr(cls, name, wrapped)

    def start():
        written_after(StoredTensor, "tensor", StoredTensor.tensor)
        written_after(FileRange, "fill", FileRange.fill)
        return calls

    return start


@pytest.mark.parametrize("verb", VERBS)
def test_what_reads_a_file_that_changes_meanwhile_says_so(verb, path, tmp_path, writer):
    tree = st.files.open(path)
    calls = writer()
    with pytest.raises(CheckpointError, match=f"{data_of(path)}: it was changed while it was read"):
        VERBS[verb](tree, tmp_path)
    assert calls
    assert not (tmp_path / "b.pt").exists()
    assert not (tmp_path / "b.safetensors").exists()
    assert not (tmp_path / "b" / ".metadata").exists()


@pytest.mark.parametrize("load", LOADS)
def test_loading_from_a_file_that_changes_meanwhile_says_so(load, path, writer):
    st.files.open(path)
    calls = writer()
    with pytest.raises(CheckpointError, match=f"{data_of(path)}: it was changed while it was read"):
        LOADS[load](path)
    assert calls


@pytest.mark.parametrize("replace", ["another in its place", "removed", "times put back"])
def test_what_happens_at_the_path_counts_too(replace, path, monkeypatch):
    tree, file = st.files.open(path), data_of(path)
    found = []

    def mapped(self, original=StoredTensor.tensor):
        result = original(self)
        if not found:
            found.append(self)
            if replace == "times put back":
                file.write_bytes(file.read_bytes())
                os.utime(file, (1e9, 1e9))
                return result
            moved = file.with_name("moved")
            moved.write_bytes(file.read_bytes())
            os.utime(moved, (1e9, 1e9))
            moved.replace(file) if replace == "another in its place" else file.unlink()
        return result

    monkeypatch.setattr(StoredTensor, "tensor", mapped)
    with pytest.raises(CheckpointError, match=f"{file}: it was (changed|removed) while it was read"):
        st.offload(tree)


def test_another_name_for_a_file_is_no_change(path):
    """Incremental saves link the files of the step before, and retention removes names."""
    tree, file = st.files.open(path), data_of(path)
    os.link(file, file.with_name("linked"))
    assert torch.equal(st.offload(tree)["w"], STATE["w"])
    other = st.files.open(path)
    file.with_name("linked").unlink()
    assert torch.equal(st.offload(other)["w"], STATE["w"])


def test_another_current_directory_is_no_change(path, tmp_path, monkeypatch):
    monkeypatch.chdir(path.parent)
    tree = st.files.open(path.name)
    monkeypatch.chdir("/")
    assert torch.equal(st.offload(tree)["w"], STATE["w"])


def test_each_file_is_looked_at_once_more_and_not_each_tensor(tmp_path, monkeypatch):
    tree = st.files.open(write({f"w{number}": bits(5, start=number) for number in range(50)}, tmp_path / "a.pt"))
    counts, original = [], OpenFiles.check
    monkeypatch.setattr(OpenFiles, "check", lambda self, path: (counts.append(path), original(self, path))[1])
    st.offload(tree)
    assert len(counts) == 50 + 1


def test_a_failed_check_lets_go_of_what_was_staged(path, writer):
    tree = st.files.open(path)
    writer()
    with st.Stager(max_snapshots=1) as stager:
        with pytest.raises(CheckpointError, match="was changed while it was read") as error:
            stager.stage(tree)
        assert stager.stage(STATE)["w"].equal(STATE["w"])
        assert error.value
