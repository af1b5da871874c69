"""That the benchmarks run, judge and report correctly. How fast anything is, is not asked here."""

import gc
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import rows
from benchmarks.__main__ import GROUPS, ROWS, main
from benchmarks.checks import has_leaves_of, holds_values_of, is_copy_of, is_like
from benchmarks.machine import Bystanders
from benchmarks.measure import Budget, Timing, WrongResult, floor, measure, ours, peer
from benchmarks.states import State, leaves, zeros_like

ROOT = Path(__file__).parents[2]
TINY = 0.0005
TWICE = Budget(rounds=2, most=2, seconds=0)


def right(_):
    return True


def state():
    return State("", {"a": torch.arange(3.0), "b": [torch.arange(3.0, 8.0), 1]})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What the command writes, and what it prints."""
    path = tmp_path_factory.mktemp("bench") / "results.json"
    command = ["-m", "benchmarks", "--quick", "--scale", str(TINY), "--only", "similarity", "flat", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


class TestCommand:
    def test_says_what_was_measured_on_what(self, written):
        document, _ = written
        assert document["format"] == 1
        assert {"python", "torch", "optree", "statetree"} <= document["versions"].keys()
        assert {"cpu", "cores", "threads", "huge_pages"} <= document["machine"].keys()
        assert {"date", "load_before", "load_after"} <= document.keys()
        assert (document["scale"], document["quick"]) == (TINY, True)

    def test_runs_only_the_groups_asked_for(self, written):
        document, printed = written
        assert {row["group"] for row in document["rows"]} == {"similarity", "flat"}
        assert all(row["title"] in printed for row in document["rows"])

    def test_each_row_has_statetree_its_peers_and_the_floor(self, written):
        document, _ = written
        for row in document["rows"]:
            roles = [contender["role"] for contender in row["contenders"]]
            assert roles.count("ours") == 1
            assert {"peer", "floor"} <= set(roles)

    def test_each_figure_is_a_positive_number(self, written):
        document, _ = written
        for row in document["rows"]:
            assert row["leaves"] > 0
            assert row["bytes"] > 0
            assert row["bystander_cores"] >= 0
            for contender in row["contenders"]:
                assert contender["runs"] == 3
                assert 0 < contender["min_s"] <= contender["median_s"] <= contender["max_s"] < math.inf
                assert contender["us_per_leaf"] > 0
                assert contender["times_ours"] > 0

    def test_each_aim_says_whether_it_was_reached(self, written):
        document, _ = written
        aims = [aim for row in document["rows"] for aim in row["aims"]]
        assert aims
        assert all(isinstance(aim["reached"], bool) and aim["value"] > 0 for aim in aims)

    def test_an_unknown_group_is_refused(self, capsys):
        with pytest.raises(SystemExit, match="2"):
            main(["--only", "nothing"])
        assert "similarity" in capsys.readouterr().err


@pytest.mark.parametrize("group", GROUPS)
def test_every_contender_does_its_work_and_every_aim_has_its_figures(group):
    for row in ROWS:
        if row.group == group:
            result = row.measure(TINY, TWICE)
            assert all(isinstance(aim.holds(aim.value(result)), bool) for aim in row.aims)


class TestMeasure:
    def test_contenders_take_turns(self):
        calls = []
        contenders = [
            ours(lambda: calls.append("a"), right),
            peer("b", lambda: calls.append("b"), right),
            floor("c", lambda: calls.append("c"), right),
        ]
        timings = measure(contenders, lambda: calls.append("changed"), TWICE)
        assert [len(timing.samples) for timing in timings] == [2, 2, 2]
        assert "".join(calls) == "abcchangedabcabcabcabc"

    def test_rounds_are_added_until_time_is_up(self):
        (timing,) = measure([ours(lambda: None, right)], lambda: None, Budget(rounds=1, most=5, seconds=60))
        assert len(timing.samples) == 5

    def test_what_is_fresh_is_made_for_every_run(self):
        made = []

        def make():
            made.append(object())
            return made[-1]

        used = []
        measure([ours(used.append, right, fresh=make)], lambda: None, TWICE)
        assert used == made
        assert len(made) == 5

    def test_a_result_is_gone_before_the_next_run(self):
        class Result:
            alive = 0

            def __init__(self):
                Result.alive += 1
                self.cycle = self  # only the collector frees it

            def __del__(self):
                Result.alive -= 1

        before = []

        def run():
            before.append(Result.alive)
            return Result()

        measure([ours(run, right)], lambda: None, TWICE)
        assert before[2:4] == [0, 0]

    def test_a_wrong_first_result_is_refused(self):
        with pytest.raises(WrongResult, match="statetree: the result is wrong"):
            measure([ours(lambda: 1, lambda result: result == 2)], lambda: None, TWICE)

    def test_a_result_that_was_not_renewed_is_refused(self):
        source = state()
        stale = zeros_like(source)
        torch._foreach_copy_(stale.tensors, source.tensors)
        with pytest.raises(WrongResult, match="late"):
            measure([peer("late", lambda: stale.tree, is_copy_of(source))], source.change, TWICE)

    def test_the_collector_is_back_on_after_a_failure(self):
        verdicts = iter([True, False])
        with pytest.raises(WrongResult, match="the result is wrong"):
            measure([ours(lambda: 1, lambda _: next(verdicts))], lambda: None, TWICE)
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0


class TestRow:
    @pytest.fixture
    def disturbances(self, monkeypatch):
        """How many cores others will take during each attempt."""
        coming = []

        class Scripted:
            def cores(self):
                return coming.pop(0)

        monkeypatch.setattr(rows, "Bystanders", Scripted)
        return coming

    def row(self, runs):
        return rows.Row("group", "work", lambda _: state(), lambda _: [ours(lambda: runs.append(1), right)])

    @pytest.mark.parametrize(
        ("cores", "attempts", "counts"),
        [
            pytest.param([0.01], 1, 0.01, id="quiet"),
            pytest.param([0.9, 0.02], 2, 0.02, id="quiet the second time"),
            pytest.param([0.9, 0.5, 0.7], 3, 0.5, id="never quiet"),
        ],
    )
    def test_is_measured_again_if_disturbed(self, disturbances, cores, attempts, counts):
        disturbances.extend(cores)
        runs = []
        result = self.row(runs).measure(1.0, Budget(rounds=2, most=2, seconds=0, attempts=3))
        assert result.bystanders == counts
        assert len(runs) == attempts * 5
        assert disturbances == []


def test_this_process_is_no_bystander(monkeypatch):
    readings = iter([(10.0, 100.0), (14.0, 101.0)])  # a second of work for others in four
    monkeypatch.setattr(Bystanders, "_readings", lambda _: next(readings))
    assert Bystanders().cores() == 0.25


class TestAims:
    @pytest.fixture
    def result(self):
        """statetree took 2 µs a leaf, the peer 10, the floor 1; once each, all took a second."""
        timings = [
            Timing(ours(state, right), [20e-6, 20e-6, 1.0]),
            Timing(peer("peer", state, right), [100e-6, 1.0, 100e-6]),
            Timing(floor("floor", state, right), [1.0, 10e-6, 10e-6]),
        ]
        return rows.Result(ROWS[0], "", 10, 0, timings, 0.0)

    @pytest.mark.parametrize(
        ("aim", "value", "reached"),
        [
            pytest.param(rows.faster("peer", 4), 5, True, id="faster"),
            pytest.param(rows.faster("peer", 6), 5, False, id="not faster"),
            pytest.param(rows.share(0.4, "floor"), 0.5, True, id="share"),
            pytest.param(rows.share(0.6, "floor"), 0.5, False, id="not the share"),
            pytest.param(rows.within(3, "floor"), 2, True, id="within"),
            pytest.param(rows.within(1.5, "floor"), 2, False, id="not within"),
            pytest.param(rows.at_most(3), 2, True, id="at most"),
            pytest.param(rows.at_most(1.5), 2, False, id="more"),
        ],
    )
    def test_holds_if_the_figure_is_reached(self, result, aim, value, reached):
        assert aim.value(result) == pytest.approx(value)
        assert aim.holds(aim.value(result)) is reached


class TestChecks:
    def test_a_copy_is_told_from_the_original(self):
        original = state()
        same = State("", {"a": original.tree["a"].clone(), "b": [original.tree["b"][0].clone(), 1]})
        assert is_copy_of(original)(same.tree)
        assert not is_copy_of(original)(original.tree)

    @pytest.mark.parametrize(
        "spoil",
        [
            pytest.param(lambda tree: tree["a"].add_(1), id="value"),
            pytest.param(lambda tree: tree["b"].pop(), id="leaf missing"),
            pytest.param(lambda tree: tree["b"].__setitem__(1, 2), id="plain value"),
            pytest.param(lambda tree: tree.__setitem__("a", tree["a"].double()), id="dtype"),
            pytest.param(lambda tree: tree.__setitem__("a", tree["a"][:2]), id="shape"),
        ],
    )
    def test_a_wrong_copy_is_noticed(self, spoil):
        original, other = state(), state()
        assert is_copy_of(original)(other.tree)
        spoil(other.tree)
        assert not is_copy_of(original)(other.tree)

    def test_contents_do_not_matter_where_memory_is_allocated(self):
        original = state()
        assert is_like(original)(zeros_like(original).tree)
        assert not is_like(original)(original.tree)
        assert not is_like(original)({"a": torch.zeros(3)})

    def test_a_target_must_hold_the_values(self):
        original, target = state(), zeros_like(state())
        check = holds_values_of(original, target=target)
        assert not check(None)
        torch._foreach_copy_(target.tensors, original.tensors)
        assert check(None)

    def test_a_tree_put_together_again_has_the_same_leaves(self):
        original = state()
        first, second, number = leaves(original.tree)
        assert has_leaves_of(original)({"a": first, "b": [second, number]})
        assert not has_leaves_of(original)(original.tree)
        assert not has_leaves_of(original)({"a": first, "b": [second.clone(), number]})
