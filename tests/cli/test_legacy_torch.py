"""Files of torch before 1.6: a mark, pickles, and storages, without an archive around them."""

from __future__ import annotations

import pytest
import torch

import statetree as st
from tests.cli.states import bits
from tests.judge import assert_trees_equal


@pytest.fixture
def state():
    state = {"w": bits(4, 3), "n": [bits(5).to(torch.bfloat16), torch.nn.Parameter(bits(2))], "step": 3}
    return {**state, "tied": state["w"], "part": state["w"][1:].t(), "none": torch.zeros(0)}


@pytest.fixture(params=[2, 3], ids=["protocol 2", "protocol 3"])
def old(request, state, tmp_path):
    torch.save(state, tmp_path / "old.pt", pickle_protocol=request.param, _use_new_zipfile_serialization=False)
    return tmp_path / "old.pt"


def test_they_are_opened_with_their_ties(old, state):
    assert_trees_equal(st.offload(st.files.open(old)), state)


def test_they_are_shown_and_converted(old, state, tmp_path, statetree):
    ran = statetree("show", "--json", old)
    assert {entry["key"]: entry.get("shape") for entry in ran.json["entries"]}["part"] == [3, 3]
    for name in ("b.pt", "c"):
        assert statetree("convert", old, tmp_path / name).status == 0
        assert statetree("diff", "--values", old, tmp_path / name).status == 0
    assert_trees_equal(torch.load(tmp_path / "b.pt", weights_only=True), state)


def test_they_have_no_checksums(old, statetree):
    ran = statetree("show", "--verify", old)
    assert ran.status == 0
    assert "stores no checksums" in ran.out


def refused(statetree, path, data, *words):
    path.write_bytes(data)
    ran = statetree("show", path)
    assert ran.status == 2, ran.out
    assert ran.err.startswith(f"error: read: {path}: ")
    for word in words:
        assert word in ran.err


def test_cut_off_files_are_refused_wherever_they_end(old, tmp_path, statetree):
    data = old.read_bytes()
    for end in [*range(20, len(data), 61), len(data) - 1]:
        refused(statetree, tmp_path / "a.pt", data[:end])


def test_sizes_are_compared_before_memory_is_taken(old, state, tmp_path, statetree):
    data = old.read_bytes()
    elements = (12).to_bytes(8, "little") + state["w"].numpy().tobytes()
    assert data.count(elements) == 1
    for count in (0, 1 << 60):
        faulty = data.replace(elements, count.to_bytes(8, "little") + elements[8:])
        refused(statetree, tmp_path / "a.pt", faulty, f"has {count} elements: the tree says 12")


def test_what_does_not_add_up_is_refused(old, tmp_path, statetree):
    data = old.read_bytes()
    refused(statetree, tmp_path / "a.pt", data + b"x", "1 bytes lie behind the last storage")
    refused(statetree, tmp_path / "a.pt", data.replace(b"M\xe9\x03.", b"M\xe8\x03."), "an unknown version")
    assert data.count(b"q\x02\x88") == 1  # little_endian
    refused(statetree, tmp_path / "a.pt", data.replace(b"q\x02\x88", b"q\x02\x89"), "byte order of another machine")


def test_code_does_not_run(old, tmp_path, statetree):
    marker = tmp_path / "statetree_was_here"
    evil = b"cposix\nmkdir\nX" + len(str(marker)).to_bytes(4, "little") + str(marker).encode() + b"\x85R."
    data = old.read_bytes()
    refused(statetree, tmp_path / "a.pt", data[:14] + b"\x80\x02" + evil + data[14:])
    assert not marker.exists()


def test_numbers_that_torch_writes_and_does_not_read_are_not_saved(tmp_path):
    with pytest.raises(
        st.CheckpointError, match=r"save: .* refuses: Unsupported operand 139\. Leave it out \(select\)"
    ):
        st.save({"x": 10**700}, tmp_path / "t.pt")
    assert list(tmp_path.iterdir()) == []
    st.save({"x": 10**600}, tmp_path / "t.pt")
    assert torch.load(tmp_path / "t.pt", weights_only=True) == {"x": 10**600}
