"""The tables of docs/scale.md: GPUs that plans know, plans of models, and what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from results_tables import table

from nanovllm_bench.gpus import find_gpu, known_gpus
from nanovllm_bench.plan import Layout, plan_layouts
from nanovllm_core.config import load_config

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MODELS = {"qwen3-8b": (1, 2), "qwen3-32b": (1, 2, 4)}
LENGTH = 4096
MEASURED = BENCHMARKS / "results" / "h200"
SIZES = {2048: "2 KB", 32768: "32 KB", 65536: "64 KB", 262144: "256 KB", 1048576: "1 MB",
         4194304: "4 MB", 8388608: "8 MB", 16777216: "16 MB", 67108864: "64 MB"}  # fmt: skip


def gpu_table() -> str:
    """Every GPU that a plan knows by name."""
    rows = [
        [
            f"`{gpu.name}`",
            f"{gpu.memory_bytes / 2**30:.1f}",
            f"{gpu.rates.copy_bytes_per_s / 1e12:.4g}",
            f"{gpu.rates.matmul_flops_per_s / 1e12:,.0f}",
            f"{(gpu.link_bytes_per_s or 0) / 1e9:,.0f}",
            gpu.source,
        ]
        for gpu in known_gpus()
    ]
    head = ["GPU", "GiB", "TB/s", "bf16 TFLOP/s", "link GB/s, each direction", "source"]
    return table(head, rows)


def plan_table() -> str:
    """Each split of H200s for the larger benchmark models."""
    head = ["model", "engines x GPUs", "weights, GiB", "blocks, GiB", f"sequences of {LENGTH:,}"]
    head += ["1 sequence each, tok/s", "many: sequences each", "many, tok/s"]
    rows = [
        [model.replace("qwen3-", "Qwen3-").replace("b", "B"), *_row(layout)]
        for model, sizes in MODELS.items()
        for num_gpus in sizes
        for layout in _layouts(model, num_gpus)
    ]
    return table(head, rows)


def start_table() -> str:
    """The blocks of a recorded start beside those of its plan."""
    record = json.loads((BENCHMARKS / "results/h200/throughput_triton.json").read_text())
    config = load_config(
        str(BENCHMARKS / "configs/qwen3-0.6b"),
        overrides={"attention": "triton", "limits": record["config"]["limits"]},
        env={},
    )
    [layout] = plan_layouts(config, find_gpu("H200"), 1, [])
    planned = layout.memory.num_blocks if layout.memory else 0
    row = ["Qwen3-0.6B, `throughput_triton.json`", f"{record['num_blocks']:,}", f"{planned:,}"]
    return table(["start on an H200", "blocks, recorded", "blocks, planned"], [row])


def all_reduce_table(num_gpus: int) -> str:
    """Microseconds of the ways between so many GPUs, by size."""
    file = BENCHMARKS / f"results/h100/all_reduce_{num_gpus}.json"
    found = json.loads(file.read_text())["microseconds"]
    kinds = {"residual": "add", "residual + norm": "add, norm", "residual, norm": "add and norm"}
    ways = {"NCCL, residual": "NCCL, add"}
    for shown, way in (("one-shot", "ours"), ("two-shot", "our two-shot"))[: num_gpus // 2]:
        ways |= {f"{shown}, {kind}": f"{way}, {name}" for kind, name in kinds.items()}
    rows = [
        [shown, *(f"{found[way].get(str(size), '-')}" for way in ways.values())]
        for size, shown in SIZES.items()
    ]
    return table(["bytes of a rank", *(f"{name}, µs" for name in ways)], rows)


def parallel_table() -> str:
    """Output tokens per second of the layouts of each model, and shares of their floors."""
    rows = []
    for file in sorted(MEASURED.glob("parallel_*.json")):
        record = json.loads(file.read_text())
        scheduler = json.loads(record["settings"]).get("scheduler")
        by = f", by `{scheduler}`" if scheduler else ""
        for layout, found in record["layouts"].items():
            for workload, row in found.get("workloads", {}).items():
                rate, share = row["tokens_per_second"], row["share_of_floor"]
                shown = [_layout_name(layout), workload + by, f"{rate:,.0f}", f"{share:.0%}"]
                rows.append([Path(record["model"]).name, *shown])
    return table(["model", "layout", "workload", "output tok/s", "share of its floor"], rows)


def _layout_name(layout: str) -> str:
    if layout.startswith("d"):
        return f"{layout[1:]} engines, each with its own requests"
    ranks, _, way = layout.partition(":")
    return f"{ranks} GPU" if ranks == "1" else f"{ranks} GPUs{', ' * bool(way)}{way}"


def _layouts(model: str, num_gpus: int) -> list[Layout]:
    overrides = {"attention": "triton", "max_model_len": LENGTH}
    config = load_config(str(BENCHMARKS / "configs" / model), overrides=overrides, env={})
    return plan_layouts(config, find_gpu("H200"), num_gpus, [LENGTH])


def _row(layout: Layout) -> list[str]:
    name = f"{layout.data_parallel} x {layout.tensor_parallel}"
    if layout.memory is None:
        return [name, *("-",) * 6]
    one, many = layout.speeds[0], layout.speeds[-1]
    both = (f"{speed.floor:,.0f} / {speed.with_communication or 0:,.0f}" for speed in (one, many))
    alone, together = both
    return [
        name,
        f"{layout.memory.weights / 2**30:.1f}",
        f"{layout.memory.blocks / 2**30:.1f}",
        f"{layout.rooms[-1].sequences:,}",
        alone,
        f"{many.rows:,}",
        together,
    ]


SCALE: Mapping[str, Callable[[], str]] = {
    "gpus": gpu_table,
    "plans": plan_table,
    "starts": start_table,
    "all-reduces of 2": partial(all_reduce_table, 2),
    "all-reduces of 4": partial(all_reduce_table, 4),
    "layouts": parallel_table,
}
