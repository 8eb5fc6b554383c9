"""The soak benchmark's own facts, on the tiny model: a few hundred steps of random traffic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import differences, growth, problems, run

from .tiny import open_tiny

STEPS = 300


def soaked(tiny: Path, seed: int, steps: int = STEPS) -> dict[str, Any]:
    with open_tiny(tiny, **{"cache.num_blocks": 24, "cache.block_size": 16}) as llm:
        return run(llm, seed, lambda step, _: step < steps).to_json()


@pytest.fixture(scope="module")
def results(tiny: Path) -> dict[int, list[dict[str, Any]]]:
    """Two runs of each of two seeds; the engine checks its invariants at every step."""
    return {seed: [soaked(tiny, seed), soaked(tiny, seed)] for seed in (1, 2)}


@pytest.mark.parametrize("seed", [1, 2])
def test_random_traffic_leaves_nothing_and_comes_out_the_same_again(
    results: dict[int, list[dict[str, Any]]], seed: int
) -> None:
    """Every block is free, every request answered, and every token that of the first run."""
    one, other = results[seed]
    assert problems(one) == problems(other) == []
    assert differences(one, other) == []
    numbers = [number for _, number, _ in one["finished"]]
    assert sorted(numbers) == list(range(one["requests"]))
    assert min(one["aborts"], one["preemptions"], one["prefix_hit_tokens"]) > 0


def test_seeds_make_different_traffic(results: dict[int, list[dict[str, Any]]]) -> None:
    (one, _), (other, _) = results.values()
    assert one["finished"] != other["finished"]
    assert differences(one, other) == [
        "these are not runs of the same schedule with the same settings"
    ]


def test_runs_of_different_lengths_are_compared_over_the_steps_of_both(
    tiny: Path, results: dict[int, list[dict[str, Any]]]
) -> None:
    """As where two processes ran for the same time."""
    shorter = soaked(tiny, 1, STEPS // 2)
    longer = results[1][0]
    assert len(shorter["finished"]) < len(longer["finished"])
    assert differences(shorter, longer) == differences(longer, shorter) == []


Change = Callable[[dict[str, Any]], None]


def other_digest(result: dict[str, Any]) -> None:
    result["finished"][5][2] = "0" * 16


def later_end(result: dict[str, Any]) -> None:
    result["finished"][5][0] += 1


def lost_request(result: dict[str, Any]) -> None:
    del result["finished"][5]


@pytest.mark.parametrize("change", [other_digest, later_end, lost_request])
def test_one_request_that_differs_is_found(
    results: dict[int, list[dict[str, Any]]], change: Change
) -> None:
    one, other = results[1]
    changed = {**other, "finished": [list(entry) for entry in other["finished"]]}
    change(changed)
    number = other["finished"][5][1]
    found = differences(one, changed)
    assert found[0].startswith(f"request {number}:")
    assert found[-1] == f"1 of {len(one['finished'])} requests differ"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"free_blocks": 20}, "4 blocks did not come back"),
        ({"preemptions": 0}, "no request was preempted"),
        ({"host_growth_mib": 17.0}, "memory of the host grew by 17.0 MiB"),
    ],
)
def test_what_a_run_must_not_show_is_named(
    results: dict[int, list[dict[str, Any]]], change: dict[str, Any], message: str
) -> None:
    (found,) = problems({**results[1][0], **change})
    assert message in found


def test_growth_counts_from_the_end_of_the_warm_up() -> None:
    """What the first steps take is no growth; what every later minute takes is."""
    assert growth([0.0] * 20 + [100.0] * 80) == 0.0
    assert growth([float(i) for i in range(100)]) > 60
    assert growth([float(i) for i in range(30)]) is None, "too short a run to tell"
