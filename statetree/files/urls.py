"""Paths that are URLs, which are refused: a URL taken for a path makes a local folder ``s3:`` without a word."""

from __future__ import annotations

import os
import re
from typing import Any, Final

from statetree.errors import CheckpointError

# A ``Path`` of a URL has lost one of its slashes. A letter alone before the colon is a drive.
_URL: Final = re.compile(r"[A-Za-z][\w+.:-]+:/")


def is_url(path: Any) -> bool:
    """Whether a path looks like a URL."""
    name = os.fspath(path)
    return isinstance(name, str) and _URL.match(name.lstrip()) is not None


def refuse_url(verb: str, path: Any, remedy: str = "Pass the path of a file or directory.") -> None:
    """Raise ``CheckpointError`` if a path looks like a URL."""
    if is_url(path):
        msg = f"{verb}: {os.fspath(path)} is no path: expected a local one, got a URL. {remedy}"
        raise CheckpointError(msg)
