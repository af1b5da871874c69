"""The page of versions takes the outcomes of the runs that it is told of, and keeps those of others."""

from __future__ import annotations

import sys

import pytest

from tests.versions import BEGIN, END, HEAD, Outcome, run, write


@pytest.fixture
def page(tmp_path):
    page = tmp_path / "versions.md"
    page.write_text(f"before\n{BEGIN}{HEAD}| 2.11.0 | 0.14 | 3.11 | 1 | 2 | 3 | 2001-01-01 |\n{END}after\n")
    return page


def test_a_run_takes_the_place_of_the_last_one_of_its_version(page):
    write([Outcome("2.15.0", "0.20", "3.12", 10_000, 5, 0)], page)
    write([Outcome("2.11.0", "0.20", "3.12", 7, 8, 9)], page)
    before, first, second, after = (
        line for line in page.read_text().splitlines() if not line.startswith(("<", "| t", "|-"))
    )
    assert (before, after) == ("before", "after")
    assert first.startswith("| 2.11.0 | 0.20 | 3.12 | 7 | 8 | 9 |")
    assert second.startswith("| 2.15.0 | 0.20 | 3.12 | 10,000 | 5 | 0 |")


@pytest.mark.slow
def test_outcomes_are_counted(tmp_path):
    tests = tmp_path / "test_three.py"
    tests.write_text("import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip('c')\n")
    outcome = run(sys.executable, [str(tests), "--rootdir", str(tmp_path), "-p", "no:randomly"])
    assert (outcome.passed, outcome.skipped, outcome.failed) == (1, 1, 1)


@pytest.mark.slow
def test_a_run_without_tests_is_no_success(tmp_path):
    with pytest.raises(SystemExit, match="the tests did not run"):
        run(sys.executable, [str(tmp_path), "--rootdir", str(tmp_path)])
