"""Several results of `nanovllm bench serve` beside one another: load by load, and drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanovllm_bench.plots import draw_panels
from nanovllm_core.errors import ConfigError

Run = Mapping[str, Any]
PANELS: Mapping[str, Callable[[Run], float | None]] = {
    "output tok/s": lambda run: run["tokens_per_second"],
    "first token, p99, ms": lambda run: run["ttft_ms"] and run["ttft_ms"]["p99"],
    "between tokens, p99, ms": lambda run: run["inter_token_ms"] and run["inter_token_ms"]["p99"],
}


def load_name(run: Run) -> str:
    """`64 clients`, `50 requests/s` or `all at once`."""
    if run["load"] == "closed":
        return "1 client" if run["clients"] == 1 else f"{run['clients']} clients"
    return "all at once" if run["rate"] is None else f"{run['rate']:g} requests/s"


def is_serving(record: Mapping[str, Any]) -> bool:
    """Whether a record is of `nanovllm bench serve`."""
    return record.get("benchmark") == "serve"


def by_load(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Run]]:
    """Runs by load, then by the result's name; ConfigError where the requests are not the same."""
    if strange := [name for name, record in results.items() if not is_serving(record)]:
        raise ConfigError(
            f"{strange[0]} is no result of `nanovllm bench serve`; results of several kinds cannot "
            "be put beside one another"
        )
    kinds = {(one["workload"], one["prompts"]): name for name, one in results.items()}
    if len(kinds) > 1:
        raise ConfigError(
            "the results are of different requests, and their figures say nothing of one another: "
            + "; ".join(f"{name}: {workload} as {how}" for (workload, how), name in kinds.items())
        )
    loads: defaultdict[str, dict[str, Run]] = defaultdict(dict)
    for name, record in results.items():
        for run in record["runs"]:
            loads[load_name(run)][name] = run
    return dict(loads)


def names_of(files: Sequence[Path]) -> list[str]:
    """A short name for each file: its stem, or its path where two have one stem."""
    stems = [file.stem for file in files]
    return stems if len({*stems}) == len(stems) else [str(file) for file in files]


def draw_serving(results: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Throughput and p99s by the number of clients or of requests per second."""
    by_load(results)
    series: defaultdict[str, list[tuple[float, Run]]] = defaultdict(list)
    for name, record in results.items():
        for run in record["runs"]:
            if (level := run["clients"] or run["rate"]) is not None:
                series[f"{name}, {run['load']} loop"].append((level, run))
    panels = {
        title: {
            name: [(level, value(run)) for level, run in sorted(points, key=lambda one: one[0])]
            for name, points in series.items()
        }
        for title, value in PANELS.items()
    }
    draw_panels(panels, "clients (closed loop) or requests/s (open loop)", file)
