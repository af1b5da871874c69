"""A checkpoint that an earlier version of statetree wrote, kept as it is, loads with and without a template."""

from __future__ import annotations

import dataclasses
import enum
import io
from collections import OrderedDict, deque, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import statetree
from tests.judge import assert_trees_equal

pytestmark = pytest.mark.filterwarnings("ignore:save. leaves that restore makes with a template only")

BEFORE = Path(__file__).parent / "data" / "before"


@dataclasses.dataclass
class Counters:
    step: int
    seen: Any


class Color(enum.Enum):
    RED = 1


Pair = namedtuple("Pair", "left right")


def builtin(scale):
    """What loads without a template. The values are all ``scale`` times what they are for 1."""
    model = OrderedDict(weight=torch.arange(6.0).reshape(2, 3) * scale, empty=torch.zeros(0))
    vars(model)["_metadata"] = OrderedDict({"": {"version": 1}})
    return {
        "model": model,
        "blocks": [torch.arange(2) * scale, {}, [1 * scale, (2 * scale, [])], torch.arange(3) * scale],
        "keys": {0: 1 * scale, "0": 2 * scale, (1, "a"): 3 * scale, True: 4 * scale, b"x": 5 * scale, 0.5: 6 * scale},
        "pair": ({"a": torch.ones(1) * scale}, OrderedDict()),
    }


def state(scale):
    return {
        "builtin": builtin(scale),
        "classes": [Counters(7 * scale, torch.ones(2) * scale), Pair(torch.ones(1) * scale, 3 * scale), deque([()], 5)],
        "enum": {Color.RED: torch.ones(1) * scale},
        "sparse": torch.sparse_coo_tensor([[0, 2]], [1.0 * scale, 2.0 * scale], (3,), check_invariants=True).coalesce(),
    }


def test_it_loads_into_a_template():
    loaded = statetree.load(BEFORE, state(0), in_place=True)
    assert_trees_equal(loaded, state(1))


def test_what_is_missing_of_it_is_named():
    template = state(0)
    template["builtin"]["keys"] = {False: 0, "0": 0}
    with pytest.raises(statetree.TreeMismatch, match=r"missing at builtin.keys.False: expected present"):
        statetree.load(BEFORE, template, in_place=True)


def test_classes_of_it_take_a_template():
    with pytest.raises(statetree.TreeMismatch, match=r"structure differs at classes.1: .*Pair"):
        statetree.load(BEFORE)


@pytest.mark.filterwarnings("ignore:save. containers that restore makes with a template only")
def test_it_is_written_as_it_was(tmp_path):
    statetree.save(state(1), tmp_path)
    now, before = (torch_dcp.FileSystemReader(place).read_metadata() for place in (tmp_path, BEFORE))
    assert known_before(now.state_dict_metadata) == known_before(before.state_dict_metadata)
    assert now.planner_data == before.planner_data
    # Since then, the length of a deque and the names of a dataclass' attributes are written, too.
    expected = structure_text(BEFORE)
    for was, now in CHANGES.items():
        assert was in expected
        expected = expected.replace(was, now)
    assert structure_text(tmp_path) == expected


CHANGES = {
    '["collections.deque","deque",["i0"],[16],null]': '["collections.deque","deque",["i0"],[16],[5]]',
    '["sstep","sseen"],[12,13],null]': '["sstep","sseen"],[12,13],[["step",null],["seen",null]]]',
}


def known_before(entries):
    """What the versions of torch describe alike: 2.14 began to tell strides."""
    return {
        key: (vars(entry) | {"properties": {**vars(entry.properties), "strides": None}})
        if hasattr(entry, "properties")
        else entry
        for key, entry in entries.items()
    }


def structure_text(place):
    reader = torch_dcp.FileSystemReader(place)
    index = torch_dcp.metadata.MetadataIndex("<statetree structure>")
    info = reader.read_metadata().storage_data[index]
    with (place / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        return torch.load(io.BytesIO(file.read(info.length)), weights_only=True)
