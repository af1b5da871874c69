"""The blocks of the documentation that import what only this environment has."""

from __future__ import annotations

import pytest

from tests.docs.snippets import Page
from tests.docs.test_snippets import ELSEWHERE, TRIED

SCRIPTS = [script for path in TRIED for script in Page(path).scripts() if script.imported() & ELSEWHERE]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_the_blocks_of_a_page_make_a_program(script, tmp_path):
    script.execute(tmp_path)
