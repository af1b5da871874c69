"""What a type checker knows of the verbs of one process."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, assert_type

import torch

import statetree as st
from statetree.stager.stats import StagerStats


def structure(state: dict[str, Any]) -> None:
    leaves, spec = st.flatten(state)
    assert_type(leaves, list[Any])
    assert_type(spec, st.TreeSpec)
    assert_type(spec.num_leaves, int)
    assert_type(spec.paths(), list[st.Path])
    assert_type(spec.flat_keys(), list[str])
    assert_type(st.unflatten(spec, leaves), Any)
    assert_type(st.unflatten(spec, (leaf for leaf in leaves)), Any)
    assert_type(st.paths(state), list[st.Path])
    assert_type(st.paths(state)[0].child("weight").parent, st.Path)
    assert_type(st.paths(state)[0](state), Any)
    assert_type(st.to_flat(state), tuple[dict[str, Any], st.TreeSpec])
    assert_type(st.from_flat({"a": 1}, spec), Any)


def functions(state: dict[str, Any], other: dict[str, Any]) -> None:
    def halve(leaf: torch.Tensor) -> torch.Tensor:
        return leaf / 2

    def lerp(path: st.Path, leaf: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return leaf.lerp(target, 0.5 if path[0] == "model" else 0.1)

    assert_type(st.map_leaves(halve, state), Any)
    assert_type(st.map_leaves(torch.add, state, other), Any)
    weights = {"w": torch.ones(1)}
    assert_type(st.map_leaves(halve, weights), dict[str, torch.Tensor])
    assert_type(st.map_leaves(str, weights), Any)
    assert_type(st.map_with_path(lerp, weights, weights), dict[str, torch.Tensor])
    assert_type(st.map_with_path(lerp, state, other), Any)


def copies(state: dict[str, Any]) -> None:
    assert_type(st.allocate_like(state, device="cuda", pin_memory=False, share_memory=False), dict[str, Any])
    assert_type(st.offload(state), dict[str, Any])
    assert_type(
        st.offload(state, device=torch.device("cpu"), pin_memory=True, share_memory=True, copy=False), dict[str, Any]
    )
    assert_type(st.copy_into(state, state, cast=True), dict[str, Any])


@st.leafwise
@st.collective
def of_our_own(tree: dict[str, Any], *, group: object = None, timeout: float | None = None) -> dict[str, Any]:
    return tree


def declared(state: dict[str, Any]) -> None:
    assert_type(of_our_own(state, timeout=1.0), dict[str, Any])


def comparison(a: object, b: object) -> None:
    report = st.similarity(a, b, values=True)
    assert_type(report, st.Similarity)
    assert_type(bool(report), bool)
    assert_type(report.count, int)
    assert_type(report.differences, tuple[st.Difference, ...])
    for difference in report.differences:
        assert_type(difference.path, st.Path)
        assert_type(difference.kind, str)
        assert_type(difference.left, Any)
        assert_type(difference.right, Any)


def composition(state: dict[str, Any]) -> None:
    save = st.chain(partial(st.gather, dst=0), st.offload, lambda tree: tree)
    assert_type(save(state), Any)
    step: Callable[[Any], Any] = save
    assert_type(st.chain(step, save)(state), Any)
    assert_type(st.stream(state, save), Iterator[tuple[st.Path, Any]])
    for path, leaf in st.stream(state, st.offload):
        assert_type(path, st.Path)
        assert_type(leaf, Any)


def staging(state: dict[str, Any]) -> None:
    with st.Stager(pin_memory=False, share_memory=True, max_snapshots=3) as stager:
        assert_type(stager, st.Stager)
        assert_type(stager.stage(state), dict[str, Any])
        future = stager.stage_async(state)
        assert_type(future, Future[dict[str, Any]])
        assert_type(future.result(timeout=60.0), dict[str, Any])
        stager.prewarm(state)
        stager.synchronize()
        assert_type(stager.nbytes, int)
        assert_type(stager.stats, StagerStats)
    stager.close()


def errors(state: dict[str, Any]) -> None:
    try:
        st.copy_into(state, state)
    except st.TreeMismatch as error:
        assert_type(error.differences, tuple[st.Difference, ...])
        as_value_error: ValueError = error
        raise as_value_error from None
    except st.UnsupportedLeaf as error:
        assert_type(error.path, st.Path | None)
        as_type_error: TypeError = error
        raise as_type_error from None
    except (st.CyclicTree, st.TreeTooDeep, st.RankMismatch, st.CheckpointError) as error:
        base: st.StateTreeError = error
        raise base from None
    except (st.StagerBusy, st.StagerClosed):
        pass


def conversions(state: dict[str, Any]) -> None:
    conversion = st.Conversion([("a.{i}", "b.{i}", "(x y) -> x y")], sizes={"x": 2})
    assert_type(conversion.inverse, st.Conversion)
    st.save(conversion(state), "a.safetensors")
    assert_type(st.combine(torch.lerp, state, state, where="a.*"), dict[str, Any])


class Pair:
    def __init__(self, one: Any, other: Any) -> None:
        self.one = one
        self.other = other


def unpair(pair: Pair) -> tuple[list[Any], None]:
    return [pair.one, pair.other], None


class Scaled:
    def __init__(self, values: torch.Tensor, scale: float) -> None:
        self.values = values
        self.scale = scale


class ScaledType(st.LeafType):
    def unpack(self, value: Scaled) -> tuple[list[torch.Tensor], float]:
        return [value.values], value.scale

    def pack(self, context: float, parts: Any) -> Scaled:
        return Scaled(parts[0], context)


def extension() -> None:
    st.register_container(Pair, unpair, lambda _, children: Pair(*children))
    st.register_leaf_type(Scaled, ScaledType)
    st.register_leaf_type(Scaled, ScaledType())
    st.register_leaf_type(Scaled, None)
