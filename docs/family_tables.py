"""The table of docs/performance.md on models of several families, from `families.json`."""

from __future__ import annotations

from results_tables import Record, Results, Tables, percent, table

ROWS = ("1", "4", "16", "64", "128")


def families_table(results: Results) -> str:
    """A decode step by its rows, and a long prompt to its first token, with their shares."""
    models: dict[str, Record] = results.records.get("families", {}).get("models", {})
    rows = [
        (
            name,
            *(f"{one['step_ms'][n]:.2f} ({percent(one['step_share'][n])})" for n in ROWS),
            f"{one['prompt_ms']:.1f} ({percent(one['prompt_share'])})",
        )
        for name, one in models.items()
    ]
    return table(("model", "1 row", *(f"{n} rows" for n in ROWS[1:]), "prompt"), rows)


FAMILIES: Tables = {"families": families_table}
