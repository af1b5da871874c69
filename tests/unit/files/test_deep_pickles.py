"""Values that are nested very deeply, where a file should have a name or a key: an error, and the process goes on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.hostile import archive
from tests.pace import units

#: A tuple in a tuple, and so on: hashing it takes a frame of the stack for each.
DEEP = b")" + b"\x85" * 200_000
DATETIME = b"cnumpy\ndtype\nX\x02\x00\x00\x00M8K\x00K\x01\x87R"
PICKLES = {
    "the name of a layout": b"ctorch.serialization\n_get_layout\n" + DEEP + b"\x85R.",
    "the type of a device": b"ctorch\ndevice\n" + DEEP + b"\x85R.",
    "a size": b"ctorch\nSize\n" + DEEP + b"\x85R.",
    "a key": b"}" + DEEP + b"K\x01s.",
    "a key beside a name that is not known": b"}" + DEEP + b"cfoo\nBar\ns.",
    "a part of a set": b"c__builtin__\nset\n](" + DEEP + b"e\x85R.",
    "the key of a storage": b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + DEEP + b"X\x03\x00\x00\x00cpuK\x04tQ.",
    "the unit of a time": DATETIME + b"(K\x04X\x01\x00\x00\x00<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00}("
    + DEEP + b"K\x01K\x01K\x01t\x86tb.",
    "a key after which the process goes on": b"}" + b")" + b"\x85" * 3_000_000 + b"K\x01s.",
    "defaultdicts in each other, which free each other": b"ccollections\ndefaultdict\nq\x00)R"
    + b"K\x00h\x00)R" * 50_000 + b"s" * 50_000 + b".",
    "the factory of a defaultdict": b"ccollections\ndefaultdict\n" + DEEP + b"\x85R.",
}  # fmt: skip

READ = """
import sys
from pathlib import Path
import statetree as st
from statetree.dcp.plain_values import why_not_restorable

try:
    st.files.open(sys.argv[1])
except st.StateTreeError:
    print("refused as a file")
if why_not_restorable(Path(sys.argv[1]).read_bytes()):
    print("refused as a value")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", PICKLES)
def test_deep_values_where_something_else_belongs_are_refused(name, tmp_path):
    path = archive(tmp_path / "a.pt", b"\x80\x02" + PICKLES[name])
    ran = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, timeout=units(60))
    assert ran.returncode == 0, (ran.returncode, ran.stderr[-500:])
    assert "refused as a value" in ran.stdout
    assert "refused as a file" in ran.stdout
