"""The part of the models' suite about how the engine runs a model: captured, in half precision."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm_core.config import bucket_sizes
from nanovllm_core.layers import (
    Attention,
    AttentionLayer,
    AttentionRuntime,
    LatentAttention,
    Router,
)
from nanovllm_kit.dense_attention import DenseRuntime
from nanovllm_kit.fused_kernels import FusedKernels
from nanovllm_kit.model_weights import assert_same_logits
from nanovllm_kit.numerics import relative_norm_error
from nanovllm_kit.recording import record
from nanovllm_kit.reference_model import ReferenceCheckpoint, load_model, run_model

HALF_ERROR_FACTOR, HALF_ERROR = 1.5, 1e-3
"""Half precision may be so many times as far off as that of transformers, and so much further."""
LARGE_STATE = 1_000.0
"""The largest number of an embedding: models have such states. float16 cannot hold its square."""


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


class _KeepsSome(DenseRuntime):
    """Leaves some tokens behind the last attention, as a step that samples from these alone."""

    def __init__(self, model: nn.Module, max_len: int, kept_S: Tensor) -> None:
        super().__init__(model, max_len)
        self.kept_S = kept_S

    def keep_sampled(self, layer: AttentionLayer, *tensors: Tensor) -> tuple[Tensor, ...]:
        if layer.layer_index < len(self.caches) - 1:
            return tensors
        return tuple(x.index_select(0, self.kept_S) for x in tensors)


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

    def test_norms_that_a_kernel_set_computes_ahead_are_those_that_are_read(
        self, model_class: Any, reference: ReferenceCheckpoint, ids: Tensor
    ) -> None:
        """By a set with every fused operation, as a GPU's: nothing writes to a residual between the
        operation that norms it (`announce_norm`, `norm_add`) and the norm that it was told of."""
        model = load_model(model_class, reference.folder, reference.config, kernels=FusedKernels())
        for chunks in ([len(ids)], [1] * len(ids)):
            assert_same_logits(run_model(model, ids, chunks), reference.logits(ids))

    def test_tokens_that_are_not_sampled_from_may_end_behind_the_last_attention(
        self, model_class: Any, reference: ReferenceCheckpoint, ids: Tensor
    ) -> None:
        """A model that calls `keep_sampled` goes on with all tensors that it gets, for one token
        and for several; one that does not call it computes every token."""
        model = load_model(model_class, reference.folder, reference.config)
        expected_TV, positions_T = reference.logits(ids), torch.arange(len(ids), dtype=torch.int32)
        for kept in ([len(ids) - 1], [0, 2, len(ids) - 1]):
            kept_S = torch.tensor(kept)
            _KeepsSome(model, len(ids), kept_S)
            with torch.inference_mode():
                logits = model.compute_logits(model(ids, positions_T))
            assert len(logits) in (len(kept), len(ids)), f"{len(logits)} of {len(kept)} tokens"
            mine = logits if len(logits) == len(kept) else logits[kept_S]
            assert_same_logits(mine, expected_TV[kept_S])

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
        assert_as_exact(actual, exact, reference.model, ids)

    def test_large_states_do_not_overflow_in_float16(
        self, model_class: Any, reference: ReferenceCheckpoint, ids: Tensor
    ) -> None:
        """A norm sums the squares in float32, for in float16 those of 256 and more are infinite."""
        embedding_VE = reference.model.get_input_embeddings().weight.detach()
        reference.scale(embedding=LARGE_STATE / float(embedding_VE.abs().max()))
        half, exact = torch.float16, reference.logits(ids)
        model = load_model(model_class, reference.folder, reference.config, dtype=half)
        assert_as_exact(run_model(model, ids), exact, reference.model, ids)


def assert_as_exact(actual_TV: Tensor, exact_TV: Tensor, reference: Any, ids_T: Tensor) -> None:
    """Logits of half precision are about as near to float32's as transformers' of that dtype."""
    dtype = actual_TV.dtype
    with torch.inference_mode():
        theirs_TV = copy.deepcopy(reference).to(dtype)(ids_T[None]).logits[0]
    error, limit = (relative_norm_error(x.float(), exact_TV) for x in (actual_TV, theirs_TV))
    most = HALF_ERROR_FACTOR * limit + HALF_ERROR
    assert error <= most, (
        f"{dtype} logits are off by {error:.1e} of their norm, and may be by {most:.1e}: "
        f"those of transformers are by {limit:.1e}"
    )
