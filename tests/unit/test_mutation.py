"""The referee of the tests: mutants are what is tested, and a run on anything else says nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import mutation

ROOT = Path(__file__).parents[2]
KILLED = "[(self.root(), '')] if self.nodes else []"
TRY = """
from tests import mutation
{before}
mutation.tests_of = lambda module: ["unit/tree/test_spec.py"]
mutants = [mutation.unchanged("tree/spec.py"), *mutation.mutants("tree/spec.py")]
chosen = next(mutant for mutant in mutants if mutant.before == {chosen!r})
print(mutation.survives(chosen)[0])
"""


def attempted(chosen, before=""):
    """Try one mutant, in a process of its own, and return what is printed and the error's last line."""
    code = TRY.format(chosen=chosen, before=before)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_a_mutant_is_killed_and_the_original_is_not():
    assert attempted("as it is")[0] == "True"
    assert attempted(KILLED)[0] == "False"


@pytest.mark.slow
def test_tests_that_run_on_the_original_say_nothing_about_a_mutant():
    found, error = attempted(KILLED, before="import statetree")
    assert not found
    assert "RuntimeError: the tests did not run" in error


def test_tests_that_are_to_notice_mutants_are_there():
    for module in mutation.TESTS:
        assert [name for name in mutation.tests_of(module) if not (ROOT / "tests" / name).exists()] == []


@pytest.mark.slow
def test_mutants_that_nothing_can_notice_are_still_there():
    stale = []
    for module in {module for module, _, _ in mutation.EQUIVALENT}:
        lines = (ROOT / mutation.PACKAGE / module).read_text().splitlines()
        made = {(lines[found.line - 1].strip(), found.change) for found in mutation.mutants(module)}
        stale += [key for key in mutation.EQUIVALENT if key[0] == module and key[1:] not in made]
    assert stale == []
