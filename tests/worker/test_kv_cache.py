"""How many KV blocks an engine takes, alone, beside others in its process, or on a shared GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.errors import OutOfMemoryError
from nanovllm_core.interfaces.cache_groups import SequenceNeed
from nanovllm_core.interfaces.executor import WorkerSetup
from nanovllm_core.interfaces.model import AttentionShape, LatentHeads, ModelShape
from nanovllm_core.interfaces.parallel import SINGLE
from nanovllm_core.worker import kv_cache
from nanovllm_core.worker.kv_cache import (
    CacheLayout,
    DeviceMemory,
    num_blocks_on_gpu,
    size_cache,
)

GIB = 1 << 30
SHAPE = ModelShape(
    num_layers=3,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    vocab_size=100,
    max_position=128,
)


def memory(*, held_before: float = 0, context: float = 1, **changes: float) -> DeviceMemory:
    gib = {"total": 80, "free": 76, "reserved": 3, "peak": 4, **changes}
    gib |= {"held_before": held_before, "context": context}
    return DeviceMemory(**{name: int(gib[name] * GIB) for name in gib})


@dataclass
class Gpu:
    """A device of 80 GiB, by the numbers that its engines would measure. All in GiB."""

    used: float = 0
    reserved: float = 0
    """Of what is used, by torch's allocator in this process."""
    has_context: bool = False

    def start(self, utilization: float, model: float = 2, step: float = 1) -> int:
        """Start an engine with these weights and this largest step; its blocks of 1/64 GiB."""
        context = 0 if self.has_context else 0.5
        self.has_context = True
        self.used += context
        before = self.reserved
        self.hold(model)
        measured = memory(
            free=80 - self.used,
            reserved=self.reserved,
            peak=self.reserved + step,
            held_before=before,
            context=context,
        )
        try:
            num_blocks = num_blocks_on_gpu(measured, utilization, GIB // 64)
        except OutOfMemoryError:
            self.hold(-model)
            raise
        self.hold(num_blocks / 64)
        return num_blocks

    def hold(self, size: float) -> None:
        """Something of this process takes memory by torch's allocator."""
        self.used += size
        self.reserved += size


def layout(dtype: torch.dtype = torch.float32, **changes: Any) -> CacheLayout:
    return CacheLayout(replace(SHAPE, **changes), 16, dtype)


def test_a_block_holds_keys_and_values_of_every_layer() -> None:
    """Bytes = 2 x layers x tokens x KV heads x head size x bytes of the dtype."""
    assert layout(torch.bfloat16).block_bytes == 2 * 3 * 16 * 2 * 16 * 2
    blocks = layout().allocate(5, torch.device("cpu"))
    assert blocks.nbytes == 5 * layout().block_bytes
    layers = layout().split(blocks)
    assert len(layers) == 3
    for slot, (group, *caches) in enumerate(layers):
        assert group == 0
        for cache, part in zip(caches, blocks[slot], strict=True):
            assert cache.shape == (5, 16, 2, 16)
            assert cache.is_contiguous()
            assert cache.data_ptr() == part.data_ptr()


def test_every_layer_finds_what_it_wrote() -> None:
    """Whatever the layers' sizes, in blocks that no two groups hold at once."""
    facts: dict[str, Any] = {"num_heads": 4, "head_size": 16}
    wide = AttentionShape(num_kv_heads=4, **facts)
    narrow = AttentionShape(num_kv_heads=1, sliding_window=8, **facts)
    made = layout(num_layers=4, attention_layers=(narrow, wide, narrow, wide))
    assert [group.layers for group in made.groups] == [(0, 2), (1, 3)]
    blocks = made.allocate(6, torch.device("cpu"))
    assert blocks.nbytes == 6 * made.block_bytes == 6 * 2 * 2 * 16 * 4 * 16 * 4
    layers = made.split(blocks)
    for number, (group, *caches) in enumerate(layers):
        for part, cache in enumerate(caches):
            assert cache.shape == (6, 16, 4 if group else 1, 16)
            cache[group::2] = 10 * number + part + 1
    for number, (group, *caches) in enumerate(layers):
        for part, cache in enumerate(caches):
            assert (cache[group::2] == 10 * number + part + 1).all()


def test_fresh_blocks_are_zero() -> None:
    """Backends may read a block's unused tail, so it must be finite."""
    assert not layout().allocate(2, torch.device("cpu")).any()


def test_the_budget_is_the_share_less_what_this_engine_uses() -> None:
    """The share is of the whole device; the peak, not the present, is taken off."""
    assert memory().budget(0.9) == 80 * 0.9 * GIB - 5 * GIB
    assert memory(graphs=2).budget(0.9) == 80 * 0.9 * GIB - 7 * GIB


def test_what_the_process_had_before_is_not_the_engines() -> None:
    """Another engine's blocks, or tensors of the program's own."""
    beside = memory(held_before=30, reserved=33, peak=34, free=46)
    assert beside.budget(0.5) == memory().budget(0.5)


def test_two_engines_of_04_go_together_in_one_process() -> None:
    """Each fills its share; the CUDA context is the first one's, which has fewer blocks for it."""
    gpu = Gpu()
    first, second = gpu.start(0.4), gpu.start(0.4)
    assert first == (0.4 * 80 - 0.5 - 3) * 64
    assert second == first + 0.5 * 64
    with pytest.raises(OutOfMemoryError, match=r"this engine needs 3\.0 GiB and 16\.0 .* are free"):
        gpu.start(0.03)
    assert gpu.start(0.2) > 0
    with pytest.raises(OutOfMemoryError, match=r"free the GPU of what others hold"):
        gpu.start(0.4)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0.05, 0.5), st.floats(0, 20), st.floats(0, 5)), max_size=5))
def test_engines_and_others_never_take_more_than_their_shares_or_than_there_is(
    starts: list[tuple[float, float, float]],
) -> None:
    """Whatever starts in whatever order, beside tensors of somebody else's."""
    gpu = Gpu()
    for utilization, others, step in starts:
        if gpu.used + others < 70:
            gpu.hold(others)
        if gpu.used > 75:
            return
        before = gpu.used
        try:
            num_blocks = gpu.start(utilization, step=step)
        except OutOfMemoryError:
            continue
        assert num_blocks > 0
        assert gpu.used + step <= 80 + 1e-6  # GiB: blocks are whole, and these are fractions
        assert gpu.used + step - before <= utilization * 80 + 1e-6


def test_memory_of_other_processes_is_not_taken_off_the_share() -> None:
    """With 30 GiB held by others there is still room for this engine's half (bug 7)."""
    assert memory(free=46).budget(0.5) == 80 * 0.5 * GIB - 5 * GIB


def test_no_more_is_promised_than_is_free() -> None:
    """What others hold bounds the blocks: free memory, less what activations will grow to again."""
    assert memory(free=10).budget(0.9) == 9 * GIB


def test_too_little_memory_is_an_error_with_the_numbers() -> None:
    """The message carries the share, what is used, what is free, and what helps in that case."""
    said = r"0\.05 of 80\.0 GiB is 4\.0 GiB.*raise cache\.gpu_memory_utilization"
    with pytest.raises(OutOfMemoryError, match=said):
        num_blocks_on_gpu(memory(), 0.05, GIB)
    with pytest.raises(OutOfMemoryError, match=r"1\.0 GiB are free.*; free the GPU") as caught:
        num_blocks_on_gpu(memory(free=1), 0.9, GIB)
    assert "raise" not in str(caught.value), "a larger share frees nothing"


def test_blocks_are_whole() -> None:
    """A budget of 67 GiB holds 22 blocks of 3 GiB."""
    assert num_blocks_on_gpu(memory(), 0.9, 3 * GIB) == 22


@pytest.mark.parametrize(
    ("length", "room", "blocks"),
    [(112, 100, 21), (112, 12, 12), (112, 5, 7), ("fit", 100, 21), ("fit", 5, 5), ("fit", 0, 1)],
)
def test_a_cpu_takes_what_its_rows_can_use_within_a_bound(
    length: int | str, room: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row at its longest, or what the bound allows, or one at its longest unless to fit."""
    monkeypatch.setattr(kv_cache, "CPU_CACHE_BYTES", room * layout().block_bytes)
    config = EngineConfig(model="m", limits={"max_num_seqs": 3, "max_model_len": length})
    facts = {"max_model_len": 112, "block_size": 16, "dtype": "float32"}
    setup = cast(WorkerSetup, SimpleNamespace(config=config, **facts))
    assert size_cache(setup, SHAPE, None, SINGLE.min_over_ranks) == (blocks, min(112, 16 * blocks))


BOTH = replace(
    SHAPE,
    num_layers=2,
    attention_layers=tuple(
        AttentionShape(num_heads=4, num_kv_heads=2, head_size=16, sliding_window=window)
        for window in (8, None)
    ),
)


def sized(length: int | str, num_blocks: int | None) -> tuple[int, int]:
    """Blocks and tokens of two cache groups, chunks of 32 tokens and a model's limit of 112."""
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "max_model_len": length}
    config = EngineConfig(model="m", limits=limits, cache={"num_blocks": num_blocks})
    facts = {"max_model_len": 112, "block_size": 16, "dtype": "float32"}
    setup = cast(WorkerSetup, SimpleNamespace(config=config, **facts))
    return size_cache(setup, BOTH, None, SINGLE.min_over_ranks)


def test_a_cache_is_sized_for_all_groups() -> None:
    """112 tokens take 7 blocks of the whole context and 4 of a window of 8 with chunks of 32."""
    assert sized(112, None) == (33, 112)
    assert sized(112, 11) == (11, 112)
    assert sized("fit", 10) == (10, 96)
    assert sized("fit", 2) == (2, 16)
    said = r"needs 11; .* at most 96 .* to 11, or lower limits\.max_num_batched_tokens \(32\)$"
    with pytest.raises(OutOfMemoryError, match=said):
        sized(112, 10)


@pytest.mark.parametrize(("length", "remedy"), [("fit", 2), (112, 11)])
def test_a_cache_without_a_block_for_each_group_is_refused(length: int | str, remedy: int) -> None:
    """No request has less than a prompt token and an output token."""
    said = rf"an output token need 2 \(cache groups: 2\); raise cache\.num_blocks to {remedy}$"
    with pytest.raises(OutOfMemoryError, match=said):
        sized(length, 1)


def test_more_blocks_than_there_is_memory_for_are_refused_with_the_bytes() -> None:
    """The message says what was asked for, what it takes, and what to do."""
    with pytest.raises(
        OutOfMemoryError, match=r"cache\.num_blocks: 10+ blocks .* GiB.*ask for fewer"
    ):
        layout().allocate(10**13, torch.device("cpu"))


@pytest.mark.parametrize(
    ("given", "remedy", "other"),
    [
        (True, r"raise cache\.num_blocks to 9", "gpu_memory_utilization"),
        (False, r"raise cache\.gpu_memory_utilization", "num_blocks"),
    ],
)
def test_a_cache_smaller_than_the_longest_sequence_is_refused(
    given: bool, remedy: str, other: str
) -> None:
    """Such a request could never finish (bug 1); the message says what would fit, and what helps.

    On a CPU only a given number of blocks can be too small, and no share of a GPU would help it.
    """
    need = SequenceNeed([None], 16, max_chunk=2048)
    need.check_fits(8, 128, given=given)
    said = rf"max_model_len=129 needs 9; .* at most 128 \(or to fit, .*{remedy}"
    with pytest.raises(OutOfMemoryError, match=said) as caught:
        need.check_fits(8, 129, given=given)
    assert other not in str(caught.value)


def test_the_longest_sequence_that_fits_is_what_the_blocks_hold() -> None:
    need = SequenceNeed([None], 16, max_chunk=2048)
    assert need.fitting_length(8, 4096) == 128
    assert need.fitting_length(8, 100) == 100


def test_a_window_bounds_what_a_sequence_needs() -> None:
    """A group with a window holds it and a chunk: 1 + 2 blocks of 16, and one for their ends."""
    local, both = ([8], [8, None])
    assert SequenceNeed(local, 16, max_chunk=32).fitting_length(4, 4096) == 4096
    assert SequenceNeed(local, 16, max_chunk=32).fitting_length(3, 4096) == 48
    assert SequenceNeed(both, 16, max_chunk=32).blocks(160) == 4 + 10
    assert SequenceNeed(both, 16, max_chunk=32).fitting_length(14, 4096) == 160


def test_what_connections_to_other_ranks_take_is_the_engine_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are opened between the two readings of the GPU's free memory, with its context."""
    free = [40 * GIB]

    def take(size: int) -> None:
        free[0] -= size

    for name in ("set_device", "init", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 80 * GIB))
    memory = DeviceMemory.open(torch.device("cuda:0"), lambda: take(2 * GIB))
    assert memory.context == 2 * GIB


LATENT = AttentionShape(
    num_heads=4,
    num_kv_heads=1,
    head_size=20,
    latent=LatentHeads(latent_size=12, key_size=16, value_size=8),
)


def test_values_of_latent_layers_are_a_part_of_their_keys() -> None:
    """A block has room for one row of each token, and none for values."""
    made = layout(num_layers=2, attention_layers=(LATENT,) * 2)
    blocks = made.allocate(5, torch.device("cpu"))
    assert blocks.nbytes == 5 * made.block_bytes == 5 * 2 * 16 * 20 * 4
    for _, k_cache, v_cache in made.split(blocks):
        assert (k_cache.shape, v_cache.shape) == ((5, 16, 1, 20), (5, 16, 1, 12))
        k_cache.copy_(torch.randn(k_cache.shape))
        assert torch.equal(v_cache, k_cache[..., :12])
        assert v_cache.data_ptr() == k_cache.data_ptr()


def test_latent_layers_beside_others_find_what_they_wrote() -> None:
    """In blocks that no two groups hold at once."""
    plain = AttentionShape(num_heads=4, num_kv_heads=1, head_size=16)
    made = layout(num_layers=4, attention_layers=(LATENT, plain, LATENT, plain))
    layers = made.split(made.allocate(6, torch.device("cpu")))
    for number, (group, k_cache, v_cache) in enumerate(layers):
        k_cache[group::2] = number
        if made.groups[group].attention is plain:
            v_cache[group::2] = number + 10
    for number, (group, k_cache, v_cache) in enumerate(layers):
        assert (k_cache[group::2] == number).all()
        values = number + 10 if made.groups[group].attention is plain else number
        assert (v_cache[group::2] == values).all()
