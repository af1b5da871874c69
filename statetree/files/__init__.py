"""Checkpoint files as trees: what a file holds is known from its headers, elements are read when they are asked for.

Files are not trusted: nothing in them is executed, sizes are compared with the file before memory is taken.

- ``formats``: ``open``, ``save`` and ``register_format``; ``checkpoint``: what a format has to do.
- ``loading``: ``load``; ``entry_matching``: which leaf belongs to which, by ``key_texts``;
  ``filling``: memory filled from files.
- ``stored``: the leaf that stands for a tensor in a file, and its leaf type; ``unread``: what a predicate sees of it;
  ``derived``: the one that stands for a tensor that is made of stored ones when it is read.
- ``ranges``: ranges of bytes of open files, every read of which is checked; ``strided_reading``: elements in them;
  ``remote``: files behind URLs.
- ``page``: ``to_html``, a tree as one page to look at; ``page_parts``: its style and script, what it shows of a chosen
  leaf, and which rank holds which box.
- ``leaf_text``: leaves in words, and what their elements are like; ``shared_bytes``: which of them share bytes.
- ``publishing``: a checkpoint is written under a temporary name, and appears whole.
- ``safetensors_format``; ``hugging_face``: folders, and indices of several files.
- ``torch_format``; ``torch_members``: what lies where in its files, zip archives and older ones;
  ``tensor_archives``: what ``torch.save`` writes of a tensor.
- ``unpickling``: pickles, of which nothing is run or imported; ``pickled_values``, ``pickled_tensors``: what the names
  in them stand for; ``untrusted``: names and texts out of files.
- ``crc32``: CRC-32, by the fastest library that is installed; ``block_checksums``: those of the blocks of a range;
  ``job_threads``: who waits, and who sums up.
"""

import _imp
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from statetree.files.checkpoint import CheckpointFormat as CheckpointFormat
    from statetree.files.checkpoint import OpenedCheckpoint as OpenedCheckpoint
    from statetree.files.checkpoint import SaveOptions as SaveOptions
    from statetree.files.formats import open as open  # noqa: A004 - `statetree.files.open`
    from statetree.files.formats import opened as opened
    from statetree.files.formats import register_format as register_format
    from statetree.files.formats import save as save
    from statetree.files.loading import load as load
    from statetree.files.stored import StoredTensor as StoredTensor
    from statetree.files.unpickling import StoredObject as StoredObject

_MODULES: Final = {
    **dict.fromkeys(("CheckpointFormat", "OpenedCheckpoint", "SaveOptions"), "checkpoint"),
    **dict.fromkeys(("open", "opened", "register_format", "save"), "formats"),
    "StoredObject": "unpickling",
    "StoredTensor": "stored",
    "load": "loading",
}

if not TYPE_CHECKING:  # a type checker is to know which names there are
    __all__ = sorted(_MODULES)

    def __getattr__(name: str) -> Any:
        """Load what a name stands for, and torch with it, when it is first asked for: headers are read without."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _imp.acquire_lock()  # as in `statetree/__init__`
        try:
            globals()[name] = value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        finally:
            _imp.release_lock()
        return value
