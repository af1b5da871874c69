"""Changes one thing at a time in the core, and sees whether the tests notice. `make mutation` runs it.

python -m tests.mutation [--count 200] [--seed 1] [--module tree/spec.py …] [--line 120] [--jobs 2] [--trust] [--list]

Each mutant is a copy of the package with one change in it. What tests a module is in ``TESTS``, the quickest first, and
then the other unit tests of its package; a mutant is killed by the first test that fails, or by not coming to an end.
Those that survive are printed as what they changed: each is equivalent to the original (``EQUIVALENT`` says why), or a
test is missing.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = "statetree"
#: The core, and the tests that are to notice a change in a module.
TESTS = {
    "tree/flatten.py": (
        "unit/tree/test_flatten.py",
        "unit/tree/test_containers.py",
        "laws/test_round_trips.py",
        "unit/test_key_paths.py",
    ),
    "tree/traversal.py": (
        "unit/tree/test_flatten.py",
        "unit/tree/test_containers.py",
        "laws/test_round_trips.py",
        "unit/test_key_paths.py",
    ),
    "tree/mapping.py": (
        "unit/tree/test_flatten.py",
        "unit/tree/test_containers.py",
        "laws/test_round_trips.py",
        "unit/test_key_paths.py",
    ),
    "tree/spec.py": (
        "unit/tree/test_spec.py",
        "unit/tree/test_flatten.py",
        "unit/tree/test_matching.py",
        "unit/test_key_paths.py",
    ),
    "tree/instances.py": (
        "unit/tree/test_containers.py",
        "unit/tree/test_flatten.py",
        "unit/tree/test_spec.py",
    ),
    "tree/registry.py": (
        "unit/tree/test_containers.py",
        "unit/tree/test_matching.py",
        "unit/tree/test_flatten.py",
    ),
    "spans/layout.py": (
        "unit/spans/test_layout.py",
        "unit/spans/test_geometry_cache.py",
        "unit/transforms/test_offload.py",
        "laws/test_ties.py",
    ),
    "spans/overlaps.py": (
        "unit/spans/test_overlaps.py",
        "unit/spans/test_geometry_cache.py",
        "unit/transforms/test_copy_into.py",
    ),
    "spans/columns.py": (
        "unit/spans/test_geometry_cache.py",
        "unit/spans/test_layout.py",
        "unit/spans/test_overlaps.py",
        "unit/transforms/test_copy_into.py",
    ),
    "chunks/layouts.py": (
        "unit/chunks/test_layouts.py",
        "collectives/test_layouts.py",
        "collectives/test_custom_chunks.py",
    ),
    "chunks/local.py": (
        "unit/chunks/test_layouts.py",
        "collectives/test_layouts.py",
        "collectives/test_custom_chunks.py",
        "collectives/test_shard_attributes.py",
    ),
    "chunks/boxes.py": (
        "unit/chunks/test_boxes.py",
        "collectives/test_layouts.py",
        "collectives/test_custom_chunks.py",
    ),
    "exchange/plan.py": (
        "unit/exchange/test_plan.py",
        "collectives/test_layouts.py",
        "collectives/test_partition_replicas.py",
    ),
    "exchange/routes.py": ("unit/exchange/test_plan.py", "collectives/test_layouts.py"),
    "exchange/senders.py": ("unit/exchange/test_plan.py", "unit/exchange/test_senders.py"),
    "exchange/stacks.py": ("unit/exchange/test_plan.py", "collectives/test_layouts.py"),
    "exchange/discovery.py": ("collectives/test_replicas.py", "collectives/test_ties.py"),
    "exchange/buckets.py": (
        "unit/exchange/test_plan.py",
        "collectives/test_ties.py",
        "collectives/test_memory.py",
        "collectives/test_layouts.py",
        "collectives/test_streaming.py",
        "laws/test_collectives.py",
    ),
    "stager/pool.py": (
        "unit/stager/test_pool.py",
        "unit/stager/test_stager.py",
    ),
    "stager/snapshot.py": (
        "unit/stager/test_geometry.py",
        "unit/stager/test_pool.py",
        "unit/stager/test_stage_async.py",
        "unit/stager/test_stager.py",
        "unit/spans/test_shared_memory.py",
    ),
    "stager/stager.py": (
        "unit/stager/test_pool.py",
        "unit/stager/test_stage_async.py",
        "unit/stager/test_stager.py",
        "unit/spans/test_shared_memory.py",
    ),
    "leaves/copying.py": (
        "unit/transforms/test_copy_into.py",
        "laws/test_all_or_nothing.py",
    ),
    "leaves/casting.py": (
        "unit/transforms/test_copy_into.py",
        "unit/transforms/test_cast.py",
    ),
    "transforms/copy_into.py": (
        "unit/transforms/test_copy_into.py",
        "laws/test_all_or_nothing.py",
    ),
    "transforms/similarity.py": (
        "unit/transforms/test_similarity.py",
        "laws/test_similarity.py",
    ),
}
#: After how many units of tests/pace.py a mutant does not come to an end, and one of its tests.
LIMIT, TEST_LIMIT = 200, 50
#: The exit status where the tests did not run on the copy.
NOT_RUN = 70

UNCHANGED = "as it is"
#: Mutants that no test can notice, by module, the line as it is written, and what they change there; and why.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "exchange/buckets.py",
        "self._layouts[alike] = layout",
        "self._layouts[alike] = layout  ->  pass",
    ): "a layout that is not kept is made again",
    ("chunks/boxes.py", "_MAX_CELLS: Final = 1 << 26", "26  ->  27"): "how hard is_covered tries before it gives up",
    (
        "spans/columns.py",
        'if "storage_keys" not in self.__dict__ and not any(self.offsets) and self.pointers_distinct:',
        "'storage_keys' not in self.__dict__  ->  'storage_keys' in self.__dict__",
    ): "the short cut is taken at other times, and comes to the same answer",
    (
        "chunks/layouts.py",
        "table = torch.arange(int(self.ranks.max()) + 1 if len(self.ranks) else 0)",
        "1  ->  2",
    ): "no rank looks at the last entry",
    (
        "exchange/plan.py",
        "LARGE_BYTES: Final = 1 << 20",
        "1  ->  2",
    ): "what is smaller travels packed, and arrives all the same",
    (
        "exchange/buckets.py",
        "most = [0, 0]",
        "0  ->  1",
    ): "a bucket of one byte, which no round needs, is taken where one of none would do",
    ("exchange/routes.py", "return 0", "0  ->  1"): "a bound of one element, where nothing comes",
    (
        "spans/columns.py",
        'if known is not None and "storages" in self.__dict__ and self.pointers_distinct and self.whole:',
        "known is not None  ->  known is None",
    ): "the short cut is taken at other times, and comes to the same answer",
    ("spans/columns.py", "return True", "True  ->  False"): "a short cut is not taken",
    (
        "exchange/stacks.py",
        "if len(peers) > 1 and not in_order:",
        "len(peers) > 1  ->  len(peers) >= 1",
    ): "one is in order",
    (
        "stager/snapshot.py",
        "synchronize(accelerators)",
        "synchronize(accelerators)  ->  pass",
    ): "without an accelerator there is nothing to wait for",
    ("tree/traversal.py", "continue", "continue  ->  break"): "the loop around it goes on with the same iterator",
    (
        "leaves/casting.py",
        "whole = 2 / torch.finfo(target).eps  # every integer up to here is a value of the target",
        "2  ->  3",
    ): "no integer type ends between twice and three times a float's whole numbers",
    (
        "transforms/similarity.py",
        "same = _same_contexts(sides[0].recipe(position), sides[1].recipe(position))",
        "_same_contexts(sides[0].recipe(position), sides[1].recipe(position))  ->  "
        "_same_contexts(sides[1].recipe(position), sides[0].recipe(position))",
    ): "it is symmetric",
}

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
}


class Mutant(NamedTuple):
    """One change: in which module and line, what was there, what is there now, and the module's text with it."""

    module: str
    line: int
    before: str
    after: str
    text: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.change}"

    @property
    def change(self) -> str:
        """What is changed, as in ``EQUIVALENT``."""
        return f"{self.before}  ->  {self.after}"


# Which changes there are


def _changes(node: ast.AST) -> Iterator[Callable[[ast.AST], ast.AST]]:
    """Yield functions, each of which makes one change to a copy of a node and returns what takes its place."""
    if isinstance(node, ast.Compare):
        yield from (
            lambda new, at=at: _with(new, "ops", at, COMPARISONS[type(new.ops[at])]()) for at in range(len(node.ops))
        )
    elif isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield lambda new: _set(new, "op", other())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield lambda new: new.operand
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield lambda new: _set(new, "op", OPERATORS[type(node.op)]())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield lambda new: ast.Constant(not new.value)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield lambda new: ast.Constant(new.value + 1)
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield lambda new: _set(new, "test", ast.UnaryOp(ast.Not(), new.test))
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield lambda new: _set(new, "ifs", [ast.UnaryOp(ast.Not(), new.ifs[0]), *new.ifs[1:]])
    elif isinstance(node, ast.Call) and len(node.args) >= 2 and not _is_symmetric(node):
        yield lambda new: _set(new, "args", [new.args[1], new.args[0], *new.args[2:]])
    elif _is_statement_to_drop(node):
        yield lambda _: ast.Pass()
    elif isinstance(node, ast.Return) and node.value is not None and not _is_negative(node.value):
        yield lambda new: _set(new, "value", ast.Constant(None))
    elif isinstance(node, ast.Continue):
        yield lambda _: ast.Break()
    elif isinstance(node, ast.Break):
        yield lambda _: ast.Continue()


def _is_statement_to_drop(node: ast.AST) -> bool:
    """Whether a statement can be left out so that the rest still runs: it binds no name."""
    if isinstance(node, ast.Assign):
        return not isinstance(node.targets[0], ast.Name | ast.Tuple)
    return isinstance(node, ast.AugAssign | ast.Raise) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )


def _is_symmetric(call: ast.Call) -> bool:
    """Whether it makes no difference which of the first two arguments is which."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    alike = ast.dump(call.args[0]) == ast.dump(call.args[1])
    return alike or name in {"min", "max", "minimum", "maximum", "same_bytes"}


def _is_negative(node: ast.expr) -> bool:
    """Whether an expression is ``None``, or ``False``: which of the two, no caller asks."""
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False)


def _set(node: ast.AST, field: str, value: object) -> ast.AST:
    setattr(node, field, value)
    return node


def _with(node: ast.AST, field: str, at: int, value: object) -> ast.AST:
    getattr(node, field)[at] = value
    return node


def _sites(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST, str, int | None]]:
    """Yield nodes of code, and where they hang.

    Annotations, messages, what only type checkers see, and checks that nothing is left over (``strict``) are no code.
    """
    pending: list[ast.AST] = [tree]
    while pending:
        parent = pending.pop()
        for field, held in ast.iter_fields(parent):
            if field in {"annotation", "returns", "decorator_list"} or (
                isinstance(parent, ast.Raise) and field == "exc"
            ):
                continue
            listed = held if isinstance(held, list) else [held]
            for at, node in enumerate(listed):
                if not isinstance(node, ast.AST) or isinstance(node, ast.JoinedStr) or _is_no_code(node):
                    continue
                yield node, parent, field, at if isinstance(held, list) else None
                pending.append(node)


def _is_no_code(node: ast.AST) -> bool:
    if isinstance(node, ast.keyword):
        return node.arg == "strict"
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def mutants(module: str) -> list[Mutant]:
    """Return every mutant of a module."""
    tree = ast.parse((ROOT / PACKAGE / module).read_text())
    found: list[Mutant] = []
    line = 0
    for node, parent, field, at in _sites(tree):
        line = getattr(node, "lineno", getattr(parent, "lineno", line))
        for change in _changes(node):
            new = change(copy.deepcopy(node))
            _put(parent, field, at, new)
            found.append(Mutant(module, line, _shown(node), _shown(new), ast.unparse(ast.fix_missing_locations(tree))))
            _put(parent, field, at, node)
    return sorted(found)


def _put(parent: ast.AST, field: str, at: int | None, node: ast.AST) -> None:
    if at is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[at] = node


def _shown(node: ast.AST) -> str:
    text = ast.unparse(ast.fix_missing_locations(node)).strip()
    head = text.split("\n")[0]
    return head if head == text else f"{head} …"


def sample(modules: list[str], count: int, seed: int) -> list[Mutant]:
    """Return some mutants, chosen by chance: of each module its share of the count, whichever are asked for."""
    listed = {module: mutants(module) for module in TESTS}
    total = sum(map(len, listed.values()))
    chosen: list[Mutant] = []
    for module in modules:
        found = listed[module]
        share = min(len(found), -(-count * len(found) // total))
        chosen += random.Random(f"{seed} {module}").sample(found, share)
    return chosen


def unchanged(module: str) -> Mutant:
    """Return a module as it is: tests that fail on it would say nothing about mutants."""
    return Mutant(module, 0, UNCHANGED, UNCHANGED, (ROOT / PACKAGE / module).read_text())


def tests_of(module: str) -> list[str]:
    """Return the files of tests that a mutant of a module has to pass, in their order."""
    folder = ROOT / "tests" / "unit" / Path(module).parts[0]
    others = [f"unit/{folder.name}/{file.name}" for file in sorted(folder.glob("test_*.py"))]
    return list(dict.fromkeys([*TESTS[module], *others]))


# Whether tests notice


def survives(mutant: Mutant) -> tuple[bool, str]:
    """Return whether the tests pass on a mutant, and which one did not."""
    with tempfile.TemporaryDirectory(prefix="statetree-mutant-") as folder:
        place = Path(folder)
        for name in (PACKAGE, "tests"):
            shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", place)
        (place / PACKAGE / mutant.module).write_text(mutant.text)
        report = place / "report"
        limit, test_limit = _limits()
        child = os.fork()
        if not child:
            _run_tests(place, report, tests_of(mutant.module), test_limit)
        status = _ended(child, time.monotonic() + limit)
        if status is None:
            return False, "not coming to an end"
        if status < 0:
            return False, signal.Signals(-status).name
        text = report.read_text(errors="replace")
        failed = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if status == NOT_RUN or (status not in {0, 1, 2} and not failed):  # passed, failed, could not be imported
            raise RuntimeError(f"the tests did not run: {text[-2000:]}")
        return not status, failed[0] if failed else text[-200:]


def _limits() -> tuple[float, float]:
    """Return after how many seconds a mutant, and one of its tests, does not come to an end, here and now.

    Another process measures them: this one must import nothing of the package, or mutants would not be what is tested.
    """
    code = f"from tests.pace import units; print(units({LIMIT}), units({TEST_LIMIT}))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    limit, test_limit = map(float, found.stdout.split())
    return limit, test_limit


def _run_tests(place: Path, report: Path, tests: list[str], limit: float) -> None:
    """Run tests in the copy, in this process, which has imported what takes long and nothing of the package."""
    status = NOT_RUN
    try:
        os.setsid()  # so that what the tests start can be ended with them
        os.chdir(place)
        output = os.open(report, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.path[:] = [str(place), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
        os.environ["PYTHONPATH"] = str(place)  # for the ranks that tests start
        import pytest

        options = [
            "-x",
            "-q",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--hypothesis-seed=1",
            f"--timeout={limit}",
        ]
        given = [str(place / "tests" / name) for name in tests]
        found = int(pytest.main([*options, *given]))
        module = sys.modules.get(PACKAGE)
        if module is None or Path(str(module.__file__)).is_relative_to(place):
            status = found
        else:
            print(f"They ran on {module.__file__}.")  # and say nothing about the mutant
    finally:
        os._exit(status)


def _ended(child: int, deadline: float) -> int | None:
    """Return a process's exit status (negative for a signal); ``None`` if it had to be killed."""
    status = None
    while status is None and time.monotonic() < deadline:
        found, code = os.waitpid(child, os.WNOHANG)
        if found:
            status = os.waitstatus_to_exitcode(code)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


def _written(mutant: Mutant) -> str:
    """Return the line that a mutant changes, as it stands in its module."""
    return (ROOT / PACKAGE / mutant.module).read_text().splitlines()[mutant.line - 1].strip()


def main() -> int:
    """Run what the command line asks for; return 1 if a mutant survives that is not known to be equivalent."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--module", nargs="+", default=list(TESTS), choices=list(TESTS), metavar="MODULE")
    parser.add_argument("--line", type=int, help="all mutants of one line, instead of a sample")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--trust", action="store_true", help="do not run the tests on the modules as they are first")
    parser.add_argument("--list", action="store_true", help="only show them")
    given = parser.parse_args()
    if given.line:
        chosen = [mutant for module in given.module for mutant in mutants(module) if mutant.line == given.line]
    else:
        chosen = sample(given.module, given.count, given.seed)
    if given.list:
        print(*chosen, sep="\n")
        return 0
    import torch  # what takes long to import is shared by all

    torch.set_num_threads(1)
    if not given.trust:
        chosen = [unchanged(module) for module in given.module] + chosen
    return report(chosen, given.jobs)


def report(chosen: list[Mutant], jobs: int) -> int:
    """Try mutants, and print what became of them."""
    started = time.monotonic()
    tried = [mutant for mutant in chosen if mutant.before is not UNCHANGED]
    killed: Counter[str] = Counter()
    lost: list[Mutant] = []
    excused: list[Mutant] = []
    with ThreadPoolExecutor(jobs) as pool:
        for mutant, (alive, how) in zip(chosen, pool.map(survives, chosen), strict=True):
            if mutant.before is UNCHANGED:
                if not alive:
                    raise RuntimeError(f"{mutant}: {how}")
                continue
            reason = EQUIVALENT.get((mutant.module, _written(mutant), mutant.change))
            outcome = f"killed by {how}" if not alive else "SURVIVED" if reason is None else f"equivalent: {reason}"
            print(f"{mutant}\n    {outcome}", flush=True)
            if not alive:
                killed[mutant.module] += 1
            else:
                (lost if reason is None else excused).append(mutant)
    print(f"\n{len(tried)} mutants in {time.monotonic() - started:.0f} s")
    for module in dict.fromkeys(mutant.module for mutant in tried):
        own = sum(mutant.module == module for mutant in tried)
        print(f"  {module}: {killed[module]} of {own} killed")
    total = killed.total()
    print(f"{total} killed ({total / len(tried):.1%}), {len(excused)} equivalent, {len(lost)} survived:")
    print(*(f"  {mutant}" for mutant in lost), sep="\n")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
