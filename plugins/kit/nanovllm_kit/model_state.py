"""The part of the models' suite about what lasts and what spreads: calls, rows, the head.

A model is one function of its weights, ids and positions. Nothing of an earlier call, of another
instance or of a neighbouring row may show in it.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm_core.layers import AttentionLayer
from nanovllm_kit.dense_attention import DenseRuntime
from nanovllm_kit.model_draws import between, each_rope
from nanovllm_kit.model_small import SmallModel
from nanovllm_kit.model_weights import assert_same_logits
from nanovllm_kit.reference_model import (
    ReferenceCheckpoint,
    load_model,
    run_model,
    run_sparse,
)

NUM_CALLS = 8
GARBAGE = (float("nan"), float("inf"), -float("inf"), 3e38, -1e30)
"""What rows of padding may hold behind the first attention."""


class _Padded(DenseRuntime):
    """Rows that are not among the first `live` come out of attention as garbage."""

    def __init__(self, model: Any, rows: int, live: int, garbage_R: Tensor) -> None:
        super().__init__(model, live, rows - live + 1)
        self.set_batch([(0, live), *((i, 1) for i in range(1, rows - live + 1))])
        self.live, self.garbage_R = live, garbage_R

    def attend_prepared(self, layer: AttentionLayer, q_THD: Tensor, positions_T: Tensor) -> Tensor:
        out_TX = super().attend_prepared(layer, q_THD, positions_T)
        out_TX[self.live :] = self.garbage_R[:, None].to(out_TX.dtype)
        return out_TX


class StateChecks(SmallModel):
    """Inherited by `ModelConformance`, which has the fixtures."""

    def test_a_call_does_not_depend_on_those_before(
        self, model_class: Any, reference: ReferenceCheckpoint, draws: Random
    ) -> None:
        """Other ids at the same positions, the same ids at others, shorter and longer passes: each
        gives the bits of a model that has computed nothing yet."""
        used = load_model(model_class, reference.folder, reference.config)
        longest = min(30, model_class.shape(reference.config).max_position // 2)
        vocab_size = model_class.shape(reference.config).vocab_size
        lengths = [draws.randint(2, longest) for _ in range(NUM_CALLS // 2)]
        for call in range(NUM_CALLS):
            length = draws.choice(lengths)  # often one that was there before
            ids_T = torch.tensor([draws.randrange(vocab_size) for _ in range(length)])
            positions_T = torch.tensor(sorted(draws.sample(range(2 * longest), length))).int()
            fresh = load_model(model_class, reference.folder, reference.config)
            actual, expected = (run_sparse(m, ids_T, positions_T) for m in (used, fresh))
            assert torch.equal(actual, expected), f"call {call}, of {length} tokens, differs"

    def test_two_models_in_one_process_do_not_meet(
        self,
        model_class: Any,
        reference_class: Any,
        reference: ReferenceCheckpoint,
        ids: Tensor,
        draws: Random,
        tmp_path: Path,
    ) -> None:
        """Equal shapes with other weights and another theta: each is what transformers says."""
        base = self.small_config(reference_class)
        rope = each_rope(
            base.get("rope_parameters") or {},
            lambda rope: {**rope, "rope_theta": between(draws, (20.0, 1e5))},
        )
        folder = tmp_path / "another"
        other = ReferenceCheckpoint.save(
            folder,
            reference_class,
            {**base, **({"rope_parameters": rope} if "rope_parameters" in base else {})},
            seed=draws.randrange(2**31),
        )
        both = [
            (one, load_model(model_class, one.folder, one.config)) for one in (reference, other)
        ]
        for one, model in (*both, *both):
            assert_same_logits(run_model(model, ids), one.logits(ids))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @torch.inference_mode()
    def test_garbage_in_padding_does_not_spread(
        self,
        model_class: Any,
        reference: ReferenceCheckpoint,
        ids: Tensor,
        dtype: torch.dtype,
        draws: Random,
    ) -> None:
        """NaN, infinities and huge numbers in rows of padding leave every other row's bits alone,
        in the layers and in the head."""
        model = load_model(model_class, reference.folder, reference.config, dtype=dtype)
        live, rows = draws.randint(3, len(ids) - 2), len(ids)
        positions_T = torch.cat([torch.arange(live), torch.zeros(rows - live)]).int()

        def compute(garbage: float) -> tuple[Tensor, Tensor]:
            garbage_R = torch.full((rows - live,), garbage)
            _Padded(model, rows, live, garbage_R)
            hidden_TE = model(ids, positions_T)
            finite_TE = hidden_TE.nan_to_num(0.0, 0.0, 0.0)
            finite_TE[live:] = garbage
            return hidden_TE[:live], model.compute_logits(finite_TE)[:live]

        expected = compute(0.0)
        for garbage in GARBAGE:
            for part, actual, right in zip(
                ("hidden state", "logits"), compute(garbage), expected, strict=True
            ):
                wrong = int((actual != right).any(dim=1).sum())
                if wrong:
                    raise AssertionError(
                        f"{garbage} in {rows - live} rows of padding changes the {part} of {wrong} "
                        f"of the {live} other rows; a maximum, sum or mean may go over the last "
                        "dimension only"
                    )

    @torch.inference_mode()
    def test_a_tied_head_is_the_embedding_itself(
        self, model_class: Any, reference_class: Any, ids: Tensor, tmp_path: Path
    ) -> None:
        """No copy of it: what changes in the one shows in the other, and memory holds it once."""
        reference = self.save(reference_class, tmp_path, {"tie_word_embeddings": True})
        model = load_model(model_class, tmp_path, reference.config)
        shape = model_class.shape(reference.config)
        run_model(model, ids)  # whatever is copied at first use has been
        hidden_TE = model(ids, torch.arange(len(ids), dtype=torch.int32))
        expected_TV = model.compute_logits(2 * hidden_TE).clone()
        size = (shape.vocab_size, shape.hidden_size)
        matrices = [p for p in model.parameters() if tuple(p.shape) == size]
        if len(matrices) != 1:
            raise AssertionError(
                f"a tied model has {len(matrices)} parameters of the shape {list(size)}, where the "
                "embedding is the only one: build the head with tied_to the embedding"
            )
        matrices[0].mul_(2.0)
        try:
            assert_same_logits(model.compute_logits(hidden_TE), expected_TV)
        except AssertionError as error:
            raise AssertionError(
                f"the embedding was doubled in place, and the logits did not follow: {error}"
            ) from None
