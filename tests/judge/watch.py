"""Everything about a tree that a pure transform may not change."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from tests.judge.messages import SHOWN_ALONE, contrast, place, raise_for
from tests.judge.objects import Contents, Same, answers, caches_of, contents_of, facts_of, is_collection
from tests.judge.pickled_state import holds_attributes_only
from tests.judge.regions import raw_bytes, storage_of
from tests.judge.values import PLAIN, same_plain
from tests.judge.walk import gradient_of, walk_with_paths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _hooks(tensor: torch.Tensor) -> tuple[Same, ...]:
    kept = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return tuple(Same(hook) for hooks in kept for hook in (hooks or {}).values())


#: What may change of a tensor beside its facts.
_MOMENT: dict[str, Callable[[torch.Tensor], Any]] = {
    "version": lambda tensor: tensor._version,
    "offset": lambda tensor: tensor.storage_offset(),
    "pointer": lambda tensor: None if storage_of(tensor) is None else tensor.untyped_storage().data_ptr(),
    "is_leaf": lambda tensor: tensor.is_leaf,
    "grad": lambda tensor: id(gradient_of(tensor)),
    "hooks": _hooks,
    "retains_grad": lambda tensor: tensor.retains_grad,
}
#: Those of which the values say nothing to anybody.
_ADDRESSES = {"pointer", "grad", "hooks"}


def _all_facts(tensor: torch.Tensor) -> dict[str, Any]:
    return {**answers(tensor, _MOMENT), **facts_of(tensor)}


def _changed_contents(path: str, now: Contents, before: Contents) -> Iterator[str]:
    """Say what an object holds that it did not, by name; plain values may be equal ones."""
    if now.cls is not before.cls:
        yield f"the class of what is at {place(path)} was {before.cls} and is {now.cls}"
    present, past = _by_place(now), _by_place(before)
    found = [f"{place(path + step)} is gone" for step, nth in past if (step, nth) not in present]
    found += [f"{place(path + step)} is new" for step, nth in present if (step, nth) not in past]
    for at, part in present.items():
        was = past.get(at, part)
        if part is not was and not same_plain(part, was):
            is_plain = type(part) in PLAIN and type(was) in PLAIN
            found.append(
                f"{place(path + at[0])} {f'changed: {contrast(was, part)}' if is_plain else 'is another object'}"
            )
    if found or list(present) != list(past):
        named = [line for line in found if not line.startswith(place(f"{path}<key "))]
        yield from named or [f"the order or the keys of the {_described(path, now.cls)} changed"]


def _by_place(contents: Contents) -> dict[tuple[str, int], Any]:
    """Return the parts by their steps; of keys that look alike, by the first, the second, and so on."""
    met: Counter[str] = Counter()
    found = {}
    for step, part in contents.parts():
        found[step, met[step]] = part
        met[step] += 1
    return found


def _state_of(value: Any) -> Any:
    """Return what an object holds besides attributes (an array, a ``bytearray``, a generator); ``None`` of others."""
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if is_collection(value) or isinstance(value, (torch.Tensor, torch.storage.TypedStorage, torch.UntypedStorage)):
        return None
    cls: Any = type(value)
    if holds_attributes_only(cls) or caches_of(cls):
        return None  # attributes are looked at one by one; pickle would take caches along
    try:
        with memoryview(value) as view:
            return view.format, view.shape, view.strides, view.readonly, view.tobytes()
    except (TypeError, ValueError, BufferError):  # it has no such memory
        pass
    try:
        return pickle.dumps(value)
    except Exception:
        return None


class Watch:
    """Remembers everything about a tree that a pure transform may not change.

    Classes and identities of containers and of what they hold (plain values by type and bits), attributes, default
    factories, versions, dtypes, geometry, gradients, hooks, bytes, storage sizes, and what lies in arrays of NumPy,
    sets, random generators and other objects that can be pickled. Not how far Python's own generators have run.
    """

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self._objects = list(walk_with_paths(tree, gradients=True))
        self._contents = [contents_of(value) for _, value in self._objects]
        self._states = [_state_of(value) for _, value in self._objects]
        self._tensors = [(path, value) for path, value in self._objects if isinstance(value, torch.Tensor)]
        self._facts = [_all_facts(value) for _, value in self._tensors]
        # By storage: it, its size, its bytes, and the paths of what lies on it.
        self._storages: dict[int, tuple[torch.UntypedStorage, int, torch.Tensor, list[str]]] = {}
        for path, value in self._objects:
            if (storage := storage_of(value)) is not None:
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = storage, storage.nbytes(), raw_bytes(storage).clone(), []
                self._storages[storage._cdata][3].append(place(path))

    def changes(self) -> list[str]:
        """Return what is different now, one line for each place."""
        found: list[str] = []
        for (path, value), before in zip(self._objects, self._contents, strict=True):
            found += _changed_contents(path, contents_of(value), before)
        for (path, value), state in zip(self._objects, self._states, strict=True):
            if state is not None and _state_of(value) != state:
                found.append(f"what the {_described(path, type(value))} holds changed")
        for storage, nbytes, past_bytes, paths in self._storages.values():
            if storage.nbytes() != nbytes or not torch.equal(raw_bytes(storage), past_bytes):
                more = ", ..." if len(paths) > SHOWN_ALONE else ""
                found.append(f"bytes below {', '.join(paths[:SHOWN_ALONE])}{more} changed")
        for (path, value), past in zip(self._tensors, self._facts, strict=True):
            for name, now in _all_facts(value).items():
                if past[name] != now:
                    values = "" if name in _ADDRESSES else f" from {past[name]} to {now}"
                    found.append(f"the {name} of the tensor at {place(path)} changed{values}")
        return found

    def check(self) -> None:
        """Raise ``AssertionError`` if anything is different now."""
        raise_for("Watch: the tree changed", self.changes())


def _described(path: str, cls: type) -> str:
    return f"{cls.__qualname__} at {place(path)}"
