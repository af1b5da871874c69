"""``show --verify``."""

from __future__ import annotations

import pytest

from tests.cli.states import bits, write


@pytest.mark.parametrize("name", ["a.pt", "a"])
def test_checksums_of_archives_are_compared(name, tmp_path, statetree):
    path = write({"w": bits(1000)}, tmp_path / name)
    ran = statetree("show", "--verify", path)
    assert ran.status == 0, ran.err
    assert "checksums agree" in ran.out
    file = path / "__0_0.distcp" if path.is_dir() else path
    data = bytearray(file.read_bytes())
    place = data.index(bits(1000).numpy().tobytes()[:50])
    data[place] ^= 1
    file.write_bytes(data)
    ran = statetree("show", "--verify", path)
    assert ran.status == 2
    assert "has the checksum" in ran.err
    assert statetree("convert", path, tmp_path / "b.safetensors").status == 2


def test_that_there_is_nothing_to_compare_is_said(tmp_path, statetree):
    ran = statetree("show", "--verify", write({"w": bits(1)}, tmp_path / "a.safetensors"))
    assert ran.status == 0, ran.err
    assert "not verified: a safetensors file stores no checksums" in ran.out
