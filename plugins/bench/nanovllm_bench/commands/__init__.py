"""`nanovllm bench`: measure, and say what really ran."""

from __future__ import annotations

import typer

from nanovllm_bench.commands.attention import attention
from nanovllm_bench.commands.compare import compare
from nanovllm_bench.commands.latency import latency
from nanovllm_bench.commands.plot import plot
from nanovllm_bench.commands.serve import serve
from nanovllm_bench.commands.table import table
from nanovllm_bench.commands.throughput import throughput

app = typer.Typer(no_args_is_help=True, help="Measure speed.")
for command in (throughput, latency, serve, attention, table, compare, plot):
    app.command()(command)


@app.callback()
def _bench() -> None:
    """Measure speed."""
