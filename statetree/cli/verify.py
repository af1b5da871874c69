"""``statetree show --verify``: are the bytes those that were written?"""

from __future__ import annotations

from statetree.cli.checkpoint import DCP, SAFETENSORS, Checkpoint
from statetree.cli.digests import check_digests, digests_path
from statetree.cli.files import Files
from statetree.cli.progress import progress


def verify(checkpoint: Checkpoint, *, follow_links: bool = False) -> str:
    """Check all stored checksums and digests. Returns what was checked, in words; empty if there are none.

    Args:
        checkpoint: What to check.
        follow_links: Whether the files that the digests list may be symbolic links that lead out of their directory.

    Raises:
        CheckpointError: If a byte is not what it was when the checkpoint was written.
    """
    words = []
    is_directory = checkpoint.kind == DCP
    path = digests_path(checkpoint.path, is_directory=is_directory)
    folder = checkpoint.path if is_directory else checkpoint.path.parent
    if path.is_file():
        with Files(follow_links=follow_links) as files, progress("checking digests", checkpoint.nbytes) as advance:
            words.append(f"{check_digests(path, folder, checkpoint.files, files, advance)} digests")
    count = check_sums(checkpoint)
    if count:
        words.append(f"{count} checksums")
    return f"verified: {' and '.join(words)} agree" if words else ""


def check_sums(checkpoint: Checkpoint) -> int:
    """Check the checksums that the format has. Returns how many there are."""
    count = 0
    with progress("checking checksums", checkpoint.nbytes) as advance:
        for check in checkpoint.checks():
            check.run(advance)
            count += 1
    return count


def why_nothing(checkpoint: Checkpoint) -> str:
    """Return the message that there is nothing to verify a checkpoint by."""
    what = "safetensors has" if checkpoint.kind == SAFETENSORS else "a file of old torch has"
    digests = digests_path(checkpoint.path, is_directory=checkpoint.kind == DCP).name
    why = f"{what} no checksums, and there is no {digests}"
    return f"show: nothing to verify {checkpoint.path} by: {why}. Have convert --digest write digests."
