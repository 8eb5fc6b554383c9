"""Tables of docs/performance.md of models with experts and of their kernels, from result files."""

from __future__ import annotations

from pathlib import Path

from results_tables import Results, Tables, rate_of, share_of, table


def mixtures_table(results: Results) -> str:
    """tok/s of models with experts, and the share of the floor by the experts that were touched."""
    rows = []
    for record in results.named("mixture_").values():
        touched, of = record["roofline"]["touched_experts"], record["roofline"]["costs"]
        model = Path(record["config"]["model"]).name
        experts = f"{touched:.1f} of {of['num_experts']}"
        rows.append(
            (model, record["workload"], experts, f"{rate_of(record):,.0f}", share_of(record))
        )
    head = ("model", "workload", "experts a layer's decode step touches", "output tok/s")
    return table((*head, "share of roofline"), rows)


def experts_table(results: Results) -> str:
    """Microseconds of a layer's experts, behind no router, and their share of the floor."""
    rows = []
    for one in results.entries("experts", "experts"):
        time, floor = one["microseconds"]["experts"], one["floor"]
        share = f"{100 * floor / time:.0f} %"
        rows.append(
            (one["model"], f"{one['tokens']:,}", f"{time:,.1f} µs", f"{floor:,.1f} µs", share)
        )
    return table(("shapes", "tokens", "time", "floor", "share"), rows)


def first_tokens_table(results: Results) -> str:
    """Milliseconds of prompts that come at once, by whether steps with them are captured."""
    name = "bursts_deepseek_v2_lite"
    rows = [
        (f"{one['prompts']} x {one['length']:,}", f"{one['ms']:.1f}", f"{eager['ms']:.1f}")
        for one, eager in zip(
            results.entries(name, "bursts"),
            results.entries(f"{name}_eager_prompts", "bursts"),
            strict=True,
        )
    ]
    return table(("prompts x tokens", "as chosen", "all steps with prompts eager"), rows)


LATENT: Tables = {"latent first tokens": first_tokens_table}
MIXTURES: Tables = {"mixtures": mixtures_table, "experts": experts_table}
