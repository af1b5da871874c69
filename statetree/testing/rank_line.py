"""Messages between a process and the ranks that it started: it waits for none of them, however long a message is."""

from __future__ import annotations

import selectors
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable
    from io import BufferedReader

#: What comes before each message: its length.
HEADER = struct.Struct("!Q")
#: How much is received at once.
PIECE_BYTES = 1 << 20
#: How long is waited at once: the system counts milliseconds in 32 bits.
MAX_WAIT_S = 3600.0


class Line:
    """What a rank is told and what it answers, one message each, in as many pieces as it takes.

    Args:
        end: This process's end of a pair of sockets.
        process: The rank's process, which has the other end.

    Attributes:
        process: The rank's process.
    """

    def __init__(self, end: socket.socket, process: Any) -> None:
        end.setblocking(False)  # noqa: FBT003 - as the standard library has it
        self.process = process
        self._end = end
        self._is_open = True
        self._outgoing = memoryview(b"")
        self._incoming = bytearray()

    def tell(self, message: bytes) -> None:
        """Begin with a new message, which is ``framed``, and forget the last answer."""
        self._outgoing = memoryview(message)
        self._incoming = bytearray()

    def advance(self) -> bool:
        """Send and receive what can be at once; return whether there is no more to wait for.

        Then there is an answer, or the process has ended. (Whether the socket is closed does not tell: a process that
        lives may have closed it, and one that this process started may hold it open.)
        """
        has_ended = self.process.exitcode is not None  # asked first: what it has sent before is received below
        self._send()
        has_received = self._receive()
        return self.answer() is not None or (has_ended and not has_received)

    def answer(self) -> memoryview | None:
        """Return the answer, if all of it is here."""
        if len(self._incoming) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._incoming)[0]
        return memoryview(self._incoming)[HEADER.size : end] if len(self._incoming) >= end else None

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Have a selector wait until ``advance`` can do something."""
        selector.register(self.process.sentinel, selectors.EVENT_READ)
        if self._is_open:
            sends = selectors.EVENT_WRITE if self._outgoing else 0
            selector.register(self._end, selectors.EVENT_READ | sends)

    def close(self) -> None:
        """Close the socket."""
        self._is_open = False
        self._end.close()

    def _send(self) -> None:
        try:
            self._outgoing = self._outgoing[self._end.send(self._outgoing) :] if self._outgoing else self._outgoing
        except BlockingIOError:
            pass
        except ConnectionError:  # no one will read the rest
            self._outgoing = memoryview(b"")

    def _receive(self) -> bool:
        if not self._is_open:
            return False
        try:
            piece = self._end.recv(PIECE_BYTES)
        except BlockingIOError:
            return False
        except ConnectionError:
            piece = b""
        self._incoming += piece
        self._is_open = bool(piece)
        return self._is_open


def wait_for_any(lines: Iterable[Line], timeout: float) -> None:
    """Wait until one of several lines can ``advance``, or an hour."""
    with selectors.DefaultSelector() as selector:
        for line in lines:
            line.watch(selector)
        selector.select(min(timeout, MAX_WAIT_S))


def framed(message: bytes) -> bytes:
    """Return a message with its length in front."""
    return HEADER.pack(len(message)) + message


def read_message(stream: BufferedReader) -> bytes | None:
    """Wait for a message, as a rank does, and return it; return ``None`` if there is no one at the other end."""
    header = stream.read(HEADER.size)
    return stream.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else None
