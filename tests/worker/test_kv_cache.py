"""How many KV pages a process takes, alone or on a shared GPU."""

from __future__ import annotations

import pytest
import torch

from nanovllm_core.errors import OutOfMemoryError
from nanovllm_core.interfaces.model import ModelShape
from nanovllm_core.worker.kv_cache import (
    CPU_CACHE_BYTES,
    DeviceMemory,
    KVCache,
    block_bytes,
    check_one_sequence_fits,
    num_blocks_on_cpu,
    num_blocks_on_gpu,
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


def memory(**changes: int) -> DeviceMemory:
    gib = {"total": 80, "free": 76, "reserved": 3, "peak": 4, "context": 1, **changes}
    return DeviceMemory(**{name: value * GIB for name, value in gib.items()})


def test_a_page_holds_keys_and_values_of_every_layer() -> None:
    """Bytes = 2 x layers x tokens x KV heads x head size x bytes of the dtype."""
    assert block_bytes(SHAPE, 16, torch.bfloat16) == 2 * 3 * 16 * 2 * 16 * 2
    cache = KVCache.allocate(SHAPE, 5, 16, torch.float32, torch.device("cpu"))
    assert cache.pages.nbytes == 5 * block_bytes(SHAPE, 16, torch.float32)
    assert cache.layer(2)[1].shape == (5, 16, 2, 16)


def test_fresh_pages_are_zero() -> None:
    """Backends may read a page's unused tail, so it must be finite."""
    cache = KVCache.allocate(SHAPE, 2, 16, torch.float32, torch.device("cpu"))
    assert not cache.pages.any()


def test_the_budget_is_the_share_less_what_this_process_uses() -> None:
    """The share is of the whole device; the peak, not the present, is taken off."""
    assert memory().budget(0.9) == 80 * 0.9 * GIB - 5 * GIB


def test_memory_of_other_processes_is_not_taken_off_the_share() -> None:
    """With 30 GiB held by others there is still room for this process's half (bug 7)."""
    assert memory(free=46).budget(0.5) == 80 * 0.5 * GIB - 5 * GIB


def test_no_more_is_promised_than_is_free() -> None:
    """What others hold bounds the pages: free memory, less what activations will grow to again."""
    assert memory(free=10).budget(0.9) == 9 * GIB


def test_too_little_memory_is_an_error_with_the_numbers() -> None:
    """The message carries the share, what is used, what is free, and the remedy."""
    with pytest.raises(OutOfMemoryError, match=r"0\.05 of 80\.0 GiB is 4\.0 GiB.*raise"):
        num_blocks_on_gpu(memory(), 0.05, GIB)


def test_pages_are_whole() -> None:
    """A budget of 67 GiB holds 22 pages of 3 GiB."""
    assert num_blocks_on_gpu(memory(), 0.9, 3 * GIB) == 22


def test_a_cpu_takes_what_its_rows_can_use_within_a_bound() -> None:
    """Every row at its longest, or what the bound allows, or one sequence at its longest."""
    assert num_blocks_on_cpu(1024, 7, max_num_seqs=3) == 21
    assert num_blocks_on_cpu(GIB, 1, max_num_seqs=7) == CPU_CACHE_BYTES // GIB
    assert num_blocks_on_cpu(GIB, 7, max_num_seqs=3) == 7


def test_more_pages_than_there_is_memory_for_are_refused_with_the_bytes() -> None:
    """The message says what was asked for, what it takes, and what to do."""
    with pytest.raises(
        OutOfMemoryError, match=r"cache\.num_blocks: 10+ pages .* GiB.*ask for fewer"
    ):
        KVCache.allocate(SHAPE, 10**13, 16, torch.float32, torch.device("cpu"))


def test_a_cache_smaller_than_the_longest_sequence_is_refused() -> None:
    """Such a request could never finish (bug 1); the message says what would fit."""
    check_one_sequence_fits(8, 16, 128)
    with pytest.raises(OutOfMemoryError, match=r"max_model_len=129 needs 9.*at most 128"):
        check_one_sequence_fits(8, 16, 129)
