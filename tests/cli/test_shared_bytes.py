"""Which entries of torch files share bytes: what is shown, compared and noted of them."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from statetree.cli import shared_bytes
from statetree.cli.shared_bytes import share_bytes
from statetree.files.stored import Storage, StoredTensor
from tests.cli.states import bits, write

WHOLE = bits(4, 6, 8)
FLAT = WHOLE.view(-1)
BYTES = WHOLE.view(torch.uint8)

APART = {
    "columns": (WHOLE[..., :4], WHOLE[..., 4:]),
    "rows": (WHOLE[:, :3, 2:6], WHOLE[:, 3:, 2:6]),
    "transposed": (WHOLE[:, 0].t(), WHOLE[:, 5].t()),
    "turns": (FLAT[::2], FLAT[1::2]),
    "a block between columns": (WHOLE[..., :4], FLAT[20:24]),
    "within elements": (BYTES[..., ::4], BYTES[..., 3::4]),
}
TIED = {
    "columns": (WHOLE[..., :5], WHOLE[..., 4:]),
    "rows": (WHOLE[:, :4, 2:6], WHOLE[:, 3:, 5:7]),
    "turns": (FLAT[::2], FLAT[1::3]),
    "a block": (WHOLE[..., :4], FLAT[22:25]),
    "within elements": (BYTES[..., ::4], BYTES[..., 4:9]),
}


@pytest.mark.parametrize("name", APART)
def test_views_that_lie_between_each_other_are_not_tied(name, tmp_path, statetree):
    one, other = APART[name]
    source = write({"one": one, "other": other}, tmp_path / "a.pt")
    apart = write({"one": one.clone(), "other": other.clone()}, tmp_path / "b.pt")
    assert statetree("diff", "--values", source, apart).status == 0
    assert statetree("show", "--json", source).json["element_bytes"] == one.nbytes + other.nbytes
    assert statetree("convert", source, tmp_path / "c.safetensors").err == ""


@pytest.mark.parametrize("name", TIED)
def test_views_that_have_some_bytes_in_common_are_tied(name, tmp_path, statetree):
    one, other = TIED[name]
    source = write({"one": one, "other": other}, tmp_path / "a.pt")
    apart = write({"one": one.clone(), "other": other.clone()}, tmp_path / "b.pt")
    assert statetree("diff", "--values", source, apart).status == 1
    entries = statetree("show", "--json", source).json["entries"]
    assert [entry.get("tied_to") for entry in entries] == [None, "one"]


def places(view):
    """The bytes of its storage that a view's elements take."""
    size = view.dtype.itemsize
    numbers = torch.arange(view.offset * size + view.span)
    shape, stride = (*view.shape, size), (*(step * size for step in view.stride), 1)
    return set(numbers.as_strided(shape, stride, view.offset * size).flatten().tolist())


def test_no_shared_byte_is_overlooked():
    """Views of all sorts, two by two, against the bytes that each one takes."""
    storage = Storage("", 10_000)
    strides = [((3, 4), (16, 2)), ((4,), (7,)), ((2, 2, 3), (30, 9, 1)), ((5, 2), (3, 24)), ((9,), (1,)), ((), ())]
    views = [
        StoredTensor(storage, dtype, shape, stride, offset)
        for dtype in (torch.float32, torch.int16, torch.uint8)
        for shape, stride in [*strides, ((2, 5), (0, 4)), ((1, 6), (50, 6))]
        for offset in (0, 1, 6, 17)
    ]
    taken = [places(view) for view in views]
    are_told_apart = []
    for first, second in combinations(range(len(views)), 2):
        do_share = not taken[first].isdisjoint(taken[second])
        found = share_bytes(views[first], views[second])
        assert found is share_bytes(views[second], views[first])
        assert found or not do_share, (first, second)
        if not do_share:
            are_told_apart.append(not found)
    assert sum(are_told_apart) > len(are_told_apart) / 3


@pytest.mark.parametrize("most", [0, 3, 1000])
def test_views_are_tied_however_few_may_be_compared(most, tmp_path, statetree, monkeypatch):
    monkeypatch.setattr(shared_bytes, "_MAX_COMPARISONS", most)
    base = torch.arange(100.0)
    state = {str(number): base[number : number + 12] for number in range(0, 80, 10)}
    path = write({**state, "again": base[:12], "apart": base[95:]}, tmp_path / "a.pt")
    entries = statetree("show", "--json", path).json["entries"]
    assert {entry["key"] for entry in entries if entry.get("tied_to") == "0"} == {*state, "again"} - {"0"}
