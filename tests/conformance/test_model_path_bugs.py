"""Bugs on paths that only an engine takes: the models' suite catches each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from nanovllm_core.layers import AttentionLayer, DecoderConfig, DecoderForCausalLM
from nanovllm_kit.model import ModelConformance
from nanovllm_kit.model_runtime import CaptureChecks
from nanovllm_kit.model_settings import LLAMA_LIKE
from nanovllm_kit.reference_model import ReferenceCheckpoint

IDS = torch.arange(9)


class Model(DecoderForCausalLM):
    """The core's decoder, of all settings that it has."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
        return DecoderConfig.from_config(config)


@pytest.fixture
def reference(tmp_path: Path) -> ReferenceCheckpoint:
    return ReferenceCheckpoint.save(tmp_path, transformers.LlamaForCausalLM, LLAMA_LIKE)


def test_the_core_s_decoder_passes(reference: ReferenceCheckpoint) -> None:
    """So what fails is the bug."""
    checks = CaptureChecks()
    checks.test_norms_that_a_kernel_set_computes_ahead_are_those_that_are_read(
        Model, reference, IDS
    )
    checks.test_tokens_that_are_not_sampled_from_may_end_behind_the_last_attention(
        Model, reference, IDS
    )


def test_a_residual_of_all_tokens_beside_those_that_are_kept_is_caught(
    reference: ReferenceCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token that is kept would be added to all, so several are tried too."""
    keep = AttentionLayer.keep_sampled

    def keep_the_first(self: AttentionLayer, *tensors: Tensor) -> tuple[Tensor, ...]:
        return keep(self, *tensors)[0], *tensors[1:]

    monkeypatch.setattr(AttentionLayer, "keep_sampled", keep_the_first)
    with pytest.raises((AssertionError, RuntimeError)):
        CaptureChecks().test_tokens_that_are_not_sampled_from_may_end_behind_the_last_attention(
            Model, reference, IDS
        )


def test_the_wrong_tokens_are_caught(
    reference: ReferenceCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first ones in place of those that are sampled from."""
    keep = AttentionLayer.keep_sampled

    def keep_the_beginning(self: AttentionLayer, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x[: len(kept)] for x, kept in zip(tensors, keep(self, *tensors), strict=True))

    monkeypatch.setattr(AttentionLayer, "keep_sampled", keep_the_beginning)
    with pytest.raises(AssertionError):
        CaptureChecks().test_tokens_that_are_not_sampled_from_may_end_behind_the_last_attention(
            Model, reference, IDS
        )


class Suite(ModelConformance):
    tiny_config = LLAMA_LIKE


def test_another_default_than_that_of_transformers_is_caught(
    reference: ReferenceCheckpoint, tmp_path: Path
) -> None:
    """A checkpoint that leaves the setting out would be computed wrongly without an error."""

    class Own(Model):
        @classmethod
        def read_config(cls, config: Mapping[str, Any]) -> DecoderConfig:
            epsilon = config.get("rms_norm_eps", 0.3)
            return replace(DecoderConfig.from_config(config), rms_norm_eps=epsilon)

    check = Suite().test_the_model_is_the_same_without_settings_that_have_their_default
    check(Model, transformers.LlamaForCausalLM, reference, IDS, tmp_path)
    with pytest.raises(AssertionError, match="without rms_norm_eps, which is 1e-06 then"):
        check(Own, transformers.LlamaForCausalLM, reference, IDS, tmp_path)
