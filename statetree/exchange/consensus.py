"""Consensus: before any data moves, the ranks make sure that they are about to do the same.

Each rank sends one small message of fixed length: whether it is ready, and digests of what it holds. Only where these
differ does more follow, to find out what the first difference is. Then *every* rank raises, and the group is in step:
the next collective works.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections import defaultdict
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from statetree.chunks.ranks import ranks_named
from statetree.declare import cached_property
from statetree.errors import RankMismatch, shown
from statetree.leaves.leaf_numbers import text_number
from statetree.spans.sums import signed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statetree.exchange.group import Group

#: How much of a failed rank's error the others show.
_ERROR_CHARACTERS: Final = 1000
#: How many different texts, paths or errors the ranks tell each other.
_MOST_TOLD: Final = 16
#: The same of errors.
_MOST_FAILURES: Final = 256
#: Less than any number that a rank states: what those say that have none.
_NOTHING: Final = -(1 << 63)
_DIGEST: Final = struct.Struct("<qq")
#: Numbers of calls are less than this; what ranks propose as the number of a new one is not.
_NEW: Final = 1 << 61

#: What the path of an entry for a container ends in.
CONTAINER: Final = " (container)"


class Entry(NamedTuple):
    """One line of what a rank holds: a path, and what lies there."""

    path: str
    text: str


class Alike(NamedTuple):
    """Boxes of a part of a leaf, which the ranks that hold them must hold the same elements of."""

    path: str
    boxes: str
    holders: list[int]  # the ranks that hold the same boxes, rising: of several meshes, those of this rank's own
    elements: int  # a number for them

    def share(self, rank: int) -> int:
        """Return a number. Those of all holders add up to zero exactly if (but for chance) they hold the same."""
        weight = len(self.holders) - 1 if self.holders[0] == rank else -1
        return weight * text_number(self.path, self.boxes, str(self.holders), str(self.elements))


@dataclass(frozen=True)
class Fingerprint:
    """What a rank is about to do, in so far as the others must be about to do the same."""

    options: str  # the verb and its options
    #: What it holds, in the order of the paths; ``None`` if it leaves that to others. By default all ranks mean the
    #: same already, and only wait for each other.
    entries: Sequence[Entry] | None = (Entry("", ""),)
    #: What only need agree for there to be a short cut: where it does not, ``compare`` returns so.
    details: Sequence[str] = ()
    alike: Sequence[Alike] = ()  # what only those ranks must agree on that hold the same boxes
    nbytes: int = 0  # how many bytes it will send next
    device: int = 0  # the number of the type of device, among those of the group, that it would communicate from
    reads: bool = False  # whether it looks at elements that it receives before it can tell whether it is ready
    #: What to do where the entries differ.
    remedy: str = "Pass trees of the same structure, shapes and dtypes on every rank."

    @cached_property
    def key(self) -> tuple[bytes, bytes, bytes]:
        """Digests of the options, the entries and the details: what ``Consensus`` has if all ranks state the same."""
        lines = [text for entry in self.entries or () for text in entry]
        return text_digest([self.options]), text_digest(lines), text_digest(self.details)

    def message(self) -> list[int]:
        """Return what is told to the other ranks: numbers of which all get to know the greatest.

        A digest is stated twice, the second time with all bits inverted: if the greatest are each other's inverse, so
        are the greatest and the least digest the same.
        """
        options, *held = (_DIGEST.unpack(found) for found in self.key)
        absent = self.entries is None
        stated = [*options, *(_NOTHING if absent else word for words in held for word in words)]
        inverse = [*(~word for word in options), *(_NOTHING if absent else ~word for words in held for word in words)]
        proposed = _NEW + int.from_bytes(os.urandom(8), "little") % _NEW
        facts = [int(self.reads), int(bool(self.alike))]
        return [0, proposed, _NOTHING, int(absent), self.nbytes, self.device, *facts, *stated, *inverse]


def text_digest(texts: Sequence[str]) -> bytes:
    """Return a digest of texts."""
    # With the lengths: a text may hold what separates them, and what was planned for others would be taken for theirs.
    joined = _bytes("\0".join([*texts, str(list(map(len, texts)))]))
    return blake2b(joined, digest_size=_DIGEST.size).digest()


def _bytes(text: str) -> bytes:
    """Return a text as bytes. Keys of dicts may be no proper Unicode."""
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


#: How many numbers a message has; the last of them are those of three digests, each stated twice.
_WORDS: Final = len(Fingerprint("").message())
_DIGEST_WORDS: Final = 12
#: The message of a rank that failed.
FAILED: Final = (1, *[_NOTHING] * (_WORDS - 1))


class Consensus(NamedTuple):
    """What came of it."""

    key: tuple[bytes, bytes, bytes]  # digests of the options, the entries and the details
    details_agree: bool  # whether the details are the same everywhere
    nbytes: int  # the most that a rank announced
    absent: bool  # whether some rank holds nothing, and leaves it to others
    device: str  # the type of device that all ranks communicate from
    reads: bool  # whether some rank looks at elements before it can tell whether it is ready
    number: int  # the number of this call, by which ranks that keep it know it again: random, the same on every rank


def compare_fingerprints(verb: str, group: Group, fingerprint: Fingerprint, message: Sequence[int]) -> Consensus:
    """Make sure that all ranks have one fingerprint; otherwise, or if one failed, raise ``RankMismatch`` on every rank.

    ``message`` is what the fingerprint tells, made in advance: from here on nothing of this rank's own may fail.
    """
    failed, number, _, absent, nbytes, device, reads, compared, *words = _greatest(group, message)
    if failed:
        raise _failed(verb, group)
    stated, inverse = _digests(words)
    options, entries, details = (slice(first, first + 2) for first in range(0, len(stated), 2))
    if stated[options] != inverse[options]:
        raise _different_calls(verb, group, fingerprint)
    if stated[entries] != inverse[entries] and _NOTHING not in stated[entries]:
        raise _first_difference(verb, group, fingerprint.entries, fingerprint.remedy)
    if compared:
        _check_alike(verb, group, fingerprint.alike)
    key = tuple([_DIGEST.pack(*stated[part]) for part in (options, entries, details)])
    assert len(key) == 3
    alike = stated[details] == inverse[details]
    return Consensus(key, alike, nbytes, bool(absent), group.devices[device], bool(reads), number - _NEW)


def _greatest(group: Group, message: Sequence[int]) -> list[int]:
    """Return the greatest numbers of all ranks' messages."""
    found = group.all_reduce_max(message)
    if not found[0] and found[2] != _NOTHING:
        # Ranks that keep a call know now that others do not, and state what they hold as well.
        return group.all_reduce_max(message)
    return found


def _digests(words: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the greatest digests that ranks stated, and the least."""
    half = len(words) // 2
    return [*words[:half]], [~word for word in words[half:]]


def _different_calls(verb: str, group: Group, fingerprint: Fingerprint) -> RankMismatch:
    """Hear from all ranks which call they make."""
    told = group.told_once(_bytes(fingerprint.options), most=_MOST_TOLD)
    return RankMismatch(
        f"{verb}: the ranks do not call the same with the same options: expected one call, got {_by_text(told)}. "
        "Nothing was moved."
    )


def errors_on_ranks(
    verb: str, group: Group, fingerprint: Fingerprint, message: Sequence[int], own: BaseException | None
) -> dict[int, BaseException]:
    """Return what failed on which rank, once all are here. ``message`` is ``FAILED`` where this one has failed.

    It begins as every agreement does: ranks that make another call hear of it, and raise ``RankMismatch`` as well.
    """
    failure = None if own is None else _Failure(_shortened(own), _pickled(own))
    found = _greatest(group, message)
    if found[0]:
        failures = _failures(group, failure)
        return {rank: failure.error() for rank, failure in failures.items()}
    stated, inverse = _digests(found[-_DIGEST_WORDS:])
    if stated[:2] != inverse[:2]:
        raise _different_calls(verb, group, fingerprint)
    return {}


def _check_alike(verb: str, group: Group, parts: Sequence[Alike]) -> None:
    """Make sure that ranks that hold the same boxes hold the same there; otherwise all raise ``RankMismatch``."""
    total = sum(part.share(group.rank) for part in parts)
    if not group.all_reduce(torch.tensor([signed(total)], dtype=torch.int64, device="cpu")).any():
        return
    held: defaultdict[tuple[str, str, str], defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for text, ranks in group.told_once(json.dumps(parts).encode()):
        for path, boxes, holders, elements in json.loads(text):
            held[path, boxes, str(holders)][elements] += ranks
    for (path, boxes, _), found in sorted(held.items()):
        if len(found) > 1:  # and not only meshes of which ranks know different ones
            raise RankMismatch(
                f"{verb}: the ranks do not hold the same at {path}, where ranks hold alike what is not cut with the "
                f"tensor around it: expected the same elements of {boxes}, got different ones on "
                f"{' and on '.join(map(ranks_named, map(sorted, found.values())))}. Nothing was moved. "
                "Write the same into it on those ranks, from the one that is right."
            )


def all_repeat(verb: str, group: Group, number: int) -> bool:
    """Tell the other ranks the number of a call that this one could make once more; return whether all can.

    It comes in the place of ``compare_fingerprints``, which those ranks take part in that keep no such call: they hear
    of it, and everybody compares fingerprints then. ``RankMismatch`` if one of them failed, on every rank.
    """
    failed, first, second, *_ = group.all_reduce_max([0, number, ~number, *[_NOTHING] * (_WORDS - 3)])
    if failed:
        raise _failed(verb, group)
    return first == ~second  # the greatest number is the least one, and no new one


def tell_failure(group: Group, error: BaseException) -> None:
    """Take part in the other ranks' next agreement, so that they raise, too."""
    failure = _Failure(_shortened(error))  # made in advance: from here on nothing of this rank's own may fail
    group.all_reduce_max(FAILED)
    _failures(group, failure)


def _failed(verb: str, group: Group) -> RankMismatch:
    """Hear from the ranks that failed why."""
    failures = _failures(group, None)
    lines = [f"rank {rank} failed: {failures[rank].text}" for rank in sorted(failures)]
    return RankMismatch(f"{verb}: {shown(lines)} Nothing was moved.")


class _Failure(NamedTuple):
    """What the others get to know of an error."""

    text: str
    pickled: bytes = b""  # the error, if they raise it themselves

    def error(self) -> BaseException:
        """Return the error, or one that says what it was."""
        found: BaseException = pickle.loads(self.pickled) if self.pickled else RuntimeError(self.text)
        return found


def _failures(group: Group, own: _Failure | None) -> dict[int, _Failure]:
    """Return what the ranks that failed tell the others."""
    told = group.told_once(None if own is None else pickle.dumps(tuple(own)), most=_MOST_FAILURES)
    return {rank: _Failure(*pickle.loads(text)) for text, ranks in told for rank in ranks}


def _shortened(failure: BaseException) -> str:
    try:
        text = str(failure)
    except Exception:  # noqa: BLE001 - a hostile __str__, or an alarm in it, must not keep the others waiting
        text = "(its message cannot be shown)"
    if len(text) > _ERROR_CHARACTERS:
        text = text[:_ERROR_CHARACTERS] + "…"
    return f"{type(failure).__name__}: {text}".encode("utf-8", "replace").decode()


def _pickled(error: BaseException) -> bytes:
    """Return an error as the other ranks raise it; nothing if it cannot be sent."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - as above
        return b""
    return data


def _by_text(told: Sequence[tuple[bytes, Sequence[int]]]) -> str:
    """Say which ranks hold which text."""
    return "; ".join(f"{_text(text)} on {ranks_named(ranks)}" for text, ranks in told)


def _first_difference(verb: str, group: Group, entries: Sequence[Entry] | None, remedy: str) -> RankMismatch:
    """Find the first path at which the ranks that hold something differ: missing on some rank, or something else there.

    The place of the first difference is found by bisection. Which path comes first there may differ from rank to rank:
    they tell each other, and then what they hold at these paths.
    """
    holds = entries is not None
    lines = list(entries or ())
    place = _first_place(group, lines if holds else None)
    named = group.told_once(_bytes(lines[place].path) if place < len(lines) else None, most=_MOST_TOLD)
    own = dict(lines)
    found: list[tuple[bytes, list[int]]] = []
    first = ""
    candidates = sorted((_text(path) for path, _ in named), key=lambda path: (path.endswith(CONTAINER), path))
    for path in [*candidates, *candidates[:1]]:  # the last where all entries are the same, but not in the same order
        text = _bytes(own.get(path, "nothing")) if holds else None
        first, found = path, group.told_once(text, most=_MOST_TOLD)
        if len(found) > 1:
            break
    return RankMismatch(
        f"{verb}: the ranks do not hold the same at {first or '<root>'}: expected one layout, got {_by_text(found)}. "
        f"Nothing was moved. {remedy}"
    )


def _first_place(group: Group, lines: Sequence[Entry] | None) -> int:
    """Return the first place at which the ranks that hold something have different lines, by bisection."""
    alike, differ = 0, group.all_reduce_max([0 if lines is None else len(lines)])[0]
    known = blake2b(digest_size=_DIGEST.size)  # of the lines up to ``alike``
    while differ - alike > 1:
        middle = (alike + differ) // 2
        further = known.copy()
        for line in (lines or ())[alike:middle]:
            further.update(text_digest(line))
        words = _DIGEST.unpack(further.digest())
        stated = [_NOTHING] * 4 if lines is None else [*words, *(~word for word in words)]
        most = group.all_reduce_max(stated)
        if most[:2] == [~word for word in most[2:]]:
            alike, known = middle, further
        else:
            differ = middle
    return alike
