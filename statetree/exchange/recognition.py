"""Recognition: a collective that is called again with the same tensors moves at once, as it did the last time.

Training calls the same verbs with the same tensors step after step. What such a call moves is recorded, as for
``prepare``, and kept for the next one: then the tensors are only looked at, the ranks tell each other in their one
agreement that all of them know the call by its number, and what was recorded is done again. If some rank does not know
it, all of them describe, agree and plan as ever.

What is kept must neither keep tensors alive nor write to memory that is not theirs any more. It is recorded with
*aliases*: tensors at the same addresses, on storages that own nothing. They are only ever looked at while the tensors
of a call have these addresses, these sizes of storages, and all else that follows has been compared, too.
"""

from __future__ import annotations

from collections import OrderedDict
from datetime import timedelta
from functools import wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar
from weakref import ref

import torch

from statetree.declare import phase, without_collections
from statetree.errors import RankMismatch, StateTreeError, unsignalled
from statetree.exchange.call import Call
from statetree.exchange.group import Group, group_of
from statetree.exchange.prepared import Preparation, preparation_under_way, preparing
from statetree.exchange.sighting import VALUES, Sighting
from statetree.leaves.replicas import replicated
from statetree.spans.columns import storages_of
from statetree.spans.layout import is_dense
from statetree.spans.memory import Memory
from statetree.torch_internals import (
    COPIED_AS_INTEGERS,
    carry_tangents,
    clone_all,
    geometry_guard,
    storage_key,
    version_of,
)
from statetree.tree.atoms import same_value
from statetree.tree.flatten import flatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from statetree.exchange.executor import Action
    from statetree.tree.spec import TreeSpec

P = ParamSpec("P")
T = TypeVar("T")

#: How many calls are kept, and how many are remembered to have been made: the second time they are recorded.
_KEPT_CALLS: Final = 8
_SEEN_CALLS: Final = 64
#: Options that are all that their representation says.
_OPTIONS: Final = VALUES | {timedelta}
#: How often a call must have been seen before it is recorded.
_SEEN_BEFORE: Final = 1
#: How often calls are recorded that are not made again, because other ranks do not or something in them changed.
_MOST_VAIN: Final = 4


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether torch's own clone of a tensor is the same in everything."""
    bare = type(tensor) is torch.Tensor and not vars(tensor) and not tensor.requires_grad
    flat = bare and is_dense(contiguous=tensor.is_contiguous(), shape=tensor.shape, stride=tensor.stride())
    return flat and tensor.dtype not in COPIED_AS_INTEGERS and not (tensor.is_conj() or tensor.is_neg())


class Keeping(Preparation):
    """A call that is made and recorded at once."""

    def __init__(self, sighting: Sighting) -> None:
        super().__init__()
        self._sighting: Sighting | None = sighting

    def agreed(self, call: Call, number: int) -> None:
        """Take note of the number of the call, which that of its first agreement with other ranks is."""
        self.number = self.number or (number if call.group.process_group is not None else 0)

    def agree_again(self, agree: Action) -> None:  # noqa: ARG002 - other ranks do not
        """Note that the ranks would have to agree on elements."""
        self.is_repeatable = False

    def hold(self, spec: TreeSpec, leaves: Sequence[Any], indices: Iterable[int], *, opaque: bool = False) -> None:
        """Hold nothing."""

    def conclude(self, call: Call) -> None:  # noqa: ARG002 - with which all has been agreed on
        """Do what was recorded."""
        assert self._sighting is not None
        _moved(self.recorder.catch_up, self._sighting)
        self._sighting = None


class KeptCall:
    """A call that was made and recorded, with what it was given; ``is_repeatable`` if it can be made again."""

    def __init__(
        self,
        verb: Callable[..., Any],
        sighting: Sighting,
        given: Mapping[str, Any],
        names: Sequence[str],
        call: Call,
        *,
        compares_values: bool,
    ) -> None:
        self._verb = verb
        self._specs, self._facts = sighting.specs, sighting.facts()
        self._values = sighting.values if compares_values else None
        shapes = [tensor.shape for tensor in sighting.tensors]
        strides = [tensor.stride() for tensor in sighting.tensors]
        self._guard = geometry_guard(sighting.tensors, shapes, strides)
        self._process_group = ref(sighting.group.process_group)
        leaves, parts = sighting.aliases()
        left = iter(leaves)
        trees = [spec.unflatten(islice(left, spec.num_leaves)) for spec in sighting.specs]
        versions = list(map(version_of, parts))
        with preparing(Keeping(sighting)) as self._keeping:
            call.hand_over()
            tree = verb(**{**given, **dict(zip(names, trees, strict=True))})
        self._written = [place for place, version in enumerate(map(version_of, parts)) if version != versions[place]]
        self._note_written(sighting)
        self.is_repeatable = self._keeping.is_repeatable and self._keeping.number > 0 and self._guard is not None
        self._result, self._spec = flatten(tree)
        # Of each leaf of the result: which leaf of those that the call was given it is, or -1.
        places = {id(leaf): place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        self._given = [
            places.get(id(leaf), -1) if isinstance(leaf, torch.Tensor) else -1 if compares_values else place
            for place, leaf in enumerate(self._result)
        ]
        rows = list(enumerate(zip(self._result, self._given, strict=True)))
        self._fresh = [place for place, (leaf, given) in rows if given < 0 and isinstance(leaf, torch.Tensor)]
        fresh = [self._result[place] for place in self._fresh]
        lie = list(map(storage_key, storages_of([getattr(leaf, "_local_tensor", leaf) for leaf in fresh])))
        assert set(lie).isdisjoint(map(storage_key, storages_of(parts)))
        self._are_simple = len(set(lie)) == len(fresh) and all(map(_is_simple, fresh))
        self._let_go()

    def is_of(self, sighting: Sighting) -> bool:
        """Whether a call is given the same, as far as its key does not tell, and may move it."""
        if not (
            self._process_group() is sighting.group.process_group
            and self._facts == sighting.facts()
            and self._guard is not None
            and self._guard(sighting.tensors)
            and self._specs == sighting.specs
            and (self._values is None or all(map(same_value, self._values, sighting.values)))
            and not carry_tangents(sighting.parts)
        ):
            return False
        try:
            self._keeping.recorder.check()
        except StateTreeError:  # whoever makes the call anew says why
            return False
        return True

    def result(self, leaves: Sequence[Any]) -> Any:
        """Return the result that a call has that is given some leaves: what is fresh in it is so each time."""
        found = [leaves[given] if given >= 0 else leaf for leaf, given in zip(self._result, self._given, strict=True)]
        fresh = [self._result[place] for place in self._fresh]
        if self.is_repeatable and self._are_simple:
            fresh = clone_all(fresh)
        elif self.is_repeatable:  # otherwise nobody else gets them
            fresh = replicated(self._verb.__name__, fresh, Memory(), copy=True)
        for place, tensor in zip(self._fresh, fresh, strict=True):
            found[place] = tensor
        return self._spec.unflatten(found)

    def repeat(self, sighting: Sighting, call: Call) -> bool:
        """Make the call again if all ranks do, and return whether they do."""
        recorded = self._keeping.call
        assert recorded is not None
        if not call.all_repeat(self._keeping.number):
            return False
        recorded.group.process_group = sighting.group.process_group
        with phase(f"{call.verb}.move"):
            _moved(self._keeping.recorder.replay, sighting)
        self._note_written(sighting)
        self._let_go()
        return True

    @property
    def is_alive(self) -> bool:
        """Whether the process group was not destroyed."""
        group = self._process_group()
        return group is not None and Group(group, 0, [0], "").is_alive

    def _note_written(self, sighting: Sighting) -> None:
        """Have the tensors say that they were written: their aliases do not share their versions."""
        torch.autograd.graph.increment_version([sighting.parts[place] for place in self._written])

    def _let_go(self) -> None:
        """Do not keep a process group alive."""
        if self._keeping.call is not None:
            self._keeping.call.group.process_group = None


#: What is still written, perhaps, by calls that failed while they communicated: aliases do not hold it.
_LOST: Final[list[Sighting]] = []


def _moved(move: Callable[[], None], sighting: Sighting) -> None:
    """Communicate, and if that fails hold what the call was given for good: a backend may go on for a while.

    It may after an interrupt, too. What is refused before anything is sent is not held.
    """
    try:
        move()
    except BaseException as error:
        if isinstance(error, RankMismatch) or not isinstance(error, StateTreeError):
            _LOST.append(sighting)
        raise


#: Calls by what they were given; and for those made lately, by its hash, once more than they were recorded in vain.
_KEPT: Final[OrderedDict[Any, KeptCall]] = OrderedDict()
_SEEN: Final[OrderedDict[int, int]] = OrderedDict()


def recognised(
    *names: str, compares_values: bool = True, alone: Callable[[Mapping[str, Any]], bool] = lambda _: False
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Have a collective do at once what it did before, when it is called with the same tensors again (a decorator).

    ``names`` are its arguments that are trees. They come first; others are options. ``compares_values`` is whether the
    result depends on plain values of these, or passes them on. ``alone`` says with which options it communicates with
    nobody.
    """

    def declare(verb: Callable[P, T]) -> Callable[P, T]:
        @wraps(verb)
        def wrapper(*args: P.args, **options: P.kwargs) -> T:
            given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **options}
            is_complete = len(given) == len(args) + len(options) and given.keys() >= set(names)
            group = None
            if is_complete and preparation_under_way() is None and not alone(options):
                group = group_of(verb.__name__, given.get("group"), given.get("timeout"))
            if group is None or group.process_group is None:
                return verb(*args, **options)
            # The others wait already: what fails while this rank looks at its tensors is told to them.
            with Call(verb.__name__, group) as call:
                made: T = _made(verb, names, given, call, compares_values=compares_values)
            return made

        return wrapper

    return declare


@without_collections
def sighted(group: Group, given: Mapping[str, Any], names: Sequence[str], verb: str) -> Sighting | None:
    """Return what a call is given; ``None`` if it is nothing that could be known again."""
    options = {name: value for name, value in given.items() if name not in names and name != "group"}
    if not all(map(_is_told, options.values())) or options.get("union"):  # what other ranks have is not known
        return None
    try:
        return Sighting(verb, [given[name] for name in names], repr(sorted(options.items())), group)
    except unsignalled(Exception):  # whatever it is: the verb comes to it again, and says it as it does
        return None


def _is_told(option: Any) -> bool:
    """Whether an option is all that its representation says."""
    if type(option) in (list, tuple):
        return all(map(_is_told, option))
    return type(option) in _OPTIONS


def _made(
    verb: Callable[..., Any], names: Sequence[str], given: Mapping[str, Any], call: Call, *, compares_values: bool
) -> Any:
    """Make a call: again if it is known, otherwise anew; then record it if that is worth while."""
    sighting = sighted(call.group, given, names, call.verb)
    if sighting is None:
        call.hand_over()
        return verb(**given)
    kept = _KEPT.pop(sighting.key, None)  # nobody else has it while it is made
    name = hash(sighting.key)
    seen = _SEEN.pop(name, 0)
    if kept is not None and kept.is_of(sighting) and kept.repeat(sighting, call):
        _KEPT[sighting.key] = kept
        _SEEN[name] = 1
        return kept.result(sighting.leaves)
    seen += kept is not None
    kept = None  # before memory is taken again
    records = _SEEN_BEFORE <= seen <= _MOST_VAIN
    if records and not sighting.is_ordinary:
        records, seen = False, _MOST_VAIN + 1
    _SEEN[name] = max(seen, 1)
    while len(_SEEN) > _SEEN_CALLS:
        _SEEN.popitem(last=False)
    if not records:
        call.hand_over()
        return verb(**given)
    fresh = KeptCall(verb, sighting, given, names, call, compares_values=compares_values)
    result = fresh.result(sighting.leaves)
    if fresh.is_repeatable:
        for other in [other for other, kept in list(_KEPT.items()) if not kept.is_alive]:
            _KEPT.pop(other, None)  # their group was destroyed: nobody repeats them, and they hold results
        _KEPT[sighting.key] = fresh
        while len(_KEPT) > _KEPT_CALLS:
            _KEPT.popitem(last=False)
    else:
        _SEEN[name] = _MOST_VAIN + 1
    return result
