"""Checkpoints behind URLs: the same trees as on a disk, of which only what is needed is fetched."""

from __future__ import annotations

import argparse
import fractions
import io
import re
from zipfile import ZipFile

import fsspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import statetree as st
from statetree.cli import app
from statetree.errors import CheckpointError, TreeMismatch
from statetree.files import formats, ranges, stored
from statetree.testing import run_ranks
from tests.cli.states import bits, tied_state
from tests.judge import assert_trees_equal

STATE = {"model": {"w": bits(200, 300), "b": bits(3, dtype=torch.bfloat16)}, "step": 3}
FILES = [".metadata", ".statetree_manifest", "__0_0.distcp"]
NAMES = ["a.safetensors", "a.pt", "directory"]


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def far(folder, name):
    """Return a URL of what lies in a folder here: unlike ``file://``, it is no other name of a path."""
    return f"dir://{name}::file://{folder}"


def state_for(name):
    return {"model": STATE["model"]} if name.endswith("safetensors") else STATE


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_comes_back(name, memory):
    url, state = f"memory://run/{name}", state_for(name)
    st.save(state, url)
    like = st.map_leaves(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else 0, state)
    assert_trees_equal(st.load(url, like), state)
    assert_trees_equal(st.from_flat(*st.to_flat(like)), like)
    assert_trees_equal(st.load(url, like, in_place=True), state)
    assert torch.equal(next(iter(st.to_flat(st.load(url, where="**.b"))[0].values())), state["model"]["b"])
    st.save({"other": torch.ones(2)}, url)
    assert torch.equal(st.load(url)["other"], torch.ones(2))


@pytest.mark.parametrize("name", NAMES)
def test_only_what_is_needed_is_fetched(name, memory):
    url = f"memory://run/{name}"
    st.save({"large": bits(500, 1000), "small": bits(7)}, url)
    checkpoint = formats.opened(url)
    assert checkpoint.files.nbytes_read < 30_000
    before = checkpoint.files.nbytes_read
    assert torch.equal(checkpoint.tree["large"].read((slice(10, 12),)), bits(500, 1000)[10:12])
    assert checkpoint.files.nbytes_read - before < 20_000


def test_only_blocks_that_hold_what_is_needed_are_fetched_to_be_compared(memory):
    st.save({"large": bits(500, 1000)}, "memory://run/directory")
    checkpoint = formats.opened("memory://run/directory", verify=True)
    before = checkpoint.files.nbytes_read
    assert torch.equal(checkpoint.tree["large"].read((slice(10, 12),)), bits(500, 1000)[10:12])
    assert checkpoint.files.nbytes_read - before < (128 << 10) + 20_000


def test_ties_of_torch_files_come_back(memory):
    st.save(tied_state(), "memory://run/a.pt")
    assert_trees_equal(st.load("memory://run/a.pt"), tied_state())


def test_sparse_tensors_come_back(memory):
    state = {"s": torch.eye(3).to_sparse(), "w": bits(4)}
    st.save(state, "memory://run/a.pt")
    assert_trees_equal(st.load("memory://run/a.pt"), state)


def with_note(note):
    tensor = bits(5)
    tensor.note = note
    return tensor


def quantized():
    return torch.quantize_per_tensor(torch.arange(6.0), 0.5, 1, torch.qint8)


def generator():
    made = torch.Generator().manual_seed(5)
    torch.rand(3, generator=made)
    return made


MADE_OF_ELEMENTS = {
    "quantized": quantized,
    "quantized per channel": lambda: torch.quantize_per_channel(
        torch.arange(6.0).view(3, 2), torch.ones(3), torch.zeros(3), 0, torch.qint8
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)]),
    "storage": lambda: bits(4).untyped_storage(),
    "storage of a tensor": lambda: (lambda tensor: [tensor, tensor.untyped_storage()])(bits(4, dtype=torch.uint8)),
    "inside": lambda: with_note({"of": bits(3)}),
    "inside, tied": lambda: (lambda tensor: [tensor, argparse.Namespace(of=tensor[:2])])(bits(4)),
}


@pytest.mark.filterwarnings("ignore:.*(nested tensors|TypedStorage|quantize|torch.ao)")
@pytest.mark.parametrize("make", MADE_OF_ELEMENTS.values(), ids=MADE_OF_ELEMENTS)
def test_what_torch_makes_with_its_elements_alone_comes_back(make, tmp_path):
    torch.save({"a": make(), "w": bits(4)}, tmp_path / "a.pt")
    assert_trees_equal(st.load(far(tmp_path, "a.pt")), st.load(tmp_path / "a.pt"))


def test_a_generator_comes_back(tmp_path):
    torch.save({"a": generator()}, tmp_path / "a.pt")
    assert torch.equal(st.load(far(tmp_path, "a.pt"))["a"].get_state(), generator().get_state())


@pytest.mark.filterwarnings("ignore:.*(quantize|torch.ao)")
def test_what_lies_beside_objects_that_are_not_loaded_comes_back(tmp_path):
    state = {"note": with_note(bits(3)), "q": quantized(), "odd": fractions.Fraction(1, 2)}
    torch.save(state, tmp_path / "a.pt")
    for name in ("note", "q"):
        assert_trees_equal(st.load(far(tmp_path, "a.pt"), where=name), {name: state[name]})


@pytest.mark.filterwarnings("ignore:.*(quantize|torch.ao)")
def test_a_damaged_quantized_tensor_is_told_as_what_it_is(memory):
    st.save({"q": quantized()}, "memory://run/a.pt")
    name = next(iter(memory.store))
    data = memory.cat_file(name)
    assert data.count(b"_rebuild_qtensor") == 1
    memory.pipe_file(name, data.replace(b"K\x06\x85", b"K\x60\x85", 1))
    with pytest.raises(CheckpointError, match=r"a tensor of shape \(96,\) on a storage, which would end at byte 96"):
        st.load("memory://run/a.pt", verify=False)


BESIDE_ELEMENTS = {
    "Parameter": lambda: torch.nn.Parameter(bits(3, 2)),
    "frozen Parameter": lambda: torch.nn.Parameter(bits(3, 2), requires_grad=False),
    "transposed Parameter": lambda: torch.nn.Parameter(bits(3, 2).t()),
    "Buffer": lambda: torch.nn.Buffer(bits(3)),
    "requires_grad": lambda: bits(3).requires_grad_(),
    "attributes": lambda: with_note({"of": ["a", 1]}),
    "conjugate": lambda: torch.complex(bits(3, 2), bits(3, 2)).t().conj(),
    "negative": lambda: torch.complex(bits(3), bits(3)).conj().imag,
}


@pytest.mark.parametrize("make", BESIDE_ELEMENTS.values(), ids=BESIDE_ELEMENTS)
def test_what_a_tensor_is_beside_its_elements_comes_back(make, memory):
    torch.manual_seed(0)
    state = {"a": make(), "large": bits(500, 1000)}
    state["b"] = state["a"]
    st.save(state, "memory://run/a.pt")
    assert_trees_equal(st.load("memory://run/a.pt"), state)
    checkpoint = formats.opened("memory://run/a.pt")
    assert_trees_equal(st.offload({name: checkpoint.tree[name] for name in "ab"}), {name: state[name] for name in "ab"})
    assert checkpoint.files.nbytes_read < 60_000  # the large one is left where it is


def test_several_files_are_read_by_their_index(memory):
    st.save({"a": bits(900), "b": bits(800)}, "memory://run/m.safetensors", shard_bytes=3600)
    assert len([name for name in memory.store if "-of-" in name]) == 2
    loaded = st.load("memory://run/m.safetensors.index.json")
    assert_trees_equal(loaded, {"a": bits(900), "b": bits(800)})
    assert_trees_equal(st.load("memory://run/m.safetensors.index.json", where="b"), {"b": bits(800)})


@pytest.mark.parametrize("name", NAMES)
def test_what_changes_meanwhile_is_an_error(name, memory):
    url = f"memory://run/{name}"
    st.save({"w": bits(50)}, url)
    tree = st.files.open(url)
    st.save({"w": bits(50, start=3)}, url)
    with pytest.raises(CheckpointError, match="it was changed while it was read"):
        st.offload(tree)


def test_what_is_not_there_is_named(memory):
    for url in ("memory://run/x.pt", "memory://run/x"):
        with pytest.raises(CheckpointError, match=r"read: memory://.*run/x.*: there is no such"):
            st.load(url)
    with pytest.raises(CheckpointError, match=r"nowhere://a: cannot be reached: .*statetree\[remote\]"):
        st.load("nowhere://a")


def test_nothing_is_replaced_where_that_is_not_allowed(memory):
    st.save({"w": bits(5)}, "memory://run/a.pt")
    with pytest.raises(CheckpointError, match="it exists already"):
        st.save({"w": bits(6)}, "memory://run/a.pt", overwrite=False)
    assert torch.equal(st.load("memory://run/a.pt")["w"], bits(5))


def test_a_misfit_is_told_before_elements_are_fetched(memory):
    st.save({"w": bits(5)}, "memory://run/a.safetensors")
    with pytest.raises(TreeMismatch, match="shape differs at w"):
        st.load("memory://run/a.safetensors", {"w": torch.zeros(6)})


def test_a_flipped_bit_is_an_error(memory):
    st.save({"w": bits(500)}, "memory://run/directory")
    name = next(name for name in memory.store if name.endswith(".distcp"))
    data = bytearray(memory.cat_file(name))
    data[data.index(bits(500).numpy().tobytes()) + 5] ^= 1
    memory.pipe_file(name, bytes(data))
    with pytest.raises(CheckpointError, match=r"the entry 'w': .*checksum"):
        st.load("memory://run/directory")


def by_all_ranks(folder):
    url = far(folder, "run/directory")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(torch.arange(10.0), mesh, [Shard(0)]), "n": 1}
    st.save(state, url)
    like = {"w": distribute_tensor(torch.zeros(10), mesh, [Shard(0)]), "n": 0}
    loaded = st.load(url, like)
    return loaded["w"].full_tensor().tolist(), loaded["n"]


def test_every_rank_uploads_and_fetches_its_own_part(tmp_path):
    assert run_ranks(2, by_all_ranks, tmp_path) == [(list(map(float, range(10))), 1)] * 2
    assert st.load(tmp_path / "run" / "directory")["w"].tolist() == list(range(10))


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("near", ["b.safetensors", "b.pt", "b"])
def test_what_lies_behind_a_url_is_converted_to_here(source, near, memory, tmp_path):
    st.save({"w": bits(4, 3)}, f"memory://run/{source}")
    assert app.main(["convert", f"memory://run/{source}", str(tmp_path / near)]) == 0
    assert torch.equal(st.load(tmp_path / near)["w"], bits(4, 3))


@pytest.mark.parametrize("name", NAMES)
def test_a_server_that_tells_no_size_is_named(name, memory, monkeypatch):
    st.save(state_for(name), f"memory://run/{name}")
    info = type(memory).info
    monkeypatch.setattr(type(memory), "info", lambda *args, **options: {**info(*args, **options), "size": None})
    with pytest.raises(CheckpointError, match="does not say how large it is"):
        st.load(f"memory://run/{name}")


def test_a_server_without_ranges_is_named(monkeypatch):
    st.save({"w": torch.ones(100)}, "memory://run/m.safetensors")
    system = fsspec.filesystem("memory")
    whole = system.cat_file
    monkeypatch.setattr(system, "cat_file", lambda path, **_: whole(path))
    with pytest.raises(st.CheckpointError, match=r"the server sent \d+ bytes for 64: it serves no ranges. Download it"):
        st.load("memory://run/m.safetensors")


def test_a_parameter_is_one_where_its_elements_cannot_be_mapped(tmp_path, monkeypatch):
    st.save({"w": torch.nn.Parameter(torch.arange(4.0, dtype=torch.float64))}, tmp_path / "a.pt")
    with ZipFile(tmp_path / "a.pt") as aligned, ZipFile(tmp_path / "b.pt", "w") as packed:
        for name in aligned.namelist():
            packed.writestr(name, aligned.read(name))
    monkeypatch.setattr(stored, "_UNALIGNED", ())
    piece = st.files.open(far(tmp_path, "b.pt"))["w"]._pieces()[0]
    assert piece.file.start % 8
    found = st.load(far(tmp_path, "b.pt"))["w"]
    assert isinstance(found, torch.nn.Parameter)
    assert found.requires_grad
    assert found.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", [".", "empty", "other", "run"])
@pytest.mark.parametrize("verb", [st.load, st.files.open])
def test_a_folder_that_is_no_checkpoint_is_named(verb, name, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("notes")
    for step in (1, 2):
        st.save({"a": torch.ones(2)}, far(tmp_path, f"run/step-{step}"))
    found = {"run": ". 2 checkpoints lie in it, the last of them step-2"}.get(name, "")
    with pytest.raises(CheckpointError, match=rf"it has no \.metadata file.* incomplete one{re.escape(found)}\. Pass"):
        verb(far(tmp_path, name))


def test_what_is_protected_behind_a_url_is_not_replaced(memory):
    st.save({"a": torch.ones(2), "b": torch.ones(2)}, "memory://run/directory")
    st.save({"a": torch.ones(2), "b": torch.ones(2)}, "memory://run/a.pt")
    for url in ("memory://run/directory", "memory://run/a.pt"):
        for protected in ([url], url):
            with pytest.raises(CheckpointError, match="which is being read, and lose"):
                st.save({"a": torch.zeros(2)}, url, protected=protected)
        assert st.load(url)["b"].tolist() == [1, 1]
        assert app.main(["convert", "--match", "a", "--force", url, url]) == 2
        assert st.load(url)["b"].tolist() == [1, 1]
    for beside in ("memory://run/b.pt", "memory://run"):
        st.save({"a": torch.zeros(2)}, beside, protected=["memory://run/a.pt"])
    assert st.load("memory://run/a.pt")["b"].tolist() == [1, 1]


class ClientResponseError(Exception):
    """As that of aiohttp, of which fsspec's http makes a ``FileNotFoundError`` whatever the status."""

    __module__ = "aiohttp.client_exceptions"

    def __init__(self, status):
        super().__init__(status, "a status")
        self.status = status


@pytest.mark.parametrize("cause", [ClientResponseError(503), ClientResponseError(429), ConnectionRefusedError("no")])
@pytest.mark.parametrize("name", ["a.pt", "directory", *[f"directory/{file}" for file in FILES]])
def test_a_request_that_fails_is_not_told_as_absence(cause, name, memory, monkeypatch):
    url, info, asked = f"memory://run/{name.partition('/')[0]}", type(memory).info, []

    def flaky(system, path, **options):
        if path == f"/run/{name}":
            asked.append(path)
            if len(asked) in failing:
                raise FileNotFoundError(path) from cause
        return info(system, path, **options)

    st.save(STATE, url)
    monkeypatch.setattr(type(memory), "info", flaky)
    failing = [1, 2]
    assert_trees_equal(st.load(url), STATE)
    failing = range(1000)
    with pytest.raises(CheckpointError, match=f"cannot be reached: {type(cause).__name__}: "):
        st.load(url)


@pytest.mark.parametrize("status", [403, 404])
def test_an_answer_is_told_as_absence(status, memory, monkeypatch):
    def info(_system, path, **_options):
        raise FileNotFoundError(path) from ClientResponseError(status)

    monkeypatch.setattr(type(memory), "info", info)
    with pytest.raises(CheckpointError, match="there is no such file"):
        st.load("memory://run/a.pt")


def test_what_cannot_be_reached_is_a_matter_of_the_url(memory, monkeypatch):
    def info(*_args, **_options):
        raise OSError("503 Slow Down")

    monkeypatch.setattr(type(memory), "info", info)
    with pytest.raises(CheckpointError, match=r"503 Slow Down\. Check the URL"):
        st.load("memory://run/a.pt")


FLIPPED = {
    "w": bits(600, 500),
    "small": bits(37),
    "half": bits(700, 33).bfloat16(),
    "part": bits(300, 400).t(),
    "sparse": torch.eye(40).to_sparse(),
    "text": "x" * (2 << 20),
}


def answers_wrong(monkeypatch, number=-1):
    """Flip a bit in one answer of the server; return how many bytes each has."""
    system, counts = fsspec.filesystem("memory"), []
    cat_file = type(system).cat_file

    def wrong(self, path, *args, **options):
        data = bytearray(cat_file(self, path, *args, **options))
        if len(counts) == number and data:
            data[len(data) // 2] ^= 1
        counts.append(len(data))
        return bytes(data)

    monkeypatch.setattr(type(system), "cat_file", wrong)
    return counts


def rows_read_twice(url):
    stored = formats.opened(url, verify=True).tree["w"]
    for _ in range(2):
        rows = [stored.read((slice(first, first + 100), slice(3, 497))) for first in range(0, 600, 100)]
    return {"w": torch.cat(rows)}


def like_them():
    return {key: leaf if key in ("sparse", "text") else torch.zeros_like(leaf) for key, leaf in FLIPPED.items()}


LOADS = {
    "whole": (st.load, FLIPPED),
    "where": (lambda url: st.load(url, where="w"), {"w": FLIPPED["w"]}),
    "like": (lambda url: st.load(url, like_them()), FLIPPED),
    "rows": (rows_read_twice, {"w": FLIPPED["w"][:, 3:497]}),
}


@pytest.mark.parametrize("name", ["a.pt", "directory"])
@pytest.mark.parametrize("how", LOADS)
def test_a_wrong_answer_is_never_what_is_loaded(how, name, memory, monkeypatch):
    st.save(FLIPPED, f"memory://run/{name}")
    if how == "rows":  # of blocks that are larger than what is read at once
        monkeypatch.setattr(ranges, "BUCKET_BYTES", 1 << 16)
    load, wanted = LOADS[how]
    number = told = 0
    while True:
        with monkeypatch.context() as patched:
            counts = answers_wrong(patched, number)
            try:
                assert st.similarity(load(f"memory://run/{name}"), wanted), number
            except CheckpointError:
                told += 1
            if len(counts) <= number:
                break
        number += 1
    assert told  # others were asked for once more, and right then


@pytest.mark.parametrize("name", ["a.pt", "directory"])
def test_what_is_read_in_parts_is_not_fetched_whole_for_each(name, memory, monkeypatch):
    st.save({"w": FLIPPED["w"]}, f"memory://run/{name}")
    monkeypatch.setattr(ranges, "BUCKET_BYTES", 1 << 16)
    counts = answers_wrong(monkeypatch)
    rows_read_twice(f"memory://run/{name}")
    assert sum(counts) < 3.2 * FLIPPED["w"].nbytes  # twice, and once to find out what its blocks are


def test_what_is_fetched_to_be_mapped_is_fetched_once(memory, monkeypatch):
    rows = bits(50, 1000)
    tree = {"rows": list(rows.unbind()), "sparse": torch.eye(5).to_sparse()}  # which is made with its elements alone
    memory.pipe_file("/run/a.pt", saved_by_torch(tree))
    counts = answers_wrong(monkeypatch)
    assert st.similarity(st.load("memory://run/a.pt"), tree)
    assert sum(counts) < 1.5 * rows.nbytes


def saved_by_torch(tree):
    file = io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()
