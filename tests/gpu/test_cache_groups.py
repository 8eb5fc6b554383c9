"""Models of several cache groups on a GPU: captured steps, and tokens beyond the windows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from nanovllm_core import SamplingParams
from nanovllm_core.interfaces.cache_groups import SequenceNeed
from tests.e2e.alternating import NAME, choices, install_alternating
from tests.e2e.tiny import CONFIG, VOCAB_SIZE, open_tiny, write_checkpoint

pytestmark = pytest.mark.whole_gpu

LENGTHS = (3, 40, 129, 300, 700, 511)


@pytest.mark.parametrize("attention", ["triton", "sdpa"])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("windows", [(24, None), (100, 7)])
def test_layers_with_different_windows_say_what_dense_masks_say(
    tmp_path: Path,
    install: Callable[..., None],
    windows: tuple[int | None, ...],
    attention: str,
    block_size: int,
) -> None:
    """Captured decode steps and steps with prompts, chunks, prefix hits, freed blocks.

    There are blocks for two of the longest requests, so that what is freed is soon another's. The
    reference is computed in float32 on the CPU from whole sequences.
    """
    install_alternating(install)
    facts = {"architectures": [NAME], "windows": windows, "max_position_embeddings": 1024}
    folder = write_checkpoint(tmp_path / "tiny", **facts)
    draws = Random(len(windows))
    prompts = [[draws.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    params = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.0)
    need = SequenceNeed(windows, block_size, max_chunk=256)
    with open_tiny(
        folder,
        device="cuda",
        dtype="float32",
        attention=attention,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        cache={"block_size": block_size, "num_blocks": 2 * need.blocks(1024)},
    ) as llm:
        assert llm.info.cache_windows == windows
        first, second = (
            [list(one.token_ids) for one in llm.generate(prompts, params)] for _ in range(2)
        )
    assert first == second, "behind prefix hits"
    for prompt, answer in zip(prompts, first, strict=True):
        assert answer == choices(folder, CONFIG | facts, prompt, answer)
