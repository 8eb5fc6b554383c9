"""What a `generate` call takes it gives back."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

from nanovllm_core import LLM, SamplingParams

from .tiny import open_tiny


def generate(llm: LLM) -> None:
    """64 requests over 8 rows, with a common prefix."""
    prompts = [[7] * 200 + [i] * (1 + i) for i in range(64)]
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True), use_tqdm=False
    )
    assert [len(output.token_ids) for output in outputs] == [8] * 64


def test_three_generate_calls_in_a_row_leave_peak_memory_unchanged(tiny: Path) -> None:
    """Python's own peak; prompts that leaked would be 100 KiB a call, and caches may still fill."""
    with open_tiny(tiny, debug=False) as llm:
        generate(llm)
        peaks = []
        tracemalloc.start()
        try:
            for _ in range(3):
                llm.reset_prefix_cache()
                gc.collect()
                tracemalloc.reset_peak()
                generate(llm)
                peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert llm.stats.free_blocks == llm.info.num_blocks
    assert max(peaks) - peaks[0] < 48 << 10, peaks
