"""From a configuration to choices: which checkpoint, device, number format and length."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm_core.config.sources import load_config
from nanovllm_core.errors import (
    ArchitectureError,
    CheckpointConflictError,
    CheckpointNotFoundError,
    ConfigError,
    DeviceError,
    PluginLoadError,
    SchedulerError,
    UnsupportedError,
)
from nanovllm_core.registry.manager import get_plugin_manager
from nanovllm_core.selection import startup
from nanovllm_core.selection.checkpoint import find_checkpoint, find_source
from nanovllm_core.selection.checkpoint_files import read_model_config
from nanovllm_core.selection.decisions import Decisions, resolve_device
from nanovllm_core.selection.startup import start

from .e2e.tiny import write_config
from .latent import install_latent, write_latent

Install = Callable[..., None]

for plugin in ("model_qwen3", "attention_sdpa"):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_config(tmp_path / "model")


def started(folder: Path, **changes: Any) -> startup.Startup:
    return start(load_config(str(folder), overrides={"device": "cpu", **changes}))


def decided(folder: Path, **changes: Any) -> Decisions:
    return Decisions(load_config(str(folder), overrides=changes))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


# -- what is captured ------------------------------------------------------------------------------


@pytest.mark.usefixtures("two_gpus")
def test_steps_with_prompts_are_captured_where_the_backend_says_so(folder: Path) -> None:
    """None on a CPU; sizes that the configuration names for another backend are refused."""
    pytest.importorskip("nanovllm_attention_triton", reason="needs a backend that can")

    def sizes(backend: str, **changes: Any) -> tuple[int, ...]:
        return decided(folder, attention=backend, **changes).prompt_graph_sizes

    named = {"cuda_graphs.prompt_sizes": [64]}
    assert sizes("triton", **named) == (64,)
    assert sizes("sdpa", device="cpu", **named) == ()
    assert sizes("sdpa") == ()
    with pytest.raises(ConfigError, match=r"prompt_sizes: \[64\].*'sdpa': its prefill cannot"):
        sizes("sdpa", **named)


@pytest.mark.usefixtures("two_gpus")
def test_prompts_of_latent_attention_are_captured_over_rows_that_the_backend_serves(
    tmp_path: Path, install: Install
) -> None:
    """Where it attends to rows at all, and to rows of that size, whatever a head's keys are."""
    pytest.importorskip("nanovllm_attention_triton", reason="needs a backend that can")
    install_latent(install)

    def decisions(backend: str, named: Sequence[int] | None = (64,), **changes: Any) -> Decisions:
        folder, _ = write_latent(tmp_path / f"{backend}-{len(changes)}", **changes)
        return decided(folder, attention=backend, **{"cuda_graphs.prompt_sizes": named})

    assert decisions("triton").prompt_graph_sizes == (64,)
    with pytest.raises(ConfigError, match="'sdpa': its prefill cannot be captured"):
        _ = decisions("sdpa").prompt_graph_sizes
    # A head's key has more numbers behind its value than a row may have.
    apart = {"qk_nope_head_dim": 160, "qk_rope_head_dim": 8, "v_head_dim": 16}
    assert decisions("triton", **apart).prompt_graph_sizes == (64,)
    wide = decisions("triton", kv_lora_rank=1024)
    with pytest.raises(UnsupportedError, match="latent part has 1024 numbers, at most 512"):
        _ = wide.prompt_graph_sizes
    assert decisions("triton", None).prompt_graph_sizes[-1] == 2048
    with pytest.raises(ConfigError, match=r"\[64, 3072\].*more than 2236 prompt tokens"):
        _ = decisions("triton", [64, 3072]).prompt_graph_sizes


# -- where the checkpoint is ----------------------------------------------------------------------


def test_a_folder_is_found_by_its_path_absolute_or_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    plugins = get_plugin_manager()
    for model in (str(folder), "model", "./model", f"local:{folder}"):
        assert find_checkpoint(plugins, model) == folder.resolve()


SHELF = """
from pathlib import Path
from nanovllm_core.api import CheckpointSpec, hookimpl

@hookimpl
def nanovllm_checkpoints():
    return [CheckpointSpec(name="shelf", impl="shelf:fetch", contract=2)]

def fetch(options, reference):
    return Path("/shelf", reference)
"""


@pytest.fixture
def shelf(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed source `shelf`, in an empty current directory."""
    install("nanovllm-shelf", {"nanovllm.checkpoints": {"shelf": "shelf"}}, {"shelf": SHELF})
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


@pytest.mark.parametrize("what", ["an empty folder", "a folder of other files", "a file", "none"])
def test_a_source_wins_over_what_is_here_and_holds_no_checkpoint(what: str, shelf: Path) -> None:
    """The README's first command works beside a folder `demo/`, whatever else that holds."""
    if what == "a file":
        (shelf / "shelf").touch()
    elif what != "none":
        (shelf / "shelf").mkdir()
    if what == "a folder of other files":
        (shelf / "shelf/notes.txt").touch()
    assert find_checkpoint(get_plugin_manager(), "shelf") == Path("/shelf")


def test_a_source_and_a_checkpoint_of_one_name_are_an_error_that_says_how_to_choose(
    shelf: Path,
) -> None:
    write_config(shelf / "shelf")
    plugins = get_plugin_manager()
    with pytest.raises(
        CheckpointConflictError,
        match=r"model: 'shelf' is .*here/shelf.* nanovllm-shelf 1\.2\.3.*'\./shelf'.*'shelf:'",
    ):
        find_source(plugins, "shelf")
    for model in ("./shelf", "local:shelf", str(shelf / "shelf")):
        assert find_checkpoint(plugins, model) == shelf / "shelf"
    assert find_checkpoint(plugins, "shelf:") == Path("/shelf")
    without = get_plugin_manager(disable=["nanovllm-shelf"])
    assert find_checkpoint(without, "shelf") == shelf / "shelf"


def test_a_prefix_always_means_the_source_and_a_folder_may_hold_a_colon(shelf: Path) -> None:
    plugins = get_plugin_manager()
    for name in ("shelf:a", "mine:b"):
        write_config(shelf / name)
    assert find_checkpoint(plugins, "shelf:a") == Path("/shelf/a")
    assert find_checkpoint(plugins, "./shelf:a") == shelf / "shelf:a"
    assert find_checkpoint(plugins, "mine:b") == shelf / "mine:b"


def test_a_folder_of_a_hub_name_is_used_and_never_fetched(shelf: Path) -> None:
    """A folder that lacks its config.json is no reason to ask the hub for that name in silence."""
    plugins = get_plugin_manager()
    write_config(shelf / "Qwen/Small")
    assert find_checkpoint(plugins, "Qwen/Small") == shelf / "Qwen/Small"
    (shelf / "Qwen/Small/config.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"holds no config\.json.*'hub:Qwen/Small'"):
        find_checkpoint(plugins, "Qwen/Small")


def test_a_name_with_a_slash_is_the_hubs_and_one_without_a_plugins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import nanovllm_core.selection.checkpoint as sources

    asked: list[str] = []

    def download(options: Any, reference: str) -> Path:
        asked.append(reference)
        return tmp_path

    monkeypatch.setattr(sources, "from_hub", download)
    plugins = get_plugin_manager()
    for model in ("Qwen/Qwen3-0.6B", "hub:Qwen/Qwen3-0.6B"):
        assert find_checkpoint(plugins, model) == tmp_path
    assert asked == ["Qwen/Qwen3-0.6B"] * 2


def test_a_path_that_is_not_there_is_never_looked_for_on_the_hub(tmp_path: Path) -> None:
    plugins = get_plugin_manager()
    for model in (str(tmp_path / "none"), "./none/here", "~/none/here"):
        with pytest.raises(CheckpointNotFoundError, match="does not exist"):
            find_checkpoint(plugins, model)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no config.json, or an empty one, so it is no checkpoint"),
        ("{}", "holds no config.json, or an empty one"),
        ("{", "is not readable JSON"),
        ("[]", "holds a list; it must hold a JSON object"),
        ("[" * 100_000, "is not readable JSON"),
    ],
    ids=["no file", "empty", "no JSON", "a list", "too deep"],
)
def test_a_config_that_is_none_is_named(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointNotFoundError, match=message):
        read_model_config(tmp_path)


SOURCE = """
from nanovllm_core.api import CheckpointNotFoundError, CheckpointSpec, hookimpl

@hookimpl
def nanovllm_checkpoints():
    return [CheckpointSpec(name="shelf", impl="shelf:fetch", contract=2)]

def fetch(options, reference):
    if reference == "gone":
        raise CheckpointNotFoundError("the shelf is empty")
    return {"none": None}[reference]
"""


def test_a_source_that_gives_no_folder_is_named_and_its_own_errors_pass(install: Install) -> None:
    install("nanovllm-shelf", {"nanovllm.checkpoints": {"shelf": "shelf"}}, {"shelf": SOURCE})
    plugins = get_plugin_manager()
    for reference, error in (("none", "made None, which is no Path"), ("other", "KeyError")):
        with pytest.raises(
            PluginLoadError, match=rf"\(nanovllm-shelf 1\.2\.3\).*{error}.*correct the ref"
        ):
            find_checkpoint(plugins, f"shelf:{reference}")
    with pytest.raises(CheckpointNotFoundError, match="the shelf is empty"):
        find_checkpoint(plugins, "shelf:gone")


MODEL = """
from nanovllm_core.api import ModelSpec, hookimpl

@hookimpl
def nanovllm_models():
    return [ModelSpec(name="Mine", impl="mine_model:Mine", contract=2)]

class Mine:
    @staticmethod
    def shape(config):
        return config["hidden_sise"] / config["num_heads"]
"""


def test_a_setting_that_a_model_misses_or_cannot_compute_with_is_named(
    install: Install, tmp_path: Path
) -> None:
    install("mine", {"nanovllm.models": {"Mine": "mine_model"}}, {"mine_model": MODEL})
    for settings, error in (
        ({}, r"'Mine' \(mine 1\.2\.3\): KeyError: 'hidden_sise'"),
        ({"hidden_sise": 64, "num_heads": 0}, "ZeroDivisionError: .*correct that setting"),
    ):
        config = {"architectures": ["Mine"], **settings}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ArchitectureError, match=error):
            _ = decided(tmp_path).shape


SCHEDULERS = """
from nanovllm_core.api import SchedulerSpec, hookimpl

@hookimpl
def nanovllm_schedulers():
    return [SchedulerSpec(name="mine", contract=1, impl="IMPL", level="LEVEL")]
"""


@pytest.mark.parametrize(
    ("impl", "level", "said"),
    [
        ("nanovllm_core.engine.scheduler:FcfsPolicy", "scheduler", "makes a policy"),
        ("mine_scheduler:make", "policy", "makes a scheduler"),
    ],
)
def test_a_scheduler_is_of_the_level_that_it_states(
    impl: str, level: str, said: str, install: Install, folder: Path
) -> None:
    """By its level its suite is chosen, and listings say what it is."""
    source = (
        SCHEDULERS.replace("IMPL", impl).replace("LEVEL", level)
        + """
def make(options):
    from nanovllm_core.engine.scheduler import FcfsPolicy
    from nanovllm_core.engine.scheduler import TokenBudgetScheduler
    return TokenBudgetScheduler(FcfsPolicy(options))
"""
    )
    install("mine", {"nanovllm.schedulers": {"mine": "mine_scheduler"}}, {"mine_scheduler": source})
    with pytest.raises(PluginLoadError, match=rf"'mine' \(mine 1\.2\.3\): .*{said}.*state level="):
        started(folder, scheduler="mine")


POLICY = """
from nanovllm_core.api import SchedulingPolicy

class Mine(SchedulingPolicy):
    def __init__(self, options):
        pass

    def service_key(self, request):
        return request.num_prompt_tokens
"""


def test_a_policy_whose_key_is_an_int_is_named_with_its_distribution(
    install: Install, folder: Path
) -> None:
    source = SCHEDULERS.replace("IMPL", "mine_policy:Mine").replace("LEVEL", "policy")
    modules = {"mine_scheduler": source, "mine_policy": POLICY}
    install("mine", {"nanovllm.schedulers": {"mine": "mine_scheduler"}}, modules)
    request: Any = SimpleNamespace(request_id="a", num_prompt_tokens=7, arrival_index=0)
    scheduler = started(folder, scheduler="mine").scheduler
    with pytest.raises(
        SchedulerError, match=r"'mine' \(mine 1\.2\.3\): service_key gave 7; .*tuple"
    ):
        scheduler.add(request)


# -- device and number format ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "gpus", "resolved"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cpu", 2, "cpu"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_a_device_is_resolved_by_what_is_there(
    device: str, gpus: int, resolved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert resolve_device(device) == resolved


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("device", ["mars", "cpu:0", "mps", "xpu:1", "cuda:-1", "cuda:", ""])
def test_what_names_no_device_is_not_taken_for_a_gpu(device: str) -> None:
    with pytest.raises(DeviceError, match=f"device: '{device}' must be auto, cpu, cuda or cuda:N"):
        resolve_device(device)


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_beyond_the_last_is_named_with_their_number() -> None:
    with pytest.raises(
        DeviceError, match=r"'cuda:2', but torch sees only cuda:0, cuda:1; use one of these$"
    ):
        resolve_device("cuda:2")


def test_a_gpu_where_there_is_none_gets_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"'cuda:1', but .* sees no CUDA device; use device: cpu"):
        resolve_device("cuda:1")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("asked", "device", "stored", "expected"),
    [
        ("float16", "cpu", {"dtype": "bfloat16"}, "float16"),
        ("auto", "cpu", {"dtype": "bfloat16"}, "float32"),
        ("auto", "cuda:0", {"dtype": "float16"}, "float16"),
        ("auto", "cuda:0", {"torch_dtype": "float32"}, "float32"),
        ("auto", "cuda:0", {}, "bfloat16"),
    ],
)
def test_auto_follows_the_checkpoint_on_a_gpu_and_is_float32_on_a_cpu(
    asked: str, device: str, stored: dict[str, str], expected: str, tmp_path: Path
) -> None:
    """Bug 15 of peers: KV kept in fp16 for a bf16 model. One dtype serves weights and cache."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Any"], **stored}))
    assert decided(tmp_path, dtype=asked, device=device).dtype == expected


@pytest.mark.usefixtures("two_gpus")
def test_a_stored_dtype_that_is_not_computed_in_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float8_e4m3fn"}')
    with pytest.raises(ConfigError, match="which says 'float8_e4m3fn'; choose float32, float16"):
        _ = decided(tmp_path).dtype


# -- what the workers are told --------------------------------------------------------------------


def test_the_setup_holds_everything_that_was_resolved(folder: Path) -> None:
    """Nothing is left to guess: no `auto`, and each plugin with its distribution and version."""
    setup = started(folder, attention="sdpa").setup
    assert (setup.device, setup.dtype, setup.cuda_graphs) == ("cpu", "float32", False)
    assert (setup.max_model_len, setup.block_size) == (512, 16)
    assert setup.model.name == "Qwen3ForCausalLM"
    for plugin in (setup.model, setup.prefill_attention, setup.decode_attention):
        assert plugin.distribution.startswith("nanovllm-")
        assert plugin.version


def test_nothing_heavy_happens_at_the_start(folder: Path) -> None:
    """A checkpoint of a config alone goes through: weights are read by the worker."""
    assert started(folder).setup.model_config["vocab_size"] == 97


def test_the_chosen_attention_is_logged_with_why_others_lost(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="nanovllm_core.selection.startup"):
        started(folder)
    assert "sdpa" in caplog.text


def test_steps_warm_up_unless_every_plugin_of_a_step_needs_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One plugin that needs it is enough: here `sdpa`, which does not say."""
    decisions = decided(folder)
    assert startup.make_setup(decisions).needs_warm_up
    states_none = SimpleNamespace(needs_warm_up=False)
    monkeypatch.setattr(type(decisions.plugins), "spec", lambda *_: states_none)
    assert not startup.make_setup(decisions).needs_warm_up


def test_blocks_are_cleared_for_backends_that_read_their_tails(folder: Path) -> None:
    """sdpa does; a pair of which neither does saves the time."""
    decisions = decided(folder)
    assert startup.make_setup(decisions).clears_blocks
    attention = decisions.attention
    reads_none = replace(
        attention.prefill,
        spec=replace(
            attention.prefill.spec,
            capabilities=replace(attention.prefill.spec.capabilities, needs_finite_tail=False),
        ),
    )
    decisions.attention = replace(attention, prefill=reads_none, decode=reads_none)
    assert not startup.make_setup(decisions).clears_blocks


def test_the_plugins_of_triton_kernels_need_no_warm_up() -> None:
    """So an engine of them compiles its kernels in parallel."""
    plugins = get_plugin_manager()
    for kind in ("attention", "kernels"):
        pytest.importorskip(f"nanovllm_{kind}_triton", reason="it is not installed")
        assert not plugins.spec(kind, "triton").needs_warm_up
    assert not plugins.spec("model", "Qwen3ForCausalLM").needs_warm_up
    assert not plugins.spec("sampler", "gumbel").needs_warm_up
    assert not plugins.spec("executor", "single").needs_warm_up
    pytest.importorskip("nanovllm_executor_parallel", reason="it is not installed")
    assert not plugins.spec("executor", "parallel").needs_warm_up
