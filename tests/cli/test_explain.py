"""`nanovllm explain`: what was chosen at each seam, why, and why each alternative was not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from nanovllm_core.cli.main import make_app
from nanovllm_core.config.sources import load_with_sources
from nanovllm_core.diagnostics import doctor
from nanovllm_core.diagnostics.explain import Seam, explain as explain_config
from nanovllm_core.errors import ConfigError
from nanovllm_core.interfaces.doctor import DoctorCheck
from nanovllm_core.registry.manager import get_plugin_manager
from nanovllm_core.selection.decisions import SEQUENCE

Install = Callable[..., None]

for plugin in ("model_qwen3", "attention_sdpa", "checkpoint_demo"):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")

SLOW = """
from nanovllm_core.api import AttentionCapabilities, AttentionSpec, KVLayout, hookimpl

@hookimpl
def nanovllm_attention():
    return [AttentionSpec(
        name="slow", impl="slow_code:Slow", contract=2,
        capabilities=AttentionCapabilities(
            devices=frozenset({"cpu", "cuda"}), dtypes=frozenset({"float32", "bfloat16"}),
            gqa=True, cuda_graphs="decode",
        ),
        kv_layouts=lambda requirements, options: [KVLayout("NPKD", 16)],
        rank=lambda requirements: -7,
    )]
"""


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers below are those of a machine without one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def slow(install: Install) -> None:
    """A backend that can serve anywhere, and that `auto` takes last."""
    modules = {"slow_spec": SLOW, "slow_code": "class Slow: pass"}
    install("slow-attention", {"nanovllm.attention": {"slow": "slow_spec"}}, modules)


def seams(model: str = "demo", file: Path | None = None, **overrides: Any) -> dict[str, Seam]:
    found = explain_config(load_with_sources(model, file=file, overrides=overrides, env={}))
    return {seam.name: seam for seam in found}


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(make_app(), ["explain", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def test_every_seam_is_explained_and_nothing_is_a_problem_for_the_demo() -> None:
    found = seams()
    assert list(found) == list(SEQUENCE)
    for seam in found.values():
        assert seam.chosen, seam
        assert seam.why, seam
        assert not seam.problem, seam


def test_a_cache_in_which_no_sequence_fits_is_a_problem() -> None:
    """An engine would stop with it, so `explain` does not call it right."""
    found = seams(**{"cache.num_blocks": 1})
    assert "limits.max_model_len=2048 needs 128" in found["KV blocks"].problem
    assert not seams(**{"cache.num_blocks": 128})["KV blocks"].problem


def test_a_length_that_fits_is_known_where_the_number_of_pages_is() -> None:
    """Otherwise it is said to be decided by the memory that a start finds; never a problem."""
    open_length = seams(max_model_len="fit")["longest sequence"]
    assert open_length.chosen == "at most 2048 tokens"
    assert "limits.max_model_len, from the command line: fit; the memory" in open_length.why
    given = seams(max_model_len="fit", **{"cache.num_blocks": 3, "cache.block_size": 32})
    assert given["longest sequence"].chosen == "96 tokens"
    assert not given["KV blocks"].problem


def test_no_weights_are_loaded(tmp_path: Path) -> None:
    """A checkpoint of a config.json alone is explained."""
    import nanovllm_checkpoint_demo

    source = Path(nanovllm_checkpoint_demo.__file__).parent / "checkpoint" / "config.json"
    (tmp_path / "config.json").write_text(source.read_text())
    found = seams(str(tmp_path))
    assert found["model"].chosen.startswith("Qwen3ForCausalLM 0.1.0, nanovllm-model-qwen3")
    assert found["checkpoint"].chosen == f"local: {tmp_path}"


def test_auto_says_its_rank_and_why_each_other_backend_lost(slow: None) -> None:
    for phase in ("prefill", "decode"):
        seam = seams()[f"attention, {phase}"]
        assert seam.chosen.startswith("sdpa 0.1.0")
        assert seam.why == "auto: rank 10"
        assert seam.others["slow"] == "it can serve, but its rank -7 is not above sdpa's 10"
        if "flash" in seam.others:
            assert "does not run on cpu, only on cuda" in seam.others["flash"]


def test_a_named_backend_says_who_named_it(slow: None, tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("attention: {prefill: slow, decode: sdpa}\n")
    found = seams(file=file)
    assert found["attention, prefill"].chosen == "slow 1.2.3"
    assert found["attention, prefill"].why == f"attention.prefill.backend, from {file}"
    assert found["attention, prefill"].others["sdpa"] == "it can serve, and is not named"
    assert found["KV blocks"].chosen == "16 tokens, layout NPKD"
    assert "slow and sdpa can read: multiples of 16" in found["KV blocks"].why


PICKY = """
from pydantic import BaseModel, ConfigDict

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    library: str
""" + SLOW.replace('impl="slow_code:Slow"', 'impl="slow_code:Slow", options=Options').replace(
    "slow", "picky"
).replace("rank=lambda", "provider=lambda options: options.library, rank=lambda")


def test_a_named_backend_is_asked_with_the_options_that_it_was_given(install: Install) -> None:
    """What it would be with its defaults, or whether it has any, does not matter."""
    modules = {"picky_spec": PICKY, "picky_code": "class Slow: pass"}
    install("picky", {"nanovllm.attention": {"picky": "picky_spec"}}, modules)
    found = seams(attention={"backend": "picky", "options": {"library": "fa9"}})
    for phase in ("prefill", "decode"):
        seam = found[f"attention, {phase}"]
        assert seam.chosen == "picky 1.2.3 (fa9)"
        assert "picky" not in seam.others
        assert seam.others["sdpa"] == "it can serve, and is not named"
    missing = seams(attention={"backend": "picky"})["attention, prefill"]
    assert "attention.options.library: missing" in missing.problem


def test_a_chosen_plugin_whose_code_cannot_be_imported_is_a_problem(install: Install) -> None:
    """Its light module says all is well; an engine would stop at the code behind it."""
    modules = {"slow_spec": SLOW, "slow_code": "1/0"}
    install("slow-attention", {"nanovllm.attention": {"slow": "slow_spec"}}, modules)
    found = seams(attention="slow")
    for phase in ("prefill", "decode"):
        problem = found[f"attention, {phase}"].problem
        assert "ZeroDivisionError" in problem or problem == "depends on the problem above"
    assert not any(seam.problem for seam in seams(attention="sdpa").values())


def test_a_broken_model_plugin_is_not_said_to_be_of_another_architecture(install: Install) -> None:
    install("broken", {"nanovllm.models": {"Broken": "broken_model"}}, {"broken_model": "1/0"})
    others = seams()["model"].others
    assert "ZeroDivisionError" in others["Broken"]


def test_plugins_that_were_not_named_and_those_that_could_not_be_are_told(
    install: Install,
) -> None:
    install("broken", {"nanovllm.schedulers": {"broken": "broken_explain"}}, {
        "broken_explain": "1/0"
    })  # fmt: skip
    found = seams(plugins={"disable": ["executor:single"]}, executor="other")
    assert "ZeroDivisionError" in found["scheduler"].others["broken"]
    assert "no executor 'other' is installed" in found["executor"].problem
    found = seams()
    assert found["scheduler"].why == "the default of scheduler.name"
    assert found["kernels"].why == "auto: rank 10, the highest of those that fit"
    if find_spec("nanovllm_kernels_triton"):
        assert found["kernels"].others["triton"] == "does not run on cpu, only on cuda"


def test_values_say_where_they_come_from() -> None:
    found = seams(dtype="bfloat16", limits={"max_model_len": 100, "max_num_seqs": 9})
    assert (found["dtype"].chosen, found["dtype"].why) == (
        "bfloat16", "dtype, from the command line",
    )  # fmt: skip
    assert found["longest sequence"].chosen == "100 tokens"
    assert found["sequences at once"].why == "limits.max_num_seqs, from the command line"
    assert found["tokens per step"].why == "the default of limits.max_num_batched_tokens"
    assert seams()["longest sequence"].why == "the model's own limit (max_position_embeddings)"
    assert seams()["dtype"].why == "auto: float32 on a CPU"


def test_on_a_gpu_graphs_and_dtype_follow_it(monkeypatch: pytest.MonkeyPatch, slow: None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    found = seams(attention="slow")
    assert found["device"].chosen == "cuda:0"
    assert found["device"].others == {"cpu": "a GPU is there"}
    assert found["dtype"].why == "auto: as the checkpoint says (bfloat16)"
    assert found["CUDA graphs"].chosen == "captured for 1, 2, 4, 8, ..., 256 rows"
    if find_spec("nanovllm_attention_triton"):  # whose prefill can be captured
        assert seams(attention="triton")["CUDA graphs"].chosen == (
            "captured for 1, 2, 4, 8, ..., 256 rows, and with up to 4096 prompt tokens"
        )
    eager = seams(cuda_graphs={"enforce_eager": True})["CUDA graphs"]
    assert (eager.chosen, eager.why) == (
        "none", "cuda_graphs.enforce_eager, from the command line",
    )  # fmt: skip


def test_a_problem_is_told_once_and_what_does_not_hang_on_it_is_still_explained() -> None:
    found = seams("nosuchmodel")
    assert "'nosuchmodel' is no folder and no checkpoint plugin" in found["checkpoint"].problem
    assert found["model"].problem == "depends on the problem above"
    assert found["scheduler"].chosen.startswith("fcfs")
    assert found["kernels"].chosen.startswith("torch")


def test_a_folder_demo_breaks_nothing_until_it_holds_a_checkpoint_and_every_command_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`explain` and `config check` say what a start would, and the doctor warns of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    file = tmp_path / "engine.yaml"
    file.write_text("model: demo")
    both = r"model: 'demo' is the checkpoint in .*; write './demo' .* or 'demo:' for the source"

    def claims() -> list[DoctorCheck]:
        return [*doctor.check_conflicts(get_plugin_manager())]

    assert seams()["checkpoint"].chosen.startswith("demo: ")
    assert not claims()
    CliRunner().invoke(make_app(), ["config", "check", str(file)], catch_exceptions=False)
    (tmp_path / "demo/config.json").write_text("{}")
    assert re.search(both, seams()["checkpoint"].problem)
    with pytest.raises(ConfigError, match=both):
        CliRunner().invoke(make_app(), ["config", "check", str(file)], catch_exceptions=False)
    [claim] = claims()
    assert (claim.name, claim.ok, claim.fatal) == ("checkpoint demo", False, False)
    assert "'demo:' for the source" in claim.remedy
    assert not seams("demo:")["checkpoint"].problem


def test_a_device_that_is_not_there_is_the_devices_problem() -> None:
    found = seams(device="cuda")
    assert found["checkpoint"].chosen
    assert "sees no CUDA device" in found["device"].problem
    assert found["scheduler"].chosen.startswith("fcfs")


def test_the_command_prints_seams_and_fails_where_an_engine_would_not_start(
    tmp_path: Path,
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("model: demo\nscheduler: fcfs\n")
    status, shown = run(str(file), "--set", "limits.max_num_seqs=3")
    assert status == 0
    lines = shown.splitlines()
    at = lines.index("scheduler: fcfs 0.1.0, nanovllm-core")
    assert lines[at + 1] == f"    because  scheduler.name, from {file}"
    assert "sequences at once: 3" in lines
    status, shown = run("--model", "demo", "--scheduler", "nosuch")
    assert status == 1
    assert "scheduler: no scheduler 'nosuch' is installed" in shown
    result = CliRunner().invoke(make_app(), ["explain", "--model", "demo", "--scheduler", "nosuch"])
    assert result.stderr == "An engine would not start: see scheduler.\n"


def test_the_json_holds_every_seam() -> None:
    status, shown = run("--model", "demo", "--json")
    assert status == 0
    written = json.loads(shown)
    assert [seam["name"] for seam in written] == list(SEQUENCE)
    assert {"name", "chosen", "why", "others", "problem"} == set(written[0])


def test_extensions_observers_and_processors_are_listed(install: Install) -> None:
    install("diary", {"nanovllm.extensions": {"diary": "diary_explain"}}, {
        "diary_explain": "from nanovllm_core.api import hookimpl"
    })  # fmt: skip
    assert seams()["extensions"].others["diary"] == "installed, and not named"
    assert seams(plugins={"enable": ["diary"]})["extensions"].chosen == "diary"
    missing = seams(observers=["nosuch"])["observers"]
    assert "no observer 'nosuch' is installed" in missing.problem
