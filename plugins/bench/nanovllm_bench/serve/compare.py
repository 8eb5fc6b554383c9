"""Several results of `nanovllm bench serve` beside one another: load by load, and drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanovllm_bench.plots import draw_panels
from nanovllm_core.errors import ConfigError, shown

Run = Mapping[str, Any]
DIFFERENT = "the results are of different requests, and their figures say nothing of one another"
DIALECT = frozenset({"ignore_eos", "min_tokens", "stream_options"})
"""Fields with which one endpoint is asked for the answers that another gives without them."""
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
    _check_alike({name: _requests_of(record) for name, record in results.items()})
    loads: defaultdict[str, dict[str, Run]] = defaultdict(dict)
    for name, record in results.items():
        for run in record["runs"]:
            loads[load_name(run)][name] = run
    for load, runs in loads.items():
        _check_alike({f"{name}, {load}": _load_of(run) for name, run in runs.items()})
    return dict(loads)


def _requests_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a result that say what each request asks for."""
    fields = {name: value for name, value in record["body"].items() if name not in DIALECT}
    return {"workload": record["workload"], "prompts": record["prompts"], "body": fields}


def _load_of(run: Run) -> dict[str, Any]:
    """The fields of a load that say how many requests came, and when."""
    return {
        "num_seqs": run["num_seqs"],
        "arrivals": run["arrivals"],
        "long prompts": run["long_prompts"] is not None,
    }


def _check_alike(kinds: Mapping[str, Mapping[str, Any]]) -> None:
    """ConfigError with the first field in which results differ, and the value of each."""
    for field in next(iter(kinds.values()), {}):
        values = {name: kind[field] for name, kind in kinds.items()}
        if any(value != next(iter(values.values())) for value in values.values()):
            said = "; ".join(f"{name}: {shown(value)}" for name, value in values.items())
            raise ConfigError(f"{DIFFERENT}: {field} of {said}; measure them alike")


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
