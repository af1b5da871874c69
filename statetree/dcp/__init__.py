"""Whole training states as checkpoints in the format of ``torch.distributed.checkpoint`` (DCP).

A state is flattened down to what DCP writes as one entry. Its structure is written beside these, as one more entry, so
that the state can be loaded without a template; plain DCP reads all others. Files are not trusted.

- ``saving``: a state written by all ranks; ``save_plan``: which of them writes what.
- ``background``: ``async_save``, by a thread with a group of its own.
- ``checkpointer``: ``Checkpointer``, over the directories that ``series`` keeps; ``restoring``: which of them is taken.
  ``step_writer``: one of them written; ``mirror``: the series in an object store.
  ``step_numbers``: steps, metrics, metadata and counts, checked. ``schedule``: when to save. ``events``: what is told.
  ``stateful``: objects with ``state_dict`` and ``load_state_dict``.
  ``async_stager``: for DCP's own saves.
- ``state_entries``: the entries of a tree, with DCP's keys, and what is saved of each.
  ``plain_values``: the values among them, read.
- ``saved_structure``: a ``TreeSpec`` as text, and back.
- ``data_writer``: the files that a rank writes, or links where they hold that already.
- ``stored_directory``: directories as a format of ``statetree.files``; ``stored_parts``: leaves saved in parts.
- ``file_manifest``, ``metadata``, ``metadata_pickle``, ``data_files``: what is known and checked of the files.
- ``groups``: the ranks, what they decide together, and their errors.
"""

from statetree.dcp.async_stager import AsyncStager
from statetree.dcp.background import async_save
from statetree.dcp.checkpointer import Checkpointer
from statetree.dcp.events import Event

__all__ = ["AsyncStager", "Checkpointer", "Event", "async_save"]
