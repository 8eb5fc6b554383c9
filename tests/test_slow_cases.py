"""The list of cases that are left to the full run names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conftest import SLOW_CASES

ROOT = Path(__file__).parents[1]
KIT = "\n".join(file.read_text() for file in (ROOT / "plugins/kit/nanovllm_kit").rglob("*.py"))


@pytest.mark.parametrize("case", SLOW_CASES)
def test_a_case_that_is_left_to_the_full_run_is_there(case: str) -> None:
    """Its file, its class, and its function: there, or in a suite that the class inherits."""
    file, *names = re.split("::", case)
    own = (ROOT / file).read_text()
    for name in filter(None, (name.partition("[")[0] for name in names)):
        kind = "class" if name.startswith("Test") else "def"
        assert re.search(
            rf"^ *{kind} {name}\(", own if kind == "class" else own + KIT, re.MULTILINE
        )
