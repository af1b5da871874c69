"""Whether two tensors, storages or arrays are the same."""

from __future__ import annotations

from typing import Any

import torch

from statetree.testing.findings import VALUES, Findings
from statetree.testing.messages import brief, place
from statetree.testing.objects import is_sharded
from statetree.testing.pickled_state import reduced
from statetree.testing.regions import Region, View, bits_of, raw_bytes, region_of, storage_of
from statetree.testing.walk import layout_parts


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
        kind = f"{type(a).__module__}.{type(a).__qualname__}"
        if is_sharded(a):
            self._judge_sharded(path, a, b)
            return
        names = ["dtype", "layout", "requires_grad", "is_nested", "is_quantized", "is_meta"]
        if self.strictness.device:
            names.append("device")
        agree = [self.expect(path, f"{name} differs", getattr(a, name), getattr(b, name)) for name in names]
        if not all(agree):
            if self.strictness.further:
                self.judge_unlike(path, a, b)
            return
        if torch.nn.parameter.is_lazy(a):
            self.judge_attributes(path, a, b)
        elif kind.startswith("torch._subclasses.fake_tensor"):
            self._judge_fake(path, a, b)
        elif hasattr(type(a), "__tensor_flatten__") and hasattr(type(a), "__tensor_unflatten__"):
            self._judge_wrapper(path, a, b)
        else:
            with torch.no_grad():
                self._judge_elements(path, a, b)
            self.judge_attributes(path, a, b)

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

    def _expect_strides(self, path: str, a: torch.Tensor, b: torch.Tensor) -> bool:
        return not self.strictness.strides or self.expect(path, "strides differ", a.stride(), b.stride())

    def _judge_fake(self, path: str, a: Any, b: Any) -> None:
        same = [self.expect(path, "shape differs", a.shape, b.shape), self._expect_strides(path, a, b)]
        if a.fake_mode is not b.fake_mode:
            self.differ(path, "fake mode differs")
        # Of sizes that are symbols nobody can say where they end.
        if all(same) and a.layout is torch.strided and not a._has_symbolic_sizes_strides:
            self.views.append(View(place(path), region_of(a), region_of(b)))

    def _judge_sharded(self, path: str, a: Any, b: Any) -> None:
        self.expect(path, "metadata differs", a.metadata(), b.metadata())
        self.expect(path, "sharding spec differs", a.sharding_spec(), b.sharding_spec())
        if a._process_group is not b._process_group:
            self.differ(path, "process group differs")
        self.later(f"{path}.local_shards()", a.local_shards(), b.local_shards())
        self.judge_attributes(path, a, b, skip=frozenset(name for name in vars(a) if name.startswith("_")))

    def _judge_wrapper(self, path: str, a: Any, b: Any) -> None:
        (names, context), (others, other_context) = a.__tensor_flatten__(), b.__tensor_flatten__()
        ragged = a.layout is torch.jagged
        # The ragged size of a jagged tensor is a symbol, which equals nothing but itself.
        shapes = [[size if type(size) is int else "ragged" for size in tensor.shape] for tensor in (a, b)]
        self.expect(path, "shape differs", *shapes)
        if not ragged:
            self._expect_strides(path, a, b)
        described: tuple[str, ...] = ()
        if hasattr(a, "placements") and hasattr(a, "device_mesh"):
            described = ("_spec",)  # by its placements, mesh, shape and strides
            self.expect(path, "placements differ", a.placements, b.placements)
            if a.device_mesh != b.device_mesh:
                self.differ(path, "mesh differs", a.device_mesh, b.device_mesh)
        else:
            self.later(f"{path}.__tensor_flatten__()", context, other_context)
        if self.expect(path, "inner tensors differ", list(names), list(others)):
            for name in names:
                if name != "device_mesh":
                    self.later(f"{path}.{name}", getattr(a, name), getattr(b, name))
        self.judge_attributes(path, a, b, skip=frozenset({*names, *described}))

    def _judge_elements(self, path: str, a: torch.Tensor, b: torch.Tensor) -> None:
        if not a.is_nested and not self.expect(path, "shape differs", a.shape, b.shape):
            if self.strictness.further:
                self.judge_unlike(path, a, b)
            return
        if a.layout is torch.sparse_coo:
            self.expect(path, "coalesced differs", a.is_coalesced(), b.is_coalesced())
        parts = layout_parts(a)
        for (name, one), (_, other) in zip(parts, layout_parts(b), strict=True):
            self._judge_strided(f"{path}.{name}", one, other)
        if not parts and a.layout is torch.strided:
            self._judge_strided(path, a, b)
        elif not parts:
            self._judge_strided(path, a.to_dense(), b.to_dense(), copied=True)

    def _judge_strided(self, path: str, a: torch.Tensor, b: torch.Tensor, *, copied: bool = False) -> None:
        facts = [
            self.expect(path, "dtype differs", a.dtype, b.dtype),
            self.expect(path, "shape differs", a.shape, b.shape),
            self._expect_strides(path, a, b),
            self.expect(path, "conj bit differs", a.is_conj(), b.is_conj()),
            self.expect(path, "neg bit differs", a.is_neg(), b.is_neg()),
            self.expect(path, "requires_grad differs", a.requires_grad, b.requires_grad),
        ]
        if a.is_quantized:
            self._judge_scales(path, a, b)
        # A wrapper that does not say how it is taken apart may have no memory: all that it holds is in its attributes.
        has_memory = [tensor.is_meta or storage_of(tensor) is not None for tensor in (a, b)]
        if not all(facts) or not self.expect(path, "memory differs", *has_memory) or not has_memory[0]:
            if self.strictness.further:
                self.judge_unlike(path, a, b)
            return
        if not a.is_meta:
            self._judge_bits(path, a, b)
        if not copied:  # where copies lie says nothing of what they were made of
            self.views.append(View(place(path), region_of(a), region_of(b)))

    def _judge_scales(self, path: str, a: torch.Tensor, b: torch.Tensor) -> None:
        if not self.expect(path, "quantization scheme differs", a.qscheme(), b.qscheme()):
            return
        if a.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            self.expect(path, "scale differs", a.q_scale(), b.q_scale())
            self.expect(path, "zero point differs", a.q_zero_point(), b.q_zero_point())
            return
        self.expect(path, "axis differs", a.q_per_channel_axis(), b.q_per_channel_axis())
        self._judge_strided(f"{path}.scales", a.q_per_channel_scales(), b.q_per_channel_scales())
        self._judge_strided(f"{path}.zero_points", a.q_per_channel_zero_points(), b.q_per_channel_zero_points())

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
