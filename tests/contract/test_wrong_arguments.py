"""What is wrong with an argument is said by the verb, with the argument's name, and not by what stumbles over it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import statetree as st

TREE = {"a": torch.ones(2), "b": torch.ones(3)}

WRONG: dict[str, tuple[type[Exception], Callable[[Path], object]]] = {
    "combine: fn cannot be called": (TypeError, lambda _: st.combine("mean", TREE)),
    "map_leaves: fn cannot be called": (TypeError, lambda _: st.map_leaves("mean", TREE)),
    "map_with_path: fn cannot be called": (TypeError, lambda _: st.map_with_path(None, TREE)),
    "flatten: is_leaf cannot be called": (TypeError, lambda _: st.flatten(TREE, is_leaf=3)),
    "paths: is_leaf cannot be called": (TypeError, lambda _: st.paths(TREE, is_leaf=3)),
    "unflatten: leaves cannot be 3": (TypeError, lambda _: st.unflatten(st.flatten(TREE)[1], 3)),
    "rename: rules cannot be None": (TypeError, lambda _: st.rename(TREE, None)),
    "gather: dst must name ranks .* got 3.5": (st.RankMismatch, lambda _: st.gather(TREE, dst=3.5)),
    "gather: dst must name ranks .* got tensor": (st.RankMismatch, lambda _: st.gather(TREE, dst=torch.tensor(3))),
    "gather: the timeout must be positive.*'x'": (TypeError, lambda _: st.gather(TREE, timeout="x")),
    "prepare: the verb cannot be called": (TypeError, lambda _: st.prepare("gather", TREE)),
    "chain: step 0 cannot be called": (TypeError, lambda _: st.chain("gather")),
    "from_flat: expected the flat dict": (TypeError, lambda _: st.from_flat("", st.to_flat(TREE)[1])),
    "load: through cannot be called": (TypeError, lambda path: st.load(path, through="rules.toml")),
    "Checkpointer: on_event cannot be called": (TypeError, lambda path: st.Checkpointer(path, on_event="log")),
    "similarity: rtol is no tolerance": (ValueError, lambda _: st.similarity(TREE, TREE, rtol=None)),
    "similarity: atol is no tolerance": (ValueError, lambda _: st.similarity(TREE, TREE, atol=float("nan"))),
    "save: shard_bytes is no number of bytes.*'5GB'": (
        ValueError,
        lambda path: st.save(TREE, path / "x.safetensors", shard_bytes="5GB"),
    ),
    "save: shard_bytes is no number of bytes.*-1": (
        ValueError,
        lambda path: st.save(TREE, path / "x.safetensors", shard_bytes=-1),
    ),
    r"save: cannot write '.*\\ud800': expected the name": (
        st.CheckpointError,
        lambda path: st.save(TREE, path / "\ud800"),
    ),
    "Conversion: rules cannot be 5": (TypeError, lambda _: st.Conversion(5)),
    "Conversion: ignore cannot be None": (TypeError, lambda _: st.Conversion([("a", "b")], ignore=None)),
    "Conversion: sizes cannot be .* a mapping": (TypeError, lambda _: st.Conversion([("a", "b")], sizes=["d"])),
    "stage: which leaves are meant cannot be told": (TypeError, lambda _: st.Stager(frozen=0).stage(TREE)),
}


def test_numbers_of_other_libraries_are_numbers(tmp_path):
    st.save(TREE, tmp_path / "a.safetensors", shard_bytes=np.int64(8))
    assert st.similarity(TREE, TREE, rtol=np.float32(0.1), atol=torch.tensor(0.1))
    st.Conversion([("a", "b")], sizes=[("d", 2)])


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_argument_is_named(said, tmp_path):
    error, call = WRONG[said]
    with pytest.raises(error, match=said):
        call(tmp_path)


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("group", [[], 3, "world"])
def test_what_is_no_process_group_is_named(group):
    with pytest.raises(TypeError, match="gather: group cannot be"):
        st.gather(TREE, group=group)
