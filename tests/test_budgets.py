"""Time of tests: each run says how long each distribution's tests took, and spares what it can."""

from __future__ import annotations

import gc
import os
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace


def test_seconds_are_summed_by_the_folder_that_a_test_lies_in() -> None:
    """A test of the examples, wherever it lies, is the examples'; `tests/` is the core's."""
    sum_up = runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))[
        "seconds_by_distribution"
    ]
    durations = {
        "tests/engine/test_rows.py::test_one": 1.0,
        "plugins/kit/tests/test_aot.py::test_two[x::y]": 2.0,
        "plugins/kit/tests/test_ranks.py::test_three": 4.0,
        "examples/plugins/model_llama/tests/test_llama.py::test_four": 8.0,
        "tests/examples/test_example_plugins.py::test_five": 16.0,
    }
    reports = [SimpleNamespace(nodeid=name, duration=s) for name, s in durations.items()]
    assert sum_up(reports) == {"examples": 24.0, "kit": 6.0, "core": 1.0}
    assert [*sum_up(reports)] == ["examples", "kit", "core"]


def test_what_is_imported_is_left_out_of_collections() -> None:
    """Engines of earlier tests, which thaw all objects when they close, have thawed nothing."""
    gc.unfreeze()
    assert gc.get_freeze_count() > 10_000


def test_processes_of_a_make_target_read_compiled_modules() -> None:
    """Also where the surroundings forbid Python to write them."""
    shown = subprocess.run(
        ["make", "--silent", "--eval", "variables: ; @env", "variables"],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "PYTHONDONTWRITEBYTECODE=\n" in shown
