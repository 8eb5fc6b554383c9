"""Checks of an attention backend's numbers, against a float64 reference over poisoned blocks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from nanovllm_core.interfaces.specs import AttentionSpec
from nanovllm_kit.attention_backend import (
    EDGES,
    AttentionSubject,
    BackendUnderTest,
    UnavailableError,
    assert_near,
)
from nanovllm_kit.conformance import PluginUnderTest

NEEDLES = (0, 15, 16, 31, 32, 63, 64)
"""Positions at and around the tiles and blocks that kernels use."""


class AttentionNumbers(AttentionSubject):
    """Every key that a query may see, each once and nothing else, in every shape declared."""

    def test_decode_equals_the_reference(self, decoder: BackendUnderTest) -> None:
        """One query per row, over lengths around every tile and block, short rows beside long."""
        decoder.check(decoder.case([decoder.block_size]), "one block", phases=("decode",))
        case = decoder.case([*EDGES, decoder.longest])
        decoder.check(case, "ragged rows", phases=("decode",))
        # Alone, a long row is worth cutting in parts that are merged.
        decoder.check(decoder.case([decoder.longest]), "one long row", phases=("decode",))

    def test_prefill_equals_the_reference(self, prefiller: BackendUnderTest) -> None:
        """Whole prompts: a query sees the keys up to its own, and no later one."""
        lens = [prefiller.block_size]
        prefiller.check(prefiller.case(lens, lens), "one block")
        lengths = [*(n for n in EDGES if n < 100), prefiller.longest // 2]
        prefiller.check(prefiller.case(lengths, lengths), "whole prompts")

    def test_chunks_continue_the_context_in_the_blocks(self, prefiller: BackendUnderTest) -> None:
        """A chunk's queries are the last positions of its sequence, behind what came before."""
        lengths = [7, 64, 128, 129, prefiller.longest // 2, 97]
        case = prefiller.case(lengths, [7, 57, 64, 1, 40, 33])
        prefiller.check(case, "chunks behind a context", phases=("prefill",))

    def test_a_prompt_in_chunks_equals_the_prompt_at_once(
        self, prefiller: BackendUnderTest
    ) -> None:
        """Wherever it is cut: at no multiple of a tile, of a block or of another chunk."""
        whole = prefiller.case([120], [120])
        expected = whole.expected()
        for start, end in ((0, 7), (7, 64), (64, 119), (119, 120)):
            queries = whole.q_THD[start:end]
            chunk = replace(whole, q_THD=queries, query_lens=(end - start,), seq_lens=(end,))
            out = prefiller.prefill(chunk)
            assert_near(chunk, out, f"tokens {start} to {end} of 120", expected[start:end])

    def test_the_scale_is_applied_once(self, subject: BackendUnderTest) -> None:
        """The configuration gives the softmax scale; it need not be 1 / sqrt(head size)."""
        for scale in (0.25, 1.0):
            subject.check(replace(subject.case([40, 17]), scale=scale), f"scale {scale}")
            chunks = replace(subject.case([40, 17], [20, 17]), scale=scale)
            subject.check(chunks, f"scale {scale}")

    def test_no_key_is_lost_wherever_it_lies(self, subject: BackendUnderTest) -> None:
        """One key outweighs all others: first, last, and at every edge of a tile or a block."""
        longest = subject.longest
        needles = [*NEEDLES, 127, 128, 255, 256, longest - 1]
        case = subject.case([longest] * len(needles), needle=needles)
        subject.check(case, f"needles at {needles}")
        for needle in (0, longest // 2, longest - 1):
            subject.check(subject.case([longest], needle=[needle]), f"a needle at {needle}")
        needles = [*NEEDLES, 69]
        case = subject.case([70] * len(needles), [40] * len(needles), needle=needles)
        subject.check(case, f"needles at {needles}, which only queries from there on see")

    def test_large_scores_neither_overflow_nor_vanish(self, subject: BackendUnderTest) -> None:
        """Only differences of scores count: the largest is subtracted before the exponential."""
        case = subject.case([40, 40, 300, 1])
        # In halves every product and sum is exact, whatever the order of summation.
        for tensor in (case.q_THD, case.k_cache):
            tensor.copy_((tensor * 2).round() / 2)
        side = 2.0 ** math.ceil(math.log2(math.sqrt(100 / case.scale)))
        case.k_cache[..., 0] = side
        case.q_THD[0::2, ..., 0] = side
        case.q_THD[1::2, ..., 0] = -side
        rel_norm = 1e-4 if subject.dtype == "float32" else 1e-2
        subject.check(case, "all scores near 100, or near -100", rel_norm=rel_norm)

    def test_every_declared_dtype_computes(self, subject: BackendUnderTest) -> None:
        """To its own precision: sums are wider than a half-precision input."""
        for dtype in subject.dtypes:
            subject.check(subject.case([1, 33, 200], dtype=dtype), "decode rows")
            subject.check(subject.case([1, 17, 130], [1, 17, 30], dtype=dtype), "chunks")

    def test_every_declared_head_size_computes(self, subject: BackendUnderTest) -> None:
        """Each, or one that is no power of two among others where any is declared."""
        for head_size in subject.head_sizes:
            subject.check(subject.case([70, 16, 33], head_size=head_size), "decode rows")
            subject.check(subject.case([70, 16], [40, 16], head_size=head_size), "chunks")

    def test_sliding_windows_end_where_they_should(self, subject: BackendUnderTest) -> None:
        """A window of w holds w keys with the query's own; the key before them is not seen."""
        if not subject.capabilities.sliding_window:
            pytest.skip("declares no sliding window")
        subject.skip_unless_served(sliding_window=True)
        for window in (1, 2, 16, 31, 33, 100, 4096):
            # One key outweighs all others: the last one inside, the first one outside, the next.
            first = max(0, 200 - window)
            needles = [first, max(0, first - 1), max(0, first - 2), 199]
            case = subject.case([200] * 4, needle=needles, sliding_window=window)
            subject.check(case, f"needles at {needles}")
            case = subject.case([5, 90, 130], [5, 90, 30], sliding_window=window)
            subject.check(case, "chunks")

    def test_soft_caps_bend_the_scores(self, subject: BackendUnderTest) -> None:
        """Scaled scores s become c·tanh(s / c) before the mask and the softmax."""
        if not subject.capabilities.soft_cap:
            pytest.skip("declares no soft cap")
        subject.skip_unless_served(soft_cap=True)
        for soft_cap in (0.5, 30.0):
            window = 20 if subject.capabilities.sliding_window else None
            for reach in (None, window):
                bent: dict[str, Any] = {"soft_cap": soft_cap, "sliding_window": reach}
                subject.check(subject.case([1, 40, 130], **bent), "decode rows")
                subject.check(subject.case([40, 70], [40, 30], **bent), "chunks")

    def test_every_declared_device_runs(self, plugin: PluginUnderTest) -> None:
        """On each that this machine has: decode rows and chunks, near the reference."""
        here = {"cpu"} | ({"cuda"} if torch.cuda.is_available() else set())
        devices = cast(AttentionSpec, plugin.spec).capabilities.devices
        ran, reasons = [], []
        for device in sorted(devices & here):
            try:
                subject = BackendUnderTest(plugin, device)
            except UnavailableError as error:
                reasons.append(str(error))
                continue
            subject.check(subject.case([40, 3]), f"decode rows on {device}")
            subject.check(subject.case([40, 3], [20, 3]), f"chunks on {device}")
            ran.append(device)
        if not ran:
            elsewhere = f"runs on {', '.join(sorted(devices))}, which is not here"
            pytest.skip("; ".join(reasons) or elsewhere)
