"""`nanovllm plugins doctor`: what it finds, what it advises, and when it fails."""

from __future__ import annotations

import builtins
import json
import os
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from nanovllm_core import __version__
from nanovllm_core.cli.main import main, make_app
from nanovllm_core.diagnostics import doctor
from nanovllm_core.interfaces.doctor import DoctorCheck
from nanovllm_core.registry import checks
from nanovllm_core.registry.manager import get_plugin_manager

Install = Callable[..., None]

BACKEND = """
from nanovllm_core.api import AttentionCapabilities, AttentionSpec, KVLayout, hookimpl

@hookimpl
def nanovllm_attention():
    return [AttentionSpec(
        name="fake", impl="fake_code:Backend", contract=2, summary="Made up.",
        capabilities=AttentionCapabilities(
            devices=frozenset({"cpu", "cuda"}), dtypes=frozenset({"float32", "bfloat16"}),
            gqa=True, cuda_graphs="decode",
        ),
        kv_layouts=lambda requirements, options: [KVLayout("NPKD", 16)],
    )]
"""

EXTENSION = """
from nanovllm_core.api import DoctorCheck, hookimpl

@hookimpl
def nanovllm_doctor():
    return [
        DoctorCheck("disk", False, "2 GiB free", "make room"),
        DoctorCheck("colour", True, "blue"),
    ]
"""


def examine() -> dict[str, DoctorCheck]:
    return {check.name: check for check in doctor.examine()}


def only(checks: Iterable[DoctorCheck]) -> DoctorCheck:
    [check] = checks
    return check


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(make_app(), ["plugins", "doctor", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


# -- a whole examination --------------------------------------------------------------------------


def test_a_sound_environment_has_a_line_for_everything_and_ends_with_what_to_do() -> None:
    pytest.importorskip("nanovllm_attention_sdpa", reason="needs the sdpa plugin")
    pytest.importorskip("nanovllm_model_qwen3", reason="needs the qwen3 plugin")
    pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the demo plugin")
    status, shown = run()
    assert status == 0
    for word in ("python: 3.", f"torch: {torch.__version__}", "attention sdpa", "scheduler fcfs"):
        assert word in shown
    advice = shown.partition("What to do next:")[2]
    assert "nanovllm generate --model demo" in advice


def test_the_json_holds_the_checks_and_the_steps() -> None:
    status, shown = run("--json")
    written = json.loads(shown)
    assert status == 0
    assert {"name", "ok", "detail", "remedy", "fatal"} == set(written["checks"][0])
    assert written["next"]


def test_without_attention_or_a_model_nothing_can_be_generated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit status 1, and the remedies come first."""
    names = sorted({p.distribution for p in get_plugin_manager().installed()} - {"nanovllm-core"})
    monkeypatch.setenv("NANOVLLM_PLUGINS__DISABLE", yaml.safe_dump(names))
    status, shown = run()
    assert status == 1
    advice = shown.partition("What to do next:")[2].splitlines()
    disabled = "of those disabled, take one out of plugins.disable: "
    assert f"{disabled}DeepseekV2ForCausalLM" in advice[1]
    assert f"{disabled}flash, sdpa, triton" in advice[2]
    assert "nanovllm generate" not in "".join(advice)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("scheduler", "fcfs"), ("executor", "single"), ("sampler", "gumbel"), ("kernels", "torch")],
)
def test_a_default_that_is_disabled_stops_generation(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("NANOVLLM_PLUGINS__DISABLE", f"['{kind}:{name}']")
    check = examine()[kind]
    assert check.fatal
    assert f"take the {kind} of the core out of plugins.disable" in check.remedy
    assert repr(name) in check.detail


def test_a_variable_is_no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start that it stops names it; the remedies here would be wrong."""
    monkeypatch.setenv("NANOVLLM_TENSOR_PARALLEL_SIZE", "2")
    monkeypatch.setenv("NANOVLLM_SCHEDULER", "nope")
    assert not {"executor", "scheduler"} & examine().keys()


def test_a_name_in_plugins_disable_that_fits_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NANOVLLM_PLUGINS__DISABLE", "[fcsf]")
    assert "did you mean fcfs?" in examine()["plugins.disable"].detail


# -- plugins --------------------------------------------------------------------------------------


def test_a_plugin_whose_code_cannot_be_imported_is_broken(install: Install) -> None:
    """Its light module is fine, and `plugins list` calls it ready."""
    group = {"nanovllm.attention": {"fake": "fake_spec"}}
    code = "import nosuchmodule\nclass Backend: pass"
    install("fake-attention", group, {"fake_spec": BACKEND, "fake_code": code})
    check = examine()["attention fake"]
    assert not check.ok
    assert "nosuchmodule" in check.detail
    assert check.remedy == (
        "install 'nosuchmodule', which fake-attention imports, or uninstall fake-attention"
    )
    assert not check.fatal


@pytest.mark.parametrize(
    ("code", "required", "remedy"),
    [
        ("import nosuchmodule", ["numpy", "nosuchmodule >=1.3"],
         'pip install "nosuchmodule >=1.3", or uninstall fake-attention'),
        ("import nosuchmodule", ["nosuch", "no such thing"], "install 'nosuchmodule', which"),
        ("import fake_spec.part", [], "reinstall, repair or uninstall fake-attention; if it is"),
        ("def", [], "reinstall, repair or uninstall fake-attention; if it is yours: nanovllm"),
        ("1/0", [], "reinstall, repair or uninstall fake-attention"),
        ("from nanovllm_core.api import Later", [], "install a version of fake-attention that"),
        ("import nanovllm_core.later", [], "install a version of fake-attention that fits"),
    ],
)  # fmt: skip
def test_the_remedy_for_a_broken_plugin_follows_the_cause(
    install: Install, monkeypatch: pytest.MonkeyPatch, code: str, required: list[str], remedy: str
) -> None:
    """A module that is missing is to be installed."""
    monkeypatch.setattr(checks, "requires", {"fake-attention": required}.get)
    group = {"nanovllm.attention": {"fake": "fake_spec"}}
    install("fake-attention", group, {"fake_spec": BACKEND, "fake_code": code})
    assert examine()["attention fake"].remedy.startswith(remedy)


def test_a_plugin_whose_extra_was_left_out_is_not_wrong(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot run here, and is told how it could; what to do next does not name it."""
    required = {"fake-attention": ['NoSuchModule-SDK>=1.3; extra == "trace"']}
    monkeypatch.setattr(checks, "requires", required.get)
    group = {"nanovllm.attention": {"fake": "fake_spec"}}
    code = "import nosuchmodule.sdk\nclass Backend: pass"
    install("fake-attention", group, {"fake_spec": BACKEND, "fake_code": code})
    check = examine()["attention fake"]
    assert check.detail == (
        'needs nosuchmodule, of the extra trace: pip install "fake-attention[trace]"'
    )
    assert (check.ok, check.fatal, check.remedy) == (False, False, "")


def test_a_backend_that_answers_wrongly_is_to_be_repaired(install: Install) -> None:
    source = BACKEND.replace("kv_layouts=", "rank=lambda requirements: None, kv_layouts=")
    group = {"nanovllm.attention": {"fake": "fake_spec"}}
    install("fake-attention", group, {"fake_spec": source, "fake_code": "class Backend: pass"})
    check = examine()["attention fake"]
    assert "rank gave None, not an integer" in check.detail
    assert check.remedy.startswith("reinstall, repair or uninstall fake-attention")


def test_a_broken_light_module_is_broken_and_harms_nobody_else(install: Install) -> None:
    install("broken", {"nanovllm.models": {"Broken": "broken_doctor"}}, {"broken_doctor": "1/0"})
    check = examine()["model Broken"]
    assert "ZeroDivisionError" in check.detail
    assert not check.fatal


def test_a_plugin_of_another_contract_is_told_with_both_numbers(install: Install) -> None:
    source = BACKEND.replace("contract=2", "contract=7")
    install("fake-attention", {"nanovllm.attention": {"fake": "fake_seven"}}, {
        "fake_seven": source
    })  # fmt: skip
    check = examine()["attention fake"]
    assert "contract 7" in check.detail
    assert f"a version of fake-attention that fits nanovllm-core {__version__}" in check.remedy


def test_an_extension_adds_its_checks_and_one_that_fails_is_a_finding(install: Install) -> None:
    install("diary", {"nanovllm.extensions": {"diary": "diary_doctor"}}, {
        "diary_doctor": EXTENSION
    })  # fmt: skip
    failing = EXTENSION.replace("return [", "raise ValueError('tired')\n    return [")
    install("tired", {"nanovllm.extensions": {"tired": "tired_doctor"}}, {"tired_doctor": failing})
    checks = examine()
    assert (checks["disk"].remedy, checks["colour"].detail) == ("make room", "blue")
    assert "ValueError: tired" in checks["tired_doctor"].detail
    assert "make room" in doctor.next_steps(checks.values())


BROKEN_COMMANDS = """
from nanovllm_core.api import hookimpl

@hookimpl
def nanovllm_cli(app):
    raise ValueError("no command today")
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("1/0", "ZeroDivisionError"),
        (BROKEN_COMMANDS, "no command today"),
        (EXTENSION.replace("nanovllm_doctor", "nanovllm_docter"), "nanovllm_docter"),
        (None, "no extension 'lame' is installed"),
    ],
    ids=["import", "commands", "hook", "missing"],
)
def test_an_enabled_extension_that_fails_stops_every_command_but_the_doctor(
    source: str | None,
    said: str,
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The doctor goes through everything else, and says what to take out."""
    if source is not None:
        install("lame", {"nanovllm.extensions": {"lame": "lame_cli"}}, {"lame_cli": source})
    monkeypatch.setenv("NANOVLLM_PLUGINS__ENABLE", "[lame]")
    monkeypatch.setattr(sys, "argv", ["nanovllm", "plugins", "list"])
    with pytest.raises(SystemExit, match=said):
        main()
    monkeypatch.setattr(sys, "argv", ["nanovllm", "plugins", "doctor", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    found = json.loads(capsys.readouterr().out)
    by_name = {check["name"]: check for check in found["checks"]}
    assert said in by_name["plugins.enable"]["detail"]
    assert by_name["plugins.enable"]["fatal"]
    assert by_name["scheduler fcfs"]["ok"]
    assert any("NANOVLLM_PLUGINS__ENABLE" in step for step in found["next"])


@pytest.mark.parametrize("answer", ["['tired']", "'tired'", "5"])
def test_an_extension_whose_answer_is_no_check_is_a_finding(answer: str, install: Install) -> None:
    odd = EXTENSION.replace("return [", f"return {answer}\n    return [")
    install("odd", {"nanovllm.extensions": {"odd": "odd_doctor"}}, {"odd_doctor": odd})
    found = examine()["odd_doctor"]
    assert not found.ok
    assert "its nanovllm_doctor failed: TypeError" in found.detail


def test_two_distributions_of_one_name_are_a_conflict(install: Install) -> None:
    for distribution in ("one", "two"):
        install(distribution, {"nanovllm.schedulers": {"same": "same_doctor"}}, {
            "same_doctor": "raise RuntimeError"
        })  # fmt: skip
    check = only(doctor.check_conflicts(get_plugin_manager()))
    assert (check.name, check.detail) == ("scheduler same", "registered by one and two")
    assert "plugins: {disable: [two]}" in check.remedy
    found = [check for check in doctor.examine() if check.name == "scheduler same"]
    assert found == [check], "told once, and neither of the two is called broken"


def test_a_default_that_another_distribution_claims_too_is_not_called_disabled(
    install: Install,
) -> None:
    """What helps is said once: to leave the other distribution out."""
    install("aa-mine", {"nanovllm.schedulers": {"fcfs": "mine_doctor"}}, {"mine_doctor": ""})
    found = [check for check in doctor.examine() if check.name in ("scheduler", "scheduler fcfs")]
    assert {check.name for check in found} == {"scheduler", "scheduler fcfs"}
    for check in found:
        assert "disable: [aa-mine]" in check.detail + check.remedy
        assert "take the scheduler" not in check.remedy


# -- what is installed ----------------------------------------------------------------------------


def dist_info(folder: Path, name: str, version: str, **files: str) -> None:
    """The metadata of a distribution; `requires` becomes Requires-Dist."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    if "requires" in files:
        metadata += f"Requires-Dist: {files['requires']}\n"
    (info / "METADATA").write_text(metadata)
    if "entry_points" in files:
        (info / "entry_points.txt").write_text(files["entry_points"])


def found_in(*folders: Path) -> list[Any]:
    return [*distributions(path=[str(folder) for folder in folders])]


def test_entry_points_that_cannot_be_read_are_laid_at_their_distributions_door(
    tmp_path: Path,
) -> None:
    """importlib.metadata alone would raise for all distributions at once."""
    dist_info(tmp_path, "bad", "1.0", entry_points="[nanovllm.attention]\nno equals sign\n")
    dist_info(tmp_path, "good", "1.0", entry_points="[nanovllm.models]\nA = a\n[other]\nb = b\n")
    entries, checks = doctor.read_entry_points(found_in(tmp_path))
    assert [(entry.group, entry.name) for entry in entries] == [("nanovllm.models", "A")]
    assert only(checks).name == "bad"
    assert only(checks).fatal
    assert "--force-reinstall bad" in only(checks).remedy


def test_an_entry_point_in_a_group_that_nobody_reads_is_told_with_the_nearest(
    tmp_path: Path,
) -> None:
    dist_info(tmp_path, "typo", "1.0", entry_points="[nanovllm.scheduler]\nfair = fair\n")
    dist_info(
        tmp_path, "sinks", "1.0",
        entry_points="[nanovllm.kinds]\nsink = sinks\n[nanovllm.sinks]\nfile = sinks\n",
    )  # fmt: skip
    entries, _ = doctor.read_entry_points(found_in(tmp_path))
    check = only(doctor.check_groups(entries))
    assert check.name == "nanovllm.scheduler: fair"
    assert "in typo, correct the group; did you mean nanovllm.schedulers?" in check.remedy


def test_a_distribution_that_needs_another_core_is_told(tmp_path: Path) -> None:
    dist_info(tmp_path, "nanovllm-core", __version__)
    dist_info(tmp_path, "old", "1.0", requires="nanovllm-core==0.0.1")
    dist_info(tmp_path, "fine", "1.0", requires=f"nanovllm-core>={__version__}")
    dist_info(tmp_path, "only-tests", "1.0", requires='nanovllm-core==9; extra == "dev"')
    core, old = doctor.check_installs(found_in(tmp_path))
    assert core.ok
    assert (old.name, old.detail) == (
        "old 1.0", f"needs nanovllm-core==0.0.1, and nanovllm-core is {__version__}",
    )  # fmt: skip
    assert old.remedy == "pip install --upgrade nanovllm-core old"


def test_two_versions_on_the_path_are_told(tmp_path: Path) -> None:
    dist_info(tmp_path / "a", "nanovllm-core", __version__)
    dist_info(tmp_path / "b", "nanovllm-core", "0.0.1")
    _, twice = doctor.check_installs(found_in(tmp_path / "a", tmp_path / "b"))
    assert f"installed more than once: {__version__}, 0.0.1" in twice.detail


# -- the machine ----------------------------------------------------------------------------------


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make importing a package fail."""
    genuine = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(f"no {package} here")
        return genuine(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)


def test_without_torch_nothing_can_be_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch")
    check = only(doctor.check_torch())
    assert check.fatal
    assert "no torch here" in check.detail


@pytest.mark.parametrize("gpu", [True, False])
def test_triton_is_needed_on_a_gpu_only(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "triton")
    check = doctor._check_triton(gpu)
    assert not check.ok
    assert check.fatal is gpu
    assert bool(check.remedy) is gpu


@pytest.mark.parametrize(
    ("driver", "gpu", "cuda", "ok", "words"),
    [
        (None, False, None, True, "computes on the CPU"),
        ("570.1", True, "13.0", True, "NVIDIA 570.1"),
        ("570.1", False, None, False, "torch is built for CPUs"),
        ("470.1", False, "13.0", False, "torch is built for CUDA 13.0"),
    ],
)
def test_a_driver_without_a_gpu_that_torch_sees_is_wrong(
    driver: str | None, gpu: bool, cuda: str | None, ok: bool, words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(doctor, "_driver_version", lambda: driver)
    check = doctor._check_driver(gpu, cuda)
    assert check.ok is ok
    assert words in check.detail
    assert ok or "pytorch.org" in check.remedy


@pytest.mark.parametrize(
    ("script", "version"),
    [("echo 570.86.15", "570.86.15"), ("exit 9", None), ("true", None)],
)
def test_the_driver_is_the_one_that_nvidia_smi_names(
    script: str, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None where it fails or says nothing."""
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert doctor._driver_version() == version


# -- advice ---------------------------------------------------------------------------------------


def test_what_stops_generation_is_advised_first_and_nothing_twice() -> None:
    checks = [
        DoctorCheck("a", False, "", "mend a"),
        DoctorCheck("b", False, "", "mend b", fatal=True),
        DoctorCheck("c", False, "", "mend a"),
        DoctorCheck("d", False, ""),
        DoctorCheck("e", True, "", "never said"),
    ]
    assert doctor.next_steps(checks) == ["mend b", "mend a"]
    assert doctor.next_steps(checks[2:])[-1].startswith("write something: nanovllm generate")
