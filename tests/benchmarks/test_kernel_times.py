"""The times of kernels that overlap: each has its own, and all add up to the step."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, strategies as st

FOLDER = Path(__file__).parents[2] / "benchmarks"
TIMES = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 60), st.sampled_from("abc")))


@pytest.fixture(scope="module")
def times() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        import kernel_times

        return kernel_times


def test_a_kernel_that_waits_for_another_has_the_time_behind_its_end(times: ModuleType) -> None:
    """Its duration counts the wait, and its own time does not; a gap belongs to none."""
    runs = [times.Kernel(0, 10, "product"), times.Kernel(4, 13, "norm"), times.Kernel(20, 25, "a")]
    shares, idle = times.share_out(runs)
    assert idle == 7
    assert {name: share.own for name, share in shares.items()} == {"product": 10, "a": 5, "norm": 3}
    assert shares["norm"].lasted == 9
    assert list(shares) == ["product", "a", "norm"]


@given(drawn=TIMES)
def test_own_times_and_gaps_add_up_to_the_span(times: ModuleType, drawn) -> None:
    """However kernels overlap, and in whatever order they are given."""
    kernels = [times.Kernel(start, start + length, name) for start, length, name in drawn]
    shares, idle = times.share_out(kernels)
    span = max((k.end for k in kernels), default=0) - min((k.start for k in kernels), default=0)
    assert idle + sum(share.own for share in shares.values()) == span
    assert sum(share.runs for share in shares.values()) == len(kernels)


def test_the_last_steps_are_cut_at_the_kernels_that_end_steps(times: ModuleType) -> None:
    """What ran before them, as prompts do, and behind them, as copies do, is left out."""
    step = [("embed", 1), ("product", 3), (times.LAST_KERNEL, 1)]
    kernels, now = [times.Kernel(0, 50, "prompt"), times.Kernel(50, 51, times.LAST_KERNEL)], 51
    for name, length in step * 4:
        kernels.append(times.Kernel(now, now + length, name))
        now += length
    kernels.append(times.Kernel(now, now + 1, "copy"))
    found = times.describe(times.last_steps(kernels, 3), 3)
    assert found["us"] == 5
    assert found["kernels"]["product"] == {"runs": 1, "lasted": 3, "own": 3}
    assert "prompt" not in found["kernels"]
    assert "copy" not in found["kernels"]
    with pytest.raises(ValueError, match=r"5 steps ran, 5 and one before them are needed"):
        times.last_steps(kernels, 5)


def test_without_a_gpu_it_says_so(times: ModuleType, monkeypatch, capsys) -> None:
    """Before it starts an engine."""
    monkeypatch.setattr(times.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["kernel_times.py"])
    with pytest.raises(SystemExit):
        times.main()
    assert "needs a CUDA GPU" in capsys.readouterr().err
