"""All rows, and how they are measured: every group in a process of its own, with a fresh heap.

What earlier rows leave behind, above all memory in small pieces, makes those after them slower.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import groupby
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks import (
    rows_convert,
    rows_copy,
    rows_delta,
    rows_exchange,
    rows_files,
    rows_gpu,
    rows_growth,
    rows_import,
    rows_real,
    rows_scale,
    rows_shards,
    rows_similarity,
    rows_stage,
    rows_stagers,
    rows_tree,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.measure import Budget
    from benchmarks.rows import Result

ROWS: Final = (
    *rows_stage.ROWS,
    *rows_stagers.ROWS,
    *rows_copy.ROWS,
    *rows_convert.ROWS,
    *rows_similarity.ROWS,
    *rows_delta.ROWS,
    *rows_tree.ROWS,
    *rows_real.ROWS,
    *rows_files.ROWS,
    *rows_gpu.ROWS,
    *rows_exchange.ROWS,
    *rows_shards.ROWS,
    *rows_growth.ROWS,
    *rows_scale.ROWS,
    *rows_import.ROWS,
)
GROUPS: Final = tuple(dict.fromkeys(row.group for row in ROWS))


def measured(
    groups: Sequence[str], scale: float, budget: Callable[[], Budget], threads: int | None
) -> Iterator[Result]:
    """Measure the rows of some groups, one after the other.

    Args:
        groups: Which.
        scale: How large the states are; 1 is the size in the titles.
        budget: Asked before each row.
        threads: How many threads torch uses, if it does not decide that itself.
    """
    chosen = [number for number, row in enumerate(ROWS) if row.group in groups]
    for _, numbers in groupby(chosen, key=lambda number: ROWS[number].group):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            for number in numbers:
                result = process.submit(_measure, number, scale, budget(), threads).result()
                yield replace(result, row=ROWS[number])


def _measure(number: int, scale: float, budget: Budget, threads: int | None) -> Result:
    if threads is not None:
        torch.set_num_threads(threads)
    nobody: Any = None  # a row has functions that cannot be pickled
    return replace(ROWS[number].measure(scale, budget), row=nobody)
