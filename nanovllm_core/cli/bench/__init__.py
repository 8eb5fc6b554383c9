"""`nanovllm bench`: measure, and say what really ran."""

from __future__ import annotations

import typer

from nanovllm_core.cli.bench.attention import attention
from nanovllm_core.cli.bench.compare import compare
from nanovllm_core.cli.bench.latency import latency
from nanovllm_core.cli.bench.plot import plot
from nanovllm_core.cli.bench.table import table
from nanovllm_core.cli.bench.throughput import throughput

app = typer.Typer(no_args_is_help=True, help="Measure speed on this machine.")
for command in (throughput, latency, attention, table, compare, plot):
    app.command()(command)


@app.callback()
def _bench() -> None:
    """Measure speed on this machine."""
