"""The table of docs/performance.md on products of few rows, from `products.json`."""

from __future__ import annotations

from results_tables import Record, Results, Tables, percent, table

LAUNCH_MICROSECONDS = 1.2
"""A launch that waits for the one before it, as the aim counts it."""
SHARES = {1: 0.92, 16: 0.88, 64: 0.82}
"""Of the copy rate, the stream's aim by rows."""


def products_table(results: Results) -> str:
    """The four products of a layer and the layer beside the aim, and cuBLAS in brackets.

    The aim is the stream of the weights at a share of the copy rate, and the launches.
    """
    by_product: dict[tuple[str, str], dict[int, Record]] = {}
    for line in results.entries("products", "products"):
        if line["rows"] in SHARES:
            by_product.setdefault((line["model"], line["product"]), {})[line["rows"]] = line
    rows = [(*names, *(_cell(lines[n]) for n in SHARES)) for names, lines in by_product.items()]
    return table(("model", "", "1 row", *(f"{n} rows" for n in SHARES if n > 1)), rows)


def _cell(line: Record) -> str:
    launches = 4 if line["product"] == "layer" else 1
    aim = line["floor"] / SHARES[line["rows"]] + launches * LAUNCH_MICROSECONDS
    chosen, cublas = (line["microseconds"][name] for name in ("chosen", "cuBLAS"))
    return f"{chosen:.1f} of {aim:.1f} µs, {percent(aim / chosen)} ({cublas:.1f})"


PRODUCTS: Tables = {"products": products_table}
