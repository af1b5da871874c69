"""The law of exactness, beyond what ``test_transforms.py`` has of it: one container stays one, and no more bytes."""

from hypothesis import example, given
from hypothesis import strategies as hyp

import statetree as st
from tests.judge import assert_trees_equal
from tests.laws.drawn import with_shared_containers
from tests.memory import covered_bytes, storages
from tests.trees.optimizers import optimizer_plans
from tests.trees.plans import Again, Node, build, tied_plans, tree_plans


@given(plan=with_shared_containers(tied_plans(opaque=False)))
@example(plan=Node("list", (Again(2), Again(2))))
@example(plan=Node("list", (Node("Thing", (Again(2),)), Node("Thing", (Again(2),)))))
def test_stage_keeps_one_container_one(plan):
    tree = build(plan)
    with st.Stager() as stager:
        for _ in range(2):
            assert_trees_equal(stager.stage(tree), tree, containers=True)


@given(plan=hyp.one_of(tree_plans(), tied_plans(), optimizer_plans()))
def test_no_more_is_copied_than_is_needed(plan):
    tree = build(plan)
    assert sum(storage.nbytes() for storage in storages(st.offload(tree))) <= covered_bytes(tree)
