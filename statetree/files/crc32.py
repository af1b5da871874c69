"""CRC-32, by the fastest library that is installed: isal and zlib-ng (the extra ``fast``) are several times zlib's."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Final
from zlib import crc32

with suppress(ImportError):
    from zlib_ng.zlib_ng import crc32  # type: ignore[no-redef, unused-ignore]  # the same function
with suppress(ImportError):
    from isal.isal_zlib import crc32  # type: ignore[no-redef, unused-ignore]  # the same function

__all__ = ["crc32", "joined"]

#: Checksums are polynomials over two elements modulo this one; the highest bit is the coefficient of x^0.
_POLYNOMIAL: Final = 0xEDB88320
_ONE: Final = 1 << 31


def joined(first: int, second: int, nbytes: int) -> int:
    """Return the checksum of bytes with the checksum ``first``, and ``nbytes`` more with the checksum ``second``."""
    return _product(_shift(nbytes), first) ^ second


def _product(a: int, b: int) -> int:
    found = 0
    while a:
        if a & _ONE:
            found ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found


@lru_cache(1024)
def _shift(nbytes: int) -> int:
    """Return x to the power of ``8 * nbytes``."""
    found, power = _ONE, 1 << 23  # x^0, x^8
    while nbytes:
        if nbytes & 1:
            found = _product(power, found)
        power, nbytes = _product(power, power), nbytes >> 1
    return found
