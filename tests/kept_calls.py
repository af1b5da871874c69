"""Collectives that know a call again, in all tests that call them: the variable ``STATETREE_TESTS_KEPT_CALLS``.

``on``: every call that can be kept is, from the first one on. ``again``: and every call is made twice, so that its
result is that of a call that is known. ``full``: the same, where one call alone is kept. ``off``: none is.
"""

import os
from typing import Any

import pytest

from statetree.exchange import recognition, sighting
from statetree.exchange.prepared import preparation_under_way


def call_twice(*args: Any, **options: Any) -> Any:
    """Make a call, and make it again."""
    if preparation_under_way() is None:
        _make(*args, **options)
    return _make(*args, **options)


MODE = os.environ.get("STATETREE_TESTS_KEPT_CALLS", "")
#: For tests of what one call does that is not known yet: the bytes that it sends, say.
of_one_call = pytest.mark.skipif(MODE not in {"", "off"}, reason="calls are known, or made twice")
_make = recognition._made
if MODE == "off":
    sighting.MOST_BYTES = -1
elif MODE:
    sighting.FEWEST = recognition._SEEN_BEFORE = 0
    recognition._MOST_VAIN = 1 << 30
    if MODE == "full":
        recognition._KEPT_CALLS = 1
    if MODE in ("again", "full"):
        recognition._made = call_twice
