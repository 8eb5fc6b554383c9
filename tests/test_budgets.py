"""Time of tests: each run says how long each distribution's tests took."""

from __future__ import annotations

import runpy
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
