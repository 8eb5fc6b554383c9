"""Small configurations drawn at random, for `nanovllm_kit.model_drawn`.

A list of sizes misses the bug that begins one layer or one head behind its last entry. Each kind of
draw is large in one thing, and draws the others as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from nanovllm_kit.model_settings import LLAMA_LIKE, Settings

HEADS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""Settings that must fit together."""
Range = tuple[int, int]
Scales = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Between which bounds a kind of configuration is drawn.

    `embedding` and `head` multiply these matrices, `std` is the deviation of all; `eps` and `theta`
    are bounds of a number whose logarithm is drawn. `spare` is added to `hidden_size`, where that
    need not be the width of all heads.
    """

    layers: Range = (1, 4)
    kv_heads: Range = (1, 3)
    groups: Range = (1, 4)
    half_heads: Range = (2, 9)
    spare: Range = (0, 12)
    intermediate: Range = (8, 90)
    vocab: Range = (40, 300)
    eps: Scales = (1e-6, 0.5)
    theta: Scales = (20.0, 3e6)
    embedding: Scales = (1.0, 1.0)
    head: Scales = (1.0, 1.0)
    std: float = 0.2


KINDS: Mapping[str, Kind] = {
    # Small sizes, so that many layers are quick; a large epsilon and a small theta show in each.
    "many layers": Kind(
        layers=(36, 56), kv_heads=(1, 2), groups=(1, 2), eps=(0.1, 1.0), theta=(10.0, 200.0)
    ),
    "many heads": Kind(kv_heads=(9, 20), groups=(1, 5), layers=(1, 3)),
    "large heads": Kind(half_heads=(65, 128), layers=(1, 2), kv_heads=(1, 2), groups=(1, 3)),
    "wide layers": Kind(spare=(520, 700), intermediate=(1100, 1500), layers=(1, 2)),
    "a large vocabulary": Kind(vocab=(66_000, 72_000), layers=(1, 2), groups=(1, 1)),
    "large numbers": Kind(embedding=(1e3, 1e5), head=(3e3, 1e5), std=0.6, layers=(1, 2)),
    "small numbers": Kind(embedding=(1e-4, 1e-3), head=(1e-4, 1e-2), eps=(1e-8, 5e-7)),
}
"""What a bug may depend on: which layer, head, id or size of a number it begins at."""

FAR = Kind(layers=(1, 2), kv_heads=(1, 2), groups=(1, 2), vocab=(60, 140), theta=(1e4, 3e6))
"""What a long context is computed with, so that it is quick."""
FAR_POSITIONS = (66_000, 90_000)
"""Beyond what 15 and 16 bits hold, and the lengths that models were trained with."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Settings of a configuration, the seed and the deviation of its weights, and their scales."""

    settings: dict[str, Any]
    seed: int
    std: float
    embedding: float
    head: float


def draw(
    draws: Random,
    kind: Kind,
    base: Settings,
    known: Set[str],
    stated: Settings,
    longest: Range,
    *,
    own_head_size: bool,
) -> Drawn:
    """A configuration of this kind on top of `base`.

    `known` are the settings that the reference knows; others are left out. What the author stated
    stays: one of `HEADS` keeps all of them, unless it says that there is a KV head for each head.
    `own_head_size`: heads need not share `hidden_size`, where the reference knows `head_dim`.
    """
    settings: dict[str, Any] = {
        **_draw_heads(draws, kind, known, stated, own_head_size),
        "num_hidden_layers": draws.randint(*kind.layers),
        "intermediate_size": draws.randint(*kind.intermediate),
        "vocab_size": draws.randint(*kind.vocab),
        "max_position_embeddings": draws.randint(*longest),
        "tie_word_embeddings": draws.random() < 0.5,
        "sliding_window": None,
        **{key: between(draws, kind.eps) for key in epsilons(known)},
    }
    if base.get("rope_parameters"):
        settings["rope_parameters"] = each_rope(
            base["rope_parameters"], lambda rope: {**rope, "rope_theta": between(draws, kind.theta)}
        )
    kept = stated.keys() - {*HEADS, "rope_parameters"}
    settings = {key: value for key, value in settings.items() if key in known and key not in kept}
    settings |= _one_per_layer({**base, **settings}, base.get("num_hidden_layers"))
    scales = between(draws, kind.embedding), between(draws, kind.head)
    return Drawn(settings, draws.randrange(2**31), kind.std, *scales)


def epsilons(known: Set[str]) -> list[str]:
    """The norms' epsilons, under the names that configurations give them."""
    return sorted(key for key in known if key.endswith(("_eps", "_epsilon")))


def split_over(draws: Random, size: int) -> Kind:
    """Sizes that so many ranks can share, with more or fewer KV heads than ranks."""
    shared = draws.choice([n for n in range(1, size + 1) if size % n == 0] + [2 * size])
    group = math.lcm(shared, size) // shared * draws.randint(1, 2)
    fed = size * draws.randint(5, 12)
    return replace(
        Kind(), kv_heads=(shared, shared), groups=(group, group), intermediate=(fed, fed)
    )


def each_rope(ropes: Settings, change: Callable[[Settings], dict[str, Any]]) -> dict[str, Any]:
    """One rope changed, or where `rope_parameters` has one for each kind of layer, all of them."""
    if any(isinstance(value, Mapping) for value in ropes.values()):
        return {kind: change(rope) for kind, rope in ropes.items()}
    return change(ropes)


def draw_rope(draws: Random, rope: Settings) -> dict[str, Any]:
    """The same kind of rope with other numbers; lists stay as they are."""
    drawn = {
        "rope_theta": between(draws, (25.0, 1e6)),
        "factor": draws.uniform(1.3, 30.0),
        "low_freq_factor": draws.uniform(0.5, 1.5),
        "high_freq_factor": draws.uniform(2.0, 9.0),
        "original_max_position_embeddings": draws.randint(9, 50),
    }
    return {**rope, **{key: value for key, value in drawn.items() if key in rope}}


def between(draws: Random, bounds: Scales) -> float:
    """A number between two bounds above 0, of any magnitude alike."""
    low, high = map(math.log, bounds)
    return math.exp(draws.uniform(low, high))


def _draw_heads(
    draws: Random, kind: Kind, known: Set[str], stated: Settings, own_head_size: bool
) -> dict[str, Any]:
    heads = stated.get("num_attention_heads", LLAMA_LIKE["num_attention_heads"])
    one_each = "num_key_value_heads" not in known or stated.get("num_key_value_heads") == heads
    if not one_each and stated.keys() & set(HEADS):
        return {}
    num_kv_heads, group = draws.randint(*kind.kv_heads), draws.randint(*kind.groups)
    if one_each:  # all heads are stored, and the layer is as wide
        group = min(group, 2)
    num_heads, head_dim = num_kv_heads * group, 2 * draws.randint(*kind.half_heads)
    if one_each:
        num_kv_heads = num_heads
    width = num_heads * head_dim
    free = own_head_size and "head_dim" in known and "hidden_size" not in stated
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_size": 2 * draws.randint(8, 30) + draws.randint(*kind.spare) if free else width,
    }


def _one_per_layer(settings: Settings, count: int | None) -> dict[str, Any]:
    """Lists with an entry for each layer, repeated to the drawn number of layers."""
    num_layers = settings.get("num_hidden_layers")
    if not count or not num_layers:
        return {}
    return {
        key: (list(value) * num_layers)[:num_layers]
        for key, value in settings.items()
        if isinstance(value, list | tuple) and len(value) == count
    }
