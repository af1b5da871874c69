"""Trees with awkward keys."""

from __future__ import annotations

import datetime
from typing import Any

import torch

from tests.trees.containers import Point
from tests.trees.corpus import Color, Level, Ramp, a_function, tree
from tests.trees.fields import Frozen
from tests.trees.objects import IntWithAttributes


@tree()
def keys_that_look_alike(new: Ramp) -> Any:
    return {0: new(1), "0": new(2), "0.0": {"a": 1}, 0.5: 2, "0.5": 3, "": {"": 4}, ".": 5, None: 6, "None": 7}


@tree()
def keys_true_and_one(new: Ramp) -> Any:
    return [{True: new(1)}, {1: new(1)}, {1.0: new(1)}, {False: 1, 1: {0: 2}}, {(1, True): 1}, {(1, 1): 2}]


@tree()
def keys_nan(new: Ramp) -> Any:
    return {float("nan"): new(1), float("-inf"): new(2), (float("nan"), 1): {float("nan"): [new(1)]}}


@tree()
def keys_several_nans(new: Ramp) -> Any:
    return {float("nan"): new(1), float("nan") * 1: new(2), "nan": new(1)}  # two objects, so two keys


@tree()
def keys_unsortable(new: Ramp) -> Any:
    return {None: new(1), 3: new(1), "a": new(1), (1, "b"): 1, b"c": 2, Color.RED: 3, 1.5: 4, 2j: 5, int: 6, ...: 7}


@tree()
def keys_with_dots_and_brackets(new: Ramp) -> Any:
    return {
        "a": {"b": 1, "b.c": 2},
        "a.b": {"c": 3},
        "[0]": 4,
        "['a']": {"['b']": 5},
        "['a']['b']": 6,
        "['a.b']": {"c": 7},
        "a.b.c": new(1),
        "a~2": 8,
    }


@tree()
def keys_of_numbers_and_lists(new: Ramp) -> Any:
    return {"a": [1, {"0": 2}], "a.0": 3, "a.1": {0: 4}, "a.1.0": new(1)}


@tree()
def keys_unicode(new: Ramp) -> Any:
    return {"é": new(1), "e\u0301": new(2), "\ud800": 3, "\x00": 4, " ": 5, "\n": 6, "日本": {"語": 7}, "🌲": 8}


@tree()
def keys_composite(new: Ramp) -> Any:
    return {
        (): 1,
        (0,): 2,
        ("0",): 3,
        frozenset({"b", "a"}): new(1),
        Point(1, 2): 4,
        Frozen(1, "x"): 6,
        Color.BLUE: 7,
        Level.LOW: 8,
        torch.float32: 9,
        torch.device("cpu"): 10,
        a_function: 11,
        datetime.date(2024, 1, 2): 12,
        -0.0: 13,
        "Color.BLUE": 14,
        1 << 80: 15,
        IntWithAttributes(5): 16,
    }
