"""What a reader found: texts like addresses, NaN payloads, keys that are equal, memory that cannot be written."""

import struct

import numpy as np
import pytest
import torch

import statetree as st

NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]


@pytest.mark.parametrize(
    ("one", "other"), [("read at 0x1", "write at 0x2"), (b"a at 0x1", b"b at 0x1"), (NAN, float("nan"))], ids=str
)
def test_plain_values_that_differ_have_other_digests(one, other):
    assert st.digest({"x": one}) != st.digest({"x": other})
    assert st.apply_delta(st.delta({"x": other}, {"x": one}), {"x": one})["x"] is other


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_delta_is_not_written_into_a_map_for_reading(tmp_path):
    file = tmp_path / "m"
    np.arange(4.0).tofile(file)
    mapped = torch.from_numpy(np.memmap(file, mode="r", dtype="float64"))
    base = {"a": torch.zeros(2), "m": torch.arange(4.0, dtype=torch.float64)}
    new = {"a": torch.ones(2), "m": torch.ones(4, dtype=torch.float64)}
    target = {"a": torch.zeros(2), "m": mapped}
    with pytest.raises(st.TreeMismatch, match="mapped for reading only"):
        st.apply_delta(st.delta(new, base), target)
    assert target["a"].tolist() == [0.0, 0.0]


def test_keys_that_are_equal_are_not_merged():
    with pytest.raises(st.TreeMismatch, match="two keys at p are equal"):
        st.rename({"p": {0: "x"}, "q": {False: "y"}}, [("q.False", "p.False")])
