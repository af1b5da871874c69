"""Checkpoint files as trees: what a file holds is known from its headers, elements are read when they are asked for.

Files are not trusted: nothing in them is executed, sizes are compared with the file before memory is taken.

- ``formats``: ``open``, ``save`` and ``register_format``; ``checkpoint``: what a format has to do.
- ``direct_loading``: ``load``, into the layout of another tree.
- ``stored``: the leaf that stands for a tensor in a file, and its leaf type.
- ``ranges``: ranges of bytes of open files, every read of which is checked.
- ``page``: ``to_html``, a tree as one page to look at.
- ``publishing``: a checkpoint appears whole, or not at all.
- ``safetensors_format``; ``torch_format``; ``torch_pickles``, ``zip_archive``: what is looked at before torch reads.
- ``safe_pickle``: pickles read without running or importing anything; ``untrusted``: names and texts out of files.
"""

from statetree.files.checkpoint import CheckpointFormat, OpenedCheckpoint, SaveOptions
from statetree.files.direct_loading import load
from statetree.files.formats import open, opened, register_format, save  # noqa: A004 - `statetree.files.open`
from statetree.files.stored import StoredObject, StoredTensor

__all__ = [
    "CheckpointFormat",
    "OpenedCheckpoint",
    "SaveOptions",
    "StoredObject",
    "StoredTensor",
    "load",
    "open",
    "opened",
    "register_format",
    "save",
]
