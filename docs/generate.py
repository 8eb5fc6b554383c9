"""Write the documents' tables: of fields and plugins from the code, of speed from result files.

    python docs/generate.py

Rewrites what stands between `<!-- generated: NAME -->` and `<!-- end -->`, and draws the plots of
docs/performance.md. A test fails where a document differs from what this would write.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from capability_tables import CAPABILITIES, job, shipped
from contract_tables import METADATA, PLUGINS, POLICY, SCHEDULER
from family_tables import FAMILIES
from layer_tables import LAYERS
from mixture_tables import LATENT, MIXTURES
from moe_tables import MOE
from product_tables import PRODUCTS
from results_tables import (
    ATTENTION,
    PERFORMANCE,
    README,
    Results,
    Tables,
    compare_table,
    table,
)
from scale_tables import SCALE
from served_tables import SERVED
from serving_tables import SERVING
from settings_tables import CONFIGURATION
from turn_tables import TURNS
from workload_tables import WORKLOADS

from nanovllm_attention_sdpa.workspace import WORKSPACE_LIMIT
from nanovllm_bench.plots import draw, series_of
from nanovllm_core.cli.prompts import MAX_PROMPTS, MAX_SIZE
from nanovllm_core.config import yaml_reader as config_yaml
from nanovllm_core.config.settings import BLOCK_SIZES, EngineConfig
from nanovllm_core.interfaces import request_labels, sampling_params
from nanovllm_core.interfaces.plan import MAX_DEVICE_STOP_IDS
from nanovllm_core.interfaces.scheduler import SchedulingPolicy
from nanovllm_core.registry.objects import load_object

FOLDER = Path(__file__).parent
BENCHMARKS = FOLDER.parent / "benchmarks"
EDGE_AIM = 1.3
"""Microseconds of an edge from which on a persistent kernel for a layer would pay."""
PLOT = BENCHMARKS / "results" / "h200" / "by_batch.svg"
GPU, CPU = (
    Results.read(BENCHMARKS / "results" / machine, BENCHMARKS / "peers.json")
    for machine in ("h200", "cpu")
)


def measured(tables: Tables) -> Mapping[str, Callable[[], str]]:
    """Tables of the results that were committed for the GPU."""
    return {name: partial(make, GPU) for name, make in tables.items()}


def by_batch() -> dict[str, Any]:
    """What the plot shows: the table of backends and the fixed lengths; empty without either."""
    records = [*GPU.named("table").values(), *GPU.named("fixed_").values()]
    return series_of(records) if records else {}


def plots() -> str:
    """The plot's place in the document, where there is something to draw."""
    return (
        f"![By batch](../{PLOT.relative_to(FOLDER.parent)})" if by_batch() else "Not measured yet."
    )


# -- arithmetic ------------------------------------------------------------------------------------


def edge_table() -> str:
    """Microseconds of an edge between products of one row, the better of the numbers of warps."""
    edges = json.loads((BENCHMARKS / "results/h100/edges.json").read_text())["edges"]
    rows: dict[int, dict[str, float]] = {}
    for one in edges:
        best = rows.setdefault(one["size"], one["us_an_edge"])
        rows[one["size"]] = {way: min(best[way], us) for way, us in one["us_an_edge"].items()}
    cells = [
        (f"{size:,}", *(f"{us:.2f} µs" for us in best.values())) for size, best in rows.items()
    ]
    cells.append(("aim", "", *2 * (f"{EDGE_AIM} µs",)))
    return table(("numbers of x", "kernels with dependent launch", "counter", "tags"), cells)


def power_table() -> str:
    """Power and clock of a GPU in the phases of a run."""
    power = json.loads((BENCHMARKS / "results/h200/power.json").read_text())
    limit, highest = power["limit_w"], power["highest_mhz"]
    head = "Qwen3-32B nano, one H200", "power, of its limit", "clock, of the highest", "a step"
    return table(
        head,
        [
            (
                one["phase"],
                f"{one['watts']} of {limit} W",
                f"{one['mhz']:,} of {highest:,} MHz",
                f"{one['step_ms']:,.1f} ms",
            )
            for one in power["phases"]
        ],
    )


def gathering_table() -> str:
    """What a dense copy of the blocks takes in one layer, by the shapes of a config.json."""
    file = BENCHMARKS / "configs" / "qwen3-0.6b" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rows = []
    for batch, longest in ((16, 1024), (64, 2048), (64, 8192), (256, 4096)):
        dense = 2 * batch * longest * kv_heads * config["head_dim"] * 2
        scores = 4 * batch * heads * longest * longest
        sizes = (dense // 2, dense, dense * heads // kv_heads, scores)
        rows.append([f"{batch} x {longest}", *(f"{size / 2**20:,.0f} MiB" for size in sizes)])
    head = "batch x longest", "in the cache", "copy", "repeated", "scores in prefill"
    return table(head, rows)


def limit_table() -> str:
    """Limits that are numbers, from where they stand in the code."""
    steps = EngineConfig.model_json_schema()["properties"]["steps_ahead"]["maximum"]
    logprobs = sampling_params.MAX_LOGPROBS
    largest = f"2^{sampling_params.MAX_INTEGER.bit_length()} - 1"
    penalty = f"{-sampling_params.MAX_PENALTY:g} to {sampling_params.MAX_PENALTY:g}"
    scale = f"{sampling_params.MIN_SCALE:g} to {sampling_params.MAX_SCALE:g}"
    bias = f"{-sampling_params.MAX_BIAS:g} to {sampling_params.MAX_BIAS:g}"
    rows: list[tuple[str, ...]] = [
        ("prompt and answer of one request", "`limits.max_model_len`", "refused when added"),
        ("prompt", "at least 1 token; room for one more", "refused when added"),
        ("requests that run", "`limits.max_num_seqs`", "further ones wait"),
        ("tokens of one step", "`limits.max_num_batched_tokens`", "prompts are computed in chunks"),
        (
            "tokens of all running requests",
            "`cache.num_blocks` × `cache.block_size`",
            "a request is preempted and computed again; one that can never fit is refused",
        ),
        (
            "tokens per block",
            " or ".join([", ".join(map(str, BLOCK_SIZES[:-1])), str(BLOCK_SIZES[-1])]),
            "refused at start",
        ),
        ("steps ahead", f"0 to {steps}", "refused at start"),
        ("outputs of one prompt", f"1 to {sampling_params.MAX_SAMPLES:,} (`n`)"),
        (
            "labels of one request",
            f"{request_labels.MAX_LABELS}: names of 1 to {request_labels.MAX_NAME_LENGTH} "
            f"characters, values of 0 to {request_labels.MAX_TEXT_LENGTH}",
        ),
        ("reported likeliest tokens", f"0 to {logprobs} (`logprobs`)"),
        (
            "stop ids that the device checks",
            str(MAX_DEVICE_STOP_IDS),
            "with more, the host checks each token of that request",
        ),
        ("temperature", f"0, or {scale}"),
        ("repetition penalty", scale),
        ("`max_tokens`", f"1 to {largest}"),
        ("`min_tokens`", "0 to `max_tokens`"),
        ("presence penalty", penalty),
        ("frequency penalty", penalty),
        ("bias of a token id", bias),
        ("stop strings, and stop ids", f"{sampling_params.MAX_STOPS:,} each"),
        ("token ids with a bias", f"{sampling_params.MAX_BIASED_IDS:,} of a request"),
        ("`top_k`", f"-1 to {largest}"),
        ("`priority`", f"up to {largest}, and down to its negative"),
        ("`top_p`", "above 0, at most 1"),
        ("`min_p`", "0 to 1"),
        ("seeds", f"0 to {largest}"),
        ("a configuration file", f"{config_yaml.MAX_SIZE:,} characters", "refused at start"),
        (
            "keys and values of one file, and those that its aliases repeat",
            f"{config_yaml.MAX_VALUES:,}",
            "refused at start",
        ),
        ("nested sections", str(config_yaml.MAX_DEPTH), "refused at start"),
        ("plugins in one list", "100", "refused at start"),
        ("integers in one file", "64 bits", "refused at start"),
        ("prompts in a file of `nanovllm generate`", f"{MAX_PROMPTS:,}, {MAX_SIZE >> 20} MiB"),
        (
            "working memory of `sdpa`, for each cache group",
            f"{WORKSPACE_LIMIT >> 20} MiB",
            "steps are split into slices",
        ),
    ]
    complete = [row if len(row) == 3 else (*row, "refused") for row in rows]
    return table(["what", "limit", "beyond it"], complete)


# -- scheduling ------------------------------------------------------------------------------------


def waits_table() -> str:
    """What examples/scheduling.py measures: waits do not depend on the device or the backend."""
    example = runpy.run_path(str(FOLDER.parent / "examples" / "scheduling.py"))
    lengths = [example["LONG"]] * 3 + [example["SHORT"]] * 9
    names = [f"L{i}" for i in range(3)] + [f"s{i}" for i in range(9)]
    prompts = [[(i + j) % 100 + 5 for j in range(length)] for i, length in enumerate(lengths)]
    rows = []
    for scheduler in ("fcfs", "sjf"):
        outputs = example["serve"]("demo", scheduler, prompts)
        steps = example["waits"](outputs)
        numbers = (mean(steps), max(steps), mean(steps[3:]), mean(steps[:3]))
        order = example["order_of_service"](names, outputs)
        rows.append([f"`{scheduler}`", order, *(f"{number:.0f}" for number in numbers)])
    head = "scheduler", "order of service", "mean wait", "worst", "mean of short", "mean of long"
    return table(head, rows)


def ageing_table() -> str:
    """The step at which a long prompt is served while a short one arrives in every step."""
    [_, spec, _] = shipped("scheduler")
    rows = []
    for ageing in (0.0, 1.0, 4.0, 16.0, 64.0):
        step = served_at(load_object(spec.impl)(spec.options(ageing=ageing)))
        rows.append([f"{ageing:g}", "never" if step is None else f"step {step}"])
    return table(["`ageing`", "the long prompt is served at"], rows)


def served_at(policy: SchedulingPolicy, steps: int = 10_000) -> int | None:
    """Play the queue: the lowest key of all that wait is served in each step."""
    long = policy.service_key(job(600, 0))
    for step in range(1, steps):
        if long < policy.service_key(job(12, step)):
            return step
    return None


DOCUMENTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "../README.md": measured(README),
    "configuration.md": CONFIGURATION,
    "capabilities.md": CAPABILITIES,
    "limits.md": {"limits": limit_table},
    "plugins.md": PLUGINS,
    "write/attention.md": METADATA,
    "write/policy.md": POLICY,
    "write/scheduler.md": SCHEDULER,
    "write/model.md": LAYERS,
    "scale.md": SCALE,
    "serving.md": SERVING,
    "scheduling.md": {"waits": waits_table, "ageing": ageing_table},
    "attention.md": {"gathering": gathering_table},
    "moe.md": {**MOE, **measured(LATENT)},
    "performance.md": {
        **measured({**PERFORMANCE, **FAMILIES, **SERVED, **MIXTURES}),
        **measured({**WORKLOADS, **PRODUCTS, **TURNS}),
        "transformers on a cpu": partial(compare_table, CPU),
        "plots": plots,
        "edges": edge_table,
        "power": power_table,
    },
    "attention_implementation.md": measured(ATTENTION),
}


def render(document: str, tables: Mapping[str, Callable[[], str]] = CONFIGURATION) -> str:
    """The document with every generated part made anew."""
    for name, make in tables.items():
        pattern = rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)"
        text = make()
        document, count = re.subn(
            pattern, lambda m, t=text: f"{m[1]}\n{t}\n\n{m[2]}", document, flags=re.DOTALL
        )
        if count != 1:
            raise SystemExit(f"expected one part 'generated: {name}', found {count}")
    return document


if __name__ == "__main__":
    for file_name, file_tables in DOCUMENTS.items():
        file = FOLDER / file_name
        file.write_text(render(file.read_text(encoding="utf-8"), file_tables), encoding="utf-8")
    if by_batch():
        draw(by_batch(), PLOT)
