"""``python -m statetree``: the command line, where the extra ``cli`` is installed."""

from __future__ import annotations

import sys
from importlib import import_module


def main() -> int:
    """Run the ``statetree`` command. Returns its exit status."""
    try:
        for name in ("click", "rich"):
            import_module(name)
        from statetree.cli.app import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("click", "rich"):
            raise
        sys.stderr.write(
            f"statetree: the command needs the extra cli ({error.name} is missing): pip install 'statetree[cli]'\n"
        )
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
