"""Every law of every transform, with as many states as the profile says."""

import random

import pytest
from hypothesis import settings

import statetree as st
from statetree.testing import check_transform, laws
from statetree.testing.states import STATES
from tests.contract.verbs import VERBS, Verb
from tests.judge.walk import walk
from tests.repack import repacked


def examples():
    """Return how many states there are, and which: other ones each time, unless the profile wants the same ones."""
    chosen = settings.default
    return {
        "examples": len(STATES) + chosen.max_examples,
        "seed": 0 if chosen.derandomize else random.randrange(1 << 30),
    }


def has_memory(tree):
    return not any(getattr(value, "is_meta", False) for value in walk(tree))


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb.prepare is None], ids=str)
def test_every_law_holds(verb):
    beyond = [laws.accepts]
    if verb.copies:
        beyond.append(laws.idempotent)
    if verb.fresh:
        beyond.append(laws.stable)
    if verb.fresh and verb.copies:
        beyond += [laws.separate, laws.commutes_with_offload, laws.streams]

    def applied(tree):
        # Meta tensors become real when memory is allocated for them.
        return verb.apply(tree) if verb.copies or has_memory(tree) else st.offload(tree)

    check_transform(applied, laws=[*verb.laws(), *beyond], **examples())


def test_every_law_holds_of_leaf_types_alone():
    check_transform(repacked, laws=[laws.accepts, *Verb("unpack and pack", repacked).laws()], **examples())
