"""Whole training states as checkpoints of ``torch.distributed.checkpoint`` (DCP): it does files and resharding.

``saving`` and ``loading`` hold ``save`` and ``load``, ``background`` holds ``async_save``, on which ``checkpointer``
builds with the directories of ``series``. Below them: ``outline`` says which entries a tree has in a checkpoint,
``structure`` writes and reads its containers (with ``keys``), ``tensors`` says what is saved of a leaf, ``matching``
finds a template's entries in a checkpoint. Towards DCP: ``planners``, ``directories``, ``metadata`` and ``checksums``
(files that nobody vouches for), ``failures``, ``groups`` and ``internals``.
"""

from statetree.dcp.async_stager import AsyncStager
from statetree.dcp.background import async_save
from statetree.dcp.checkpointer import Checkpointer
from statetree.dcp.loading import load
from statetree.dcp.saving import save

__all__ = ["AsyncStager", "Checkpointer", "async_save", "load", "save"]
