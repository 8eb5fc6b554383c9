"""Models whose layers keep different parts of the context, through the whole engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from nanovllm_core import SamplingParams

from .alternating import NAME, choices, install_alternating
from .tiny import CONFIG, VOCAB_SIZE, open_tiny, write_checkpoint

Install = Callable[..., None]

for plugin in ("attention_sdpa",):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")

COUNT = 24
PARAMS = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=0.0)


def drawn_prompts(seed: int, *lengths: int) -> list[list[int]]:
    draws = Random(seed)
    return [[draws.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(
    ("windows", "soft_caps"),
    [((8, None), (None,)), ((None, 24), (None, 1.5)), ((5, 40), (None,)), ((1, None), (None,))],
)
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_layers_with_different_windows_say_what_dense_masks_say(
    tmp_path: Path,
    install: Install,
    windows: tuple[int | None, ...],
    soft_caps: tuple[float | None, ...],
    steps_ahead: int,
) -> None:
    """Prompts in chunks, shorter and far longer than the windows, in batches, with prefix hits.

    The cache is too small for the batch, so that rows are preempted.
    """
    install_alternating(install)
    facts = {"architectures": [NAME], "windows": windows, "soft_caps": soft_caps}
    folder = write_checkpoint(tmp_path / "tiny", **facts)
    prompts = drawn_prompts(steps_ahead, 3, 33, 17, 150, 200, 90)
    prompts += [prompts[4][:120] + prompts[0], prompts[4]]
    with open_tiny(
        folder,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=40,
        steps_ahead=steps_ahead,
        cache={"block_size": 16, "num_blocks": 30},
    ) as llm:
        first, second = (
            [list(one.token_ids) for one in llm.generate(prompts, PARAMS)] for _ in range(2)
        )
    assert first == second, "behind prefix hits"
    for prompt, answer in zip(prompts, first, strict=True):
        assert answer == choices(folder, CONFIG | facts, prompt, answer)
