"""Checkpoints that others published, through every transform and back, exactly.

The files come with packages that are installed without their dependencies and never imported.
"""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import statetree as st
from tests.judge import assert_trees_equal

pytestmark = pytest.mark.slow

FILES = {
    "resemblyzer": ["pretrained.pt"],
    "lpips": [f"weights/{version}/{net}.pth" for version in ("v0.0", "v0.1") for net in ("alex", "squeeze", "vgg")],
}


def published():
    for package, names in FILES.items():
        for name in names:
            yield pytest.param((package, name), id=f"{package}-{Path(name).stem}-{Path(name).parent.name or 'top'}")


@pytest.fixture(params=published())
def checkpoint(request):
    package, name = request.param
    found = find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed, and its checkpoint comes with it")
    file = Path(found.origin).parent / name
    return torch.load(file, map_location="cpu", weights_only=True)


def copied_into(tree):
    return st.copy_into(tree, st.allocate_like(tree))


def staged(tree):
    with st.Stager() as stager:
        stager.stage(tree)
        return stager.stage(tree)


def staged_to_shared_memory(tree):
    with st.Stager(share_memory=True) as stager:
        return stager.stage(tree)


def flat_and_back(tree):
    return st.from_flat(*st.to_flat(tree))


@pytest.mark.parametrize(
    "transform",
    [
        st.offload,
        partial(st.offload, share_memory=True),
        partial(st.offload, copy=False),
        copied_into,
        staged,
        staged_to_shared_memory,
        st.chain(st.offload, st.offload),
        flat_and_back,
        partial(st.map_leaves, lambda leaf: leaf),
    ],
    ids=["offload", "shared", "move", "copy_into", "stage", "stage_shared", "chain", "flat", "map"],
)
def test_every_transform_gives_the_checkpoint_again(checkpoint, transform):
    untouched = st.offload(checkpoint)
    # Pieces of one slab stand for storages of their own in shared memory.
    shared = transform is staged_to_shared_memory or getattr(transform, "keywords", {}).get("share_memory", False)
    assert_trees_equal(transform(checkpoint), checkpoint, storages=not shared)
    assert_trees_equal(checkpoint, untouched)


@pytest.mark.parametrize("checkpoint", [("resemblyzer", "pretrained.pt")], indirect=True, ids=["resemblyzer"])
def test_ties_and_integer_keys_are_really_there(checkpoint):
    leaves, spec = st.flatten(checkpoint)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert (len(tensors), len({tensor.untyped_storage().data_ptr() for tensor in tensors})) == (48, 37)
    assert any(type(key) is int for path in spec.paths() for key in path)
    assert st.similarity(checkpoint, st.offload(checkpoint), values=True)


def test_one_changed_byte_in_a_published_checkpoint_is_noticed(checkpoint):
    other = st.offload(checkpoint)
    paths, leaves = st.paths(other), st.flatten(other)[0]
    path, victim = next((p, x) for p, x in zip(paths, leaves, strict=True) if isinstance(x, torch.Tensor) and x.numel())
    victim.view(-1).view(torch.uint8)[0] ^= 1
    report = st.similarity(checkpoint, other, values=True)
    assert path in [difference.path for difference in report.differences]
    assert st.similarity(checkpoint, other, values=False)
