"""Tables of docs/performance.md, from result files alone. Rows without a file are left out.

Rates and shares of throughputs are computed here from raw times. What is printed as it is stored,
percentiles, shares and winners, a test computes anew from the same file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm_bench.roofline import ModelCosts, Rates, generate_floor
from nanovllm_bench.workloads import fixed_lengths, recorded_workload

Record = Mapping[str, Any]
NOTHING = "Not measured yet."


@dataclass(frozen=True, slots=True)
class Results:
    """The result files of one machine, by name, and the peers' figures."""

    records: Mapping[str, Record]
    peers: Record

    @classmethod
    def read(cls, folder: Path, peers: Path) -> Results:
        """Every JSON file of a folder that holds one record."""
        files = sorted(folder.glob("*.json"))
        read = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}
        records = {name: one for name, one in read.items() if isinstance(one, dict)}
        return cls(records, json.loads(peers.read_text(encoding="utf-8")))

    def named(self, prefix: str) -> dict[str, Record]:
        """The records whose file's name begins so."""
        return {name: one for name, one in self.records.items() if name.startswith(prefix)}

    def entries(self, name: str, key: str) -> Sequence[Any]:
        """A list in the record of one file; empty without the file."""
        entries: Sequence[Any] = self.records.get(name, {}).get(key, ())
        return entries


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in markdown, or a sentence where it has no rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not lines:
        return NOTHING
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines])


def rate_of(record: Record) -> float:
    """Output tokens per second of the best run."""
    return float(record["output_tokens"] / min(record["seconds"]))


def share_of(record: Record) -> str:
    """The share of the roofline, of the best run; a dash where the device was not measured."""
    roofline = record.get("roofline")
    if roofline is None:
        return "–"
    return f"{100 * roofline['floor_seconds'] / min(record['seconds']):.0f} %"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def gib(memory: float | None) -> str:
    return "–" if memory is None else f"{memory} GiB"


def nano_table(results: Results) -> str:
    """The nano workload by attention backend, the fastest first."""
    records = [r for r in results.named("throughput_").values() if r["workload"] == "nano"]
    records.sort(key=rate_of, reverse=True)
    rows = [
        (
            f"`{_backend(r)}`: {r['attention']}",
            f"{r['config']['limits']['max_model_len']:,}",
            f"{len(r['seconds'])}",
            f"{rate_of(r):,.0f}",
            f"{min(r['seconds']):.2f} s",
            share_of(r),
            percent(r.get("gpu_utilisation")),
            f"{r['host_us_per_steady_step']:.0f} µs",
            f"{r['load_seconds'] + r['capture_seconds']:.1f} s",
        )
        for r in records
    ]
    head = ("attention", "max_model_len", "runs", "output tok/s", "time", "share of roofline")
    return table((*head, "GPU busy", "host per steady step", "load and capture"), rows)


def _backend(record: Record) -> str:
    choice = record["config"]["attention"]
    prefill, decode = choice["prefill"]["backend"], choice["decode"]["backend"]
    return prefill if prefill == decode else f"{prefill}+{decode}"


def _workload_order(name: str) -> tuple[int, int]:
    lengths = fixed_lengths(name)
    return (sum(lengths), int(name.split()[0])) if lengths else (0, 0)


def _ours(results: Results) -> dict[str, Record]:
    """Our best record of each workload."""
    best: dict[str, Record] = {}
    for record in (*results.named("throughput_").values(), *results.named("fixed_").values()):
        name = record["workload"]
        if name not in best or rate_of(record) > rate_of(best[name]):
            best[name] = record
    return best


def peers_table(results: Results) -> str:
    """Ours beside the peers' figures, with the ratio to the fastest of them."""
    engines, ours = results.peers["engines"], _ours(results)
    rows = []
    for workload in sorted(results.peers["tokens_per_second"], key=_workload_order):
        peers = results.peers["tokens_per_second"][workload]
        cells = ["–", "–", "–"]
        if record := ours.get(workload):
            rate = rate_of(record)
            cells = [f"{rate:,.0f}", f"{rate / max(peers.values()):.2f}", share_of(record)]
        rows.append((workload, *(f"{peers[name]:,}" for name in engines), *cells))
    return table(("workload", *engines.values(), "nanovllm", "to the best", "our share"), rows)


def speed_table(results: Results) -> str:
    """The README's table: our best backend beside the fastest peer, a row for each workload."""
    ours = _ours(results)
    rows = []
    for workload in sorted(results.peers["tokens_per_second"], key=_workload_order):
        if record := ours.get(workload):
            best = max(results.peers["tokens_per_second"][workload].values())
            rate = rate_of(record)
            cells = (f"{rate:,.0f}", f"{best:,}", f"{rate / best:.2f}", share_of(record))
            rows.append((workload, *cells))
    head = "workload", "nanovllm, tok/s", "best peer, tok/s", "ratio", "share of the roofline"
    return table(head, rows)


def floor_table(results: Results) -> str:
    """The arithmetic of the roofline for the peers' workloads, at the rates of our nano run."""
    record = results.records.get("throughput_triton")
    if record is None:
        return NOTHING
    costs, rates = ModelCosts(**results.peers["costs"]), Rates(**record["roofline"]["rates"])
    rows = []
    for workload in sorted(results.peers["tokens_per_second"], key=_workload_order):
        num_seqs = 256 if workload == "nano" else int(workload.split()[0])
        lengths = recorded_workload({"workload": workload, "num_seqs": num_seqs}).lengths
        floor = generate_floor(costs, lengths, num_seqs, rates)
        tokens = sum(output for _, output in lengths)
        rows.append(
            (
                workload,
                f"{floor.kv_bytes / 1e12:.2f} TB",
                f"{floor.weight_bytes / 1e12:.2f} TB",
                f"{floor.decode_seconds:.2f} s",
                f"{floor.prefill_seconds:.3f} s",
                f"{floor.seconds:.2f} s",
                f"{tokens / floor.seconds:,.0f}",
                f"{tokens / floor.decode_seconds:,.0f}",
            )
        )
    head = ("workload", "KV reads", "weight reads", "decode", "prompts", "floor", "tok/s")
    return table((*head, "tok/s without prompts"), rows)


def fixed_table(results: Results) -> str:
    """Throughput at fixed lengths."""
    records = sorted(results.named("fixed_").values(), key=lambda r: _workload_order(r["workload"]))
    rows = [
        (
            r["workload"],
            f"`{_backend(r)}`",
            f"{rate_of(r):,.0f}",
            share_of(r),
            percent(r.get("gpu_utilisation")),
        )
        for r in records
    ]
    return table(("batch x prompt/output", "attention", "output tok/s", "share", "GPU busy"), rows)


def latency_table(results: Results) -> str:
    """Percentiles of time to first token and between tokens."""
    rows = []
    for record in results.named("latency").values():
        rate = record["rate"]
        arrival = "all at once" if rate is None else f"{rate:g} per second, {record['arrivals']}"
        sizes = record.get("prompt_graph_sizes")
        ran = (f"`{_backend(record)}`", f"up to {sizes[-1]:,} tokens" if sizes else "none")
        for key, what in (("ttft_ms", "first token"), ("inter_token_ms", "between tokens")):
            values = (f"{record[key][p]:.2f} ms" for p in ("p50", "p90", "p99"))
            model = Path(record["config"]["model"]).name
            rows.append((model, record["workload"], arrival, *ran, what, *values))
    head = ("model", "requests", "arrivals", "attention", "prompts in graphs")
    return table((*head, "time", "p50", "p90", "p99"), rows)


def backends_table(results: Results) -> str:
    """tok/s by backend, batch and length; output as long as the prompt."""
    names = list(results.records.get("table", {}).get("engines", ()))
    rows = []
    for cell in results.entries("table", "cells"):
        values = [cell["backends"][name]["result"] for name in names]
        speed_up = cell["speed_up"]
        rows.append(
            (
                f"{cell['batch']}",
                f"{cell['length']}",
                *(f"{v:,.0f}" if isinstance(v, float) else v for v in values),
                cell["winner"] or "–",
                "–" if speed_up is None else f"{speed_up:.2f}",
            )
        )
    return table(("batch", "length", *names, "winner", "speed-up over the next"), rows)


def attention_table(results: Results, phase: str) -> str:
    """Time and rate of attention alone, by length and backend."""
    rate, unit = ("tb_per_s", "TB/s") if phase == "decode" else ("tflop_per_s", "TFLOP/s")
    rows = []
    for row in results.entries(f"attention_{phase}", "rows"):
        for name, cell in row["backends"].items():
            shown = f"**{name}**" if name == row["winner"] else name
            rows.append((f"{row['length']}", shown, *_attention_cells(cell, rate)))
    return table(("length", "backend", "ms", unit, "share", "grid", "launches"), rows)


def _attention_cells(cell: Record, rate: str) -> tuple[str, ...]:
    if isinstance(cell["ms"], str):
        return (cell["ms"], "–", "–", "–", "–")
    grid = "–" if cell["grid"] is None else " × ".join(map(str, cell["grid"]))
    launches = "–" if cell["launches"] is None else f"{cell['launches']}"
    return (f"{cell['ms']:.4f}", f"{cell[rate]:.3g}", percent(cell["share"]), grid, launches)


def error_table(results: Results, phase: str) -> str:
    """Relative error and peak memory of attention, by length, a column pair per backend."""
    measured = results.entries(f"attention_{phase}", "rows")
    names = list(measured[0]["backends"]) if measured else []
    rows = [
        (f"{row['length']}", *(v for name in names for v in _error_cells(row["backends"][name])))
        for row in measured
    ]
    head = [title for name in names for title in (f"{name}: error", f"{name}: peak MiB")]
    return table(("length", *head), rows)


def _error_cells(cell: Record) -> tuple[str, str]:
    if isinstance(cell["ms"], str):
        return cell["ms"], cell["ms"]
    peak = "–" if cell["peak_mib"] is None else f"{cell['peak_mib']:,.0f}"
    return f"{cell['relative_error']:.1e}", peak


def compare_table(results: Results) -> str:
    """transformers' generate on the same requests."""
    rows = []
    for record in results.named("compare_hf").values():
        sides = {"nanovllm": record["ours"]}
        sides |= {f"transformers, {mode}": one for mode, one in record["transformers"].items()}
        for name, one in sides.items():
            rate = record["output_tokens"] / min(one["seconds"])
            ratio = record["output_tokens"] / min(record["ours"]["seconds"]) / rate
            rows.append(
                (
                    f"`{record['config']['model']}`, {record['device']}",
                    name,
                    f"{rate:,.0f}",
                    f"{one['ttft_ms']['p50']:,.0f} ms",
                    gib(one["peak_memory_gib"]),
                    "" if name == "nanovllm" else f"{ratio:.2f}",
                )
            )
    head = ("model, device", "engine", "output tok/s", "first token p50", "peak memory")
    return table((*head, "we are × as fast"), rows)


def truncation_table(results: Results) -> str:
    """top_k and top_p: a sort of the rows beside the kernel as it is tiled now."""
    rows = [
        # The last tile of a line is the largest, which the kernel uses.
        (f"{line['rows']}", line["cut"], f"{line['sort']:.2f} ms", f"{[*line.values()][-1]:.2f} ms")
        for line in results.entries("top_k_top_p", "milliseconds")
    ]
    return table(("rows", "limits", "by sorting", "by the kernel"), rows)


def bursts_table(results: Results) -> str:
    """Prompts that come at once to an idle engine, until the last of them has its first token."""
    rows = [
        (f"{burst['prompts']}", f"{burst['length']:,}", f"{burst['ms']:.1f} ms")
        for burst in results.entries("bursts", "bursts")
    ]
    return table(("prompts at once", "tokens of each", "all first tokens"), rows)


def steps_table(results: Results) -> str:
    """What each step of the work was predicted to buy, what it bought, and what limits then."""
    times = "before", "after"
    rows = [
        (
            step["name"],
            f"{step['predicted']:+.0%}",
            *(f"{step[time]:,.{step.get('digits', 0)}f} {step['unit']}" for time in times),
            f"{step['after'] / step['before'] - 1:+.0%}",
            step["limits"],
        )
        for step in results.entries("steps", "steps")
    ]
    return table(("step", "predicted", *times, "bought", "what limits now"), rows)


def goals_table(results: Results) -> str:
    """The aims that are not reached, and what limits them."""
    rows = []
    for goal in results.entries("goals", "goals"):
        figures = [
            f"{goal[name]:,.{goal['digits']}f}" if goal[name] else "–"
            for name in ("now", "aim", "floor")
        ]
        row = f"{goal['row']}, {goal['unit']}"
        rows.append((row, *figures, f"`{goal['commit']}`", goal["limits"]))
    return table(("", "now", "aim", "floor", "commit", "what limits it"), rows)


def promises_table(results: Results) -> str:
    """What one host reached of the figures that are promised."""
    rows = []
    for row in results.entries("promises", "rows"):
        value, limit = (f"{row[name]:,.{_digits(row[name])}f}" for name in ("value", "limit"))
        bound = "at most" if row["is_time"] else "at least"
        rows.append((f"{row['name']}, {row['unit']}", value, f"{bound} {limit}"))
    return table(("", "this host", "promised"), rows)


def _digits(value: float) -> int:
    """Behind the point, so that three or more are shown."""
    return 0 if value >= 1000 else 1 if value >= 10 else 2


def files_table(results: Results) -> str:
    """Which commit each file was measured at."""
    rows = []
    for name, record in results.records.items():
        environment = record.get("environment") or next(
            (engine["environment"] for engine in record.get("engines", {}).values()), None
        )
        if environment is None or "outcomes" in record:  # not measured, or tests
            continue
        state = {True: "clean", False: "changed", None: "not known"}[environment["clean_tree"]]
        packages = environment["packages"]
        rows.append(
            (
                f"`{name}.json`",
                environment["device"]["name"],
                f"torch {packages.get('torch', '–')}",
                f"`{(environment['commit'] or '–')[:12]}`",
                state,
            )
        )
    return table(("file", "device", "versions", "commit", "tree"), rows)


Tables = Mapping[str, Callable[[Results], str]]

README: Tables = {"speed": speed_table}

PERFORMANCE: Tables = {
    "floors": floor_table,
    "nano": nano_table,
    "peers": peers_table,
    "fixed": fixed_table,
    "latency": latency_table,
    "bursts": bursts_table,
    "backends": backends_table,
    "attention prefill": partial(attention_table, phase="prefill"),
    "attention decode": partial(attention_table, phase="decode"),
    "transformers": compare_table,
    "truncation": truncation_table,
    "promises": promises_table,
    "goals": goals_table,
    "steps": steps_table,
    "files": files_table,
}

ATTENTION: Tables = {
    "prefill errors": partial(error_table, phase="prefill"),
    "decode errors": partial(error_table, phase="decode"),
}
