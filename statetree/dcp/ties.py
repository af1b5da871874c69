"""Tensors of a template that share memory: loaded apart, and written only where what was saved of them agrees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.dcp.tensors import pieces_of
from statetree.errors import Difference, TreeMismatch
from statetree.spans.columns import Columns
from statetree.spans.overlaps import sharing
from statetree.transforms.allocate_like import allocate_like
from statetree.transforms.copy_into import copy_into

if TYPE_CHECKING:
    from collections.abc import Mapping

    from statetree.paths import Path


class Ties:
    """What is loaded in the place of tensors that share memory: as many with memory of their own.

    Args:
        tensors: What there is to fill, by key.
        paths: Where each lies in the template.

    Attributes:
        receiving: The tensors to load into, by key.
    """

    def __init__(self, tensors: Mapping[str, Any], paths: Mapping[str, Path]) -> None:
        pieces = [(key, piece) for key, tensor in tensors.items() for piece in pieces_of(tensor)]
        keys = dict.fromkeys(pieces[index][0] for index in sharing(Columns([piece for _, piece in pieces])))
        self._tied = {key: tensors[key] for key in keys}
        self._loaded = {
            key: allocate_like(tensor, device=pieces_of(tensor)[0].device) for key, tensor in self._tied.items()
        }
        self._paths = paths
        self.receiving: dict[str, Any] = {**tensors, **self._loaded}

    def tie(self) -> None:
        """Write what was loaded into the tensors that share memory.

        Raises:
            TreeMismatch: If elements in the same place were saved with different values. None of these tensors has
                changed.
        """
        if not self._tied:
            return
        try:
            copy_into(self._loaded, self._tied)
        except TreeMismatch as error:
            found = [
                Difference(self._paths[path[0]], "ties", "values of its own", right)
                for path, _, _, right in error.differences
            ]
            remedy = "The other tensors were loaded. Pass a template in which these do not share memory."
            raise TreeMismatch.between("load", found, remedy) from None
