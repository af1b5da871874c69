"""How ``statetree diff`` shows what only one side has, and containers and parts that differ."""

from __future__ import annotations

import torch

from tests.cli.states import bits, write


def shown(statetree, tmp_path, left, right, *options):
    one, other = write(left, tmp_path / "left.pt"), write(right, tmp_path / "right.pt")
    ran = statetree("diff", *options, one, other)
    assert ran.status == 1, ran.out + ran.err
    return ran.out.splitlines()


def test_what_one_side_lacks_is_marked(tmp_path, statetree):
    both = {"w": bits(2)}
    lines = shown(statetree, tmp_path, {**both, "old": bits(3)}, {**both, "new": 1})
    assert "- old: float32 [3]" in lines
    assert "+ new: int 1" in lines


def test_empty_containers_that_one_side_lacks_are_found(tmp_path, statetree):
    both = {"w": bits(2)}
    lines = shown(statetree, tmp_path, {**both, "a": {}}, {**both, "b": {}})
    assert "- a: dict of 0" in lines
    assert "+ b: dict of 0" in lines


def test_other_containers_in_one_place_are_found(tmp_path, statetree):
    lines = shown(statetree, tmp_path, {"a": [bits(2)]}, {"a": (bits(2),)})
    assert "~ a: structure list of 1 against tuple of 1" in lines


def test_sparse_tensors_of_other_shapes_are_found(tmp_path, statetree):
    def sparse(size):
        return torch.sparse_coo_tensor(torch.tensor([[0, 1]]), bits(2), (size,), check_invariants=False).coalesce()

    lines = shown(statetree, tmp_path, {"a": sparse(3)}, {"a": sparse(4)})
    assert any(line.startswith("~ a: shape ") for line in lines), lines


def test_values_and_tensors_in_one_place_are_found(tmp_path, statetree):
    lines = shown(statetree, tmp_path, {"a": bits(2), "b": 1, "c": "x"}, {"a": 1, "b": bits(2), "c": "y"}, "--values")
    assert any(line.startswith("~ a: leaf type ") for line in lines), lines
    assert any(line.startswith("~ b: leaf type ") for line in lines), lines
    assert any(line.startswith("~ c: value ") for line in lines), lines
