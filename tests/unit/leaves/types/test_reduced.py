"""Subclasses with ``__torch_dispatch__`` and ``__reduce_ex__``, but no ``__tensor_flatten__``: Transformer Engine's."""

import pytest
import torch

import statetree as st


class Scaled(torch.Tensor):
    """Bytes with a scale, laid out as ``Float8Tensor`` is."""

    @staticmethod
    def __new__(cls, data, scale, *, kind="e4m3", requires_grad=False):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, requires_grad=requires_grad)

    def __init__(self, data, scale, *, kind="e4m3", requires_grad=False):
        self.data_, self.scale, self.kind, self.cache = data, scale, kind, {}

    @classmethod
    def make(cls, data, scale, kind):
        return cls(data, scale, kind=kind)

    def __reduce_ex__(self, protocol):
        return Scaled.make, (self.data_, self.scale, self.kind)

    def __repr__(self):
        return "Scaled"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_, args[0].scale, kind=args[0].kind)
        raise NotImplementedError(func)


class Copies(Scaled):
    """Gives out copies of what is inside."""

    def __reduce_ex__(self, protocol):
        return Copies.make, (self.data_.clone(), self.scale, self.kind)


class Forgets(Scaled):
    """Makes something else of what it gave out."""

    def __reduce_ex__(self, protocol):
        return Forgets.make, (self.data_, self.scale, "e5m2" if self.kind == "e4m3" else "e4m3")


class BecomesPlain(Scaled):
    def __reduce_ex__(self, protocol):
        return torch.Tensor.float, (self.data_,)


def scaled(start=0, cls=Scaled, **options):
    return cls(torch.arange(start, start + 6, dtype=torch.uint8).view(2, 3), torch.tensor([start + 0.5]), **options)


@pytest.mark.parametrize("verb", [st.offload, lambda tree: st.Stager().stage(tree)], ids=["offload", "stage"])
def test_copies_are_exact(verb):
    first = scaled(3, kind="e5m2", requires_grad=True)
    first.note, first.extra = "note", torch.arange(2)
    tree = {"a": first, "again": first, "tied": first.scale, "p": torch.nn.Parameter(scaled(7))}
    copied = verb(tree)
    again = copied["a"]
    assert (type(again), again.kind, again.requires_grad, again.note) == (Scaled, "e5m2", True, "note")
    assert torch.equal(again.data_, first.data_)
    assert torch.equal(again.scale, first.scale)
    assert torch.equal(again.extra, first.extra)
    assert again.data_.data_ptr() != first.data_.data_ptr()
    assert copied["again"] is again
    assert copied["tied"].data_ptr() == again.scale.data_ptr()
    assert isinstance(copied["p"], torch.nn.Parameter)
    assert torch.equal(copied["p"].data_, tree["p"].data_)


def test_memory_is_allocated_for_them():
    made = st.allocate_like({"w": scaled()})["w"]
    assert (type(made), made.shape, made.data_.shape, made.kind) == (Scaled, (2, 3), (2, 3), "e4m3")


def test_they_are_written_to():
    src, dst = {"w": scaled(3)}, {"w": scaled(50)}
    data, scale = dst["w"].data_, dst["w"].scale
    assert st.similarity(src, dst, values=False)
    assert not st.similarity(src, dst, values=True)
    result = st.copy_into(src, dst)
    assert result["w"] is dst["w"]
    assert dst["w"].data_ is data
    assert torch.equal(data, src["w"].data_)
    assert torch.equal(scale, src["w"].scale)
    assert st.similarity(src, dst, values=True)


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (lambda: scaled(kind="e5m2"), "metadata"),
        (lambda: Scaled(torch.zeros(3, 2, dtype=torch.uint8), torch.zeros(1)), "shape"),
        (lambda: torch.zeros(2, 3), "leaf type"),
    ],
    ids=["kind", "shape", "plain"],
)
def test_others_do_not_fit(other, kind):
    src, dst = {"w": scaled()}, {"w": other()}
    assert kind in {difference.kind for difference in st.similarity(src, dst, values=False).differences}
    with pytest.raises(st.TreeMismatch, match=f"{kind} differs at w"):
        st.copy_into(src, dst)


@pytest.mark.parametrize("cls", [Copies, Forgets, BecomesPlain])
@pytest.mark.parametrize("verb", [st.offload, st.allocate_like, lambda tree: st.copy_into(tree, tree)])
def test_what_is_not_given_out_as_it_is_is_refused(cls, verb):
    with pytest.raises(
        st.UnsupportedLeaf, match=r"at w \(.*\) cannot be taken apart: .* __reduce_ex__ that gives out"
    ) as caught:
        verb({"w": scaled(cls=cls)})
    assert caught.value.path == "w"
    assert not st.similarity({"w": scaled(cls=cls)}, {"w": scaled(cls=cls)}, values=False)


def test_classes_that_say_nothing_are_refused():
    class Silent(Scaled):
        __reduce_ex__ = torch.Tensor.__reduce_ex__

    with pytest.raises(st.UnsupportedLeaf, match="expected __tensor_flatten__"):
        st.offload({"w": scaled(cls=Silent)})


def test_digests_and_deltas_notice_what_is_no_tensor():
    base, new = {"w": scaled(kind="e4m3")}, {"w": scaled(kind="e5m2")}
    assert st.digest(base) != st.digest(new)
    assert st.digest(base) == st.digest({"w": scaled(kind="e4m3")})
    delta = st.delta(new, base)
    assert list(delta.changed) == ["w"]
    assert st.apply_delta(delta, base)["w"].kind == "e5m2"
