"""The memory of an engine: its share of the device, whatever else the process holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.errors import OutOfMemoryError
from tests.gpu.conftest import write_config

pytestmark = pytest.mark.whole_gpu

GIB = 1 << 30
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
PROMPTS = [[3 + row, 5, 7] * (2 + row) for row in range(12)]


@pytest.fixture(autouse=True)
def _returned() -> Iterator[None]:
    """What a test took is given back, or the next one would find less."""
    yield
    torch.cuda.empty_cache()


def engine(utilization: float, **changes: Any) -> LLM:
    limits = {"max_num_seqs": 32, "max_model_len": 512}
    fixed = {"attention": "triton", "device": "cuda", "cache.gpu_memory_utilization": utilization}
    return LLM("demo", **{**limits, **fixed, **changes})


def tokens(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def used() -> int:
    """Bytes of the device that somebody holds."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_two_engines_of_04_go_together_in_one_process_and_agree() -> None:
    """The second has its own 0.4 of the device, and neither changes the other's tokens."""
    total = torch.cuda.get_device_properties(0).total_memory
    with engine(0.4) as first:
        alone, held = tokens(first), used()
        with engine(0.4) as second:
            assert tokens(second) == alone
            assert used() - held <= 0.4 * total + GIB / 2, "no more than its share"
            assert second.info.num_blocks == pytest.approx(first.info.num_blocks, rel=0.02)
            assert tokens(first) == alone
            streams = [llm.stream(PROMPTS[5], GREEDY) for llm in (first, second)]
            pairs = list(zip(*streams, strict=True))
            assert all(one.new_token_ids == other.new_token_ids for one, other in pairs)
        assert tokens(first) == alone, "the second's end is not the first's"


def test_engines_one_after_the_other_have_the_same_blocks() -> None:
    """What the first left behind is not taken off the second's share."""
    blocks = []
    for _ in range(3):
        with engine(0.4) as llm:
            blocks.append(llm.info.num_blocks)
    assert max(blocks) - min(blocks) <= 0.01 * blocks[0]


def test_what_the_program_itself_holds_is_not_the_engines() -> None:
    """20 GiB of its tensors, used and cached, before the start; only what is free bounds it."""
    with engine(0.4) as llm:
        alone = llm.info.num_blocks
    kept = torch.empty(15 * GIB, dtype=torch.uint8, device="cuda")
    torch.empty(5 * GIB, dtype=torch.uint8, device="cuda").fill_(1)
    with engine(0.4) as llm:
        assert llm.info.num_blocks == pytest.approx(alone, rel=0.01)
    assert kept.numel() == 15 * GIB


EIGHT_B = {
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


def eight_b(folder: Path, gib: float, **changes: Any) -> LLM:
    """Random weights of Qwen3-8B's shapes, with so many GiB of the device."""
    total = torch.cuda.get_device_properties(0).total_memory
    write_config(folder, "8B", **EIGHT_B)
    return LLM(
        str(folder),
        load_format="dummy",
        device="cuda",
        attention="triton",
        **{"cache.gpu_memory_utilization": gib * GIB / total, **changes},
    )


@pytest.mark.parametrize("gib", [20, 24])
def test_8b_shapes_start_within_a_small_gpu_by_the_longest_length_that_fits(
    gib: int, tmp_path: Path
) -> None:
    """Within its share, and a sequence of that very length runs to its end."""
    before = used()
    with eight_b(tmp_path, gib, max_model_len="fit") as llm:
        length = llm.info.max_model_len
        assert 1024 < length <= 40960
        assert length == min(40960, llm.info.num_blocks * llm.info.block_size)
        prompt = [7] * (length - 16)
        [output] = llm.generate(
            [prompt], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        )
        assert len(output.token_ids) == 16
        assert used() - before <= (gib + 0.75) * GIB


def test_without_fit_the_error_names_the_length_that_fits(tmp_path: Path) -> None:
    """What it says is true: with that length the engine starts."""
    with pytest.raises(
        OutOfMemoryError, match=r"max_model_len to at most \d+ \(or to fit"
    ) as caught:
        eight_b(tmp_path, 20)
    said = str(caught.value).partition("to at most ")[2]
    length = int(said.partition(" ")[0])
    with eight_b(tmp_path, 20, max_model_len=length) as llm:
        assert llm.info.max_model_len == length
