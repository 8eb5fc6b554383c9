"""The part of the models' suite that draws: sizes, numbers, positions and ranks at random.

The suite's seed decides them; see `nanovllm_kit.model_draws` for what they are.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm_core.errors import ArchitectureError
from nanovllm_core.layers import TensorParallel
from nanovllm_kit.conformance import full_level
from nanovllm_kit.model_draws import (
    FAR,
    FAR_POSITIONS,
    KINDS,
    Kind,
    Range,
    draw,
    split_over,
)
from nanovllm_kit.model_settings import Settings
from nanovllm_kit.model_small import SmallModel, known_settings
from nanovllm_kit.model_weights import REL_NORM
from nanovllm_kit.numerics import assert_close_report
from nanovllm_kit.ranks import run_ranks
from nanovllm_kit.reference_model import (
    ReferenceCheckpoint,
    load_model,
    run_model,
    run_sparse,
)

MAX_ERROR = 1e-4
"""How far one logit may be off, as a part of the largest."""
ROUNDINGS = 10.0
"""Rounding may show at drawn weights: so many times that of transformers is no error."""
FAR_ERROR = 1e-2
"""The same, and of all, at far positions: a float32 angle has few digits left there."""
NUM_TRIES = 8
"""So many draws may be refused, by transformers or by the model, before a check is skipped."""
UNSETTLED = 1e-3
"""Embeddings that differ by 1e-5 change logits by more than this where a near tie decides."""
SHORT: Range = (40, 200)
"""The longest context of most draws; prompts are 40 tokens at most."""


class DrawnChecks(SmallModel):
    """Inherited by `ModelConformance`, which has the fixtures."""

    def draw_checkpoint(
        self,
        reference_class: Any,
        model_class: Any,
        folder: Path,
        draws: Random,
        kind: Kind,
        changes: Settings | None = None,
        longest: Range = SHORT,
    ) -> ReferenceCheckpoint:
        """A checkpoint of a drawn configuration that both serve, or a skip with the last reason."""
        known = known_settings(reference_class)
        base = {**self.small_config(reference_class), **(changes or {})}
        stated = {**self.stated_config(), **(changes or {})}
        reason = ""
        for attempt in range(NUM_TRIES):
            drawn = draw(draws, kind, base, known, stated, longest, own_head_size=attempt % 2 == 0)
            settings = {**base, **drawn.settings}
            if attempt % 2:  # a configuration class may insist on a window
                settings = {k: v for k, v in settings.items() if (k, v) != ("sliding_window", None)}
            try:
                reference = ReferenceCheckpoint.save(
                    folder, reference_class, settings, seed=drawn.seed, std=drawn.std
                )
                reference.logits(torch.arange(2))
            except Exception as error:  # transformers has many kinds
                reason = f"transformers refuses: {' '.join(str(error).split())}"
                continue
            try:
                model_class.shape(reference.config)
            except ArchitectureError as error:
                reason = f"refused: {error}"
                continue
            if (drawn.embedding, drawn.head) != (1.0, 1.0):
                reference.scale(embedding=drawn.embedding, head=drawn.head)
            return reference
        pytest.skip(f"{NUM_TRIES} drawn configurations refused, at last: {reason}")

    # -- sizes and numbers

    @pytest.mark.parametrize("kind", KINDS)
    def test_drawn_sizes_equal_transformers(
        self, model_class: Any, reference_class: Any, kind: str, draws: Random, tmp_path: Path
    ) -> None:
        """No layer, head, id or size of a number is so far out that the computation changes."""
        reference = self.draw_checkpoint(reference_class, model_class, tmp_path, draws, KINDS[kind])
        _assert_serves(model_class, reference, draw_ids(draws, reference, draws.randint(20, 40)))

    def test_drawn_sizes_with_each_variant_equal_transformers(
        self,
        model_class: Any,
        reference_class: Any,
        variant: Settings,
        draws: Random,
        tmp_path: Path,
    ) -> None:
        """What the class promises holds at any size."""
        reference = self.draw_checkpoint(
            reference_class, model_class, tmp_path, draws, Kind(), variant
        )
        _assert_serves(model_class, reference, draw_ids(draws, reference, draws.randint(20, 40)))

    # -- positions and tokens

    def test_far_positions_equal_transformers(
        self, model_class: Any, reference_class: Any, draws: Random, tmp_path: Path
    ) -> None:
        """A few tokens between the first and the last position of a long context, as a prompt and
        one by one: no window, length or width of an integer hides the first from the last."""
        reference = self.draw_checkpoint(
            reference_class, model_class, tmp_path, draws, FAR, longest=FAR_POSITIONS
        )
        if window := getattr(reference.model.config, "sliding_window", None):
            pytest.skip(f"the reference has a window of {window} tokens, not positions")
        model = load_model(model_class, tmp_path, reference.config)
        last = model_class.shape(reference.config).max_position - 1
        positions_T = draw_positions(draws, last)
        ids_T = draw_ids(draws, reference, len(positions_T))
        expected = reference.logits(ids_T, positions_T)
        for chunks in ([len(ids_T)], [len(ids_T) // 2] + [1] * (len(ids_T) - len(ids_T) // 2)):
            actual = run_sparse(model, ids_T, positions_T, chunks)
            assert_near(actual, expected, FAR_ERROR, FAR_ERROR)

    def test_a_pass_of_thousands_of_tokens_equals_transformers(
        self, model_class: Any, reference_class: Any, draws: Random, tmp_path: Path
    ) -> None:
        """More than any usual size of a chunk."""
        self._assert_long(model_class, reference_class, draws, tmp_path, (2100, 2400))

    @full_level("a minute, and 4 GiB of memory")
    def test_a_pass_of_many_thousands_of_tokens_equals_transformers(
        self, model_class: Any, reference_class: Any, draws: Random, tmp_path: Path
    ) -> None:
        """More than the usual token budget of a step."""
        self._assert_long(model_class, reference_class, draws, tmp_path, (8200, 9000))

    def _assert_long(
        self,
        model_class: Any,
        reference_class: Any,
        draws: Random,
        folder: Path,
        num_tokens: Range,
    ) -> None:
        longest = (num_tokens[1], num_tokens[1] + 100)
        reference = self.draw_checkpoint(
            reference_class, model_class, folder, draws, FAR, longest=longest
        )
        _assert_serves(
            model_class, reference, draw_ids(draws, reference, draws.randint(*num_tokens))
        )

    # -- ranks

    def test_a_drawn_model_split_over_ranks_equals_the_whole_one(
        self, model_class: Any, reference_class: Any, draws: Random, tmp_path: Path
    ) -> None:
        """Over 5 to 8 ranks, with more or fewer KV heads than ranks."""
        size = draws.randint(5, 8)
        reference = self.draw_checkpoint(
            reference_class, model_class, tmp_path, draws, split_over(draws, size)
        )
        shape = model_class.shape(reference.config)
        if shape.num_heads % size:
            pytest.skip(f"the author's settings keep {shape.num_heads} heads, for {size} ranks")
        ids = draw_ids(draws, reference, 20)

        def on_rank(tp: TensorParallel) -> Tensor:
            return run_model(load_model(model_class, tmp_path, reference.config, tp=tp), ids)

        expected, slack = reference.logits(ids), ROUNDINGS * reference.rounding(ids)
        for logits in run_ranks(size, on_rank):
            assert_near(logits, expected, max(REL_NORM, slack), max(MAX_ERROR, slack))


def draw_ids(draws: Random, reference: ReferenceCheckpoint, count: int) -> Tensor:
    """Ids of the whole vocabulary [count], its last one among them."""
    vocab_size = reference.model.config.vocab_size
    ids = [draws.randrange(vocab_size) for _ in range(count - 1)]
    ids.insert(draws.randrange(count), vocab_size - 1)
    return torch.tensor(ids)


def draw_positions(draws: Random, last: int) -> Tensor:
    """Increasing positions from 0 to `last`, int32: runs of neighbours and gaps of any length."""
    chosen = {0, 1, 2, last}
    start = 3.0
    while start < last:
        run = draws.randint(1, 3)
        chosen |= {min(int(start) + i, last) for i in range(run)}
        start = (start + run) * draws.uniform(1.1, 1.9)
    return torch.tensor(sorted(chosen), dtype=torch.int32)


def assert_near(actual: Tensor, expected: Tensor, rel_norm: float, max_error: float) -> None:
    """Equal but for so much of the norm, and of the largest logit at any place."""
    __tracebackhide__ = True
    largest = float(expected.abs().max())
    assert_close_report(actual, expected, rel_norm=rel_norm, max_abs=max_error * largest)


def _assert_serves(model_class: Any, reference: ReferenceCheckpoint, ids_T: Tensor) -> None:
    """Other ids are tried where transformers' own logits hang on a near tie between experts."""
    __tracebackhide__ = True
    model = load_model(model_class, reference.folder, reference.config)
    for attempt in range(NUM_TRIES):
        own_ids_T = ids_T.roll(attempt)
        actual, expected = run_model(model, own_ids_T), reference.logits(own_ids_T)
        slack = ROUNDINGS * reference.rounding(own_ids_T)
        try:
            assert_near(actual, expected, max(REL_NORM, slack), max(MAX_ERROR, slack))
            return
        except AssertionError as error:
            if attempt == NUM_TRIES - 1 or reference.is_settled(own_ids_T, UNSETTLED):
                raise AssertionError(f"{error}; drawn were {_shown(reference)}") from None


def _shown(reference: ReferenceCheckpoint) -> str:
    """The sizes and numbers of a configuration, without the texts that every one has."""
    settings = {k: v for k, v in reference.config.items() if isinstance(v, int | float | dict)}
    return ", ".join(f"{key} {value}" for key, value in sorted(settings.items()))
