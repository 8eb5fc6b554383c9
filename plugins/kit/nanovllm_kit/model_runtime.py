"""The part of the models' suite about how the engine runs a model: captured, in half precision."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from nanovllm_core.config import bucket_sizes
from nanovllm_core.layers import (
    Attention,
    AttentionLayer,
    AttentionRuntime,
    LatentAttention,
    Router,
)
from nanovllm_kit.numerics import relative_norm_error
from nanovllm_kit.recording import record
from nanovllm_kit.reference_model import ReferenceCheckpoint, load_model, run_model

HALF_ERROR_FACTOR, HALF_ERROR = 1.5, 1e-3
"""bfloat16 logits may be so many times as far off as transformers' own, and so much further."""


class _OwnToken(AttentionRuntime):
    """Attention of every token to itself only: no cache, and no number that the host must know."""

    def attend(self, layer: Attention, qkv_TX: Tensor, positions_T: Tensor) -> Tensor:
        prep = layer.prep
        group = prep.num_heads // prep.num_kv_heads
        v_TKD = qkv_TX[:, -prep.num_kv_heads * prep.head_size :].unflatten(
            1, (prep.num_kv_heads, -1)
        )
        v_TX: Tensor = v_TKD.repeat_interleave(group, dim=1).flatten(1)
        return v_TX + (positions_T[:, None] % 7) / 8

    def attend_latent(
        self, layer: LatentAttention, q_THD: Tensor, rows_TR: Tensor, positions_T: Tensor
    ) -> Tensor:
        _, v_THV = layer.expand_rows(rows_TR)
        return v_THV.flatten(1) + (positions_T[:, None] % 7) / 8


class CaptureChecks:
    """Inherited by `ModelConformance`, which has the fixtures."""

    def test_a_pass_can_be_captured_and_replayed(
        self, model_class: Any, reference: ReferenceCheckpoint, ids: Tensor
    ) -> None:
        """At every bucket, as in a CUDA graph: no value is read on the host, other ids follow.

        The largest is captured first, and all of them write into one buffer, as in the engine.
        """
        model = load_model(model_class, reference.folder, reference.config)
        layers = [module for module in model.modules() if isinstance(module, AttentionLayer)]
        for index, layer in enumerate(layers):
            layer.bind(_OwnToken(), index)
        logits_TV = torch.empty(len(ids), model_class.shape(reference.config).vocab_size)
        captured = []
        for rows in reversed(bucket_sizes(len(ids))):
            ids_T, positions_T = ids[:rows].int(), torch.arange(rows, dtype=torch.int32)
            with record() as recording:
                model.compute_logits(model(ids_T, positions_T), logits_TV[:rows])
            captured.append((ids_T, positions_T, recording))
        for ids_T, positions_T, recording in captured:
            ids_T.copy_(ids.flip(0)[: len(ids_T)])
            positions_T.add_(5)
            recording.replay()
            replayed_TV = logits_TV[: len(ids_T)].clone()
            with torch.inference_mode():
                expected_TV = model.compute_logits(model(ids_T, positions_T))
            assert torch.equal(replayed_TV, expected_TV), f"a replay of {len(ids_T)} rows differs"

    def test_half_precision_is_computed_in_its_own_dtype(
        self, model_class: Any, reference: ReferenceCheckpoint, ids: Tensor
    ) -> None:
        """In bfloat16 weights and logits are bfloat16's, and about as exact as transformers'."""
        half, folder, config = torch.bfloat16, reference.folder, reference.config
        model = load_model(model_class, folder, config, dtype=half)
        routers = [module for module in model.modules() if isinstance(module, Router)]
        exact_ones = {id(router.e_score_correction_bias) for router in routers}
        wrong = [
            name
            for name, weight in model.named_parameters()
            if weight.dtype != half and id(weight) not in exact_ones
        ]
        assert not wrong, f"asked for bfloat16, and not of that dtype: {', '.join(wrong)}"
        exact, actual = reference.logits(ids), run_model(model, ids)
        assert actual.dtype == half
        with torch.inference_mode():
            theirs = copy.deepcopy(reference.model).to(half)(ids[None]).logits[0]
        error, limit = (relative_norm_error(x.float(), exact) for x in (actual, theirs))
        assert error <= HALF_ERROR_FACTOR * limit + HALF_ERROR, (error, limit)
