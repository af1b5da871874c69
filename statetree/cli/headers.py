"""A safetensors file as rows, by its header alone: without torch, which takes a second or two to load."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from statetree.cli.rows import Listing, Row, labels_of
from statetree.files.ranges import OpenFiles
from statetree.files.safetensors_header import is_header, read_header

if TYPE_CHECKING:
    from pathlib import Path


def listed(path: Path) -> Listing | None:
    """Return what a safetensors file holds; ``None`` if what lies at the path is something else.

    Raises:
        CheckpointError: If it cannot be read, or its header is damaged.
    """
    place = OpenFiles().open(path) if os.path.isfile(path) else None
    if place is None or place.length < 9 or not is_header(place.read(0, 9, "its beginning")):
        return None
    entries, metadata, _ = read_header(place)
    rows = [
        Row(key, labels_of([key]), "tensor", dtype, shape, stop - begin, math.prod(shape), own_bytes=stop - begin)
        for key, dtype, shape, begin, stop in entries
    ]
    return Listing("safetensors file", place.length, rows, metadata)
