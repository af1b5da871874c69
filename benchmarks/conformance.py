"""Which silent faults the implementations have that people use today: ``python -m benchmarks.conformance``.

Without arguments it looks at all that are installed, and writes the tables of ``docs/conformance.md``. With the name of
a function of ``benchmarks.conformance_peers`` and of a fault it prints a program that reproduces what was found, and
needs no statetree.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import statetree as st
from benchmarks.conformance_peers import IMPLEMENTATIONS, Implementation
from statetree.testing import conformance
from statetree.testing.conformance_suite import FAULTS

if TYPE_CHECKING:
    from statetree.testing.conformance_suite import SilentFault

PAGE = Path(__file__).parents[1] / "docs" / "conformance.md"
MARK = "<!-- What follows is written by `python -m benchmarks.conformance`. -->\n"
OURS = (
    Implementation("statetree", "copy", st.offload, "statetree"),
    Implementation("statetree", "stager", st.Stager, "statetree"),
    Implementation("statetree", "gather", st.gather, "statetree"),
)
_CELLS = {"passes": "yes", "FAILS": "**no**", "refuses": "error"}
_TITLES = {"copy": "Copies", "stager": "Stagers", "gather": "Gathers"}


def is_installed(peer: Implementation) -> bool:
    """Whether an implementation can be looked at here."""
    try:
        importlib.metadata.version(peer.needs)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def looked_at(peer: Implementation) -> Any:
    """Look for the faults of one implementation."""
    made: Any = {peer.kind: peer.make}
    return conformance(**made)


def cell(peer: Implementation, outcome: str, name: str) -> str:
    """Return what a table says of a fault: it counts as unsupported if the implementation's documentation says so."""
    return "n/a" if outcome != "passes" and name in peer.unsupported else _CELLS[outcome]


def tables(peers: list[Implementation]) -> str:
    """Return the tables: a row a fault, a column an implementation."""
    found = {id(peer): looked_at(peer) for peer in peers}
    versions = {peer.needs: importlib.metadata.version(peer.needs) for peer in peers}
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    today = datetime.datetime.now(tz=datetime.UTC).date()
    lines = [f"Looked at on {today} with {named} and Python {platform.python_version()}, on the CPU."]
    for kind, title in _TITLES.items():
        columns = [peer for peer in peers if peer.kind == kind]
        rows = [fault for fault in FAULTS if fault.kind == kind or (kind, fault.kind) == ("stager", "copy")]
        lines += ["", f"## {title}", "", f"| what holds | {' | '.join(peer.title for peer in columns)} |"]
        lines.append("|---" * (len(columns) + 1) + "|")
        for fault in rows:
            cells = [cell(peer, found[id(peer)][fault.name].outcome, fault.name) for peer in columns]
            lines.append(f"| {fault.statement} (`{fault.name}`) | {' | '.join(cells)} |")
    notes = {(peer.title, said) for peer in peers for said in peer.unsupported.values()}
    lines += ["", "## What is documented as unsupported", ""]
    lines += [f"- {title}: {said}." for title, said in sorted(notes)]
    return "\n".join([*lines, ""])


def reproduction(peer: Implementation, fault: SilentFault) -> str:
    """Return a program that raises if an implementation has a fault, and uses nothing of statetree."""
    call = [f"{fault.name}({peer.make.__name__})"]
    if peer.kind == "stager":
        wait = "staged.result() if isinstance(staged, Future) else staged"
        call = [
            f"made = {peer.make.__name__}()",
            f"made.wait = lambda staged: {wait}",
            f"{fault.name}({'made' if fault.kind == 'stager' else 'lambda state: made.wait(made.stage(state))'})",
        ]
    if peer.kind == "gather":
        call = ['dist.init_process_group("gloo")  # torchrun --nproc-per-node=2', *call]
    head = "from concurrent.futures import Future\n" if peer.kind == "stager" else ""
    return "\n\n".join([head + fault.source, peer.source, "\n".join(call)])


def main(arguments: list[str]) -> None:
    """Write the tables, or print a reproduction."""
    if arguments:
        peer = next(peer for peer in IMPLEMENTATIONS if peer.make.__name__ == arguments[0])
        sys.stdout.write(reproduction(peer, next(fault for fault in FAULTS if fault.name == arguments[1])) + "\n")
        return
    text = tables([peer for peer in (*OURS, *IMPLEMENTATIONS) if is_installed(peer)])
    PAGE.write_text(PAGE.read_text(encoding="utf-8").partition(MARK)[0] + MARK + "\n" + text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
