"""``AsyncStager``: a ``Stager`` that ``torch.distributed.checkpoint.async_save`` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statetree.stager.stager import Stager
from statetree.torch_internals import resolved

if TYPE_CHECKING:
    import torch

    from statetree.tree.selection import Where


class AsyncStager(Stager):
    """A stager for ``torch.distributed.checkpoint.async_save(..., async_stager=...)``.

    It takes the place of DCP's ``DefaultStager`` and ``BlockingAsyncStager`` and works with both executors. For the
    process executor pass ``share_memory=True``, or every save moves its tensors into shared memory first. Each save in
    flight holds a snapshot: with two at a time (the default of ``max_snapshots``) a third raises ``StagerBusy``.

    DCP's own rules remain (``statetree.dcp.async_save`` handles them). With several ranks, the saving threads
    communicate in the background: pass ``async_save`` a ``process_group`` that nothing else uses, another one for each
    save in flight. Where staging fails on one rank only, the others wait until that group's timeout. DCP's process
    takes one save at a time: wait for its future before the next. Conjugated and negated views are staged as plain
    tensors of the same values.

    Args:
        asynchronous: Whether ``stage`` returns a future, so that staging runs in the background, too. Then DCP's
            ``async_save`` returns an ``AsyncSaveResponse``, and the state's tensors must not change before its
            ``staging_completion`` is done (or ``synchronize_staging`` returns).
        pin_memory: As for ``Stager``.
        share_memory: As for ``Stager``.
        max_snapshots: As for ``Stager``.
        frozen: As for ``Stager``.
        check: As for ``Stager``.

    Example:
        >>> import torch
        >>> from statetree.dcp import AsyncStager
        >>> with AsyncStager() as stager:
        ...     stager.stage({"w": torch.ones(2)})
        {'w': tensor([1., 1.])}
    """

    # DCP's executors hold the staged tree until the process that writes it is done.
    _receivers_are_done = True

    def __init__(
        self,
        *,
        asynchronous: bool = False,
        pin_memory: bool = False,
        share_memory: bool = False,
        max_snapshots: int = 2,
        frozen: Where | None = None,
        check: bool = False,
    ) -> None:
        super().__init__(
            pin_memory=pin_memory, share_memory=share_memory, max_snapshots=max_snapshots, frozen=frozen, check=check
        )
        self.asynchronous = asynchronous
        self._synchronize_after_execute = not asynchronous

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether ``async_save`` is to wait for the staging before it returns."""
        return self._synchronize_after_execute

    def stage(self, state_dict: Any) -> Any:  # a future, if it is asynchronous
        """Stage a tree: return it staged, or a future of that (see ``asynchronous``)."""
        if not self.asynchronous:
            return super().stage(state_dict)
        future = self.stage_async(state_dict)
        if future.done():
            future.result()  # raises what went wrong at once: DCP takes a future that is done for a success
        return future

    def _handed_out(self, staged: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(map(resolved, staged))  # torch loses conjugate and negative bits on the way to another process

    def synchronize_staging(self) -> None:
        """Wait until no staging in progress reads its tree."""
        self.synchronize()
