"""Tables of docs/performance.md: larger dense models, requests that ask for more, starts."""

from __future__ import annotations

from pathlib import Path

from results_tables import Results, Tables, rate_of, share_of, table


def dense_table(results: Results) -> str:
    """tok/s and the share of the floor of the dense models beside the small one."""
    records = sorted(
        results.named("dense_").values(),
        key=lambda record: (record["roofline"]["costs"]["num_parameters"], record["workload"]),
    )
    rows = [
        (Path(r["config"]["model"]).name, r["workload"], f"{rate_of(r):,.0f}", share_of(r))
        for r in records
    ]
    return table(("model", "workload", "output tok/s", "share of roofline"), rows)


def batch_table(results: Results) -> str:
    """Batches by scheduler: the pairs of one run, of the smaller model first."""
    records = sorted(
        results.named("batch_").values(),
        key=lambda r: (r["roofline"]["costs"]["num_parameters"], r["scheduler"]),
    )
    first_come = {r["config"]["model"]: rate_of(r) for r in records if r["scheduler"] == "fcfs"}
    rows = [
        (
            Path(r["config"]["model"]).name,
            f"`{r['scheduler']}`",
            f"{r['config']['limits']['max_num_batched_tokens']:,}",
            f"{rate_of(r):,.0f}",
            f"{rate_of(r) / first_come[r['config']['model']]:.3f}",
            share_of(r),
            f"{r['mean_wait_seconds']:.1f} s",
            f"{r['mean_end_seconds']:.1f} s",
            f"{min(r['seconds']):.1f} s",
        )
        for r in records
    ]
    head = ("model", "scheduler", "tokens of a step", "output tok/s", "beside `fcfs`", "share")
    return table((*head, "mean wait", "mean end", "end of the last"), rows)


def asking_table(results: Results) -> str:
    """tok/s of nano by what every request asks for, and beside plain requests."""
    kinds = results.records["asking"]["kinds"] if "asking" in results.records else {}
    rows = [
        (kind, f"{one['tokens_per_second']:,.0f}", f"{one['to_plain']:.3f}")
        for kind, one in kinds.items()
    ]
    return table(("each request asks for", "output tok/s", "beside plain"), rows)


def start_table(results: Results) -> str:
    """From the start of the process to an engine that is ready; the quickest of equal starts."""
    peers = [
        (results.peers["engines"][name], results.peers["start_caches"], f"{seconds} s", *"–––")
        for name, seconds in results.peers["start_seconds"].items()
    ]
    ours = []
    hosts = results.entries("starts_by_host", "hosts")
    for record in (*results.named("start_").values(), *hosts):
        ranks = record.get("tensor_parallel_size", 1)
        name = f"{record['model']}, {ranks} GPUs" if ranks > 1 else record["model"]
        for cache in ("warm", "empty"):
            starts = [s for s in record["starts"] if s["triton_cache"] == cache]
            if not starts:
                continue
            quickest = min(starts, key=lambda start: float(start["ready"]))
            parts = [("import", "plan", "processes", "device"), ("model", "attention", "cache")]
            parts.append(("compile", "warm_up", "capture"))
            ours.append(
                (
                    f"nanovllm, {name}",
                    cache,
                    f"{quickest['ready']:.1f} s",
                    *(f"{sum(quickest.get(part, 0) for part in group):.1f} s" for group in parts),
                )
            )
    head = ("engine", "compile caches", "start to ready", "imports, processes, choices")
    return table((*head, "weights, trial step, blocks", "kernels and capture"), [*ours, *peers])


WORKLOADS: Tables = {
    "dense": dense_table,
    "batches": batch_table,
    "asking": asking_table,
    "start": start_table,
}
