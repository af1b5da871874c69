"""What torch wrote before 1.6: five pickles after each other, and then the storages, each after its number of elements.

The pickles are a mark, a version, facts about the machine, the tree, and the keys of the storages in their order.
"""

from __future__ import annotations

import pickletools
import sys
from typing import TYPE_CHECKING, Final

import torch

from statetree.files.pickled_tensors import find, storages
from statetree.files.unpickling import BadPickle, read_pickle
from statetree.files.untrusted import refuse

if TYPE_CHECKING:
    from statetree.files.ranges import FileRange

#: What these files begin with: a number, pickled in one of the protocols that ``torch.load(weights_only=True)`` reads.
LEGACY: Final = tuple([protocol + b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." for protocol in (b"\x80\x02", b"\x80\x03")])
_MAX_PICKLE_BYTES: Final = 1 << 30
_COUNT_BYTES: Final = 8


def read_legacy(file: FileRange) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the pickle of the tree, and where each storage begins and how many bytes it has, by key.

    Raises:
        CheckpointError: If the file is damaged, or its storages do not fill it.
    """
    try:
        at, pickles = 0, []
        for _ in range(5):
            pickles.append(_pickle_at(file, at))
            at += len(pickles[-1])
        sizes: dict[str, tuple[int, int]] = {}

        def memory(key: str, count: int, itemsize: int) -> torch.UntypedStorage:
            sizes[key] = count, itemsize
            return torch.UntypedStorage(count * itemsize, device="meta")

        version, machine, _, keys = (read_pickle(each, find, storages(memory))[0] for each in pickles[1:])
        if version != 1001 or type(machine) is not dict:
            refuse(file.label, "it is of an unknown version")
        if machine.get("little_endian") is not (sys.byteorder == "little"):
            refuse(file.label, "it has the byte order of another machine")
        return pickles[3], _places(file, at, sizes, keys)
    except BadPickle as bad:
        refuse(file.label, f"a pickle of a file of torch before 1.6: {bad}")


def _pickle_at(file: FileRange, at: int) -> bytes:
    """Return the pickle that begins at an offset. How long it is, only its instructions say: none is carried out."""
    most = min(file.length - at, _MAX_PICKLE_BYTES)
    nbytes = min(most, 1 << 16)
    while True:
        data = file.read(at, nbytes, "a pickle")
        try:
            last = max(begin or 0 for _, _, begin in pickletools.genops(data))
        except ValueError:  # it is cut off here, or damaged
            if nbytes == most:
                raise BadPickle("it is cut off, or damaged") from None
            nbytes = min(most, 8 * nbytes)
        else:
            return data[: last + 1]


def _places(file: FileRange, at: int, sizes: dict[str, tuple[int, int]], keys: object) -> dict[str, tuple[int, int]]:
    if type(keys) is not list or not all(type(key) is str for key in keys) or sorted(keys) != sorted(sizes):
        raise BadPickle("it does not list the storages that the tree has")
    found = {}
    for key in keys:
        count, itemsize = sizes[key]
        stored = int.from_bytes(file.read(at, _COUNT_BYTES, f"the size of the storage {key[:40]!r}"), "little")
        if stored != count:
            raise BadPickle(f"the storage {key[:40]!r} has {stored} elements: the tree says {count}")
        found[key] = (at + _COUNT_BYTES, count * itemsize)
        at += _COUNT_BYTES + count * itemsize
        if at > file.length:
            raise BadPickle(f"the storage {key[:40]!r} would end at byte {at} of {file.length}")
    if at != file.length:
        raise BadPickle(f"{file.length - at} bytes lie behind the last storage")
    return found
