"""Whether two tensors, storages or arrays are the same."""

from __future__ import annotations

from typing import Any

import torch

from tests.judge.findings import VALUES, Findings
from tests.judge.messages import brief, place
from tests.judge.objects import PLURAL, facts_of, is_fake, is_sharded, is_wrapper
from tests.judge.pickled_state import reduced
from tests.judge.regions import Region, View, bits_of, raw_bytes, region_of, storage_of
from tests.judge.walk import layout_parts, scales_of


class TensorJudge(Findings):
    """Judges what holds elements."""

    def judge_storage(self, path: str, a: Any, b: Any) -> None:
        """Compare two storages, bytes included."""
        if isinstance(a, torch.storage.TypedStorage):
            self.expect(path, "dtype differs", a.dtype, b.dtype)
            a, b = a._untyped_storage, b._untyped_storage
        if self.expect(path, "bytes differ in number", a.nbytes(), b.nbytes()):
            one, other = raw_bytes(a).cpu(), raw_bytes(b).cpu()
            self._expect_bits(path, one, other, one.unsqueeze(-1), other.unsqueeze(-1))
            self.views.append(View(place(path), *(Region(s._cdata, s.data_ptr(), 0, s.nbytes()) for s in (a, b))))

    def judge_array(self, path: str, a: Any, b: Any) -> None:
        """Compare two NumPy arrays by what pickle would make of them: it keeps the order of dims, but no gaps."""
        if not self.strictness.strides:
            a, b = a.copy(order="C"), b.copy(order="C")
        same = [self.expect(path, f"{name} differs", getattr(a, name), getattr(b, name)) for name in ("dtype", "shape")]
        if all(same) and not a.dtype.hasobject and a.tobytes() != b.tobytes():
            self._expect_bits(path, a, b, _bits_of_array(a), _bits_of_array(b))
        elif all(same):
            self.later(f"{path}.__reduce__", reduced(a), reduced(b))
        self.judge_attributes(path, a, b)

    def judge_tensor(self, path: str, a: Any, b: Any) -> None:
        """Compare two tensors of one class."""
        mine, others = facts_of(a), facts_of(b)
        unasked = {*(() if self.strictness.device else ("device",)), *(() if self.strictness.strides else ("strides",))}
        same = [
            self.expect(path, f"{name} {'differ' if name in PLURAL else 'differs'}", mine[name], others[name])
            for name in mine
            if name not in unasked
        ]
        is_distributed = mine["placements"] is not None
        described = {"_spec"} if is_distributed else set()  # by its placements, mesh, shape and strides
        if is_sharded(a):
            described = {name for name in vars(a) if name.startswith("_")}
            self.later(f"{path}.local_shards()", a.local_shards(), b.local_shards())
        elif not all(same):
            if self.strictness.further:
                self.judge_unlike(path, a, b)
            return
        elif is_wrapper(a):
            (names, context), (other_names, other_context) = a.__tensor_flatten__(), b.__tensor_flatten__()
            described |= {*names}
            if not is_distributed:
                self.later(f"{path}.__tensor_flatten__()", context, other_context)
            if self.expect(path, "inner tensors differ", list(names), list(other_names)):
                for name in names:
                    if name != "device_mesh":
                        self.later(f"{path}.{name}", getattr(a, name), getattr(b, name))
        elif not torch.nn.parameter.is_lazy(a):
            with torch.no_grad():
                self._judge_elements(path, a, b)
        if not is_fake(a):  # whose attributes are its mode's
            self.judge_attributes(path, a, b, skip=frozenset(described))

    def judge_unlike(self, path: str, a: Any, b: Any) -> None:
        """Compare elements of two tensors whose classes or geometries differ, and note where they lie."""
        self.has_other_geometry = True
        one, other = (_plain(tensor) for tensor in (a, b))
        if one is None or other is None or one.is_meta != other.is_meta:
            if one is not other:
                self.note(f"elements differ at {place(path)}: those of one tensor are not there", VALUES)
            return
        if one.dtype != other.dtype or one.shape != other.shape:
            sides = [f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in (one, other)]
            self.note(f"elements differ at {place(path)}: {' against '.join(sides)}", VALUES)
        elif not one.is_meta:
            resolved = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in (one, other)]
            self._judge_bits(path, *resolved)
        self.views.append(View(place(path), region_of(one), region_of(other)))

    def _judge_elements(self, path: str, a: torch.Tensor, b: torch.Tensor) -> None:
        """Compare what lies in the memory of two tensors of equal facts, or in that of the tensors they are made of."""
        parts = layout_parts(a)
        for (name, one), (_, other) in zip(parts, layout_parts(b), strict=True):
            self.judge_tensor(f"{path}.{name}", one, other)
        if parts:
            return
        if a.layout is not torch.strided:
            self._judge_bits(path, a.to_dense(), b.to_dense())
            return
        for (name, one), (_, other) in zip(scales_of(a), scales_of(b), strict=True):
            self.judge_tensor(f"{path}.{name}", one, other)
        # A wrapper that does not say how it is taken apart may have no memory: all that it holds is in its attributes.
        has_memory = [tensor.is_meta or is_fake(tensor) or storage_of(tensor) is not None for tensor in (a, b)]
        if self.expect(path, "memory differs", *has_memory) and has_memory[0]:
            if not (a.is_meta or is_fake(a)):
                self._judge_bits(path, a, b)
            if not a._has_symbolic_sizes_strides:  # of which nobody can say where they end
                self.views.append(View(place(path), region_of(a), region_of(b)))

    def _judge_bits(self, path: str, a: torch.Tensor, b: torch.Tensor) -> None:
        one, other = bits_of(a), bits_of(b)
        if one is None or other is None:
            if one is not other:
                self.differ(path, "one storage is freed")
            return
        self._expect_bits(path, a, b, one.cpu(), other.cpu())  # the trees may be on different devices

    def _expect_bits(self, path: str, a: Any, b: Any, one: torch.Tensor, other: torch.Tensor) -> None:
        """Note where the elements of tensors or arrays differ, of which the bytes are given: those of each, last."""
        if torch.equal(one, other):
            return
        places = (one != other).any(-1)
        index = tuple(places.nonzero()[0].tolist())
        mine, others = _element(a, index), _element(b, index)
        if mine == others:  # it takes the bits to tell them apart
            mine, others = (f"{mine} of bytes {bytes(bits[index].tolist()).hex()}" for bits in (one, other))
        self.note(
            f"elements differ at {place(path)}, {int(places.sum())} of {places.numel()}, "
            f"the first at index {index}: {mine} against {others}",
            VALUES,
        )


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor as one that is a view on a storage, or ``None`` if it is none."""
    if is_sharded(tensor) or not (tensor.is_meta or storage_of(tensor) is not None) or tensor.layout != torch.strided:
        return None
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def _bits_of_array(array: Any) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
    return flat.view(*array.shape, array.itemsize)


def _element(array: Any, index: tuple[int, ...]) -> str:
    try:
        return brief(array[index].item())
    except (RuntimeError, NotImplementedError):  # torch cannot say it for every dtype
        return "an element"
