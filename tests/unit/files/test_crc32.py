"""Checksums of parts make the checksum of the whole, whichever library computes them."""

from __future__ import annotations

import importlib
import random
import subprocess
import sys
import zlib

import pytest

from statetree.files.crc32 import crc32, joined

FAST = ("isal.isal_zlib", "zlib_ng.zlib_ng")


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 1000, 65_537, 1 << 20])
def test_checksums_of_two_parts_are_joined(nbytes):
    data = random.Random(0)
    for length in (0, 1, 7, 200):
        first, second = data.randbytes(length), data.randbytes(nbytes)
        assert joined(crc32(first), crc32(second), nbytes) == zlib.crc32(first + second)


def test_parts_of_more_than_4_gib():
    once = joined(1, 0, 1 << 31)
    assert joined(joined(once, 0, 1 << 31), 0, 5) == joined(1, 0, (1 << 32) + 5)


@pytest.mark.parametrize("name", FAST)
def test_every_library_computes_the_same(name):
    found = pytest.importorskip(name)
    data = memoryview(random.Random(0).randbytes(100_003))
    assert found.crc32(data) == zlib.crc32(data)
    assert found.crc32(data[5:], found.crc32(data[:5])) == zlib.crc32(data)


@pytest.mark.parametrize("missing", [FAST, FAST[:1], FAST[1:], ()], ids=str)
def test_what_is_not_installed_is_not_needed(missing):
    code = f"""
import sys
sys.modules.update(dict.fromkeys({missing}))
from statetree.files.crc32 import crc32
print(crc32.__module__, crc32(b"abc"))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    installed = [name for name in FAST if name not in missing and _is_there(name)]
    assert told == [installed[0] if installed else "zlib", str(zlib.crc32(b"abc"))]


def _is_there(name):
    try:
        return bool(importlib.import_module(name))
    except ImportError:
        return False
