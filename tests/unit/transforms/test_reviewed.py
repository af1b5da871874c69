"""What a reader found: texts like addresses, NaN payloads and keys that are equal."""

import struct

import pytest

import statetree as st

NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]


@pytest.mark.parametrize(
    ("one", "other"), [("read at 0x1", "write at 0x2"), (b"a at 0x1", b"b at 0x1"), (NAN, float("nan"))], ids=str
)
def test_plain_values_that_differ_have_other_digests(one, other):
    assert st.digest({"x": one}) != st.digest({"x": other})
    assert st.apply_delta(st.delta({"x": other}, {"x": one}), {"x": one})["x"] is other


def test_keys_that_are_equal_are_not_merged():
    with pytest.raises(st.TreeMismatch, match="two keys at p are equal"):
        st.rename({"p": {0: "x"}, "q": {False: "y"}}, [("q.False", "p.False")])
