"""Cache groups: layers that share block tables, and the blocks that a request takes in all of them.

All groups draw their blocks from one pool. A block has a slot for each layer of its group, and the
same number of slots in every group, so that a block id means the same bytes in each. Entry i of a
group's block table covers the tokens i * block_size to (i + 1) * block_size - 1 of a request; where
the group has a sliding window, the blocks behind it are freed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nanovllm_core.errors import OutOfMemoryError
from nanovllm_core.interfaces.model import AttentionShape, ModelShape

_ENOUGH_GROUPS = 8


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of equal shapes, by their numbers among the attention layers, one to a slot."""

    layers: tuple[int, ...]
    attention: AttentionShape

    @property
    def sliding_window(self) -> int | None:
        """The tokens whose blocks are kept, the newest included; None: all."""
        return self.attention.sliding_window


def make_groups(shape: ModelShape) -> tuple[CacheGroup, ...]:
    """The cache groups of a model, in the order of their first layers' shapes.

    Layers of equal shapes are cut into groups of as many as a block has slots; the last of these
    groups may leave slots empty. A group costs a block table, a plan of its backends and a part of
    the host's work per step; an empty slot costs memory, for every token of a context where the
    group has no window. So of all numbers of slots that give up to eight groups, take the one
    with the fewest slots in groups without a window, then in all groups, then the fewest groups;
    where eight are not enough, the fewest groups. Layers that are all alike are one group.
    """
    alike: dict[AttentionShape, list[int]] = {}
    for layer, attention in enumerate(shape.attention_shapes):
        alike.setdefault(attention, []).append(layer)

    def cost(num_slots: int) -> tuple[int, ...]:
        groups = {one: -(-len(layers) // num_slots) for one, layers in alike.items()}
        whole = sum(count for one, count in groups.items() if one.sliding_window is None)
        count = sum(groups.values())
        return max(count, _ENOUGH_GROUPS), whole * num_slots, count * num_slots, count

    num_slots = min(range(1, max(map(len, alike.values())) + 1), key=cost)
    return tuple(
        CacheGroup(tuple(layers[first : first + num_slots]), attention)
        for attention, layers in alike.items()
        for first in range(0, len(layers), num_slots)
    )


@dataclass(frozen=True, slots=True)
class SequenceNeed:
    """The blocks that one sequence needs at its peak, in groups of these `windows`.

    `max_chunk` is the most tokens that one step computes of it, `limits.max_num_batched_tokens`.
    """

    windows: Sequence[int | None]
    block_size: int
    max_chunk: int

    def blocks(self, num_tokens: int, num_computed: int = 0) -> int:
        """The most that a sequence holds at once, in all groups, until it has `num_tokens` cached.

        The first `num_computed` are; the others come in chunks of at most `max_chunk`. A group with
        a window holds the window before the next token and the chunk behind it; both ends may lie
        anywhere in a block.
        """
        whole = -(-num_tokens // self.block_size)
        chunk = min(num_tokens - num_computed, self.max_chunk)
        return sum(
            whole if window is None else min(whole, -(-(window + chunk - 2) // self.block_size) + 1)
            for window in self.windows
        )

    def fitting_length(self, num_blocks: int, max_model_len: int) -> int:
        """Tokens of the longest sequence that these blocks hold, `max_model_len` at most."""
        return bisect_right(range(1, max_model_len + 1), num_blocks, key=self.blocks)

    def or_smaller_chunks(self, num_tokens: int) -> str:
        """Words for one more remedy, where the chunks decide what a window's group holds."""
        decide = self.blocks(num_tokens) > replace(self, max_chunk=1).blocks(num_tokens)
        return f", or lower limits.max_num_batched_tokens ({self.max_chunk})" if decide else ""

    def check_fits(self, num_blocks: int, max_model_len: int, *, given: bool) -> None:
        """Refuse a cache in which the longest allowed sequence could never finish.

        `given`: the configuration states the number of blocks; else a GPU's memory decided it.
        Where the length is to fit, the least is asked for: two tokens, of prompt and output.
        """
        needed = self.blocks(max_model_len)
        if num_blocks < needed:
            fitting = self.fitting_length(num_blocks, max_model_len)
            more = f"cache.num_blocks to {needed}" if given else "cache.gpu_memory_utilization"
            if fitting < 2:
                raise OutOfMemoryError(
                    f"the KV cache holds {num_blocks} blocks of {self.block_size} tokens, but even "
                    f"a prompt token and an output token need {self.blocks(2)} (cache groups: "
                    f"{len(self.windows)}); raise {more}"
                )
            raise OutOfMemoryError(
                f"the KV cache holds {num_blocks} blocks of {self.block_size} tokens "
                f"(a sequence of {fitting} tokens), but limits.max_model_len={max_model_len} needs "
                f"{needed}; set limits.max_model_len to at most {fitting} (or to fit, which takes "
                f"the longest that fits), or raise {more}{self.or_smaller_chunks(max_model_len)}"
            )
