"""Tables of docs/performance.md of larger dense models, and of requests that ask for more."""

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


def asking_table(results: Results) -> str:
    """tok/s of nano by what every request asks for, and beside plain requests."""
    kinds = results.records["asking"]["kinds"] if "asking" in results.records else {}
    rows = [
        (kind, f"{one['tokens_per_second']:,.0f}", f"{one['to_plain']:.3f}")
        for kind, one in kinds.items()
    ]
    return table(("each request asks for", "output tok/s", "beside plain"), rows)


WORKLOADS: Tables = {"dense": dense_table, "asking": asking_table}
