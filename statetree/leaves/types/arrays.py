"""Arrays of NumPy inside opaque objects: pickled as a buffer that need not be copied, and what it is a view of."""

from __future__ import annotations

import sys
from pickle import PickleBuffer
from typing import Any, Final

#: By what a class says how its arrays are pickled.
_PROTOCOL: Final = ("__reduce_ex__", "__reduce__", "__setstate__")


def is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy, which is not imported for that."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def reduced_array(array: Any) -> Any:
    """Return what pickle makes of an array, as ``reducer_override`` has it; ``NotImplemented`` to leave that to NumPy.

    NumPy copies all but contiguous arrays of its own class into ``bytes``, and what it makes of these lies in them,
    whoever else holds them. Here the elements stay where they are, if they lie without gaps, in any order of the dims.
    """
    numpy = sys.modules["numpy"]
    cls = type(array)
    plain = numpy.asarray(array)
    if any(getattr(cls, name) is not getattr(numpy.ndarray, name) for name in _PROTOCOL):
        return NotImplemented
    if plain.dtype.hasobject or not plain.nbytes:
        return NotImplemented
    writeable = plain.flags.writeable
    if not _in_order_of_memory(plain).flags.c_contiguous:
        plain = plain.copy("K")
    elements = _in_order_of_memory(plain).reshape(-1).view(numpy.uint8)
    elements.flags.writeable = writeable
    return _made, (cls, PickleBuffer(elements), plain.dtype, plain.shape, plain.strides)


def _in_order_of_memory(array: Any) -> Any:
    """Return a view of an array in which the dims with the longest strides come first."""
    return array.transpose(sorted(range(array.ndim), key=array.strides.__getitem__, reverse=True))


def _made(cls: Any, elements: Any, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    return sys.modules["numpy"].ndarray.__new__(cls, shape, dtype, elements, 0, strides)
