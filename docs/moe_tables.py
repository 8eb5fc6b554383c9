"""The tables of docs/moe.md: arithmetic by the sizes of published models, nothing measured."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from results_tables import table

from nanovllm_bench.gpus import known_gpus

ROOT = Path(__file__).parent.parent
BYTES = 2
"""Of a number in bfloat16."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """The sizes of a model's mixtures, as its config.json has them."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    @property
    def expert_mib(self) -> float:
        """One expert: gate, up and down."""
        return 3 * self.hidden_size * self.intermediate_size * BYTES / 2**20

    def touched(self, num_tokens: int) -> float:
        """How many experts a step of so many tokens reads, where all are equally likely."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens)


@dataclass(frozen=True, slots=True)
class Latent:
    """The sizes of a latent attention layer; see examples/mla.py for their names."""

    name: str
    heads: int
    nope: int
    rotated: int
    value: int
    latent: int


def read_config(name: str) -> dict[str, Any]:
    """The config.json of one of the benchmarks' models."""
    file = ROOT / "benchmarks" / "configs" / name.lower() / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return config


def read_mixture(name: str) -> Mixture:
    """Families name the number of experts differently."""
    config = read_config(name)
    return Mixture(
        name,
        config.get("num_experts") or config["n_routed_experts"],
        config["num_experts_per_tok"],
        config["hidden_size"],
        config["moe_intermediate_size"],
    )


def read_latent(name: str) -> Latent:
    """A model with latent attention."""
    config = read_config(name)
    sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    return Latent(name, config["num_attention_heads"], *(config[size] for size in sizes))


MIXTURES = (read_mixture("Qwen3-30B-A3B"), read_mixture("DeepSeek-V2-Lite"))
V2_LITE = read_latent("DeepSeek-V2-Lite")
LATENT = (V2_LITE, replace(V2_LITE, name="DeepSeek-V3", heads=128))


def touched_table() -> str:
    """What one layer's mixture reads, in both orders, by the tokens of a step."""
    rows = []
    for one in MIXTURES:
        for num_tokens in (1, 4, 16, 64, 256, 1024):
            pairs, touched = num_tokens * one.top_k, one.touched(num_tokens)
            numbers = (
                f"{num_tokens:,}",
                f"{pairs:,}",
                f"{touched:.1f} of {one.num_experts}",
                f"{pairs / touched:.1f}",
                f"{pairs * one.expert_mib:,.0f}",
                f"{touched * one.expert_mib:,.0f}",
            )
            rows.append([one.name, *numbers])
    head = ["model", "tokens", "pairs", "touched experts", "rows of each"]
    return table([*head, "MiB, each pair reads", "MiB, each touched expert once"], rows)


def balance_table() -> str:
    """The tokens of a step from which on a mixture is limited by products, by GPU."""
    rows = []
    for gpu in known_gpus():
        balance = gpu.rates.matmul_flops_per_s / gpu.rates.copy_bytes_per_s
        tokens = (f"{balance * one.num_experts / one.top_k:,.0f}" for one in MIXTURES)
        rows.append([f"`{gpu.name}`", f"{balance:.0f}", *tokens])
    head = ["GPU", "FLOP per byte", *(f"tokens, {one.name}" for one in MIXTURES)]
    return table(head, rows)


def cache_table() -> str:
    """A token in the cache of one layer, and the work of a decode step for each byte that it reads.

    Each key and value is multiplied once for every query head that shares it.
    """
    config = read_config("Qwen3-8B")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rows = [
        [
            f"Qwen3-8B: {kv_heads} KV heads for {heads} heads",
            *_per_token(2 * kv_heads * config["head_dim"], 2 * heads * config["head_dim"]),
        ]
    ]
    for one in LATENT:
        apart = one.heads * (one.nope + one.rotated + one.value)
        absorbed = one.heads * (2 * one.latent + one.rotated)
        row = one.latent + one.rotated
        rows += [
            [f"{one.name}, {one.heads} heads, if they were stored", *_per_token(apart, apart)],
            [f"{one.name}, rows, absorbed", *_per_token(row, absorbed)],
        ]
    return table(["in one layer", "numbers per token", "bytes", "FLOP per byte"], rows)


def _per_token(numbers: int, products: int) -> tuple[str, str, str]:
    num_bytes = numbers * BYTES
    return f"{numbers:,}", f"{num_bytes:,}", f"{2 * products / num_bytes:.0f}"


def absorption_table() -> str:
    """GFLOP of one layer of DeepSeek-V2-Lite both ways, by examples/mla.py."""
    flops = runpy.run_path(str(ROOT / "examples" / "mla.py"))["flops"]
    one = V2_LITE
    sizes = (one.heads, one.nope, one.rotated, one.value, one.latent)
    rows = []
    for queries, keys in ((1, 4096), (64, 4096), (256, 4096), (1024, 4096), (4096, 4096)):
        apart, absorbed = flops(queries, keys, *sizes)
        cells = f"{queries:,}", f"{keys:,}", f"{apart / 1e9:,.2f}", f"{absorbed / 1e9:,.2f}"
        rows.append(cells)
    return table(["queries", "keys", "GFLOP un-absorbed", "GFLOP absorbed"], rows)


MOE: Mapping[str, Callable[[], str]] = {
    "touched": touched_table,
    "balance": balance_table,
    "latent cache": cache_table,
    "absorption": absorption_table,
}
