"""What torch wrote before 1.6: five pickles after each other, and then the storages, each after its number of elements.

The pickles are a mark, a version, facts about the machine, the tree, and the keys of the storages in their order.
"""

from __future__ import annotations

import pickletools
import sys
from typing import TYPE_CHECKING, Final

from statetree.files.safe_pickle import BadPickle
from statetree.files.torch_pickles import plain_pickle, storage_sizes
from statetree.files.untrusted import refuse

if TYPE_CHECKING:
    from statetree.files.ranges import FileRange

#: What these files begin with: a number, pickled in one of the protocols that ``torch.load(weights_only=True)`` reads.
LEGACY: Final = tuple([protocol + b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." for protocol in (b"\x80\x02", b"\x80\x03")])
_MAX_PICKLE_BYTES: Final = 1 << 30
_COUNT_BYTES: Final = 8


def read_legacy(place: FileRange) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the pickle of the tree, and where each storage begins and how many bytes it has, by key.

    Raises:
        CheckpointError: If the file is damaged, or its storages do not fill it.
    """
    try:
        at, pickles = 0, []
        for _ in range(5):
            pickles.append(_pickle_at(place, at))
            at += len(pickles[-1])
        _, version, machine, tree, keys = pickles
        _check_machine(plain_pickle(version), plain_pickle(machine))
        return tree, _storages(place, at, storage_sizes(tree), plain_pickle(keys))
    except BadPickle as bad:
        refuse(place.label, f"a pickle of a file of torch before 1.6: {bad}")


def _check_machine(version: object, told: object) -> None:
    if version != 1001 or type(told) is not dict:
        raise BadPickle("it is of an unknown version")
    if told.get("little_endian") is not (sys.byteorder == "little"):
        raise BadPickle("it has the byte order of another machine")


def _pickle_at(place: FileRange, at: int) -> bytes:
    """Return the pickle that begins at a place, without carrying it out: how long it is, nothing says."""
    most = min(place.length - at, _MAX_PICKLE_BYTES)
    nbytes = min(most, 1 << 16)
    while True:
        data = place.read(at, nbytes, "a pickle")
        try:
            last = max(begin or 0 for _, _, begin in pickletools.genops(data))
        except ValueError:  # it is cut off here, or damaged
            if nbytes == most:
                raise BadPickle("it is cut off, or damaged") from None
            nbytes = min(most, 8 * nbytes)
        else:
            return data[: last + 1]


def _storages(place: FileRange, at: int, sizes: dict[str, tuple[int, int]], keys: object) -> dict[str, tuple[int, int]]:
    if type(keys) is not list or not all(type(key) is str for key in keys) or sorted(keys) != sorted(sizes):
        raise BadPickle("it does not list the storages that the tree has")
    found = {}
    for key in keys:
        itemsize, count = sizes[key]
        stored = int.from_bytes(place.read(at, _COUNT_BYTES, f"the size of the storage {key[:40]!r}"), "little")
        if stored != count:
            raise BadPickle(f"the storage {key[:40]!r} has {stored} elements: the tree says {count}")
        found[key] = (at + _COUNT_BYTES, count * itemsize)
        at += _COUNT_BYTES + count * itemsize
        if at > place.length:
            raise BadPickle(f"the storage {key[:40]!r} would end at byte {at} of {place.length}")
    if at != place.length:
        raise BadPickle(f"{place.length - at} bytes lie behind the last storage")
    return found
