"""Plots of result files: throughput, share of the roofline, GPU utilisation as the batch grows."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm_bench.workloads import fixed_lengths
from nanovllm_core.errors import ConfigError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Point:
    """One measured batch of one series."""

    batch: int
    tokens_per_second: float
    share: float | None
    gpu_utilisation: float | None


PANELS: Mapping[str, Callable[[Point], float | None]] = {
    "output tok/s": lambda point: point.tokens_per_second,
    "share of the roofline, %": lambda point: _percent(point.share),
    "GPU utilisation, %": lambda point: _percent(point.gpu_utilisation),
}


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def read_record(file: Path) -> dict[str, Any]:
    """The record of a result file; ConfigError for a file that holds none."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no result file of `nanovllm bench`: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(
            f"{file} is no result file of `nanovllm bench`: it holds {type(record).__name__}, not "
            "an object"
        )
    return record


def series_of(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Points by series ("triton 512/512"), by growing batch; ConfigError where there are none.

    A series names its model and device where the records have several. Of two results of one batch
    the faster counts, as the best of several runs does.
    """
    found: list[tuple[str, tuple[str, str], Point]] = []
    for record in records:
        try:
            found += _points(record)
        except (LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"a record of {record.get('benchmark', 'a throughput')!r} is not as `nanovllm "
                f"bench` writes it: {error!r}; leave its file out, or measure again"
            ) from None
    if not found:
        raise ConfigError(
            "none of the files has a throughput by batch; give results of `bench table`, or of "
            "`bench throughput` with --input-len and --output-len"
        )
    one_place = len({place for _, place, _ in found}) == 1
    series: dict[str, dict[int, Point]] = defaultdict(dict)
    for name, place, point in found:
        points = series[name if one_place else ", ".join([name, *place])]
        known = points.get(point.batch, point)
        points[point.batch] = max(known, point, key=lambda p: p.tokens_per_second)
    return {name: [series[name][b] for b in sorted(series[name])] for name in sorted(series)}


def _points(record: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, str], Point]]:
    """(series, model and device, point) of each throughput of fixed lengths in a record."""
    kind = record.get("benchmark")
    if kind == "table":
        for cell in record["cells"]:
            for name, measured in cell["backends"].items():
                if isinstance(measured["result"], float):
                    series = f"{name} {cell['length']}/{cell['length']}"
                    point = _point(cell["batch"], measured["result"], measured)
                    yield series, _place(record["engines"][name]), point
    elif kind == "throughput" and (lengths := fixed_lengths(record["workload"])):
        series = f"{record['backend']} {lengths[0]}/{lengths[1]}"
        point = _point(record["num_seqs"], record["tokens_per_second"], record)
        yield series, _place(record), point


def _place(engine: Mapping[str, Any]) -> tuple[str, str]:
    return engine["config"]["model"], engine["device"]


def _point(batch: int, rate: float, measured: Mapping[str, Any]) -> Point:
    share = measured.get("roofline", {}).get("share")
    return Point(batch, rate, share, measured.get("gpu_utilisation"))


def draw(series: Mapping[str, Sequence[Point]], file: Path) -> None:
    """Draw the panels side by side, as .svg or .png; the same bytes each time."""
    draw_panels(
        {
            title: {name: [(p.batch, value(p)) for p in points] for name, points in series.items()}
            for title, value in PANELS.items()
        },
        "batch",
        file,
    )


def draw_panels(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float | None]]]],
    xlabel: str,
    file: Path,
) -> None:
    """Draw lines of (x, y) by series for each title; points without a y are left out."""
    try:
        import matplotlib
        from matplotlib import figure as mpl_figure
    except ImportError as error:
        raise UnsupportedError(
            'plots need matplotlib, which is not installed: pip install "nanovllm-bench[plot]"'
        ) from error

    # A seed for the ids in an SVG, and text as text: the file depends on the results alone.
    with matplotlib.rc_context({"svg.hashsalt": "nanovllm", "svg.fonttype": "none"}):
        make: Any = mpl_figure.Figure  # matplotlib leaves parts of it untyped
        figure = make(figsize=(13, 4), layout="constrained")
        axes_of = figure.subplots(1, len(panels))
        for axes, (title, lines) in zip(axes_of, panels.items(), strict=True):
            for name, points in lines.items():
                shown = [(x, y) for x, y in points if y is not None]
                if shown:
                    axes.plot(*zip(*shown, strict=True), marker="o", label=name)
            axes.set(title=title, xlabel=xlabel, xscale="log", ylim=(0, None))
            ticks = sorted({x for points in lines.values() for x, _ in points})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper")
        file.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Creator": None} if file.suffix == ".svg" else None
        figure.savefig(file, metadata=metadata)
