"""The part of the models' suite about weights: nothing missing, nothing left over, all by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm_core.errors import WeightsError
from nanovllm_kit.numerics import assert_close_report
from nanovllm_kit.reference_model import ReferenceCheckpoint, load_model, run_model

REL_NORM, MAX_ABS = 1e-5, 1e-4
"""How far float32 logits may be from transformers: only the order of the sums differs."""


def assert_same_logits(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the order of float32 sums."""
    assert_close_report(actual, expected, rel_norm=REL_NORM, max_abs=MAX_ABS)


class WeightChecks:
    """Inherited by `ModelConformance`, which has the fixtures."""

    def test_every_parameter_is_filled_from_the_checkpoint(
        self, model_class: Any, reference: ReferenceCheckpoint
    ) -> None:
        """Loading leaves nothing as it was when the model was built."""
        model = load_model(model_class, reference.folder, reference.config)
        unfilled = [name for name, p in model.named_parameters() if not p.isfinite().all()]
        assert not unfilled, f"not filled: {unfilled}"

    def test_weights_in_several_files_are_read_as_one(
        self, model_class: Any, reference: ReferenceCheckpoint, ids: Tensor
    ) -> None:
        """Packed projections too, whose parts then lie in different files."""
        expected = reference.logits(ids)
        reference.split(3)
        model = load_model(model_class, reference.folder, reference.config)
        assert_same_logits(run_model(model, ids), expected)

    def test_every_weight_is_needed(self, model_class: Any, reference: ReferenceCheckpoint) -> None:
        """Whichever is missing from the checkpoint, the error says its name."""
        tensors = reference.tensors()
        for name in tensors:
            reference.rewrite({other: t for other, t in tensors.items() if other != name})
            with pytest.raises(WeightsError) as caught:
                load_model(model_class, reference.folder, reference.config)
            assert name in str(caught.value)

    def test_a_renamed_weight_is_named(
        self, model_class: Any, reference: ReferenceCheckpoint
    ) -> None:
        """By its new name, unexpected, and its old one, missing; a part of a name is no match."""
        tensors = reference.tensors()
        for name in ("model.layers.0.self_attn.q_proj.weight", *list(tensors)[:3]):
            if name not in tensors:
                continue
            path, _, last = name.rpartition(".")
            for renamed in (f"{path}.extra_{last}", f"extra.{name}"):
                changed = {renamed if n == name else n: t for n, t in tensors.items()}
                reference.rewrite(changed)
                with pytest.raises(WeightsError) as caught:
                    load_model(model_class, reference.folder, reference.config)
                assert name in str(caught.value)
                assert renamed in str(caught.value)

    def test_a_weight_that_the_model_does_not_ask_for_is_named(
        self, model_class: Any, reference: ReferenceCheckpoint
    ) -> None:
        """More than the model knows means that it would compute something else."""
        extra = {"model.layers.0.self_attn.no_such_proj.weight": torch.zeros(4, 4)}
        reference.rewrite(reference.tensors() | extra)
        with pytest.raises(WeightsError, match="no_such_proj"):
            load_model(model_class, reference.folder, reference.config)

    def test_a_weight_of_another_shape_is_named(
        self, model_class: Any, reference: ReferenceCheckpoint
    ) -> None:
        """Before anything is copied."""
        tensors = reference.tensors()
        name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
        reference.rewrite(tensors | {name: tensors[name][:, :-1].contiguous()})
        with pytest.raises(WeightsError) as caught:
            load_model(model_class, reference.folder, reference.config)
        assert name in str(caught.value)
