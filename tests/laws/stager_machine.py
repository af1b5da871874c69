"""A stateful test of stagers: hypothesis makes up what a training loop does, and looks at every staged tree."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as hyp
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from statetree.testing.conformance_suite import StagerAdapter
from statetree.tree.flatten import flatten
from tests.judge import assert_trees_equal

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = hyp.sampled_from([0, 1, 7, 32, 64, 300, (1 << 18) + 5])  # the last gets a block of its own
DTYPES = hyp.sampled_from([torch.float32, torch.int32, torch.float16, torch.complex64])


@dataclasses.dataclass(eq=False)
class HeldSnapshot:
    """A staged tree, or what is left of one, and what must be in it.

    Attributes:
        staged: What was staged.
        expected: What it was then.
        leases: Whether memory of the stager of now is in use for it, not of one that was closed.
    """

    staged: Any
    expected: Any
    leases: bool = True


class StagerMachine(RuleBasedStateMachine):
    """A stateful test of a stager: whatever happens, what was staged stays what it was.

    Tensors come, change, are resized, tied and swapped; trees are staged, held, dropped, or kept by a view alone; the
    stager is closed, and another one made. After every step each staged tree that is still held is compared with a deep
    copy of the state from the moment of its stage.

    Subclasses set ``make``, and may say which errors of a stage are no fault.

    Attributes:
        make: A function that makes a stager: an object with ``stage``, and perhaps ``wait`` and ``close``, as
            ``conformance`` takes it.
        refusals: Errors with which a stage may be refused, as one is while too many staged trees are held.
    """

    make: Callable[[], Any]
    refusals: tuple[type[BaseException], ...] = ()

    @initialize()
    def begin(self) -> None:
        """Make a stager, and a state."""
        self.stager = self.make()
        self.begin_state()

    def begin_state(self) -> None:
        """Make the state."""
        self.held: list[HeldSnapshot] = []
        self.counter = 0
        self.state: dict[str, Any] = {
            "w": self.fresh(64),
            "a": self.fresh(32),
            "b": self.fresh(7),
            "nested": [torch.ones(3)],
            "step": 0,
        }

    def teardown(self) -> None:
        """Close the stager; what is held must outlive it."""
        if hasattr(self, "held"):
            self.settle()
            self.adapter().close()
            self.unchanged()

    def settle(self) -> None:
        """Wait until the state may be changed."""

    def adapter(self) -> StagerAdapter:
        """Return the functions of the stager."""
        return StagerAdapter(self.stager)

    def fresh(self, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a new tensor with elements that no other has in the same places."""
        self.counter += 1
        return torch.arange(self.counter, self.counter + size, dtype=torch.float32).to(dtype)

    # What a training loop does to its state

    @rule(key=hyp.sampled_from("wabc"), size=SIZES, dtype=DTYPES)
    def put(self, key: str, size: int, dtype: torch.dtype) -> None:
        """Put a new tensor into the state."""
        self.state[key] = self.fresh(size, dtype)

    @rule(
        key=hyp.sampled_from("abc"), kind=hyp.sampled_from(["alias", "slice", "steps", "square", "real", "parameter"])
    )
    def tie(self, key: str, kind: str) -> None:
        """Put something into the state that shares memory with what is there."""
        base = self.state["w"]
        ties: dict[str, Callable[[], Any]] = {
            "alias": lambda: base,
            "slice": lambda: base[1:],
            "steps": lambda: base[::2],
            "square": lambda: base[:25].view(5, 5).t() if base.numel() > 25 and base.dim() == 1 else base,
            "real": lambda: base.real,
            "parameter": lambda: torch.nn.Parameter(base.detach().contiguous(), requires_grad=False),
        }
        self.state[key] = ties[kind]()

    @rule(key=hyp.sampled_from("wabc"), change=hyp.sampled_from(["dtype", "strides", "class", "offset"]))
    def change_one_fact(self, key: str, change: str) -> None:
        """Change one fact about a tensor; the shape stays."""
        if key not in self.state:
            return
        old = self.state[key]
        others: dict[str, Callable[[], Any]] = {
            "dtype": lambda: old.real.to(torch.int32 if old.dtype != torch.int32 else torch.float32),
            "strides": lambda: old.repeat_interleave(2, -1)[..., ::2],
            "class": lambda: torch.nn.Parameter(old.detach().contiguous(), requires_grad=False),
            "offset": lambda: torch.cat([old.reshape(-1)[:1], old.reshape(-1)])[1:].view(old.shape),
        }
        self.state[key] = others[change]()

    @rule(key=hyp.sampled_from("abc"))
    def remove(self, key: str) -> None:
        """Take something out."""
        self.state.pop(key, None)

    @rule(nested=hyp.sampled_from([[], (), {"a": 1}, [[torch.ones(2)]], ({"b": None},)]))
    def restructure(self, nested: Any) -> None:
        """Put other containers into the state."""
        self.state["nested"] = copy.deepcopy(nested)

    @rule()
    def train(self) -> None:
        """Write into every tensor."""
        self.settle()
        self.state["step"] += 1
        for leaf in flatten(self.state)[0]:
            if isinstance(leaf, torch.Tensor):
                leaf.detach().add_(1)

    @rule()
    def clone_everything(self) -> None:
        """Make all tensors anew, as hooks of state dicts do."""
        self.state = copy.deepcopy(self.state)

    @rule(size=SIZES)
    def swap_data(self, size: int) -> None:
        """Give a tensor other memory."""
        self.state["w"].data = self.fresh(size, self.state["w"].dtype)

    @rule(size=SIZES)
    def resize_a_tensor(self, size: int) -> None:
        """Resize a tensor in place."""
        self.settle()
        self.state["w"].resize_(size)
        self.state["w"].fill_(float(self.counter))

    @rule(which=hyp.integers(0, 3))
    def drop(self, which: int) -> None:
        """Let go of a staged tree."""
        del self.held[which : which + 1]

    @rule(which=hyp.integers(0, 3), key=hyp.sampled_from("wabc"))
    def keep_a_view_alone(self, which: int, key: str) -> None:
        """Let go of a staged tree, but for a view."""
        for held in self.held[which : which + 1]:
            self.held.remove(held)
            if isinstance(held.staged, dict) and key in held.staged and held.staged[key].numel() > 2:
                self.held.append(HeldSnapshot(held.staged[key][1:], held.expected[key][1:], held.leases))

    @rule(which=hyp.integers(0, 3))
    def train_the_staged_copy(self, which: int) -> None:
        """Write into a staged tree: it belongs to whoever holds it."""
        leaves = [flatten([held.staged, held.expected])[0] for held in self.held[which : which + 1]]
        for leaf in chain.from_iterable(leaves):
            if isinstance(leaf, torch.Tensor):
                leaf.detach().fill_(-float(self.counter))

    @rule()
    def stage(self) -> None:
        """Stage the state."""
        expected = copy.deepcopy(self.state)
        with contextlib.suppress(*self.refusals):
            self.held.append(HeldSnapshot(self.adapter().copied(self.state), expected))

    @rule()
    def close_and_begin_anew(self) -> None:
        """Close the stager, and go on with another one; what is held stays."""
        self.settle()
        self.adapter().close()
        self.stager = self.make()

    @precondition(lambda self: hasattr(self, "held"))
    @invariant()
    def unchanged(self) -> None:
        """Compare what is held with what it was."""
        for held in self.held:
            # deepcopy unties a Parameter from its tensor, and what is staged may lie in one piece of memory.
            assert_trees_equal(held.staged, held.expected, storages=False, ties=False)
