"""``check_transform`` judged: it must find each of these faults, planted into a transform that is right otherwise."""

import collections
import copy

import pytest
import torch

import statetree as st
from statetree.testing import check_transform, laws
from tests.judge.test_planted_faults import FAULTS
from tests.unit.testing.test_assertions import BEYOND

PLANTED = []
MAX_LINES = 15
EARLIER = {}


def plant(law):
    """Add a transform that breaks a law."""

    def add(transform):
        PLANTED.append(pytest.param(transform, law, id=transform.__name__))
        return transform

    return add


def tensors(law, *, when=lambda leaf: True, copied=st.offload):
    """Plant a fault into what becomes of single tensors."""

    def add(change):
        def one(leaf):
            return change(leaf) if isinstance(leaf, torch.Tensor) and not leaf.is_meta and when(leaf) else leaf

        def transform(tree):
            with torch.no_grad():
                return st.map_leaves(one, copied(tree))

        transform.__name__ = change.__name__
        return plant(law)(transform)

    return add


def plain(law, cls):
    """Plant a fault into what becomes of plain values of a class."""

    def add(change):
        def transform(tree):
            return st.map_leaves(lambda leaf: change(leaf) if type(leaf) is cls else leaf, st.offload(tree))

        transform.__name__ = change.__name__
        return plant(law)(transform)

    return add


def containers(law, cls):
    """Plant a fault into what becomes of containers of a class, at any depth."""

    def add(change):
        def rewritten(value):
            if type(value) in (dict, collections.OrderedDict):
                for key in value:
                    value[key] = rewritten(value[key])
            elif type(value) is list:
                value[:] = map(rewritten, value)
            return change(value) if isinstance(value, cls) else value

        def transform(tree):
            return rewritten(st.offload(tree))

        transform.__name__ = change.__name__
        return plant(law)(transform)

    return add


def floating(leaf):
    return leaf.is_floating_point() and leaf.dtype.itemsize > 1 and leaf.numel() and 0 not in leaf.stride()


# Geometry


@tensors(laws.geometry)
def strides_lost(leaf):
    return leaf.contiguous()


@tensors(laws.geometry, when=lambda leaf: 0 in leaf.stride() and leaf.numel())
def expansion_lost(leaf):
    return leaf.clone(memory_format=torch.contiguous_format)


@tensors(laws.geometry)
def conj_bit_resolved(leaf):
    return leaf.resolve_conj()


@tensors(laws.values, when=torch.Tensor.is_conj)
def conj_bit_cleared(leaf):
    return leaf.conj()


@tensors(laws.geometry)
def neg_bit_resolved(leaf):
    return leaf.resolve_neg()


@tensors(laws.values, when=torch.Tensor.is_neg)
def neg_bit_cleared(leaf):
    return torch._neg_view(leaf)


@tensors(laws.geometry)
def requires_grad_lost(leaf):
    return leaf.detach() if type(leaf) is torch.Tensor else leaf


@tensors(laws.geometry, when=lambda leaf: type(leaf) is torch.Tensor and floating(leaf))
def requires_grad_set(leaf):
    return leaf.requires_grad_()


@tensors(laws.geometry)
def parameter_turned_into_tensor(leaf):
    return leaf.data if isinstance(leaf, torch.nn.Parameter) else leaf


@tensors(laws.geometry, when=lambda leaf: type(leaf) not in (torch.Tensor, torch.nn.Parameter))
def subclass_lost(leaf):
    return leaf.as_subclass(torch.Tensor)


@tensors(laws.geometry, when=lambda leaf: vars(leaf))
def attribute_lost(leaf):
    vars(leaf).clear()
    return leaf


@tensors(laws.geometry, when=lambda leaf: leaf.dtype is torch.float64)
def precision_lost(leaf):
    return leaf.float()


@tensors(laws.geometry, when=lambda leaf: leaf.dtype is torch.bfloat16)
def dtype_widened(leaf):
    return leaf.float()


@tensors(laws.geometry, when=lambda leaf: leaf.dtype is torch.bool)
def bool_turned_into_bytes(leaf):
    return leaf.to(torch.uint8)


@tensors(laws.geometry, when=lambda leaf: leaf.dim() == 0)
def scalar_turned_into_vector(leaf):
    return leaf.reshape(1)


@tensors(laws.geometry, when=lambda leaf: leaf.dim() > 1)
def flattened(leaf):
    return leaf.reshape(-1)


@tensors(laws.geometry, when=lambda leaf: not leaf.numel())
def moved_to_meta(leaf):
    return leaf.to("meta")


# Values


@tensors(laws.values, when=floating)
def last_element_lost(leaf):
    leaf.view(-1)[-1:].zero_() if leaf.is_contiguous() else leaf[..., -1].zero_()
    return leaf


@tensors(laws.values, when=lambda leaf: leaf.is_complex() and leaf.numel() and leaf.is_contiguous())
def imaginary_part_lost(leaf):
    return leaf - 1j * leaf.imag


@tensors(laws.values, when=lambda leaf: leaf.dim() == 2 and leaf.shape[0] == leaf.shape[1])
def transposed(leaf):
    return leaf.t()


@tensors(laws.values, when=lambda leaf: floating(leaf) and leaf.dtype is torch.float32)
def rounded_to_half(leaf):
    return leaf.add(0.0001)


@tensors(laws.values, when=lambda leaf: leaf.dim() and leaf.shape[0] > 1 and leaf.is_contiguous())
def rows_rolled(leaf):
    return leaf.view(torch.uint8).roll(1).view(leaf.dtype) if leaf.dim() == 1 else leaf


@plain(laws.values, float)
def number_rounded(value):
    return float(int(value)) if abs(value) < 1e9 else value


@plain(laws.values, float)
def nan_lost(value):
    return value if value == value else 0.0


@plain(laws.values, bool)
def bool_turned_into_int(value):
    return int(value)


@plain(laws.values, int)
def int_turned_into_float(value):
    return float(value % 1000)


@plain(laws.values, type(None))
def none_turned_into_zero(value):
    return 0


@plain(laws.values, str)
def string_cut(value):
    return value[:-1]


@plain(laws.values, tuple)
def nothing_is_done_to_leaves_that_do_not_exist(value):
    return value


PLANTED.pop()  # the one above is right: a check of the checks below


# Structure


@containers(laws.structure, dict)
def keys_sorted(value):
    items = sorted(value.items(), key=lambda item: str(item[0]))
    value.clear()
    value.update(items)
    return value


@containers(laws.structure, collections.OrderedDict)
def ordered_dict_turned_into_dict(value):
    return dict(value)


@containers(laws.structure, collections.OrderedDict)
def metadata_lost(value):
    vars(value).clear()
    return value


@containers(laws.structure, tuple)
def tuple_turned_into_list(value):
    return list(value)


@containers(laws.structure, tuple)
def namedtuple_turned_into_tuple(value):
    return tuple(value)


@containers(laws.structure, collections.defaultdict)
def default_factory_lost(value):
    value.default_factory = None
    return value


@containers(laws.structure, collections.deque)
def maxlen_lost(value):
    return collections.deque(value)


@containers(laws.structure, collections.Counter)
def counter_turned_into_dict(value):
    return dict(value)


@containers(laws.structure, list)
def none_vanished(value):
    value[:] = [item for item in value if item is not None]
    return value


@containers(laws.structure, dict)
def empty_container_vanished(value):
    for key in [key for key, held in value.items() if held == {} and isinstance(held, dict)]:
        del value[key]
    return value


@containers(laws.structure, dict)
def keys_turned_into_strings(value):
    items = [(str(key), held) for key, held in value.items()]
    value.clear()
    value.update(items)
    return value


@containers(laws.structure, dict)
def key_added(value):
    value["version"] = 1
    return value


@containers(laws.structure, object)
def dataclass_turned_into_dict(value):
    return dict(vars(value)) if type(value).__name__ == "Pair" else value


# Ties


@tensors(laws.ties)
def ties_lost(leaf):
    return leaf.clone()


@plant(laws.ties)
def ties_of_one_object_lost(tree):
    return st.map_leaves(lambda leaf: leaf.view(leaf.shape) if type(leaf) is torch.Tensor else leaf, st.offload(tree))


@plant(laws.ties)
def equal_tensors_tied(tree):
    found = {}

    def one(leaf):
        if not isinstance(leaf, torch.Tensor) or leaf.is_meta:
            return leaf
        return found.setdefault((leaf.dtype, leaf.shape, leaf.stride()), leaf)

    return st.map_leaves(one, st.offload(tree))


@plant(laws.ties)
def overlap_shifted(tree):
    """Every storage becomes one of its own, and views begin at its beginning."""

    def one(leaf):
        if type(leaf) is not torch.Tensor or leaf.is_meta or leaf.requires_grad or not leaf.storage_offset():
            return leaf
        return leaf.as_strided(leaf.shape, leaf.stride(), 0)

    return st.map_leaves(one, st.offload(tree))


# Purity


@plant(laws.pure)
def argument_written(tree):
    for leaf in st.flatten(tree)[0]:
        if isinstance(leaf, torch.Tensor) and not leaf.is_meta and not leaf.requires_grad and floating(leaf):
            leaf.add_(0)
    return st.offload(tree)


@plant(laws.pure)
def bytes_written_behind_the_version_counter(tree):
    result = st.offload(tree)
    for leaf in st.flatten(tree)[0]:
        if isinstance(leaf, torch.Tensor) and not leaf.is_meta and floating(leaf):
            leaf.data.zero_()
    return result


@plant(laws.pure)
def key_taken_out(tree):
    result = st.offload(tree)
    if isinstance(tree, dict):
        tree.pop("w", None)
    return result


@plant(laws.pure)
def attribute_set_on_the_argument(tree):
    for leaf in st.flatten(tree)[0]:
        if isinstance(leaf, torch.Tensor):
            leaf.seen = True
    return st.offload(tree)


@plant(laws.pure)
def gradient_made(tree):
    for leaf in st.flatten(tree)[0]:
        if isinstance(leaf, torch.nn.Parameter) and leaf.requires_grad and not leaf.is_meta:
            leaf.grad = torch.zeros_like(leaf)
    return st.offload(tree)


@plant(laws.pure)
def requires_grad_of_the_argument_cleared(tree):
    for leaf in st.flatten(tree)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.is_leaf:
            leaf.requires_grad_(False)
    return st.offload(tree)


# Independence


@plant(laws.independent)
def alias_kept(tree):
    return st.map_leaves(lambda leaf: leaf, tree)


@plant(laws.independent)
def view_kept(tree):
    return st.map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, tree)


@plant(laws.independent)
def memory_of_numpy_shared(tree):
    def one(leaf):
        if type(leaf) is not torch.Tensor or leaf.dtype is not torch.float32 or leaf.requires_grad or leaf.is_meta:
            return leaf
        return torch.from_numpy(leaf.resolve_neg().numpy())

    return st.map_leaves(one, st.map_leaves(lambda leaf: leaf, tree))


@plant(laws.independent)
def history_kept(tree):
    def one(leaf):
        return leaf.clone() if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_meta else leaf

    return st.map_leaves(one, tree)


@plant(laws.separate)
def inner_containers_kept(tree):
    copied = st.offload(tree)
    return {**copied, **{k: v for k, v in tree.items() if isinstance(v, dict)}} if type(tree) is dict else copied


@plant(laws.separate)
def opaque_objects_kept(tree):
    return st.map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


# What goes on between calls


@plant(laws.stable)
def earlier_result_overwritten(tree):
    leaves, spec = st.flatten(tree)
    key = repr([(str(path), type(leaf)) for path, leaf in zip(spec.paths(), leaves, strict=True)])
    known = EARLIER.get(key)
    if known is None or not st.similarity(tree, known, values=False):
        EARLIER[key] = st.offload(tree)
        return EARLIER[key]
    return st.copy_into(tree, known)


@plant(laws.idempotent)
def wrapped_again(tree):
    return {"state": st.offload(tree)}


@tensors(laws.idempotent, when=floating)
def doubled_each_time(leaf):
    return leaf.mul_(2)


@plant(laws.commutes_with_offload)
def told_by_where_it_lies(tree):
    """A view of a larger storage is treated otherwise, and a copy is none."""

    def one(leaf):
        if type(leaf) is torch.Tensor and not leaf.is_meta and leaf.storage_offset():
            return torch.zeros_like(leaf)
        return leaf

    return st.map_leaves(one, tree)


@plant(laws.streams)
def divided_by_what_the_whole_tree_has(tree):
    copied = st.offload(tree)
    count = len(st.flatten(tree)[0])
    return st.map_leaves(lambda leaf: leaf * count if type(leaf) is torch.Tensor and floating(leaf) else leaf, copied)


@plant(laws.accepts)
def fails_with_nothing_in_it(tree):
    for leaf in st.flatten(tree)[0]:
        if isinstance(leaf, torch.Tensor) and not leaf.is_meta and leaf.dtype is torch.float32:
            leaf.max()
    return st.offload(tree)


@plant(laws.accepts)
def fails_with_none(tree):
    return st.map_leaves(lambda leaf: leaf.clone() if not isinstance(leaf, int | float | str) else leaf, tree)


@pytest.mark.parametrize(("transform", "law"), PLANTED)
def test_a_planted_fault_is_found(transform, law):
    with pytest.raises(AssertionError, match=f"{law.name} does not hold") as caught:
        check_transform(transform, laws=[law])
    source = str(caught.value).partition("does not hold. ")[2].partition("\n\n")[2]
    assert f"_{law.name}():" in source
    assert len(source.splitlines()) <= MAX_LINES


@pytest.mark.slow
def test_what_is_right_is_not_blamed():
    assert check_transform(nothing_is_done_to_leaves_that_do_not_exist, laws=laws.ALL)
    assert check_transform(st.offload)
    blamed = check_transform(copy.deepcopy).broken  # which refuses, and forgets what torch's documentation says
    assert set(blamed) == {"accepts", "geometry", "ties"}


def test_there_are_enough_faults():
    assert len(PLANTED) >= 60


@pytest.mark.parametrize("make", [made for made in FAULTS if made.id not in BEYOND])
def test_whatever_two_trees_differ_in_belongs_to_a_law(make):
    """No difference that is noticed is lost between the laws."""
    left, right = make()
    found = []
    for law in (laws.structure, laws.geometry, laws.values, laws.ties):
        try:
            law(lambda _: right, lambda: left)
        except AssertionError:
            found.append(law.name)
    assert found
