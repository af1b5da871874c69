"""The README's table of figures: the rows that aim at being so many times faster than a peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

README: Final = Path(__file__).parents[1] / "README.md"
BEGIN: Final = "<!-- figures: written by make bench -->\n"
END: Final = "<!-- end of figures -->\n"

_FASTER: Final = "times faster than "


def write(results: dict[str, Any], file: Path = README) -> None:
    """Put the figures of a complete run into the README."""
    text = file.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    file.write_text(f"{before}{BEGIN}{figures(results)}{END}{after}", encoding="utf-8")


def figures(results: dict[str, Any]) -> str:
    """Return the table, and what it was measured on."""
    lines = ["| work | statetree | peer | the peer takes | the floor takes |", "|---|---|---|---|---|"]
    done: set[str] = set()
    for row in results["rows"]:
        peers = [aim["text"].split(_FASTER)[1] for aim in row["aims"] if _FASTER in aim["text"]]
        if peers and row["title"] not in done:
            done.add(row["title"])
            lines.append(_line(row, peers[0]))
    machine = results["machine"]
    lines.append(
        f"\nMedians of {results['date'][:10]} with torch {results['versions']['torch']} on {machine['cores']} cores "
        f"({machine['cpu']}), as multiples of statetree's time. The floor is a bare copy of the bytes, or the least "
        "that the work takes."
    )
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any], peer: str) -> str:
    by_name = {contender["name"]: contender for contender in row["contenders"]}
    floors = [contender["times_ours"] for contender in row["contenders"] if contender["role"] == "floor"]
    ours = next(contender for contender in row["contenders"] if contender["role"] == "ours")
    floor = f"{floors[0]:.2f}" if floors else ""
    return (
        f"| {row['title']} | {_time(ours['median_s'])} | `{peer}` | **{by_name[peer]['times_ours']:.1f}** | {floor} |"
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
