"""The conformance suite of model plugins: the computation equals transformers', however it is cut.

An author's test file, whole:

    import pytest
    from nanovllm_kit import ModelConformance, PluginUnderTest, plugin_under_test
    from my_plugin.plugin import SPEC

    class TestMyModel(ModelConformance):
        variants = {"biases": {"attention_bias": True}}
        refused = {"a router": {"num_experts": 8}}

        @pytest.fixture
        def plugin(self) -> PluginUnderTest:
            return plugin_under_test(SPEC)

The reference is the class of transformers with the architecture's name; override
`reference_class` where it has another. Everything runs in float32 on the CPU, without an engine:
attention is `nanovllm_kit.dense_attention`, ranks are `nanovllm_kit.ranks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import TensorParallel, finalize_layers, vocab_per_rank
from nanovllm_core.worker import init_dummy_weights
from nanovllm_kit.conformance import SpecConformance
from nanovllm_kit.kernel_watch import KernelWatch
from nanovllm_kit.model_drawn import DrawnChecks
from nanovllm_kit.model_draws import draw_rope, each_rope
from nanovllm_kit.model_runtime import CaptureChecks
from nanovllm_kit.model_settings import (
    HARMLESS,
    ROPE_KINDS,
    SETTINGS,
    UNREADABLE,
    UNSUPPORTED,
    Settings,
    WatchedConfig,
)
from nanovllm_kit.model_shape import ShapeChecks
from nanovllm_kit.model_small import SmallModel
from nanovllm_kit.model_state import StateChecks
from nanovllm_kit.model_weights import WeightChecks, assert_same_logits
from nanovllm_kit.ranks import run_ranks
from nanovllm_kit.reference_model import (
    ReferenceCheckpoint,
    build_model,
    load_model,
    run_model,
    run_ragged,
)

CLEAR = 1e-3
"""A likeliest token that leads by more than this must be the likeliest here too."""


class ModelConformance(
    StateChecks, DrawnChecks, WeightChecks, CaptureChecks, ShapeChecks, SmallModel, SpecConformance
):
    """What every model must hold; see the module for a whole test file."""

    variants: ClassVar[Mapping[str, Settings]] = {}
    """Name -> settings to change in `tiny_config` that the model must serve."""
    rope_kinds: ClassVar[frozenset[str]] = frozenset({"default"})
    """The kinds of `ROPE_KINDS` that the model must serve; it may refuse the others."""
    refused: ClassVar[Mapping[str, Settings]] = {}
    """Name -> settings to change in config.json that the model must refuse."""
    harmless: ClassVar[frozenset[str]] = frozenset()
    """Settings of the reference that change nothing, so that the model need not read them."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One check per setting of the suite and of the class that inherits it."""
        choices: dict[str, Mapping[str, Any]] = {
            "variant": {"as it is": {}, **self.variants},
            "setting": SETTINGS,
            "rope": ROPE_KINDS,
            "wrong": {**UNSUPPORTED, **self.refused},
            "unreadable": UNREADABLE,
        }
        for name, values in choices.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, list(values.values()), ids=list(values))

    # -- the computation

    def test_logits_equal_those_of_transformers(
        self,
        model_class: Any,
        reference_class: Any,
        variant: Settings,
        ids: Tensor,
        tmp_path: Path,
    ) -> None:
        """Every logit of a prompt, for every variant that the class promises."""
        reference = self.save(reference_class, tmp_path, variant)
        model = load_model(model_class, tmp_path, reference.config)
        assert_same_logits(run_model(model, ids), reference.logits(ids))

    def test_every_position_chooses_the_token_of_transformers(
        self, model_class: Any, reference: ReferenceCheckpoint, ids: Tensor
    ) -> None:
        """The likeliest token after each prefix is the same, wherever it leads at all clearly."""
        expected = reference.logits(ids)
        actual = run_model(load_model(model_class, reference.folder, reference.config), ids)
        best = expected.topk(2).values
        clear = best[:, 0] - best[:, 1] > CLEAR
        assert clear.sum() > len(ids) // 2
        assert torch.equal(actual.argmax(-1)[clear], expected.argmax(-1)[clear])

    def test_a_setting_is_honoured_or_refused(
        self,
        model_class: Any,
        reference_class: Any,
        setting: Settings,
        ids: Tensor,
        tmp_path: Path,
    ) -> None:
        """Nothing that config.json says is silently ignored."""
        reference = self.save_served(reference_class, model_class, tmp_path, setting)
        model = load_model(model_class, tmp_path, reference.config)
        assert_same_logits(run_model(model, ids), reference.logits(ids))

    def test_no_setting_of_the_reference_is_overlooked(
        self, model_class: Any, reference: ReferenceCheckpoint
    ) -> None:
        """Each that transformers knows is read by the model, or varied by a check of this suite."""
        from transformers import PreTrainedConfig

        config = WatchedConfig(reference.config)
        model_class.shape(config)
        build_model(model_class, config)
        if config.copied:
            pytest.skip(
                "the model copies config.json, so the suite cannot see which settings it reads: "
                "read them from the mapping that it is given"
            )
        of_class = type(reference.model.config)
        known = of_class().to_dict().keys() - PreTrainedConfig().to_dict().keys()
        varied = [self.tiny_config, self.stated_config(), *SETTINGS.values(), *ROPE_KINDS.values()]
        varied += [*self.variants.values(), *self.refused.values()]
        overlooked = known - config.read - HARMLESS - self.harmless - {k for s in varied for k in s}
        if overlooked:
            raise AssertionError(
                f"{of_class.__name__} of transformers knows {', '.join(sorted(overlooked))}: never "
                "read. Honour them, or refuse them (refuse_unless); what changes nothing here "
                f"belongs into {type(self).__name__}.harmless"
            )

    def test_a_kind_of_rope_is_honoured_or_refused(
        self,
        model_class: Any,
        reference_class: Any,
        rope: Settings,
        ids: Tensor,
        draws: Random,
        tmp_path: Path,
    ) -> None:
        """Written as transformers 5 does, in one dict; what `rope_kinds` names must be honoured."""
        ropes = self.small_config(reference_class).get("rope_parameters") or {}
        changes = {"rope_parameters": each_rope(ropes, lambda _: draw_rope(draws, rope))}
        if rope["rope_type"] in self.rope_kinds:
            reference = self.save(reference_class, tmp_path, changes)
        else:
            reference = self.save_served(reference_class, model_class, tmp_path, changes)
        model = load_model(model_class, tmp_path, reference.config)
        assert_same_logits(run_model(model, ids), reference.logits(ids))

    def test_rope_settings_in_the_old_form_mean_the_same(
        self,
        model_class: Any,
        reference_class: Any,
        rope: Settings,
        ids: Tensor,
        draws: Random,
        tmp_path: Path,
    ) -> None:
        """`rope_theta` beside `rope_scaling`, as checkpoints from before transformers 5 have it.

        Where layers differ in their ropes, each architecture has an old form of its own.
        """
        if "rope_type" not in (self.small_config(reference_class).get("rope_parameters") or rope):
            pytest.skip("rope_parameters differ between kinds of layers; they had no common form")
        rope = draw_rope(draws, rope)
        new = {"rope_parameters": rope}
        reference = self.save_served(reference_class, model_class, tmp_path, new)
        scaling = dict(reference.config["rope_parameters"])  # with what the class adds to it
        beside = {key: scaling.pop(key, None) for key in ("rope_theta", "partial_rotary_factor")}
        stretched = None if scaling == {"rope_type": "default"} else scaling
        old = {**reference.config, **beside, "rope_scaling": stretched}
        del old["rope_parameters"]
        model = load_model(model_class, tmp_path, old)
        assert_same_logits(run_model(model, ids), reference.logits(ids))

    # -- however it is cut

    @pytest.mark.parametrize("chunks", [(7, 1, 1, 15), (16, 8), (23, 1), (1,) * 24], ids=str)
    def test_chunks_and_single_tokens_equal_one_prefill(
        self, model_class: Any, reference: ReferenceCheckpoint, ids: Tensor, chunks: Any
    ) -> None:
        """A prompt in pieces, down to one token a pass, which is decoding."""
        model = load_model(model_class, reference.folder, reference.config)
        assert_same_logits(run_model(model, ids, chunks), run_model(model, ids))

    def test_prompts_that_share_a_pass_do_not_meet(
        self, model_class: Any, reference: ReferenceCheckpoint, ids: Tensor
    ) -> None:
        """Prompts of different lengths and progress, packed: each as if it ran alone."""
        model = load_model(model_class, reference.folder, reference.config)
        prompts = [ids[:17], ids[5:6], ids[3:], ids[:9]]
        for prompt, actual in zip(prompts, run_ragged(model, prompts, chunk=5), strict=True):
            assert_same_logits(actual, run_model(model, prompt))

    def test_a_second_run_is_bitwise_equal(
        self, model_class: Any, reference: ReferenceCheckpoint, ids: Tensor
    ) -> None:
        """A model keeps no state between calls, and leaves its inputs as they are."""
        model = load_model(model_class, reference.folder, reference.config)
        before, first = ids.clone(), run_model(model, ids)
        run_model(model, ids.flip(0))
        assert torch.equal(run_model(model, ids), first)
        assert torch.equal(ids, before)

    def test_ids_and_positions_may_be_32_or_64_bits_wide(
        self, model_class: Any, reference: ReferenceCheckpoint, ids: Tensor
    ) -> None:
        """As the contract says; the values do not depend on it."""
        model = load_model(model_class, reference.folder, reference.config)
        assert torch.equal(run_model(model, ids.int()), run_model(model, ids.long()))

    @torch.inference_mode()
    def test_logits_go_where_they_are_told(
        self, model_class: Any, reference: ReferenceCheckpoint, ids: Tensor
    ) -> None:
        """`compute_logits(hidden, out)` fills `out`; without it they are the same."""
        model = load_model(model_class, reference.folder, reference.config)
        expected = run_model(model, ids)
        shape = model_class.shape(reference.config)
        positions_T = torch.arange(len(ids), dtype=torch.int32)
        hidden_TE = model(ids, positions_T)
        assert hidden_TE.shape == (len(ids), shape.hidden_size)
        assert expected.shape == (len(ids), shape.vocab_size)
        out_TV = torch.full_like(expected, float("nan"))
        assert_returns_out(model.compute_logits(hidden_TE, out_TV), out_TV)
        assert_same_logits(out_TV, expected)

    # -- head and invented weights

    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_the_head_is_the_embedding_only_where_the_configuration_says_so(
        self, model_class: Any, reference_class: Any, tied: bool, ids: Tensor, tmp_path: Path
    ) -> None:
        """Tied: the checkpoint brings one matrix. Untied: two that differ."""
        reference = self.save(reference_class, tmp_path, {"tie_word_embeddings": tied})
        assert model_class.shape(reference.config).tied_embeddings is tied
        model = load_model(model_class, tmp_path, reference.config)
        assert_same_logits(run_model(model, ids), reference.logits(ids))

    def test_invented_weights_give_finite_logits(
        self, model_class: Any, reference: ReferenceCheckpoint, ids: Tensor
    ) -> None:
        """`load_format: dummy` needs nothing but config.json."""
        model = build_model(model_class, reference.config)
        with torch.inference_mode():
            init_dummy_weights(model, seed=0)
            finalize_layers(model)
        assert run_model(model, ids).isfinite().all()

    # -- split over ranks

    @pytest.mark.parametrize("size", [2, 4])
    @pytest.mark.parametrize("split", ["as it is", "tied", "attention_bias", "mlp_bias"])
    def test_the_model_split_over_ranks_equals_the_whole_one(
        self,
        model_class: Any,
        reference_class: Any,
        size: int,
        split: str,
        ids: Tensor,
        tmp_path: Path,
    ) -> None:
        """With fewer KV heads than ranks, a vocabulary that does not divide, biases added once."""
        changes: dict[str, Settings] = {"as it is": {}, "tied": {"tie_word_embeddings": True}}
        if split in changes:
            reference = self.save(reference_class, tmp_path, changes[split])
        else:
            reference = self.save_served(reference_class, model_class, tmp_path, {split: True})

        def on_rank(tp: TensorParallel) -> Tensor:
            return run_model(load_model(model_class, tmp_path, reference.config, tp=tp), ids)

        for logits in run_ranks(size, on_rank):
            assert_same_logits(logits, reference.logits(ids))

    def test_each_rank_gives_the_logits_of_its_own_ids_where_they_are_asked(
        self, model_class: Any, reference: ReferenceCheckpoint, ids: Tensor
    ) -> None:
        """`compute_logits(hidden, out)` with an `out` of `vocab_per_rank` columns, then padding."""
        vocab_size = model_class.shape(reference.config).vocab_size

        @torch.inference_mode()
        def on_rank(tp: TensorParallel) -> Tensor:
            model = load_model(model_class, reference.folder, reference.config, tp=tp)
            run_model(model, ids)  # which binds its attention layers
            hidden_TE = model(ids, torch.arange(len(ids), dtype=torch.int32))
            out_TX: Tensor = hidden_TE.new_empty(len(ids), vocab_per_rank(vocab_size, tp.size))
            assert_returns_out(model.compute_logits(hidden_TE, out_TX), out_TX)
            return out_TX

        logits_TV = torch.cat(run_ranks(2, on_rank), dim=1)[:, :vocab_size]
        assert_same_logits(logits_TV, reference.logits(ids))

    @pytest.mark.parametrize("size", [1, 2])
    def test_the_kernel_set_alone_reads_the_weight_matrices(
        self, model_class: Any, reference: ReferenceCheckpoint, size: int, ids: Tensor
    ) -> None:
        """On one rank and on two: every product and lookup is one of the configured set."""
        folder, config = reference.folder, reference.config

        def on_rank(tp: TensorParallel) -> list[str]:
            watch = KernelWatch(TorchKernels())
            model = load_model(model_class, folder, config, tp=tp, kernels=watch.kernels)
            with watch.over(model):
                run_model(model, ids)
            return watch.found

        found = sorted({read for reads in run_ranks(size, on_rank) for read in reads})
        assert not found, f"read outside the kernel set: {', '.join(found[:4])}"


def assert_returns_out(returned: Tensor, out: Tensor) -> None:
    """`compute_logits(hidden, out)` gives back `out` itself."""
    assert returned.data_ptr() == out.data_ptr(), (
        "compute_logits(hidden, out) returned a tensor of other memory than `out`: write the "
        "logits into `out` and return it"
    )
