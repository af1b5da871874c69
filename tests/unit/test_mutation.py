"""The referee of the tests: mutants are what is tested, and a run on anything else says nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KILLED = "[(self.root(), '')] if self.nodes else []"
TRY = """
from tests import mutation
{before}
mutation.TESTS = dict.fromkeys(mutation.TESTS, ("unit/tree/test_spec.py",))
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
