"""A checkpoint fills every parameter once, or says what is wrong before anything is copied."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nanovllm_core import layers
from nanovllm_core.errors import PluginLoadError, WeightsError
from nanovllm_core.interfaces.kernels import Routing
from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import (
    Experts,
    LayerContext,
    MergedColumnParallelLinear,
    ModelParameter,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    SingleRank,
    SparseMLP,
    VocabParallelEmbedding,
    expert_modules,
)
from nanovllm_core.layers.module import ShardId
from nanovllm_core.worker.weights import INDEX_NAME, init_dummy_weights, load_weights

CPU = torch.device("cpu")


class TinyModel(nn.Module):
    """The loader's view of a model: packed parameters, a norm, a tied or untied head."""

    packed_modules: Mapping[str, tuple[str, str | int | tuple[str | int, ...]]] = {
        "q_proj": ("qkv_proj", "q"),
        "k_proj": ("qkv_proj", "k"),
        "v_proj": ("qkv_proj", "v"),
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }
    ignored_weights: Sequence[str] = ("rotary.inv_freq",)

    def __init__(self, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        context = LayerContext(CPU, dtype, SingleRank(), TorchKernels())
        self.embed = VocabParallelEmbedding(context, 6, 8)
        self.qkv_proj = QKVParallelLinear(context, 8, 4, 2, 2, bias=True)
        self.gate_up_proj = MergedColumnParallelLinear(context, 8, (4, 4))
        self.norm = RMSNorm(context, 8, 1e-6)
        self.head = ParallelLMHead(context, 6, 8, tied_to=self.embed if tied else None)
        for parameter in self.parameters():
            parameter.fill_(float("nan"))


SHAPES = {
    "embed.weight": (6, 8),
    "q_proj.weight": (8, 8),
    "k_proj.weight": (4, 8),
    "v_proj.weight": (4, 8),
    "q_proj.bias": (8,),
    "k_proj.bias": (4,),
    "v_proj.bias": (4,),
    "gate_proj.weight": (4, 8),
    "up_proj.weight": (4, 8),
    "norm.weight": (8,),
    "head.weight": (6, 8),
}


def checkpoint(**changes: Tensor | None) -> dict[str, Tensor]:
    """Random tensors; `name=None` leaves one out. Dots are written as two underscores."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    return tensors


def save(folder: Path, tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    save_file(tensors, folder / name)
    return folder / name


def save_sharded(folder: Path, tensors: dict[str, Tensor], num_files: int = 3) -> list[str]:
    """Split over files, with an index, as transformers writes them."""
    files = [f"model-{i + 1:05}-of-{num_files:05}.safetensors" for i in range(num_files)]
    names = sorted(tensors)
    weight_map = {name: files[i % num_files] for i, name in enumerate(names)}
    for file in files:
        save(folder, {n: tensors[n] for n in names if weight_map[n] == file}, file)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return files


def assert_holds(model: TinyModel, tensors: dict[str, Tensor]) -> None:
    qkv = [tensors[f"{x}_proj.weight"] for x in "qkv"]
    qkv_bias = [tensors[f"{x}_proj.bias"] for x in "qkv"]
    gate_up = [tensors["gate_proj.weight"], tensors["up_proj.weight"]]
    assert torch.equal(model.embed.weight, tensors["embed.weight"])
    assert torch.equal(model.qkv_proj.weight, torch.cat(qkv))
    assert model.qkv_proj.bias is not None
    assert torch.equal(model.qkv_proj.bias, torch.cat(qkv_bias))
    assert torch.equal(model.gate_up_proj.weight, torch.cat(gate_up))
    assert torch.equal(model.norm.weight, tensors["norm.weight"])
    head = tensors["embed.weight" if model.head.weight is model.embed.weight else "head.weight"]
    assert torch.equal(model.head.weight, head)


def assert_untouched(model: TinyModel) -> None:
    assert all(bool(parameter.isnan().all()) for parameter in model.parameters())


def test_one_file_fills_packed_and_plain_parameters(tmp_path: Path) -> None:
    """Each shard lands in its place."""
    tensors, model = checkpoint(), TinyModel()
    save(tmp_path, tensors)
    load_weights(model, tmp_path, tied=False)
    assert_holds(model, tensors)


def test_several_files_with_an_index_are_read_as_one(tmp_path: Path) -> None:
    """And files beside the index that it does not list are left alone."""
    tensors, model = checkpoint(), TinyModel()
    save_sharded(tmp_path, tensors)
    save(tmp_path, {"something.else": torch.zeros(1)}, "other.safetensors")
    load_weights(model, tmp_path, tied=False)
    assert_holds(model, tensors)


def test_several_files_without_an_index_are_read_too(tmp_path: Path) -> None:
    """All of them, whatever they are called."""
    tensors, model = checkpoint(), TinyModel()
    save_sharded(tmp_path, tensors)
    (tmp_path / INDEX_NAME).unlink()
    load_weights(model, tmp_path, tied=False)
    assert_holds(model, tensors)


STRAYS = ("consolidated.safetensors", "adapter_model.safetensors", "consolidated.00.pth")


@pytest.mark.parametrize("layout", ["one file", "an index", "shards without an index"])
def test_files_beside_the_models_own_are_left_alone(layout: str, tmp_path: Path) -> None:
    """Mistral's repositories hold the weights a second time, by other names, as `consolidated`."""
    expected = checkpoint()
    for stray in STRAYS:
        save(tmp_path, {"layers.0.attention.wq.weight": torch.ones(8, 8)}, stray)
    if layout == "one file":
        save(tmp_path, expected)
        (tmp_path / INDEX_NAME).write_text('{"weight_map": {"a": "model-00001.safetensors"}}')
    else:
        save_sharded(tmp_path, expected)
    if layout == "shards without an index":
        (tmp_path / INDEX_NAME).unlink()
    model = TinyModel()
    load_weights(model, tmp_path, tied=False)
    assert_holds(model, expected)


@pytest.mark.parametrize("head", ["none", "a copy", "a copy in another dtype"])
def test_tied_embeddings_need_no_head(head: str, tmp_path: Path) -> None:
    """A copy of the embedding in the checkpoint changes nothing."""
    tensors, model = checkpoint(head__weight=None), TinyModel(tied=True)
    tensors["embed.weight"] = tensors["embed.weight"].bfloat16().float()
    if head != "none":
        dtype = torch.float32 if head == "a copy" else torch.bfloat16
        tensors["head.weight"] = tensors["embed.weight"].to(dtype, copy=True)
    save_sharded(tmp_path, tensors)
    load_weights(model, tmp_path, tied=True)
    assert_holds(model, tensors)


@pytest.mark.parametrize("files", ["one", "shards"])
def test_a_tied_embedding_may_be_stored_as_the_head_alone(files: str, tmp_path: Path) -> None:
    """As safetensors' `save_model` stores it, which keeps one of the two names."""
    expected = checkpoint(head__weight=None)
    tensors = {**expected, "head.weight": expected["embed.weight"]}
    del tensors["embed.weight"]
    (save if files == "one" else save_sharded)(tmp_path, tensors)
    model = TinyModel(tied=True)
    load_weights(model, tmp_path, tied=True)
    assert_holds(model, expected)


def test_a_tied_embedding_that_is_stored_under_neither_name_is_missing(tmp_path: Path) -> None:
    """Under its first name, which transformers saves."""
    save(tmp_path, checkpoint(head__weight=None, embed__weight=None))
    with pytest.raises(WeightsError, match=r"1 missing: embed\.weight"):
        load_weights(TinyModel(tied=True), tmp_path, tied=True)


@pytest.mark.parametrize("head", [torch.ones(6, 8), torch.ones(8, 6)], ids=["number", "shape"])
def test_a_tied_head_of_its_own_is_refused(head: Tensor, tmp_path: Path) -> None:
    """Transformers uses the stored head, so leaving it out would give other logits."""
    save_sharded(tmp_path, checkpoint(head__weight=head))
    model = TinyModel(tied=True)
    message = r"head\.weight \(in model-.*\) differs from embed\.weight.*tie_word_embeddings: false"
    with pytest.raises(WeightsError, match=message):
        load_weights(model, tmp_path, tied=True)
    assert_untouched(model)


def test_weights_are_converted_to_the_models_dtype(tmp_path: Path) -> None:
    """A bfloat16 checkpoint can serve in float32."""
    tensors = {name: tensor.bfloat16() for name, tensor in checkpoint().items()}
    model = TinyModel()
    save(tmp_path, tensors)
    load_weights(model, tmp_path, tied=False)
    assert model.norm.weight.dtype == torch.float32
    assert torch.equal(model.norm.weight, tensors["norm.weight"].float())


def test_weights_that_the_model_ignores_may_be_there(tmp_path: Path) -> None:
    """Those named in full, all of a module whose name ends in a dot, and frequencies of ropes."""
    save(tmp_path, checkpoint(rotary__inv_freq=torch.zeros(2)))
    load_weights(TinyModel(), tmp_path, tied=False)
    model = TinyModel()
    model.ignored_weights = ("eyes.",)
    frequencies = {"layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save(tmp_path, checkpoint(eyes__layers__0__weight=torch.zeros(2)) | frequencies)
    load_weights(model, tmp_path, tied=False)
    save(tmp_path, checkpoint(eyes=torch.zeros(2), eyesight__weight=torch.zeros(2)))
    with pytest.raises(WeightsError, match=r"2 unexpected: eyes \(.*eyesight\.weight"):
        load_weights(model, tmp_path, tied=False)


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    """From 1 to the number of tensors."""
    save_sharded(tmp_path, checkpoint())
    calls: list[tuple[int, int]] = []
    load_weights(TinyModel(), tmp_path, tied=False, progress=lambda *call: calls.append(call))
    assert calls == [(i + 1, len(SHAPES)) for i in range(len(SHAPES))]


WRONG: dict[str, dict[str, Tensor | None]] = {
    r"1 missing: k_proj\.bias": {"k_proj__bias": None},
    r"1 missing: head\.weight": {"head__weight": None},
    r"2 missing: .*up_proj\.weight.*; 1 unexpected: q_norm": {
        "q_proj__weight": None, "up_proj__weight": None, "q_norm__weight": torch.zeros(8),
    },
    # Not by substring: these would match "q_proj" and "norm" (bug 16 of the peers).
    r"1 unexpected: my_q_proj\.weight \(in model": {"my_q_proj__weight": torch.zeros(8, 8)},
    r"1 unexpected: norm\.weight\.scale": {"norm__weight__scale": torch.zeros(1)},
    r"1 unexpected: qkv_proj\.weight": {"qkv_proj__weight": torch.zeros(16, 8)},
    r"1 of the wrong shape: k_proj\.weight \(.*\[8, 4\].*wants \[4, 8\]\)": {
        "k_proj__weight": torch.zeros(8, 4),
    },
    r"wrong shape: norm\.weight \(.*\[1, 8\]": {"norm__weight": torch.zeros(1, 8)},
    r"dtype that is not supported.*up_proj\.weight \(in model.safetensors: I8\)": {
        "up_proj__weight": torch.zeros(4, 8, dtype=torch.int8),
    },
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_weights_that_do_not_fit_are_named_before_anything_is_copied(
    message: str, tmp_path: Path
) -> None:
    """With file, shapes and remedy."""
    save(tmp_path, checkpoint(**WRONG[message]))
    model = TinyModel()
    with pytest.raises(WeightsError, match=f"(?s){message}.*config.json"):
        load_weights(model, tmp_path, tied=False)
    assert_untouched(model)


def test_long_lists_are_cut_with_a_count(tmp_path: Path) -> None:
    """Eight names, then how many more."""
    save(tmp_path, {"embed.weight": torch.zeros(6, 8)})
    with pytest.raises(WeightsError, match=r"10 missing: ([\w.]+, ){7}[\w.]+ and 2 more"):
        load_weights(TinyModel(), tmp_path, tied=False)


def test_a_weight_in_two_files_is_an_error(tmp_path: Path) -> None:
    """Which of the two is right cannot be known."""
    save(tmp_path, checkpoint(), "a.safetensors")
    save(tmp_path, {"norm.weight": torch.zeros(8)}, "b.safetensors")
    with pytest.raises(
        WeightsError, match=r"1 found twice: norm\.weight \(in a\.safetensors and b\.safetensors\)"
    ):
        load_weights(TinyModel(), tmp_path, tied=False)


@pytest.mark.parametrize("kept", [0, 4, 200, -1])
def test_a_truncated_file_is_named_with_its_size(kept: int, tmp_path: Path) -> None:
    """Cut within the header or within the data: before anything is copied."""
    files = save_sharded(tmp_path, checkpoint())
    path = tmp_path / files[-1]
    path.write_bytes(path.read_bytes()[:kept])
    model, size = TinyModel(), path.stat().st_size
    with pytest.raises(WeightsError, match=rf"{files[-1]} \({size} bytes\) is truncated.*again"):
        load_weights(model, tmp_path, tied=False)
    assert_untouched(model)


def test_a_file_that_the_index_lists_must_be_there(tmp_path: Path) -> None:
    """A download that stopped half-way."""
    files = save_sharded(tmp_path, checkpoint())
    (tmp_path / files[1]).unlink()
    with pytest.raises(WeightsError, match=rf"1 of the 3 files.*{files[1]}; download"):
        load_weights(TinyModel(), tmp_path, tied=False)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"weight_map": 3}', "{}", '{"weight_map": {"a": 1, "b": 2}}', "[" * 100_000],
    ids=["no JSON", "a list", "no map", "nothing", "numbers for names", "too deep"],
)
def test_an_unreadable_index_is_named(text: str, tmp_path: Path) -> None:
    """Whether it is not JSON or not an index."""
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(WeightsError, match=f"{INDEX_NAME} cannot be read"):
        load_weights(TinyModel(), tmp_path, tied=False)


def test_a_name_longer_than_any_files_is_a_missing_file(tmp_path: Path) -> None:
    """The file system itself refuses to look for it."""
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "a" * 300}}))
    with pytest.raises(WeightsError, match=r"1 of the 1 files.*are not in its folder: aaa"):
        load_weights(TinyModel(), tmp_path, tied=False)


@pytest.mark.parametrize("what", ["the file", "the folder"])
def test_weights_that_may_not_be_read_are_not_called_damaged(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download would not help; root may read all, so the answer of the system is replaced."""
    file = save(tmp_path, checkpoint())
    if what == "the folder":
        file.unlink()
    else:
        file.write_bytes(b"")  # unreadable for another reason, as a test of root's has it
    denied = file if what == "the file" else tmp_path
    monkeypatch.setattr("os.access", lambda path, mode: path != denied)
    with pytest.raises(WeightsError, match=rf"this user may not read {denied}; .*permissions$"):
        load_weights(TinyModel(), tmp_path, tied=False)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    """A checkpoint is one folder."""
    (tmp_path / INDEX_NAME).write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(WeightsError, match=r"not in its folder: \.\./secret"):
        load_weights(TinyModel(), tmp_path, tied=False)


def test_a_folder_without_weights_says_what_to_do(tmp_path: Path) -> None:
    """Download them, use random ones, or convert those of another format."""
    with pytest.raises(WeightsError, match=r"no \*\.safetensors; download.*dummy"):
        load_weights(TinyModel(), tmp_path, tied=False)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(WeightsError, match=r"only pytorch_model\.bin; .*convert"):
        load_weights(TinyModel(), tmp_path, tied=False)


def test_dummy_weights_are_finite_and_follow_the_seed(tmp_path: Path) -> None:
    """Norms are 1; the rest is small; another seed gives other numbers."""
    models = [TinyModel() for _ in range(3)]
    for model, seed in zip(models, (7, 7, 8), strict=True):
        init_dummy_weights(model, seed)
    first, same, other = (dict(model.named_parameters()) for model in models)
    for name, parameter in first.items():
        assert bool(parameter.isfinite().all())
        assert torch.equal(parameter, same[name])
        assert name == "norm.weight" or not torch.equal(parameter, other[name])
    assert torch.equal(first["norm.weight"], torch.ones(8))
    assert 0.01 < float(first["embed.weight"].std()) < 0.04


def test_dummy_routers_spread_tokens_over_all_experts() -> None:
    """Their deviation is larger than that of other weights, and their bias is 0."""
    context = LayerContext(CPU, torch.bfloat16, SingleRank(), TorchKernels())
    with torch.inference_mode():
        mixture = SparseMLP(context, 64, 8, 32, Routing(top_k=2), bias=True)
        init_dummy_weights(mixture, 0)
        x_TE = torch.randn(1000, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        _, ids_TC = mixture.gate(x_TE)
    assert 0.045 < float(mixture.gate.weight.std()) < 0.055
    assert float(mixture.experts.down.weight.std()) < 0.03
    pairs_N = ids_TC.flatten().bincount(minlength=32)
    assert int(pairs_N.min()) > 0, "an expert that no token chose"
    assert int(pairs_N.max()) < 4 * 1000 * 2 / 32


def test_a_parameter_without_a_loader_is_the_plugins_fault(tmp_path: Path) -> None:
    """The error names the parameter and how to build it."""
    model = TinyModel()
    model.extra = nn.Parameter(torch.zeros(1))
    save(tmp_path, checkpoint())
    with pytest.raises(PluginLoadError, match="extra has no weight_loader"):
        load_weights(model, tmp_path, tied=False)
    with pytest.raises(PluginLoadError, match="extra has no weight_loader"):
        init_dummy_weights(model, 0)


def test_a_parameter_that_lacks_what_loading_needs_is_the_plugins_fault(tmp_path: Path) -> None:
    """Made by its class, without `make_parameter`, which is public."""
    model = TinyModel()
    model.extra = ModelParameter(torch.zeros(1), requires_grad=False)
    model.extra.weight_loader = lambda param, tensor, shard_id: None
    save(tmp_path, checkpoint())
    for action in (
        lambda: load_weights(model, tmp_path, tied=False),
        lambda: init_dummy_weights(model, 0),
    ):
        with pytest.raises(
            PluginLoadError, match=r"extra has no shard_shapes, dummy_mean.*core\.layers$"
        ):
            action()
    assert hasattr(layers, "make_parameter")


def test_a_shard_without_a_source_is_the_plugins_fault(tmp_path: Path) -> None:
    """`packed_modules` must name every shard."""
    model = TinyModel()
    model.packed_modules = {"q_proj": ("qkv_proj", "q")}
    save(tmp_path, checkpoint())
    with pytest.raises(
        PluginLoadError, match=r"names the shards \['q'\] of qkv_proj\.weight.*model\.md"
    ):
        load_weights(model, tmp_path, tied=False)


FUSED = {"wqkv": ("qkv_proj", ("q", "k", "v")), "up_and_gate": ("gate_up_proj", (1, 0))}


def fused_checkpoint() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One tensor for q, k and v, and one for up and gate; and the same one by one."""
    apart = checkpoint()
    fused = {name: tensor for name, tensor in apart.items() if "_proj" not in name}
    for kind in ("weight", "bias"):
        fused[f"wqkv.{kind}"] = torch.cat([apart[f"{x}_proj.{kind}"] for x in "qkv"])
    fused["up_and_gate.weight"] = torch.cat([apart["up_proj.weight"], apart["gate_proj.weight"]])
    return fused, apart


def test_one_tensor_may_hold_several_shards(tmp_path: Path) -> None:
    """In the order that `packed_modules` says, which need not be ours."""
    fused, apart = fused_checkpoint()
    save(tmp_path, fused)
    model = TinyModel()
    model.packed_modules = FUSED
    load_weights(model, tmp_path, tied=False)
    assert_holds(model, apart)


@pytest.mark.parametrize("rows", [15, 17])
def test_a_tensor_of_several_shards_has_the_rows_of_all(rows: int, tmp_path: Path) -> None:
    """Neither fewer nor more; the message says how many."""
    fused, _ = fused_checkpoint()
    save(tmp_path, fused | {"wqkv.weight": torch.zeros(rows, 8)})
    model = TinyModel()
    model.packed_modules = FUSED
    with pytest.raises(WeightsError, match=rf"wqkv\.weight .*\[{rows}, 8\].*wants \[16, 8\]"):
        load_weights(model, tmp_path, tied=False)
    assert_untouched(model)


@pytest.mark.parametrize("shards", [("q", "k"), ("q", "k", "v", "w"), ("q", "k", "k", "v")])
def test_a_tensor_of_shards_that_are_not_there_is_the_plugins_fault(
    shards: tuple[str, ...], tmp_path: Path
) -> None:
    """Too few, unknown, or twice: with what was named, also where the tensor has our own name."""
    model = TinyModel()
    save(tmp_path, checkpoint())
    for name in ("wqkv", "qkv_proj"):
        model.packed_modules = {
            "up_and_gate": FUSED["up_and_gate"],
            name: ("qkv_proj", shards),
        }
        stated = ", ".join(map(repr, dict.fromkeys(shards)))
        expected = f"packed_modules names the shards [{stated}] of qkv_proj.weight"
        with pytest.raises(PluginLoadError, match=re.escape(expected)):
            load_weights(model, tmp_path, tied=False)


def test_what_is_no_pair_of_module_and_shards_is_the_plugins_fault(tmp_path: Path) -> None:
    model = TinyModel()
    model.packed_modules = {"gate_proj": ("gate_up_proj", 0, 1)}  # type: ignore[dict-item]
    save(tmp_path, checkpoint())
    with pytest.raises(PluginLoadError, match=r"\['gate_proj'\] of TinyModel is .* must be a pair"):
        load_weights(model, tmp_path, tied=False)


class Mixture(nn.Module):
    """Experts as a model holds them; their hidden size is 8, their width 6."""

    ignored_weights: Sequence[str] = ()
    weight_block_size = (2, 2)

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.packed_modules = expert_modules(num_experts)
        context = LayerContext(CPU, torch.float32, SingleRank(), TorchKernels())
        self.experts = Experts(context, num_experts, 8, 6)


def expert_stacks(num_experts: int) -> dict[str, Tensor]:
    return {
        "experts.gate_up_proj": torch.randn(num_experts, 12, 8),
        "experts.down_proj": torch.randn(num_experts, 8, 6),
    }


@pytest.mark.parametrize("num_experts", [1, 3])
def test_experts_may_be_stacked_in_the_checkpoint(num_experts: int, tmp_path: Path) -> None:
    """As transformers 5 saves them with save_original_format=False; or each in its own tensors."""
    stacks = expert_stacks(num_experts)
    single = {}
    for expert in range(num_experts):
        gate, up = stacks["experts.gate_up_proj"][expert].chunk(2)
        matrices = {"gate": gate, "up": up, "down": stacks["experts.down_proj"][expert]}
        single |= {f"experts.{expert}.{name}_proj.weight": one for name, one in matrices.items()}
    mixed = {"experts.down_proj": stacks["experts.down_proj"]}
    mixed |= {name: one for name, one in single.items() if "down" not in name}
    for tensors in (stacks, single, mixed):
        save(tmp_path, {name: one.contiguous() for name, one in tensors.items()})
        model = Mixture(num_experts)
        load_weights(model, tmp_path, tied=False)
        assert torch.equal(model.experts.gate_up.tensor, stacks["experts.gate_up_proj"])
        assert torch.equal(model.experts.down.tensor, stacks["experts.down_proj"])


WRONG_STACKS: dict[str, tuple[dict[str, Tensor], str]] = {
    "transposed": (
        {"experts.gate_up_proj": torch.zeros(3, 8, 12)},
        r"1 of the wrong shape: experts\.gate_up_proj .*\[3, 8, 12\], .* wants \[3, 12, 8\]",
    ),
    "of fewer experts": (
        {"experts.down_proj": torch.zeros(2, 12, 6)},
        r"1 of the wrong shape: experts\.down_proj .* wants \[3, 8, 6\]",
    ),
    "beside single experts": (
        {"experts.0.up_proj.weight": torch.zeros(6, 8)},
        r"1 unexpected: experts\.0\.up_proj\.weight",
    ),
    "quantised": (
        {"experts.down_proj": torch.zeros(3, 8, 6).to(torch.float8_e4m3fn)},
        r"1 of a dtype that is not supported .*: experts\.down_proj .*F8_E4M3\)\. Check",
    ),
}


@pytest.mark.parametrize("case", WRONG_STACKS)
def test_wrong_stacks_of_experts_are_named(case: str, tmp_path: Path) -> None:
    changes, message = WRONG_STACKS[case]
    save(tmp_path, {**expert_stacks(3), **changes})
    with pytest.raises(WeightsError, match=message):
        load_weights(Mixture(3), tmp_path, tied=False)


def test_names_within_a_larger_model_of_transformers_5_say_how_to_save_it(tmp_path: Path) -> None:
    """It writes them with save_original_format=False."""
    save(tmp_path, {f"model.language_model.{name}": one for name, one in checkpoint().items()})
    said = r"unexpected: model\.language_model\..* save it there with save_original_format=True, or"
    with pytest.raises(WeightsError, match=said):
        load_weights(TinyModel(), tmp_path, tied=False)


def test_a_shared_parameter_must_be_declared_tied(tmp_path: Path) -> None:
    """Else one of two different tensors would win."""
    save(tmp_path, checkpoint())
    with pytest.raises(PluginLoadError, match=r"shares head\.weight"):
        load_weights(TinyModel(tied=True), tmp_path, tied=False)


def test_threads_load_but_one_parameter_at_a_time(tmp_path: Path) -> None:
    """A loader may keep state of its parameter; those of different parameters run side by side."""
    tensors, model = checkpoint(), TinyModel()
    save(tmp_path, tensors)
    busy: set[int] = set()
    both = threading.Barrier(2)
    twice = []

    def load(param: ModelParameter, tensor: Tensor, shard_id: ShardId) -> None:
        if id(param) in busy:
            twice.append(shard_id)
        busy.add(id(param))
        if shard_id in ("q", 0):
            both.wait(timeout=60)  # until the loader of another parameter is here, too
        time.sleep(0.01)
        original[id(param)](param, tensor, shard_id)
        busy.remove(id(param))

    packed = (model.qkv_proj.weight, model.gate_up_proj.weight)
    original = {id(param): param.weight_loader for param in packed}
    for param in packed:
        param.weight_loader = load
    load_weights(model, tmp_path, tied=False)
    assert not twice
    assert_holds(model, tensors)


def test_an_error_in_a_thread_ends_the_load(tmp_path: Path) -> None:
    """What a loader raises reaches the caller as it is, and nothing hangs."""
    model = TinyModel()
    save(tmp_path, checkpoint())

    def load(param: ModelParameter, tensor: Tensor, shard_id: ShardId) -> None:
        raise ZeroDivisionError

    model.norm.weight.weight_loader = load
    with pytest.raises(ZeroDivisionError):
        load_weights(model, tmp_path, tied=False)
