"""The roofline of a `generate` call: what its bytes and its arithmetic take on a device at best.

Every decode step reads each weight once and the keys and values of all live contexts, or of their
sliding window, once; every prompt token is multiplied with the weights of all layers once. Of the
experts of a mixture a step reads those that its tokens choose: as many as were counted, or else as
are expected of an even choice by the rows of that step. A token is multiplied with its own. The
floor divides these by the rates that the device was measured at, and leaves out everything else:
activations, writes, sampling, launches, the host. A model that computes only the sampled tokens at
its end, as ours do, skips up to one layer's products of all others, which are counted. No engine
reaches it as a whole, and its share says how far one is; a kernel that only reads can exceed the
rate of a copy by a few percent.

Where several devices compute, the floor is that of one: the costs of a rank's part of the model,
and the requests of one engine. What ranks send one another is left out too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCosts:
    """The sizes of `num_layers` attention layers that are alike."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None = None
    """The number of last keys that a query sees, None for all."""
    latent_key_size: int | None = None
    latent_value_size: int | None = None
    """Of latent attention: a head's sizes in prompts. `head_size` is that of the cached row."""

    @property
    def elements_per_token(self) -> int:
        """The numbers that these layers cache of one token."""
        rows = 2 if self.latent_key_size is None else 1
        return rows * self.num_layers * self.num_kv_heads * self.head_size

    def prompt_flops(self, prompt_tokens: int) -> int:
        """Causal attention of a whole prompt: two products of half a square.

        With a window, of the band that it leaves of the half.
        """
        seen = min(prompt_tokens, self.sliding_window or prompt_tokens)
        twice_the_pairs = 2 * seen * prompt_tokens - seen**2
        key_size = self.latent_key_size or self.head_size
        value_size = self.latent_value_size or self.head_size
        return self.num_layers * self.num_heads * (key_size + value_size) * twice_the_pairs

    def keys_read(self, prompt_tokens: int, steps: int) -> int:
        """Tokens that `steps` decode steps after a prompt attend to: step k to prompt + k."""
        window = self.sliding_window or prompt_tokens + steps
        growing = min(steps, max(0, window - prompt_tokens))
        return growing * prompt_tokens + growing * (growing + 1) // 2 + (steps - growing) * window


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """A model's sizes, as far as they cost time; `itemsize` is bytes per weight and KV entry.

    Heads, window and latent sizes are those of every attention layer. A model whose layers differ
    has `attention` too, each kind of layer with its number. These then hold, and the sizes beside
    them are those of the first layer.
    """

    num_parameters: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    tied_embeddings: bool
    itemsize: int
    sliding_window: int | None = None
    expert_parameters: int = 0
    """Those of all experts in all layers; they are among `num_parameters`."""
    num_experts: int = 1
    experts_per_token: int = 1
    """Of each layer that has a mixture."""
    latent_key_size: int | None = None
    latent_value_size: int | None = None
    attention: tuple[AttentionCosts, ...] = ()

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ModelCosts:
        """The costs of a result file; files of older programs have no `attention`."""
        kinds = tuple(AttentionCosts(**kind) for kind in record.get("attention", ()))
        return cls(**{**record, "attention": kinds})

    def as_record(self) -> dict[str, Any]:
        """The costs as a result file holds them."""
        return {**asdict(self), "attention": [asdict(kind) for kind in self.attention]}

    @property
    def attention_kinds(self) -> tuple[AttentionCosts, ...]:
        """The attention layers, those that are alike together."""
        alike = AttentionCosts(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            sliding_window=self.sliding_window,
            latent_key_size=self.latent_key_size,
            latent_value_size=self.latent_value_size,
        )
        return self.attention or (alike,)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of what is cached of one token in all layers."""
        return self.itemsize * sum(one.elements_per_token for one in self.attention_kinds)

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    def weight_bytes_of_step(self, rows: float, touched_experts: float | None = None) -> int:
        """Bytes of the weights that a decode step of `rows` rows reads.

        A tied embedding table is read whole, as the output head; an untied one only in a few rows.
        `touched_experts` are those that a layer reads; without it they are the ones that are
        touched if tokens choose evenly and each for itself.
        """
        unread = 0 if self.tied_embeddings else self.embedding_parameters
        untouched: float = (1 - self.experts_per_token / self.num_experts) ** rows
        if touched_experts is not None:
            untouched = 1 - touched_experts / self.num_experts
        unread += round(untouched * self.expert_parameters)
        return (self.num_parameters - unread) * self.itemsize

    @property
    def layer_flops_per_token(self) -> int:
        """Two operations per weight of the layers, without embedding, head and others' experts."""
        tables = 1 if self.tied_embeddings else 2
        own = self.expert_parameters * self.experts_per_token // self.num_experts
        others = self.expert_parameters - own
        return 2 * (self.num_parameters - tables * self.embedding_parameters - others)

    @property
    def head_flops_per_token(self) -> int:
        """The logits of one position."""
        return 2 * self.embedding_parameters

    def attention_flops(self, prompt_tokens: int) -> int:
        """Causal attention of a whole prompt in all layers."""
        return sum(one.prompt_flops(prompt_tokens) for one in self.attention_kinds)

    def kv_bytes_read(self, prompt_tokens: int, steps: int) -> int:
        """Bytes of keys and values that `steps` decode steps after a prompt read."""
        return self.itemsize * sum(
            one.keys_read(prompt_tokens, steps) * one.elements_per_token
            for one in self.attention_kinds
        )

    def kv_bytes_of_row(self, context: float) -> float:
        """Bytes of keys and values that a row with `context` tokens reads in one decode step."""
        return self.itemsize * sum(
            min(context, one.sliding_window or context) * one.elements_per_token
            for one in self.attention_kinds
        )


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device reached: a large copy (bytes read plus written) and a large matrix product."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The least time of a workload, and what it is made of."""

    decode_steps: int
    kv_bytes: int
    weight_bytes: int
    decode_flops: int
    prefill_flops: int
    decode_seconds: float
    prefill_seconds: float

    @property
    def seconds(self) -> float:
        return self.decode_seconds + self.prefill_seconds


def generate_floor(
    costs: ModelCosts,
    lengths: Sequence[tuple[int, int]],
    max_num_seqs: int,
    rates: Rates,
    touched_experts: float | None = None,
) -> Floor:
    """The floor of requests of (prompt tokens, output tokens), all there at the start.

    A prompt's last position gives the first output; each further one is a decode step that attends
    to all tokens before it. The steps have the rows of `rows_of_steps`. `touched_experts` is the
    mean over decode steps and layers, where it was counted.
    """
    decoded = [max(0, output - 1) for _, output in lengths]
    steps = Counter(rows_of_steps(decoded, max_num_seqs))
    kv_bytes = sum(
        costs.kv_bytes_read(prompt, count)
        for (prompt, _), count in zip(lengths, decoded, strict=True)
    )
    weight_bytes = sum(
        count * costs.weight_bytes_of_step(rows, touched_experts) for rows, count in steps.items()
    )
    per_token = costs.layer_flops_per_token + costs.head_flops_per_token
    decode_flops = sum(decoded) * per_token
    prefill_flops = sum(
        prompt * costs.layer_flops_per_token
        + costs.head_flops_per_token
        + costs.attention_flops(prompt)
        for prompt, _ in lengths
    )
    return Floor(
        decode_steps=steps.total(),
        kv_bytes=kv_bytes,
        weight_bytes=weight_bytes,
        decode_flops=decode_flops,
        prefill_flops=prefill_flops,
        decode_seconds=max(
            (kv_bytes + weight_bytes) / rates.copy_bytes_per_s,
            decode_flops / rates.matmul_flops_per_s,
        ),
        prefill_seconds=prefill_flops / rates.matmul_flops_per_s,
    )


def rows_of_steps(decoded: Sequence[int], max_num_seqs: int) -> Iterator[int]:
    """The rows of each decode step of requests that decode so many tokens, full steps first.

    A request has a row in each of its first steps; rows beyond `max_num_seqs` go to the next step.
    No order of the requests takes fewer steps, or has more rows in its k fullest ones, for any k.
    So none reads fewer weights: the more rows share a step, the fewer experts each row adds.
    """
    ordered, longest = sorted(decoded), max(decoded, default=0)
    waiting = step = 0
    while waiting or step < longest:
        waiting += len(ordered) - bisect_right(ordered, step)
        rows = min(waiting, max_num_seqs)
        yield rows
        waiting -= rows
        step += 1


def decode_step_seconds(costs: ModelCosts, rows: float, context: float, rates: Rates) -> float:
    """The floor of one decode step of `rows` rows that attend to `context` tokens on average."""
    num_bytes = costs.weight_bytes_of_step(rows) + rows * costs.kv_bytes_of_row(context)
    flops = rows * (costs.layer_flops_per_token + costs.head_flops_per_token)
    return max(num_bytes / rates.copy_bytes_per_s, flops / rates.matmul_flops_per_s)


def roofline_record(
    costs: ModelCosts,
    rates: Rates,
    floor: Floor,
    seconds: float,
    touched_experts: float | None = None,
    num_engines: int = 1,
) -> dict[str, Any]:
    """The `roofline` of a result file: what went in, what came out, and the measured share.

    `floor` is that of one of `num_engines` engines.
    """
    counted = {} if touched_experts is None else {"touched_experts": touched_experts}
    return {
        "share": round(floor.seconds / seconds, 4),
        "floor_seconds": round(floor.seconds, 6),
        "costs": costs.as_record(),
        "rates": asdict(rates),
        "num_engines": num_engines,
        **counted,
        "floor": asdict(floor),
    }


def recompute(record: Mapping[str, Any], lengths: Sequence[tuple[int, int]], rows: int) -> Floor:
    """The floor that a result file's own costs, rates and counted experts give."""
    costs, rates = ModelCosts.from_record(record["costs"]), Rates(**record["rates"])
    of_one_engine = lengths[:: record.get("num_engines", 1)]
    return generate_floor(costs, of_one_engine, rows, rates, record.get("touched_experts"))
