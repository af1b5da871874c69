"""``statetree diff``."""

from __future__ import annotations

import copy
from argparse import Namespace

import pytest
import torch

from statetree.files.ranges import BUCKET_BYTES
from statetree.tree.atoms import same_value
from tests.cli.states import bits, flat_state, nested_state, tied_state, write

NAMES = ["a.pt", "a.safetensors", "a"]


def differences(ran):
    assert ran.status == 1, ran.err
    return {(found["key"], found["kind"]) for found in ran.json["differences"]}


@pytest.mark.parametrize("right", NAMES)
@pytest.mark.parametrize("left", NAMES)
def test_one_state_is_the_same_in_every_format(left, right, tmp_path, statetree):
    (tmp_path / "l").mkdir()
    (tmp_path / "r").mkdir()
    one, other = write(flat_state(), tmp_path / "l" / left), write(flat_state(), tmp_path / "r" / right)
    ran = statetree("diff", one, other)
    assert ran.status == 0, ran.out + ran.err
    assert ran.out.startswith("same: 19 entries compared")
    told = statetree("diff", "--no-values", one, other).out
    assert "compared (structure, dtypes and shapes; not values)" in told


def test_nested_states_are_the_same_as_torch_files_and_directories(tmp_path, statetree):
    one, other = write(nested_state(), tmp_path / "a.pt"), write(nested_state(), tmp_path / "a")
    assert statetree("diff", "--values", one, other).status == 0


@pytest.mark.parametrize("name", ["b.pt", "b"])
def test_every_difference_is_found(name, tmp_path, statetree):
    state = nested_state()
    one = write(state, tmp_path / "a.pt")
    other = copy.deepcopy(state)
    other["model"]["layers.0.weight"] = bits(3, 4)
    other["model"]["layers.0.bias"] = bits(4, start=5).to(torch.float64)
    other["model"]["new"] = bits(1)
    del other["optimizer"]["state"][0]["step"]
    other["optimizer"]["param_groups"][0]["lr"] = 1
    other["list"][0] = "text"
    other["values"]["big"] = 2**70 + 1
    other["optimizer"]["state"].pop(1)
    ran = statetree("diff", "--no-values", "--json", one, write(other, tmp_path / name))
    without_values = {
        ("model.layers.0.weight", "shape"),
        ("model.layers.0.bias", "dtype"),
        ("model.new", "missing"),
        ("optimizer.state.0.step", "missing"),
        ("optimizer.param_groups.0.lr", "type"),
        ("list.0", "leaf type"),
        ("optimizer.state.1", "missing"),
    }
    assert differences(ran) == without_values
    ran = statetree("diff", "--json", "--values", one, tmp_path / name)
    assert differences(ran) == {*without_values, ("values.big", "value")}


def test_values_are_measured(tmp_path, statetree):
    state = {"w": torch.arange(24.0).view(2, 3, 4), "n": torch.arange(5), "same": bits(3)}
    one = write(state, tmp_path / "a.pt")
    other = copy.deepcopy(state)
    other["w"][1, 0, 2] += 3.5
    other["w"][1, 2, 3] -= 1
    other["n"][4] = -(2**62)
    ran = statetree("diff", "--values", "--json", one, write(other, tmp_path / "b.safetensors"))
    found = {row["key"]: row for row in ran.json["differences"]}
    assert set(found) == {"w", "n"}
    assert found["w"]["first_index"] == [1, 0, 2]
    assert (found["w"]["left"], found["w"]["right"]) == ("14.0", "17.5")
    assert found["w"]["num_different"] == 2
    assert found["w"]["max_abs"] == 3.5
    assert found["w"]["max_rel"] == pytest.approx(3.5 / 17.5)
    assert found["n"]["first_index"] == [4]
    text = statetree("diff", "--values", one, tmp_path / "b.safetensors").out
    assert "~ w: value 14.0 against 17.5 at [1, 0, 2]; 2 elements differ, by at most 3.5 (relative 0.2)" in text
    assert text == statetree("diff", one, tmp_path / "b.safetensors").out
    assert statetree("diff", "--no-values", one, tmp_path / "b.safetensors").status == 0


LARGE = 2**53


@pytest.mark.parametrize(
    ("one", "other", "max_abs"),
    [
        (torch.tensor([LARGE]), torch.tensor([LARGE + 1]), 1),
        (torch.tensor([-LARGE - 1]), torch.tensor([-LARGE]), 1),
        (torch.tensor([2**63], dtype=torch.uint64), torch.tensor([2**63 + 3], dtype=torch.uint64), 3),
        (torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]), 2**64),
        (torch.tensor([2**62 + 1]), torch.tensor([2.0**62], dtype=torch.float64), None),  # as float64
        (torch.tensor([-(2**62) - 1]), torch.tensor([-(2**62)], dtype=torch.complex128), None),
        (torch.tensor([2**63 - 1]), torch.tensor([2**63 - 1], dtype=torch.uint64), None),
        (torch.tensor([-1, -(2**63)]), torch.tensor([-1, -(2.0**63)]), None),
        (torch.tensor([5, 2**40]), torch.tensor([5, 2**40], dtype=torch.complex64), None),
        (torch.tensor([1.0]), torch.tensor([float("-inf")]), "inf"),
        (torch.tensor([-1e-310], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64), 1e-310),
    ],
)
def test_large_integers_are_measured_exactly(one, other, max_abs, tmp_path, statetree):
    paths = write({"w": one}, tmp_path / "a.pt"), write({"w": other}, tmp_path / "b.pt")
    for left, right in (paths, paths[::-1]):
        rows = statetree("diff", "--values", "--json", left, right).json["differences"]
        assert [row["max_abs"] for row in rows if row["kind"] == "value"] == ([] if max_abs is None else [max_abs])
        within = statetree("diff", "--rtol", "1e-9", "--json", left, right).json["differences"]
        # Whole numbers of one dtype have no tolerance.
        assert ("value" in [row["kind"] for row in within]) == (max_abs in (1, 3, 2**64, "inf", 1e-310))


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, BUCKET_BYTES - 1, BUCKET_BYTES, BUCKET_BYTES + 5])
def test_differences_are_found_beyond_the_first_bucket(start, tmp_path, statetree):
    state = {"w": torch.zeros(BUCKET_BYTES + 6, dtype=torch.uint8)}
    one = write(state, tmp_path / "a.pt")
    state["w"][start] = 3
    ran = statetree("diff", "--values", "--json", one, write(state, tmp_path / "b.pt"))
    assert ran.json["differences"][0]["first_index"] == [start]
    assert ran.json["differences"][0]["max_abs"] == 3


def test_bits_count_not_only_numbers(tmp_path, statetree):
    quiet = torch.tensor([0.0, float("nan"), float("inf")])
    one = write({"z": quiet, "inf": torch.tensor([1.0])}, tmp_path / "a.pt")
    assert (
        statetree("diff", "--values", one, write({"z": quiet, "inf": torch.tensor([1.0])}, tmp_path / "b.pt")).status
        == 0
    )
    other = {"z": torch.tensor([-0.0, float("nan"), float("inf")]), "inf": torch.tensor([float("inf")])}
    found = statetree("diff", "--values", "--json", one, write(other, tmp_path / "c.pt")).json["differences"]
    assert [(row["key"], row["first_index"], row["max_abs"]) for row in found] == [("inf", [0], "inf"), ("z", [0], 0.0)]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.bool, torch.uint64])
def test_every_sort_of_element_is_compared(dtype, tmp_path, statetree):
    state = {"w": bits(2, 3, dtype=dtype)}
    one = write(state, tmp_path / "a.pt")
    flipped = state["w"].clone()
    flipped.view(-1).view(torch.uint8)[-1] ^= 1
    ran = statetree("diff", "--values", "--json", one, write({"w": flipped}, tmp_path / "b.pt"))
    assert ran.json["differences"][0]["first_index"] == [1, 2]


@pytest.mark.parametrize("dtype", [torch.bits8, torch.bits16, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu], ids=str)
def test_elements_that_torch_cannot_index_are_compared(dtype, tmp_path, statetree):
    numbers = torch.arange(12, dtype=torch.uint8)
    changed = numbers.clone()
    changed[5] += 1
    place = 5 // dtype.itemsize
    one = write({"w": numbers.view(dtype)}, tmp_path / "a.pt")
    ran = statetree("diff", "--values", "--json", one, write({"w": changed.view(dtype)}, tmp_path / "b.pt"))
    (found,) = ran.json["differences"]
    assert (found["kind"], found["first_index"], found["num_different"]) == ("value", [place], 1)
    ran = statetree("diff", "--values", one, write({"w": numbers[:: dtype.itemsize].float()}, tmp_path / "c.pt"))
    assert ran.status == 1
    assert "w: dtype" in ran.out


class Config(Namespace):
    """A class that is not loaded."""


def test_objects_that_are_not_loaded_leave_it_undecided(tmp_path, statetree):
    one = write({"w": bits(2), "args": Config(lr=1)}, tmp_path / "a.pt")
    other = write({"w": bits(2), "args": Config(lr=2)}, tmp_path / "b.pt")
    ran = statetree("diff", "--values", one, other)
    assert ran.status == 2
    assert ran.out.startswith("cannot tell: no difference is seen, but not all can be read")
    assert "compared by name alone: args" in ran.out
    assert ran.err.count("test_diff.Config") == 1
    ran = statetree("diff", "--values", "--json", one, other)
    assert (ran.status, ran.json["same"], ran.json["undecided"]) == (2, None, ["args"])
    assert statetree("diff", "--no-values", one, other).status == 0
    assert statetree("diff", "--values", "--match", "w", one, other).status == 0
    changed = write({"w": bits(2, start=3), "args": Config(lr=2)}, tmp_path / "c.pt")
    assert statetree("diff", "--values", one, changed).status == 1


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ([1, [2, 3]], [1, [2, 3]], True),
        ([1, [2, 3]], [1, [2, 4]], False),
        ([1, [2, 3]], [1, [2]], False),
        ([1, 2], [1, 2.0], False),
        ([1, {"a": [0.5]}], [1, {"a": [0.5]}], True),
        ([1, {"a": [0.5]}], [1, {"a": [1.5]}], False),
        ([1, {"a": 1}], [1, {"b": 1}], False),
        ([1, {"a": 1}], [1, {"a": 1, "b": 1}], False),
        ([float("nan")], [float("nan")], True),
        ([0.0], [-0.0], False),
        ([1j], [1j], True),
        ([1j], [2j], False),
    ],
    ids=str,
)
def test_values_within_values_are_compared(one, other, is_same):
    assert same_value(one, other) == is_same
    assert same_value(other, one) == is_same


def test_ties_are_compared_between_torch_files(tmp_path, statetree):
    state = tied_state()
    one = write(state, tmp_path / "a.pt")
    state["row"] = state["row"].clone()
    ran = statetree("diff", "--values", "--json", one, write(state, tmp_path / "b.pt"))
    assert differences(ran) == {("whole", "ties")}
    line = "~ whole: shares bytes with same, transposed, row, strided on the left, shares bytes with same, transposed"
    assert line in statetree("diff", one, tmp_path / "b.pt").out
    ran = statetree(
        "diff",
        "--values",
        one,
        write({key: value.contiguous().clone() for key, value in state.items()}, tmp_path / "c.safetensors"),
    )
    assert ran.status == 0
    assert "ties were not compared: a safetensors file has none" in ran.out


def test_structure_is_compared_where_it_is_known(tmp_path, statetree):
    one = write({"a": {0: bits(1)}, "b": [bits(2)], "c": {}}, tmp_path / "a.pt")
    other = write({"a": {"0": bits(1)}, "b": {"0": bits(2)}, "c": {}}, tmp_path / "b.pt")
    assert differences(statetree("diff", "--json", one, other)) == {("a.0", "missing"), ("b", "structure")}
    third = write({"a": {"0": bits(1)}, "b": [bits(2)]}, tmp_path / "c.pt")
    found = differences(statetree("diff", "--json", one, third))
    assert found == {("a.0", "missing"), ("c", "missing")}
    flat = write({"a.0": bits(1), "b.0": bits(2)}, tmp_path / "d.safetensors")
    assert statetree("diff", third, flat).status == 0


def test_other_tensors_are_compared_part_by_part(tmp_path, statetree):
    state = {"coo": torch.eye(3).to_sparse(), "csr": torch.eye(4).to_sparse_csr()}
    one = write(state, tmp_path / "a.pt")
    assert statetree("diff", "--values", one, write(state, tmp_path / "b.pt")).status == 0
    assert statetree("diff", "--values", one, write(state, tmp_path / "b")).status == 0
    state["coo"] = (torch.eye(3) * 2).to_sparse()
    ran = statetree("diff", "--values", "--json", one, write(state, tmp_path / "c.pt"))
    assert differences(ran) == {("coo", "value")}


def test_matching(tmp_path, statetree):
    one = write({"a": bits(1), "b": bits(2)}, tmp_path / "a.pt")
    other = write({"a": bits(1), "b": bits(3)}, tmp_path / "b.pt")
    assert statetree("diff", "--match", "a*", one, other).status == 0
    ran = statetree("diff", "--match", "typo", one, other)
    assert (ran.status, ran.out) == (2, "")
    assert "none of the 2 keys matches: expected one or more. Check --match and --exclude." in ran.err
    third = write({"a": bits(1), "c": bits(1)}, tmp_path / "c.pt")
    assert statetree("diff", "--match", "c", one, third).status == 1
    assert statetree("diff", one, write({}, tmp_path / "d.pt")).status == 1
    assert statetree("diff", tmp_path / "d.pt", tmp_path / "d.pt").status == 0
    assert statetree("diff", one, other).status == 1


def test_failures_have_a_status_of_their_own(tmp_path, statetree):
    one = write({"a": bits(1)}, tmp_path / "a.pt")
    ran = statetree("diff", one, tmp_path / "b.pt")
    assert ran.status == 2
    assert "b.pt: there is no such file" in ran.err
    assert statetree("diff", one).status == 2
    assert statetree("diff", "--nonsense", one, one).status == 2


def test_tolerances(tmp_path, statetree):
    one = write({"w": torch.tensor([1.0, 2.0, 100.0]), "n": torch.tensor([5])}, tmp_path / "a.pt")
    other = write({"w": torch.tensor([1.0, 2.5, 101.0]), "n": torch.tensor([5])}, tmp_path / "b.pt")
    assert statetree("diff", "--atol", "1", one, other).status == 0
    assert statetree("diff", "--rtol", "0.3", one, other).status == 0
    (found,) = statetree("diff", "--rtol", "0.1", "--json", one, other).json["differences"]
    assert (found["first_index"], found["num_different"], found["max_abs"]) == ([1], 1, 0.5)


def test_summaries_and_silence(tmp_path, statetree):
    one = write({"a": bits(3), "b": torch.tensor([1.0])}, tmp_path / "a.pt")
    other = write({"a": bits(3), "b": torch.tensor([1.5])}, tmp_path / "b.pt")
    ran = statetree("diff", "--values", one, other)
    assert ran.status == 1
    assert ran.out.endswith("\n1 difference (1 value); 2 entries compared (structure, dtypes, shapes and values)\n")
    assert statetree("diff", "--values", "-q", one, other)[:2] == (1, "")
    assert statetree("diff", "--values", "--exclude", "b", one, other).status == 0


def test_what_differs_most_comes_first(tmp_path, statetree):
    one = write({name: torch.tensor([1.0]) for name in "abc"}, tmp_path / "a.pt")
    other = {"a": torch.tensor([1.1]), "b": torch.tensor([9.0]), "c": torch.tensor([2.0])}
    found = statetree("diff", "--values", "--json", one, write(other, tmp_path / "b.pt")).json["differences"]
    assert [row["key"] for row in found] == ["b", "c", "a"]


def test_all_differences_of_structure_are_counted(tmp_path, statetree):
    one, other = ({f"{name}{index}": index for index in range(1500)} for name in "ab")
    ran = statetree("diff", "--json", "--no-values", write(one, tmp_path / "a.pt"), write(other, tmp_path / "b.pt"))
    assert (ran.json["count"], len(ran.json["differences"])) == (3000, 1000)


def test_names_that_differ_by_a_prefix_are_noticed(tmp_path, statetree):
    one = write({"w": bits(2), "v": bits(1)}, tmp_path / "a.pt")
    ran = statetree("diff", one, write({"module.w": bits(2), "module.v": bits(1)}, tmp_path / "b.pt"))
    assert "note: " in ran.out
    assert "module." in ran.out.partition("note: ")[2]


def test_repeated_elements_are_not_compared_one_by_one(tmp_path, statetree):
    """Seven hundred bytes can stand for a terabyte."""
    from tests.cli.hostile import archive, pickle_of, tensor

    def terabyte(name, first):
        data = pickle_of({"w": tensor(size=(2**38,), stride=(0,))})
        return archive(tmp_path / name, data, {"0": bytes([first]) * 16})

    one = terabyte("a.pt", 1)
    assert statetree("diff", "--values", one, terabyte("b.pt", 1)).status == 0
    assert statetree("diff", "--values", one, terabyte("c.pt", 2)).status == 1
    assert statetree("show", "--stats", one).status == 0


def test_a_tolerance_is_for_values(tmp_path, statetree):
    paths = write({"w": torch.ones(1)}, tmp_path / "a.pt"), write({"w": torch.full((1,), 1.5)}, tmp_path / "b.pt")
    assert statetree("diff", "--no-values", *paths).status == 0
    assert statetree("diff", "--rtol", "0.1", *paths).status == 1
    for option in ("--rtol", "--atol"):
        ran = statetree("diff", "--no-values", option, "0.1", *paths)
        assert (ran.status, "a tolerance is for values" in ran.err) == (2, True)


def test_quiet_and_json_exclude_each_other(tmp_path, statetree):
    path = write({"w": torch.ones(1)}, tmp_path / "a.pt")
    ran = statetree("diff", "-q", "--json", path, path)
    assert (ran.status, ran.out, "expected it without --json" in ran.err) == (2, "", True)


@pytest.mark.parametrize("value", ["nan", "-1", "x"])
@pytest.mark.parametrize("option", ["--rtol", "--atol"])
def test_what_is_no_tolerance_is_refused(option, value, tmp_path, statetree):
    path = write({"w": torch.ones(2)}, tmp_path / "a.pt")
    ran = statetree("diff", option, value, path, path)
    assert (ran.status, ran.out) == (2, "")
    assert "Invalid value for" in ran.err


@pytest.mark.parametrize("command", [["show", ""], ["diff", "", "."], ["convert", "", "a.pt"]])
def test_an_empty_name_is_no_checkpoint(command, statetree):
    ran = statetree(*command)
    assert (ran.status, ran.out) == (2, "")
    assert "there is no such file or directory" in ran.err


def test_how_large_tensors_are_is_known_of_all_that_a_dtype_holds(tmp_path, statetree):
    one = {
        "w": torch.full((4,), 2.0),
        "tiny": torch.full((4,), 1e-24),
        "tinier": torch.full((4,), 1e-180, dtype=torch.float64),
        "huge": torch.full((4,), 1e200, dtype=torch.float64),
    }
    other = {
        name: tensor * factor for (name, tensor), factor in zip(one.items(), (1.5, 1.0001, 1.01, 1.1), strict=True)
    }
    paths = write(one, tmp_path / "a.pt"), write(other, tmp_path / "b.pt")
    found = statetree("diff", "--values", "--json", *paths).json["differences"]
    assert [row["key"] for row in found] == ["w", "huge", "tinier", "tiny"]
