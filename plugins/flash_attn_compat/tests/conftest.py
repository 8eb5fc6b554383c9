"""Random calls of both functions with what they must give, computed one sequence at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

NORM_LIMIT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}


def attend(
    q_QHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, *, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence in float64: out [Q, H, D], zeros for a query without keys, and lse [H, Q]."""
    queries, heads, head_size = q_QHD.shape
    keys, group = k_LKD.shape[0], heads // k_LKD.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k_LKD, v_LKD))
    scale = head_size**-0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("qhd,khd->hqk", q_QHD.double(), k) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    ahead = torch.arange(keys, device=k.device)
    ahead = ahead - (torch.arange(queries, device=k.device)[:, None] + keys - queries)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * ahead.abs()
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if left >= 0:
        hidden |= ahead < -left
    if right >= 0:
        hidden |= ahead > right
    scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), lse.masked_fill(lse.isneginf(), math.inf)


def turn(x_HD: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of one token's dimensions as complex numbers, in float64."""
    half = angles.numel()
    x = x_HD.double()
    head = x[:, : 2 * half]
    pairs = head.unflatten(-1, (half, 2)) if interleaved else head.unflatten(-1, (2, half)).mT
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    real = torch.view_as_real(turned)
    return torch.cat(
        (real.flatten(-2) if interleaved else real.mT.flatten(-2), x[:, 2 * half :]), -1
    )


@dataclass
class Call:
    """Arguments of one function, and its results; `k_cache` is the cache after the call."""

    arguments: dict[str, Any]
    out: Tensor
    lse: Tensor
    k_cache: Tensor | None = field(default=None)

    def assert_out(self, out: Tensor) -> None:
        """Near the reference as far as the dtype goes, and zeros for queries without keys."""
        assert out.dtype is self.arguments["q"].dtype
        error = (out.double() - self.out).norm()
        assert error <= NORM_LIMIT[out.dtype] * self.out.norm(), f"{error / self.out.norm():.1e}"
        assert (out[self.out.abs().amax((-1, -2)) == 0] == 0).all()

    def assert_lse(self, lse: Tensor) -> None:
        limit = 1e-4 if self.arguments["q"].dtype is torch.float32 else 2e-2
        torch.testing.assert_close(lse.double(), self.lse, atol=limit, rtol=limit)


class Draws(Random):
    """Sizes, rules and tensors on a device, all from one seed."""

    def __init__(self, seed: int, device: str) -> None:
        super().__init__(seed)
        self.device = torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)

    def maybe(self) -> bool:
        return self.random() < 0.5

    def size(self, low: int, high: int) -> int:
        """Log-uniform in [low, high]."""
        return min(high, int(math.exp(self.uniform(math.log(low), math.log(high + 1)))))

    def tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, dtype)

    def int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, head size."""
        kv_heads = self.size(1, 3)
        return kv_heads * self.size(1, 4), kv_heads, self.size(1, 256)

    def rules(self, heads: int, rows: int, *, alibi: bool) -> dict[str, Any]:
        drawn = {
            "causal": self.maybe(),
            "softmax_scale": self.uniform(0.05, 0.5),
            "window_size": (self.choice((-1, 0, 3, 40)), self.choice((-1, 0, 5))),
            "softcap": self.choice((1.5, 20.0)),
        }
        if alibi:
            shape = (heads,) if self.maybe() else (rows, heads)
            drawn["alibi_slopes"] = self.tensor(*shape, dtype=torch.float32).abs() * 0.1
        return {name: value for name, value in drawn.items() if self.maybe()}

    def blocks(
        self, sequences: list[tuple[Tensor, Tensor]], spare: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """K and V blocks in any order, NaN beside the sequences, and their block table.

        `spare` tokens more fit behind each; entries that are not used name no block.
        """
        block_size = self.size(1, 40)
        counts = [-(-(len(k) + spare) // block_size) for k, _ in sequences]
        order = self.sample(range(sum(counts) + 2), sum(counts))
        table = torch.full((len(sequences), max(*counts, 1) + self.choice((0, 2))), 2**30)
        like = sequences[0][0]
        caches = [
            like.new_full((sum(counts) + 2, block_size, *like.shape[1:]), math.nan)
            for _ in range(2)
        ]
        for row, (count, sequence) in enumerate(zip(counts, sequences, strict=True)):
            own, order = order[:count], order[count:]
            table[row, :count] = torch.tensor(own, dtype=torch.long)
            for cache, part in zip(caches, sequence, strict=True):
                for at, token in enumerate(part):
                    cache[own[at // block_size], at % block_size] = token
        return caches[0], caches[1], table.int().to(self.device)


def _row_rules(rules: dict[str, Any], row: int) -> dict[str, Any]:
    slopes = rules.get("alibi_slopes")
    return rules if slopes is None or slopes.dim() == 1 else rules | {"alibi_slopes": slopes[row]}


def draw_packed(seed: int, dtype: torch.dtype, *, alibi: bool, device: str = "cpu") -> Call:
    """A call of `flash_attn_varlen_func`, with packed keys or blocks."""
    draws = Draws(seed, device)
    heads, kv_heads, head_size = draws.heads()
    lens = [(draws.size(1, 60) - 1, draws.size(1, 90) - 1) for _ in range(draws.size(1, 4))]
    lens[0] = (draws.size(1, 60), draws.size(1, 90))
    rules = draws.rules(heads, len(lens), alibi=alibi)
    qs = [draws.tensor(n, heads, head_size, dtype=dtype) for n, _ in lens]
    kvs = [
        (draws.tensor(n, kv_heads, head_size, dtype=dtype),
         draws.tensor(n, kv_heads, head_size, dtype=dtype))
        for _, n in lens
    ]  # fmt: skip
    parts = [attend(q, *kv, **_row_rules(rules, i)) for i, (q, kv) in enumerate(zip(qs, kvs))]  # noqa: B905
    keys: dict[str, Any] = {
        "k": torch.cat([k for k, _ in kvs]),
        "v": torch.cat([v for _, v in kvs]),
    }
    if draws.maybe():
        keys = dict(zip(("k", "v", "block_table"), draws.blocks(kvs), strict=True))
    starts = [[sum(n[side] for n in lens[:i]) for i in range(len(lens) + 1)] for side in (0, 1)]
    arguments = {
        "q": torch.cat(qs),
        **keys,
        "cu_seqlens_q": draws.int32(starts[0]),
        "cu_seqlens_k": draws.int32(starts[1]),
        "max_seqlen_q": max(n for n, _ in lens) + draws.choice((0, 7)),
        "max_seqlen_k": max(n for _, n in lens) + draws.choice((0, 7)),
        **rules,
    }
    return Call(
        arguments, torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)
    )


def draw_cached(seed: int, dtype: torch.dtype, *, alibi: bool, device: str = "cpu") -> Call:
    """A call of `flash_attn_with_kvcache`: dense or paged, appending and rotating or not."""
    draws = Draws(seed, device)
    heads, kv_heads, head_size = draws.heads()
    rows, queries = draws.size(1, 4), draws.choice((1, 1, 2, 5))
    rules = draws.rules(heads, rows, alibi=alibi)
    q = draws.tensor(rows, queries, heads, head_size, dtype=dtype)
    lens = [draws.size(1, 90) - 1 for _ in range(rows)]
    new = draws.size(1, 5) if draws.maybe() else 0
    kvs = [
        (draws.tensor(n, kv_heads, head_size, dtype=dtype),
         draws.tensor(n, kv_heads, head_size, dtype=dtype))
        for n in lens
    ]  # fmt: skip
    arguments: dict[str, Any] = {"q": q, "cache_seqlens": draws.int32(lens), **rules}
    if draws.maybe():
        names = ("k_cache", "v_cache", "block_table")
        arguments |= dict(zip(names, draws.blocks(kvs, new), strict=True))
        table, block_size = arguments["block_table"].tolist(), arguments["k_cache"].shape[1]
        places = [
            [(table[i][t // block_size], t % block_size) for t in range(n + new)]
            for i, n in enumerate(lens)
        ]
    else:
        of_row, tokens = (
            draws.sample(range(rows + 2), rows),
            max(lens) + new + draws.choice((0, 1, 9)),
        )
        tokens = max(tokens, 1)
        places = [[(of_row[i], t) for t in range(n + new)] for i, n in enumerate(lens)]
        shape = (rows + 2, tokens, kv_heads, head_size)
        for name, side in (("k_cache", 0), ("v_cache", 1)):
            arguments[name] = q.new_full(shape, math.nan)
            for i, kv in enumerate(kvs):
                arguments[name][of_row[i], : lens[i]] = kv[side]
        arguments["cache_batch_idx"] = draws.int32(of_row)
    turned_q, k_cache = [q[i] for i in range(rows)], arguments["k_cache"].clone()
    if new:
        k, v = (draws.tensor(rows, new, kv_heads, head_size, dtype=dtype) for _ in range(2))
        arguments |= {"k": k, "v": v}
        turned_k = [k[i] for i in range(rows)]
        if head_size > 1 and draws.maybe():
            interleaved, half = draws.maybe(), draws.size(1, head_size // 2)
            angles = torch.rand(max(lens) + 9, half, generator=draws.generator).to(device) * 6
            local = rules.get("causal", False) or rules.get("window_size", (-1, -1)) != (-1, -1)
            arguments |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
            arguments["rotary_interleaved"] = interleaved
            for i, n in enumerate(lens):
                turned_q[i] = torch.stack([
                    turn(x, angles[n + t * local].double(), interleaved)
                    for t, x in enumerate(q[i])
                ])  # fmt: skip
                turned_k[i] = torch.stack(
                    [turn(x, angles[n + t].double(), interleaved) for t, x in enumerate(k[i])]
                )
        for i, n in enumerate(lens):
            kvs[i] = (torch.cat((kvs[i][0].double(), turned_k[i])), torch.cat((kvs[i][1], v[i])))
            for (row, slot), token in zip(places[i][n:], turned_k[i], strict=True):
                k_cache[row, slot] = token.to(dtype)
    parts = [
        attend(one_q, *kv, **_row_rules(rules, i))
        for i, (one_q, kv) in enumerate(zip(turned_q, kvs, strict=True))
    ]
    outs, lses = (torch.stack([part[side] for part in parts]) for side in (0, 1))
    return Call(arguments, outs, lses, k_cache)


DRAW: dict[str, Callable[..., Call]] = {"packed": draw_packed, "cached": draw_cached}


@pytest.fixture(scope="session")
def draw() -> dict[str, Callable[..., Call]]:
    """`draw["packed"]` and `draw["cached"]` make a Call from a seed."""
    return DRAW


@pytest.fixture(params=["triton", "sdpa"])
def compat(request: pytest.FixtureRequest) -> ModuleType:
    """The module of one backend. On a machine with a GPU Triton's kernels do not run on the CPU."""
    if request.param == "triton" and torch.cuda.is_available():
        pytest.skip("kernels compile for the GPU here; see test_gpu.py")
    return import_module(f"nanovllm_flash_attn_compat.{request.param}")
