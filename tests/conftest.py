"""Hypothesis profiles, chosen by the environment variable HYPOTHESIS_PROFILE.

``dev`` while working, ``ci`` in `make test` and wherever CI is set, ``thorough`` in `make thorough`.
"""

import os

from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine than about the code: speed is benchmarks/' concern.
UNTIMED = settings(
    parent=settings.get_profile("default"),  # not the current profile, which is another one where CI is set
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)

settings.register_profile("dev", UNTIMED, max_examples=100)
# The same examples every time: a red run must come from the change at hand. dev and thorough explore.
settings.register_profile("ci", UNTIMED, max_examples=200, derandomize=True, database=None)
settings.register_profile("thorough", UNTIMED, max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))
