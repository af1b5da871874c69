"""What a type checker knows of selection, deltas, digests, files, prepared transfers, and of what checks transforms."""

from pathlib import Path
from typing import Any, assert_type

import torch

import statetree as st
from statetree import testing


def selection(state: dict[str, Any]) -> None:
    assert_type(st.select(state, ["**.lora_*", "step"], missing_ok=True), dict[str, Any])
    assert_type(st.partition(state, lambda path, leaf: len(path) > 1), tuple[dict[str, Any], dict[str, Any]])
    assert_type(st.merge(*st.partition(state, "*")), dict[str, Any])
    assert_type(st.update(state, "step", 0), dict[str, Any])
    assert_type(st.update(state, "step", st.HOLE), dict[str, Any])
    assert_type(st.cast(state, torch.bfloat16, where="model.**"), dict[str, Any])
    rules = st.Renaming({"model.{name}": "{name}"})
    assert_type(rules.inverse, st.Renaming)
    assert_type(st.rename(st.rename(state, rules), rules.inverse), dict[str, Any])


def deltas(new: dict[str, Any], old: dict[str, Any]) -> None:
    change = st.delta(new, old)
    assert_type(change, st.Delta)
    assert_type(change.nbytes, int)
    assert_type(change.then(change), st.Delta)
    assert_type(st.apply_delta(change, old), dict[str, Any])
    assert_type(st.digest(new), st.Digest)
    assert_type(st.audit(new), st.Audit)


def files(state: dict[str, Any], place: Path) -> None:
    st.save(state, place)
    assert_type(st.load(place, state, where="model.**", strict=False, cast=True), dict[str, Any])
    st.to_html(state, place)


def transfers(source: dict[str, Any], target: dict[str, Any]) -> None:
    with st.prepare(st.reshard, source, target, in_place=True) as sync:
        assert_type(sync, st.Prepared[dict[str, Any]])
        assert_type(sync(), dict[str, Any])
    assert_type(st.prepare(st.gather, source, dst=0)(), dict[str, Any])


def checks() -> None:
    report = testing.check_transform(st.offload, examples=3)
    assert_type(bool(report), bool)
    assert_type(report.broken, list[str])
    assert_type(report["pure"].source, str)
    found = testing.conformance(copy=st.offload)
    assert_type(found.failed, list[str])
    assert_type(found["alias_kept"].said, str)
