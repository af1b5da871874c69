"""Consensus: before any data moves, the ranks make sure that they are about to do the same.

Each rank sends one small message of fixed length: whether it is ready, and digests of what it holds. Only where these
differ does more follow, to find out what the first difference is. Then *every* rank raises, and the group is in step:
the next collective works.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import torch

from statetree.errors import RankMismatch, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from statetree.exchange.group import Group

T = TypeVar("T")

_DIGEST_BYTES: Final = 16
_READY: Final = 0
_FAILED: Final = 1
_ABSENT: Final = 2
_MESSAGE: Final = struct.Struct(f"<q{_DIGEST_BYTES}s{_DIGEST_BYTES}s{_DIGEST_BYTES}sq")
#: How much of a failed rank's error the others show.
_ERROR_CHARACTERS: Final = 1000
_NO_PATH: Final = b"\xff"  # no text in UTF-8
#: How many paths are looked into for the first difference.
_CANDIDATES: Final = 16


#: What the path of an entry for a container ends in.
CONTAINER: Final = " (container)"


class Entry(NamedTuple):
    """One line of what a rank holds: a path, and what lies there."""

    path: str
    text: str


@dataclass(frozen=True)
class Fingerprint:
    """What a rank is about to do, in so far as the others must be about to do the same.

    Attributes:
        options: The verb and its options.
        entries: What it holds, in the order of the paths; ``None`` if it leaves that to others.
        details: What only need agree for there to be a short cut: where it does not, ``agree`` returns so.
        nbytes: How many bytes it will send next.
    """

    options: str
    entries: Sequence[Entry] | None
    details: Sequence[str] = ()
    nbytes: int = 0

    @cached_property
    def key(self) -> tuple[bytes, bytes, bytes]:
        """Digests of the options, the entries and the details: what ``Consensus`` has if all ranks state the same."""
        lines = [text for entry in self.entries or () for text in entry]
        return digest([self.options]), digest(lines), digest(self.details)

    def message(self) -> bytes:
        """Return what is sent to the other ranks."""
        return _MESSAGE.pack(_ABSENT if self.entries is None else _READY, *self.key, self.nbytes)


def ready(verb: str) -> Fingerprint:
    """Return what a rank states where the ranks mean the same already, and only wait for each other to be ready."""
    return Fingerprint(verb, [Entry("", "")])


class Consensus(NamedTuple):
    """What came of it.

    Attributes:
        key: Digests of the options, the entries and the details.
        details_agree: Whether the details are the same everywhere.
        nbytes: What each rank announced.
        absent: Whether some rank holds nothing, and leaves it to others.
    """

    key: tuple[bytes, bytes, bytes]
    details_agree: bool
    nbytes: list[int]
    absent: bool


def digest(texts: Sequence[str]) -> bytes:
    """Return a digest of texts."""
    # With the lengths: a text may hold what separates them, and what was planned for others would be taken for theirs.
    return blake2b(_bytes("\0".join([*texts, str(list(map(len, texts)))])), digest_size=_DIGEST_BYTES).digest()


def _bytes(text: str) -> bytes:
    """Return a text as bytes. Keys of dicts may be no proper Unicode."""
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def agree(verb: str, group: Group, prepare: Callable[[], tuple[Fingerprint, T]]) -> tuple[Consensus, T]:
    """Make sure that all ranks are ready and mean the same.

    Args:
        verb: The collective, for messages.
        group: Its ranks.
        prepare: Does all that can fail before data moves, and returns what this rank is about to do, and anything else.

    Returns:
        What came of it, and what ``prepare`` returned beside.

    Raises:
        Exception: What ``prepare`` raised.
        RankMismatch: If another rank failed, or the ranks do not mean the same. On every rank.
    """
    try:
        group.check_usable()
        fingerprint, result = prepare()
        message = fingerprint.message()
    except BaseException as error:
        # Also an interrupt: the others must not be left waiting.
        tell_failure(group, error)
        raise
    return compare(verb, group, fingerprint, message), result


def compare(verb: str, group: Group, fingerprint: Fingerprint, message: bytes) -> Consensus:
    """Make sure that all ranks have one fingerprint.

    Args:
        verb: The collective, for messages.
        group: Its ranks.
        fingerprint: What this rank is about to do.
        message: Its ``message``, made in advance: from here on nothing of this rank's own may fail.

    Raises:
        RankMismatch: If another rank failed, or the ranks do not mean the same. On every rank.
    """
    messages = [_MESSAGE.unpack(row) for row in _tell(group, message)]
    if any(message[0] == _FAILED for message in messages):
        raise _failed(verb, [error.decode() for error in group.all_gather_bytes(b"")])
    _check_options(verb, group, fingerprint, [message[1] for message in messages])
    present = [message for message in messages if message[0] == _READY]
    if len({message[2] for message in present}) > 1:
        raise _first_difference(verb, group, fingerprint.entries)
    same = len({message[3] for message in present}) <= 1
    options, entries, details = (present or messages)[0][1:4]
    sizes = [message[4] for message in messages]
    return Consensus((options, entries, details), same, sizes, absent=len(present) < len(messages))


def tell_failure(group: Group, error: BaseException) -> None:
    """Take part in the other ranks' next agreement, so that they raise, too."""
    _tell(group, _MESSAGE.pack(_FAILED, b"", b"", b"", 0))
    group.all_gather_bytes(_told(error))


def _tell(group: Group, message: bytes) -> list[bytes]:
    """Send this rank's message, and return everybody's."""
    rows = group.all_gather(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    return [bytes(row.tolist()) for row in rows]


def _told(failure: BaseException) -> bytes:
    try:
        text = str(failure)
    except Exception:  # noqa: BLE001 - a hostile __str__ must not keep the others waiting
        text = "(its message cannot be shown)"
    if len(text) > _ERROR_CHARACTERS:
        text = text[:_ERROR_CHARACTERS] + "…"
    return f"{type(failure).__name__}: {text}".encode("utf-8", "replace")


def _failed(verb: str, errors: Sequence[str]) -> RankMismatch:
    lines = [f"rank {rank} failed: {error}" for rank, error in enumerate(errors) if error]
    return RankMismatch(f"{verb}: {shown(lines)} Nothing was moved.")


def _check_options(verb: str, group: Group, fingerprint: Fingerprint, digests: Sequence[bytes]) -> None:
    if len(set(digests)) == 1:
        return
    told = list(map(_text, group.all_gather_bytes(_bytes(fingerprint.options))))
    msg = (
        f"{verb}: the ranks do not call the same with the same options: expected one call, got {_by_text(told)}. "
        "Nothing was moved."
    )
    raise RankMismatch(msg)


def _leaves_first(path: str) -> tuple[bool, str]:
    return (path.endswith(CONTAINER), path)


def _by_text(texts: Sequence[str]) -> str:
    """Say which ranks hold which text."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, text in enumerate(texts):
        ranks[text].append(rank)
    return "; ".join(f"{text} on {ranks_named(found)}" for text, found in list(ranks.items())[:_CANDIDATES] if text)


def ranks_named(ranks: Sequence[int]) -> str:
    """Name ranks in a message, the first ones if there are many."""
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {listed}"


def _first_difference(verb: str, group: Group, entries: Sequence[Entry] | None) -> RankMismatch:
    """Find the first path at which the ranks that hold something differ.

    Each rank sends a short digest of every entry, then its entry at the first place where these differ: that is at the
    path that is missing on some rank, or holds something else there.
    """
    own = dict(entries or ())
    lines = list(entries or ())
    digests = group.all_gather_bytes(
        b"".join(blake2b(_bytes("\0".join(line)), digest_size=8).digest() for line in lines)
    )
    holds = [text == b"" for text in group.all_gather_bytes(b"absent" if entries is None else b"")]
    rows = [[row[i : i + 8] for i in range(0, len(row), 8)] for row, held in zip(digests, holds, strict=True) if held]
    place = next(
        place
        for place in range(max(map(len, rows)))
        if len({row[place] if place < len(row) else b"" for row in rows}) > 1
    )
    # Which path comes first may differ from rank to rank: each tells what it has at all of them.
    named = group.all_gather_bytes(_bytes(lines[place].path) if place < len(lines) else _NO_PATH)
    candidates = sorted({_text(path) for path in named if path != _NO_PATH}, key=_leaves_first)[:_CANDIDATES]
    told = group.all_gather_bytes(json.dumps([own.get(path, "nothing") for path in candidates]).encode())
    answers = [json.loads(text) if held else None for text, held in zip(told, holds, strict=True)]
    columns = list(zip(*(row or [""] * len(candidates) for row in answers), strict=True))
    first, texts = next(
        (found for found in zip(candidates, columns, strict=True) if len(set(filter(None, found[1]))) > 1),
        (candidates[0], columns[0]),  # the same entries, but not in the same order
    )
    msg = (
        f"{verb}: the ranks do not hold the same at {first or '<root>'}: expected one layout, got {_by_text(texts)}. "
        "Nothing was moved. Pass trees of the same structure, shapes and dtypes on every rank."
    )
    return RankMismatch(msg)
