"""That profiles of the benchmarks count every moment once, for the phase that it belongs to."""

import inspect
import json
import threading
import time
from itertools import chain
from operator import itemgetter

import pytest

import statetree as st
from benchmarks import catalogue, profiles
from benchmarks.measure import WrongResult
from benchmarks.ranks import RankRow
from benchmarks.rows import Row
from benchmarks.states import many_small
from statetree.spans import threads as spans
from statetree.tree import traversal as tree

TINY = 0.001
RESULTS = profiles.PROFILES.with_name("latest.json")
REACHED = itemgetter("reached")


@pytest.fixture
def clock(monkeypatch):
    """A clock that is told the time: each reading is a second after the last one."""
    readings = iter(range(1_000_000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(readings)))
    return profiles.PhaseClock()


def test_time_counts_for_the_innermost_phase(clock):
    with clock.phase("rest"):
        with clock.phase("checks"), clock.phase("bytes"):
            pass
        with clock.phase("checks"):
            pass
    assert {name: seconds for name, seconds in clock.spent.items() if seconds} == {"rest": 3, "checks": 3, "bytes": 1}


def test_a_phase_that_fails_is_left(clock):
    with pytest.raises(ZeroDivisionError), clock.phase("rest"), clock.phase("bytes"):
        raise ZeroDivisionError
    assert (clock.spent["rest"], clock.spent["bytes"]) == (2, 1)


def test_what_is_watched_is_found_wherever_it_was_imported_and_put_back():
    before = (tree.traverse, tree.rebuild, spans.copy_all, st.to_flat)
    clock = profiles.PhaseClock()
    with clock.watching(), clock.phase("rest"):
        st.offload(many_small(TINY).tree)
        st.to_flat({"a": 1})
        assert st.to_flat is not before[3]
    assert (tree.traverse, tree.rebuild, spans.copy_all, st.to_flat) == before
    seen = {name for name, seconds in clock.spent.items() if seconds}
    assert {"flatten", "checks", "plan", "allocation", "bytes", "rebuild", "rest"} == seen


def test_threads_are_in_phases_of_their_own(clock):
    def work():
        with clock.phase("rest"), clock.phase("bytes"):
            pass

    with clock.phase("rest"), clock.phase(profiles.ELSEWHERE):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert {name: seconds for name, seconds in clock.spent.items() if seconds} == {"rest": 4, "bytes": 1}


@pytest.mark.parametrize("function", [*chain(*profiles.PHASES.values()), *profiles.IN_THREADS, *profiles.FOR_THREADS])
def test_what_phases_consist_of_exists_once(function):
    (_, attribute, original), *_ = profiles._places_of(function)
    assert callable(original)
    assert original.__name__ == attribute
    assert not inspect.isgeneratorfunction(original)
    assert [*chain(*profiles.PHASES.values())].count(function) <= 1


#: What is in some phase, beside the rest, by the work of a row and the way in which it is done.
SEEN = {
    "stage again": {"flatten", "checks", "bytes", "rebuild"},
    "first stage": {"flatten", "checks", "plan", "allocation", "bytes", "rebuild"},
    "first stage, offload": {"flatten", "checks", "allocation", "bytes", "rebuild"},
    "ten saves, async_save": {"flatten", "checks", "plan", "bytes", "sums", "archives", "waiting"},
    "copy_into": {"flatten", "checks", "bytes", "rebuild"},
    "allocate_like": {"flatten", "checks", "allocation", "rebuild"},
    "offload": {"flatten", "checks", "bytes", "rebuild"},
    "similarity": {"flatten", "checks"},
    "similarity of values": {"flatten", "checks", "compare"},
    "delta, 2 % changed": {"checks", "plan", "bytes", "compare", "sums"},
    "apply_delta, 2 % changed": {"checks", "plan", "bytes", "sums"},
    "digest": {"sums"},
    "stage, 99 % frozen": {"flatten", "checks", "plan", "bytes", "rebuild"},
    "incremental save, 99 % unchanged": {"plan", "compare", "sums", "waiting"},
    "partition + merge": {"flatten", "checks", "plan", "rebuild"},
    "flatten + unflatten": {"flatten", "rebuild"},
    "to_flat + from_flat": {"flatten", "plan", "rebuild"},
    "gather to all": {"flatten", "checks", "plan", "allocation", "bytes", "rebuild", "waiting"},
    "gather to one": {"flatten", "bytes", "rebuild", "waiting"},  # once it is recognised
    "gather to all, prepared": {"checks", "bytes", "waiting"},
    "save": {"plan", "sums", "archives", "waiting"},
    "save with a mirror": {"plan", "sums", "archives", "waiting"},
    "start to save": {"flatten", "bytes"},
    "load": {"plan", "sums", "waiting"},
    "load, verify=False": {"plan", "waiting"},
    "load into shards": {"plan", "waiting"},
    "load a directory into shards": {"plan", "waiting"},
    "compare two files": {"compare", "waiting"},
    "distribute from one, in_place": {"flatten", "bytes", "rebuild", "waiting"},  # once it is recognised
    "distribute from one, prepared, in_place": {"checks", "bytes", "waiting"},
    "broadcast": {"flatten", "checks", "plan", "bytes", "waiting"},
    "broadcast, in place": {"flatten", "checks", "plan", "waiting"},
    "broadcast, in place, prepared": {"checks", "waiting"},
}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(profiles.PROFILED)), ids=lambda number: profiles.PROFILED[number].row.work)
def test_a_row_is_taken_to_pieces(number):
    row, contender = profiles.PROFILED[number]
    found = profiles.profile(profiles.PROFILED[number], TINY, seconds=0)
    work = row.work if contender == "statetree" else f"{row.work}, {contender.removeprefix('statetree, ')}"
    assert found.title.startswith(f"{work}, ")
    assert found.title.endswith(f", {row.ranks} ranks" if isinstance(row, RankRow) else "")
    assert found.runs >= profiles.RUNS_OF_SLOW
    assert found.unwatched_s > 0
    assert found.phases_s.keys() == set(profiles.NAMES)
    assert SEEN[work] | {"rest"} <= {name for name, seconds in found.phases_s.items() if seconds}


def test_each_row_that_misses_a_time_has_a_profile():
    recorded = json.loads(RESULTS.read_text())["rows"]
    missed = [row for row in recorded if row["group"] not in profiles.LEFT_OUT and not all(map(REACHED, row["aims"]))]
    assert missed
    works = {(row.group, row.work) for row, _ in profiles.PROFILED}
    assert {(row["group"], row["title"]) for row in missed if not any(map(_is_of(row), works))} == set()


def _is_of(recorded):
    return lambda work: work[0] == recorded["group"] and recorded["title"].startswith(f"{work[1]}, ")


def test_each_contender_with_a_time_to_reach_has_a_profile():
    rows = [row for row in catalogue.ROWS if row.group not in profiles.LEFT_OUT]
    for row in rows:
        timed = {aim.timed for aim in row.aims if "memory" not in aim.text and "rank" not in aim.text}
        assert {contender for profiled, contender in profiles.PROFILED if profiled is row} == timed
    assert {contender for _, contender in profiles.PROFILED} == {
        "statetree",
        "statetree, async_save",
        "statetree, in place",
        "statetree, in place, prepared",
        "statetree, in_place",
        "statetree, offload",
        "statetree, prepared",
        "statetree, prepared, in_place",
        "statetree, verify=False",
    }


def test_a_wrong_result_has_no_profile():
    def never(state):
        contenders = profiles.PROFILED[0].row.contenders(state)
        return [type(contenders[0])("statetree", "ours", contenders[0].run, lambda _: False)]

    with pytest.raises(WrongResult, match="the result is wrong"):
        profiles.profile(profiles.Profiled(Row("flat", "to_flat", many_small, never), "statetree"), TINY, seconds=0)


@pytest.mark.slow
def test_the_command_writes_what_it_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profiles, "PROFILED", profiles.PROFILED[:1])
    path = tmp_path / "profiles.json"
    profiles.main(["--scale", str(TINY), "--seconds", "0", "--json", str(path)])
    document = json.loads(path.read_text())
    assert {"format", "date", "versions", "machine", "load_before", "load_after", "rows"} <= document.keys()
    (row,) = document["rows"]
    assert row["title"].startswith("stage again, 10 x 1 KB")
    assert row["title"] in capsys.readouterr().out
    assert row["leaves"] == 10
    assert list(row["phases_s"]) == list(profiles.NAMES)
