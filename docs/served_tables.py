"""The table of docs/performance.md of what clients of a server see, from result files alone."""

from __future__ import annotations

from results_tables import Results, Tables, rate_of, table


def served_table(results: Results) -> str:
    """What clients of the server see, beside the same engine offline."""
    offline = results.records.get("serve_offline")
    rows = []
    for record in results.named("serve_").values():
        for run in record.get("runs", ()):
            clients, rate = run["clients"] or 0, run["rate"] or 0.0
            load = f"{clients} at a time" if clients else f"{rate:g} per second"
            if run["long_prompts"]:
                load += ", and prompts of 8,192 tokens"
            times = (
                " / ".join(f"{ms:.1f}" for ms in run[name].values())
                for name in ("ttft_ms", "inter_token_ms")
            )
            row = (record["workload"], load, f"{run['tokens_per_second']:,.0f}", *times)
            rows.append(((bool(run["long_prompts"]), rate, clients), row))
    head = ("requests", "load", "output tok/s", "first token, ms", "between tokens, ms")
    shown = table(head, [row for _, row in sorted(rows)])
    return shown if offline is None else f"Offline: {rate_of(offline):,.0f} tok/s.\n\n{shown}"


SERVED: Tables = {"served": served_table}
