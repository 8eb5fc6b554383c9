"""One sequence of decisions: `explain` names what a start chooses, and fails where it fails."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st

from nanovllm_core.config.settings import SamplerSettings
from nanovllm_core.config.sources import load_with_sources
from nanovllm_core.diagnostics.explain import VIEWS, Seam, explain
from nanovllm_core.errors import (
    CheckpointNotFoundError,
    ConfigError,
    NanoVLLMError,
    UnsupportedError,
)
from nanovllm_core.interfaces.specs import ResolvedPlugin
from nanovllm_core.registry.kinds import KINDS
from nanovllm_core.registry.manager import get_plugin_manager
from nanovllm_core.selection.decisions import SEQUENCE, Decisions, select_sampler
from nanovllm_core.selection.startup import Startup, start

from .e2e.tiny import write_config

for plugin in ("model_qwen3", "attention_sdpa"):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a config.json alone: one that is right, and some that are wrong."""
    folder = tmp_path_factory.mktemp("checkpoints")
    right = json.loads((write_config(folder / "right") / "config.json").read_text())
    for name, change in {
        "strange": {"architectures": ["StrangeForCausalLM"]},
        "shapeless": {"num_attention_heads": None},
        "nameless": {"architectures": []},
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(right | change))
    write_config(folder / "hot")
    (folder / "hot/generation_config.json").write_text('{"temperature": -1}')
    write_config(folder / "warm")
    (folder / "warm/generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    return folder


CHOICES: dict[str, list[Any]] = {
    "device": ["cpu", "auto", "cuda"],
    "dtype": ["auto", "bfloat16"],
    "attention": ["auto", "sdpa", "nosuch", {"backend": "sdpa", "options": {"kernel": "math"}},
                  {"prefill": "sdpa", "decode": "auto"}, {"backend": "sdpa", "options": {"x": 1}}],
    "kernels": ["auto", "torch", "triton", {"name": "torch", "options": {"x": 1}}],
    "sampler": ["gumbel", "nosuch"],
    "scheduler": ["fcfs", "nosuch", {"name": "fcfs", "options": {"x": 1}}],
    "executor": ["single", "nosuch"],
    "observers": [[], ["nosuch"]],
    "logits_processors": [[], ["nosuch"]],
    "constraints": [[], ["nosuch"]],
    "generation_config": ["checkpoint", "none"],
    "tensor_parallel_size": [1, 2],
    "limits.max_model_len": [None, 64, 100_000, "fit"],
    "cache.num_blocks": [None, 1, 1000],
    "cache.block_size": [None, 16, 256],
    "plugins.enable": [[], ["nosuch"]],
    "plugins.disable": [[], ["executor:single"]],
}  # fmt: skip
"""By field, the values to draw; the first is right everywhere, as are several of the others."""

MODELS = ["right", "right", "right", "warm", "strange", "shapeless", "nameless", "hot", "none"]


@st.composite
def drawn_changes(draw: st.DrawFn) -> dict[str, Any]:
    """A few fields, so that many draws start and many fail in one or two places."""
    names = draw(st.sets(st.sampled_from([*CHOICES]), max_size=4))
    return {name: draw(st.sampled_from(CHOICES[name])) for name in sorted(names)}


def named(plugins: ResolvedPlugin | tuple[ResolvedPlugin, ...]) -> str:
    """How `explain` begins each plugin that was chosen, without its options."""
    many = plugins if isinstance(plugins, tuple) else (plugins,)
    return "; ".join(f"{one.name} {one.version}, {one.distribution}" for one in many) or "none"


def chosen_by(startup: Startup, model: Path) -> dict[str, str]:
    """By decision, how what a start chose is named."""
    setup = startup.setup
    return {
        "checkpoint": f"local: {model}",
        "model": named(setup.model),
        "device": setup.device,
        "dtype": setup.dtype,
        "attention, prefill": f"{setup.prefill_attention.name} {setup.prefill_attention.version}",
        "attention, decode": f"{setup.decode_attention.name} {setup.decode_attention.version}",
        "KV blocks": f"{setup.block_size} tokens, layout {setup.kv_layout.name}",
        "kernels": named(setup.kernels),
        "sampler": named(setup.sampler),
        "logits processors": named(setup.logits_processors),
        "longest sequence": f"{setup.max_model_len} tokens",
    }


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(model=st.sampled_from(MODELS), changes=drawn_changes())
@example(model="right", changes={})
@example(model="nameless", changes={})
@example(model="right", changes={"device": "cuda", "scheduler": "nosuch"})
@example(  # the length that fits is shown by the blocks of an attention that is not there
    model="right",
    changes={"attention": "nosuch", "cache.num_blocks": 1, "limits.max_model_len": "fit"},
)
def test_explain_names_what_a_start_chooses_and_fails_where_it_fails(
    model: str, changes: dict[str, Any], folders: Path
) -> None:
    folder = folders / model
    loaded = load_with_sources(str(folder), overrides=changes, env={})
    seams = explain(loaded)
    problems = [seam.problem for seam in seams if seam.problem]
    if problems:
        with pytest.raises(NanoVLLMError) as caught:
            start(loaded.config)
        assert str(caught.value) == problems[0]
        return
    startup = start(loaded.config)
    shown = {seam.name: seam.chosen for seam in seams}
    for name, chosen in chosen_by(startup, folder).items():
        if name == "longest sequence" and changes.get("limits.max_model_len") == "fit":
            continue  # the executor measures what fits
        assert shown[name].startswith(chosen), (name, shown[name])


def test_every_decision_is_shown_and_every_kind_that_is_named_is_decided() -> None:
    assert list(VIEWS) == list(SEQUENCE)
    wanted = {kind.choice.replace("_", " ") for kind in KINDS.values() if kind.choice}
    assert wanted - {"attention"} <= set(SEQUENCE)


def test_a_decision_is_made_once_and_so_is_one_that_fails(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What needs the network, or asks plugins, is not asked again by all that hang on it."""
    calls = []

    def fail(source: object, model: str) -> Path:
        calls.append(model)
        raise CheckpointNotFoundError("no network")

    monkeypatch.setattr("nanovllm_core.selection.decisions.fetch_checkpoint", fail)
    loaded = load_with_sources("some/model", env={})
    problems = [seam.problem for seam in explain(loaded) if seam.problem]
    assert calls == ["some/model"]
    assert problems[0] == "no network"
    assert set(problems[1:]) == {"depends on the problem above"}


def test_a_decision_asks_for_no_more_than_it_needs(folders: Path) -> None:
    """Where the device is not there, plugins that do not depend on it are still chosen."""
    decisions = Decisions(load_with_sources("nosuch", overrides={"device": "cuda"}, env={}).config)
    assert [one.name for one in decisions.named("scheduler")] == ["fcfs"]
    assert decisions.named("scheduler") is decisions.named("scheduler")
    with pytest.raises(NanoVLLMError, match="no CUDA device"):
        decisions.named("sampler")


def test_a_sampler_that_cannot_be_captured_needs_eager_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugins = get_plugin_manager()
    spec = replace(plugins.spec("sampler", "gumbel"), cuda_graphs=False)
    monkeypatch.setattr(type(plugins), "spec", lambda *_: spec)
    choice = SamplerSettings(name="gumbel")
    assert select_sampler(plugins, choice, "cpu", cuda_graphs=False).name == "gumbel"
    with pytest.raises(UnsupportedError, match="cannot be captured; set cuda_graphs"):
        select_sampler(plugins, choice, "cpu", cuda_graphs=True)


def test_attention_is_asked_for_the_heads_of_one_rank(folders: Path) -> None:
    """Of a model of 4 query and 2 KV heads, 2 ranks have 2 and 1 each."""
    changes = {"tensor_parallel_size": 2, "device": "cpu"}
    decisions = Decisions(
        load_with_sources(str(folders / "right"), overrides=changes, env={}).config
    )
    [(asked, layers)] = decisions.requirements("decode").items()
    assert (asked.num_heads, asked.num_kv_heads) == (2, 1)
    assert layers == [*range(decisions.shape.num_layers)]


@pytest.mark.parametrize(("size", "name"), [(1, "single"), (2, "parallel")])
def test_an_automatic_executor_follows_the_number_of_ranks(size: int, name: str) -> None:
    """One that is not there is an error, and no other one takes its place."""
    changes = {"tensor_parallel_size": size}
    config = load_with_sources("nosuch", overrides=changes, env={}).config
    if name == "single" or find_spec("nanovllm_executor_parallel"):
        assert [one.name for one in Decisions(config).named("executor")] == [name]
    changes |= {"plugins": {"disable": [f"executor:{name}"]}}
    config = load_with_sources("nosuch", overrides=changes, env={}).config
    with pytest.raises(NanoVLLMError, match=f"executor '{name}'"):
        Decisions(config).named("executor")


@pytest.mark.parametrize(("size", "name"), [(1, "thread"), (2, "processes")])
def test_an_automatic_engine_client_follows_the_number_of_engines(size: int, name: str) -> None:
    """One that is not there is an error with the way to install it; one too small is refused."""
    changes: dict[str, Any] = {"data_parallel_size": size}
    config = load_with_sources("nosuch", overrides=changes, env={}).config
    if name == "thread" or find_spec("nanovllm_engine_processes"):
        assert [one.name for one in Decisions(config).named("engine_client")] == [name]
    changes["engine_client"] = "thread"
    config = load_with_sources("nosuch", overrides=changes, env={}).config
    if size == 1:
        assert [one.name for one in Decisions(config).named("engine_client")] == ["thread"]
        return
    with pytest.raises(ConfigError, match=r"data_parallel_size: 2, but .*'thread' runs at most 1"):
        Decisions(config).named("engine_client")


def test_what_a_sequence_needs_is_that_of_a_ranks_groups(folders: Path) -> None:
    """Layers of 1 and of 2 KV heads are two groups unsplit; on two ranks all have one head."""
    for size, groups in ((1, 2), (2, 1)):
        changes = {"tensor_parallel_size": size, "device": "cpu"}
        loaded = load_with_sources(str(folders / "right"), overrides=changes, env={})
        decisions = Decisions(loaded.config)
        layers = tuple(
            replace(one, num_kv_heads=1 + index % 2)
            for index, one in enumerate(decisions.shape.attention_shapes)
        )
        shape = replace(decisions.shape, attention_layers=layers)
        decisions._made[Decisions.__dict__["shape"]._decide] = shape
        assert len(decisions.sequence_need(16).windows) == groups


def test_a_failure_is_told_once(folders: Path) -> None:
    found: list[Seam] = explain(load_with_sources(str(folders / "none"), env={}))
    told = [seam for seam in found if seam.problem and "above" not in seam.problem]
    assert [seam.name for seam in told] == ["checkpoint"]
