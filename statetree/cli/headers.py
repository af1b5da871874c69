"""safetensors as rows, by their headers alone: without torch, which takes a second or two to load."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from statetree.cli.rows import Listing, Row, labels_of
from statetree.files.hugging_face import INDEX, SAFETENSORS_NAMES, file_in, read_index
from statetree.files.ranges import OpenFiles
from statetree.files.safetensors_header import is_header, read_header

if TYPE_CHECKING:
    from pathlib import Path

    from statetree.files.ranges import FileRange
    from statetree.files.safetensors_header import HeaderEntry


def listed(path: Path, *, follow_links: bool) -> Listing | None:
    """Return what a file, the index of several or a folder holds; ``None`` if what lies at the path is something else.

    Raises:
        CheckpointError: If it cannot be read, or a header or the index is damaged.
    """
    try:
        found = file_in(path, SAFETENSORS_NAMES) if path.is_dir() else path
        if found is None or not found.is_file():
            return None
    except OSError:  # a place without permission: `opened` says so
        return None
    files = OpenFiles(follow_links=follow_links)
    place = files.open(found)
    beginning = place.read(0, min(place.length, 64), "its beginning")
    is_index = found.name.lower().endswith(f".safetensors{INDEX}") and beginning.lstrip()[:1] == b"{"
    if not is_index and not is_header(beginning):
        return None
    metadata: dict[str, str] = {}

    def read(shard: FileRange) -> dict[str, HeaderEntry]:
        entries, texts, _ = read_header(shard)
        metadata.update(texts)
        return {entry.key: entry for entry in entries}

    entries = read_index(place, read) if is_index else read(place)
    rows = [
        Row(key, labels_of([key]), "tensor", dtype, shape, stop - begin, math.prod(shape), own_bytes=stop - begin)
        for key, dtype, shape, begin, stop in entries.values()
    ]
    return Listing("safetensors file", files.nbytes, rows, metadata)
