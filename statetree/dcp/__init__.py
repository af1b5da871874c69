"""Whole training states as checkpoints of ``torch.distributed.checkpoint`` (DCP), which does files and resharding.

A state is flattened down to what DCP writes as one entry. Its structure is written beside these, as one more entry, so
that the state can be loaded without a template; plain DCP reads all others. Files are not trusted.

- ``saving``, ``loading``: ``save`` and ``load``. ``background``: ``async_save``, by a thread with a group of its own.
- ``checkpointer``: ``Checkpointer``, over the directories that ``series`` keeps; ``restoring``: which of them is taken.
  ``run_steps``: which there are. ``step_writer``: one is written. ``schedule``: when. ``events``: what is told.
  ``step_numbers``: steps, metrics, metadata and counts, checked.
  ``stateful``: objects with ``state_dict`` and ``load_state_dict``.
  ``async_stager``: for DCP's own saves.
- ``flat_state``: the entries of a tree, with DCP's keys. ``tensors``: what is saved of a leaf; ``local_pieces``: of a
  distributed one.
- ``plain_values``: values read as data, and made by what ``reconstructors`` and ``numpy_values`` admit.
- ``saved_structure``: a ``TreeSpec`` as text, and back. ``keys``: the keys in it.
- ``stored_directory``: directories as a format of ``statetree.files``; ``nesting``: how DCP itself nests entries.
- ``templates``: which entries of a checkpoint fill a template. ``part_checks``: what indices out of a file must be.
- ``save_planner``, ``directory_writer``: how DCP saves. ``piece_sources``: what is written to a file, and whether it
  holds that already.
- ``file_manifest``, ``metadata``, ``data_files``: what is known and checked of the files. ``foreign_storage``: what a
  reader of DCP reads, in their place.
- ``groups``: the ranks, and what they decide together. ``failures``: their errors. ``internals``: the private parts of
  DCP that are used.
"""

from statetree.dcp.async_stager import AsyncStager
from statetree.dcp.background import async_save
from statetree.dcp.checkpointer import Checkpointer
from statetree.dcp.events import Event
from statetree.dcp.loading import load
from statetree.dcp.saving import save

__all__ = ["AsyncStager", "Checkpointer", "Event", "async_save", "load", "save"]
