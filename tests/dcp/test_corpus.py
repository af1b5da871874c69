"""Every awkward tree of the corpus is saved and comes back into a template, or is refused by name."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

import statetree
from statetree.spans.layout import holds_memory
from tests.judge import assert_trees_equal
from tests.trees import DISTRIBUTED_TREES, TREES, quiet


def check(tree, directory, without=()):
    state, template = tree.make(), tree.make()
    for name in without:
        del state[name], template[name]
    for leaf in statetree.flatten(template)[0]:
        strided = type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.is_quantized
        if strided and not leaf.is_nested and holds_memory(leaf):
            with suppress(RuntimeError):  # an expanded one, say, which is refused below
                leaf.detach().zero_()
    with quiet():
        statetree.save(state, directory)
        loaded = statetree.load(directory, template, in_place=True, weights_only=False)
        if not tree.changes:
            assert_trees_equal(state, loaded, ties=False)


#: What cannot be saved, or cannot be loaded into such a template, and what is said of it.
REFUSED = {
    "module_and_optimizer": r"save: the leaf at model \(Network\) cannot be pickled: .*Leave it out",
    "module_with_hooks": r"save: the leaf at module \(Network\) cannot be pickled: ",
    "objects": r"save: the leaf at held \(Held\) cannot be pickled: ",
    "atoms": r"save: the leaf at (torch|info) \(list\) cannot be pickled: .*'(module|torch.finfo)' object",
    "unpicklable": r"save: the leaf at held.0 \(Held\) cannot be pickled: .*_thread.lock",
    "quantized": r"load: layout differs at float_qparams: expected .*'scales': \[0.0",  # emptied with the template
    "quantized_below_a_byte": r"save: the leaf at packed has the dtype torch.quint4x2, .*Dequantize it first",
    "mkldnn": r"save: the leaf at mkldnn has the layout torch._mkldnn, ",
    "inference_tensors": r"(?s)load: the trees differ in 3 places:.*an inference tensor",
    "on_meta": r"save: cannot take the leaf at whole: .*a meta tensor, which has no elements.*to_empty",
    "fake": r"save: cannot take the leaf at fake: .*a FakeTensor, which has no elements",
    "uninitialized": r"save: cannot take the leaf at parameter: .*a UninitializedParameter, which has no elements",
    "freed": r"save: cannot take the leaf at freed: .*was freed or resized to 0 bytes.*Restore it",
    "dtensors": r"save: cannot take the leaf at partial: .*placements \(Partial\(sum\),\). Redistribute or reduce it",
}


def check_or_refused(tree, directory):
    if tree.name in REFUSED:
        with pytest.raises(statetree.StateTreeError, match=REFUSED[tree.name]):
            check(tree, directory)
    else:
        check(tree, directory)


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_the_corpus(tree, tmp_path):
    check_or_refused(tree, tmp_path)


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("tree", DISTRIBUTED_TREES, ids=str)
def test_the_distributed_corpus(tree, tmp_path):
    check_or_refused(tree, tmp_path)


#: Which leaves of those that are refused are to blame.
TO_BLAME = {"quantized": ["float_qparams"], "dtensors": ["partial"]}


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("name", TO_BLAME)
def test_the_rest_of_what_is_refused_is_saved(name, tmp_path):
    (tree,) = (tree for tree in [*TREES, *DISTRIBUTED_TREES] if tree.name == name)
    check(tree, tmp_path, without=TO_BLAME[name])
