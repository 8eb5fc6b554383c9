"""The distributions as a user gets them: versions, metadata, wheels in a clean environment."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import nanovllm_core
from nanovllm_core.cli.installed import KNOWN_COMMANDS
from nanovllm_core.registry.discovery import (
    COMMAND_GROUP,
    SUITE_GROUP,
    extra_command,
    install_command,
)
from nanovllm_core.registry.kinds import EXTENSION_GROUP, KIND_GROUP, KINDS, declared_group

from .environments import make_environment

ROOT = Path(__file__).parents[1]
PROJECTS = {
    file.parent: tomllib.loads(file.read_text())["project"]
    for file in (ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml")))
}
PLUGINS = {folder: project for folder, project in PROJECTS.items() if folder != ROOT}
CORE: Mapping[str, Any] = PROJECTS[ROOT]


def test_the_distributions_of_the_project_are_there() -> None:
    assert {folder.name for folder in PLUGINS} == {
        "attention_flash",
        "attention_sdpa",
        "attention_triton",
        "bench",
        "checkpoint_demo",
        "engine_processes",
        "executor_parallel",
        "flash_attn_compat",
        "kernels_triton",
        "kit",
        "model_deepseek",
        "model_qwen3",
        "model_qwen3_moe",
        "scheduler_lpt",
        "scheduler_sjf",
        "server",
    }


def test_every_distribution_has_the_one_version() -> None:
    versions = {project["name"]: project["version"] for project in PROJECTS.values()}
    assert set(versions.values()) == {nanovllm_core.__version__}, versions


def test_every_plugin_needs_the_core_of_its_own_version() -> None:
    for project in PLUGINS.values():
        assert f"nanovllm-core=={nanovllm_core.__version__}" in project["dependencies"]


def test_folder_distribution_and_package_share_one_stem() -> None:
    for folder, project in PLUGINS.items():
        assert project["name"] == f"nanovllm-{folder.name.replace('_', '-')}"
        assert (folder / f"nanovllm_{folder.name}" / "__init__.py").exists()
        assert (folder / f"nanovllm_{folder.name}" / "py.typed").exists()
        assert (folder / "README.md").exists()
        assert list((folder / "tests").glob("test_*.py"))


def test_every_distribution_supports_the_same_pythons_under_one_licence() -> None:
    for project in PROJECTS.values():
        assert project["requires-python"] == ">=3.11,<3.14"
        assert project["license"] == "MIT"


def test_every_distribution_carries_the_licence_itself() -> None:
    """A wheel travels without its repository, so the text is in each."""
    text = (ROOT / "LICENSE").read_text()
    for folder, project in PROJECTS.items():
        assert project["license-files"] == ["LICENSE"]
        assert (folder / "LICENSE").read_text() == text


def test_every_plugin_has_an_extra_of_the_core() -> None:
    extras = CORE["optional-dependencies"]
    in_extras = {requirement for extra in extras.values() for requirement in extra}
    for project in PLUGINS.values():
        assert f"{project['name']}=={project['version']}" in in_extras
    # The kit is for authors: it needs pytest and hypothesis.
    extras_of_all = (
        "sdpa,triton,flash,sjf,lpt,parallel,data-parallel,qwen3,qwen3-moe,deepseek,demo,bench,"
        "server,flash-attn-compat"
    )
    assert extras["all"] == [f"nanovllm-core[{extras_of_all}]"]


def test_the_hints_name_extras_that_install_that_plugin() -> None:
    """What an error tells to install brings the entry point that was missing."""
    groups = {kind.group: name for name, kind in KINDS.items()} | {COMMAND_GROUP: "command"}
    offered = {}
    for project in PLUGINS.values():
        for group in groups.keys() & project.get("entry-points", {}).keys():
            for name in project["entry-points"][group]:
                offered[groups[group], name] = f"{project['name']}=={project['version']}"
    hints = {
        (kind.name, name): (extra, install_command(kind.name, name))
        for kind in KINDS.values()
        for name, extra in kind.extras.items()
    }
    hints |= {
        ("command", name): (extra, extra_command(extra)) for name, extra in KNOWN_COMMANDS.items()
    }
    assert set(offered) == set(hints)
    for plugin, (extra, command) in hints.items():
        assert offered[plugin] in CORE["optional-dependencies"][extra]
        named = [PROJECTS[Path(word)] for word in shlex.split(command) if Path(word).is_absolute()]
        installed = [f"{project['name']}=={project['version']}" for project in named]
        assert installed == CORE["optional-dependencies"][extra]


def test_every_entry_point_group_is_one_that_the_core_reads() -> None:
    known = {kind.group for kind in KINDS.values()}
    known |= {EXTENSION_GROUP, KIND_GROUP, COMMAND_GROUP, SUITE_GROUP}
    for project in PLUGINS.values():  # the kinds that they declare
        known |= {
            declared_group(kind) for kind in project.get("entry-points", {}).get(KIND_GROUP, ())
        }
    for project in PROJECTS.values():
        assert set(project.get("entry-points", {})) <= known


def test_every_dependency_is_pinned_in_the_constraints_and_no_build_of_torch_is_forced() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert (pinned["torch"], pinned["triton"]) == ("2.13.0", "3.7.1")
    assert not any("+" in version for version in pinned.values())
    needed = [*CORE["dependencies"], *CORE["optional-dependencies"]["dev"]]
    names = {requirement.split(">=")[0].split("==")[0] for requirement in needed}
    assert names <= set(pinned)


# ------------------------------------------------------------------------------ wheels


CALM = {"OMP_NUM_THREADS": "1", "PIP_NO_COMPILE": "0"}
"""One thread, and what pip installs is compiled when it is imported: 0 says that `no` holds."""


def run(*command: str | Path, **variables: str) -> str:
    """Run a command of the clean environment; its output, which the test shows if it fails."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NANOVLLM_", "PYTHON", "COV_", "COVERAGE_", "TRITON_"))
    }
    result = subprocess.run(
        list(map(str, command)),
        env=inherited | CALM | variables,
        cwd="/",  # Not the checkout: what is imported must be what was installed.
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def fails(*command: str | Path, **variables: str) -> str:
    """Run a command that must fail with a message, not a traceback; the message."""
    with pytest.raises(AssertionError) as caught:
        run(*command, **variables)
    message = str(caught.value)
    assert "Traceback" not in message
    assert "error:" in message
    return message


ALONE = """
import re
import sys
from pathlib import Path
from importlib import import_module, invalidate_caches
from importlib.metadata import distributions
from nanovllm_core.registry import NO_SPEC, get_plugin_manager
from nanovllm_core.registry.objects import load_object
for folder in sys.argv[1:]:
    sys.path.insert(0, folder)
    invalidate_caches()
    [distribution] = distributions(path=[folder])
    package = distribution.name.replace("-", "_")
    required = [line for line in distribution.requires or () if "extra ==" not in line]
    stems = {re.match(r"[\\w-]+", line)[0].replace("-", "_") for line in required}
    needed = [one for one in sys.argv[1:] if Path(one).name in stems]
    sys.path += needed
    import_module(package)
    for entry_point in distribution.entry_points:
        entry_point.load()
    manager = get_plugin_manager()
    for plugin in manager.installed():
        if plugin.distribution == distribution.name and plugin.kind not in NO_SPEC:
            load_object(manager.spec(plugin.kind, plugin.name).impl)
    ours = {name.partition(".")[0] for name in sys.modules if name.startswith("nanovllm")}
    itself = {"nanovllm_core", package}
    known = itself | {Path(one).name for one in needed}
    print(package if itself <= ours <= known else f"{package} imported {ours}")
    for one in (folder, *needed):
        sys.path.remove(one)
    gone = ours - {"nanovllm_core"}
    for name in [name for name in sys.modules if name.partition(".")[0] in gone]:
        del sys.modules[name]
"""


@pytest.mark.slow
@pytest.mark.long
def test_each_distribution_loads_beside_the_core_alone(
    tmp_path: Path, wheels: dict[str, Path]
) -> None:
    """Plugins, commands and suites, from its wheel: a wheel of pure Python is a folder of modules.

    None imports another plugin than those that it requires, and none lacks a file.
    """
    core, *others = wheels.values()
    python = make_environment(tmp_path / "env")
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", core)
    folders = [tmp_path / wheel.name.partition("-")[0] for wheel in others]
    for wheel, folder in zip(others, folders, strict=True):
        zipfile.ZipFile(wheel).extractall(folder)
    loaded = run(python, "-c", ALONE, *folders)
    assert loaded.split("\n") == [*(folder.name for folder in folders), ""]


ASK = """
import sys
from nanovllm_core import LLM, SamplingParams
with LLM(config_file=sys.argv[1]) as llm:
    prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": "What is 27 + 15?"}])
    text = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4))[0]["text"]
    print(llm.config.scheduler.name, "|", llm.info.attention, "|", text)
"""


@pytest.mark.long
@pytest.mark.slow
def test_wheels_in_a_clean_environment_run_and_yaml_switches_every_part(
    tmp_path: Path, wheels: dict[str, Path]
) -> None:
    """From the core alone to everything, in one environment, as a user would add to it.

    torch and the other libraries are fetched as the wheels require them.
    """
    for wheel in wheels.values():
        assert any(name.endswith("/py.typed") for name in zipfile.ZipFile(wheel).namelist())
        names = zipfile.ZipFile(wheel).namelist()
        assert not any("test_" in name for name in names if "/scaffold/templates/" not in name)
    run(sys.executable, "-m", "venv", tmp_path / "env")
    python, nanovllm = tmp_path / "env/bin/python", tmp_path / "env/bin/nanovllm"

    def install(requirement: str) -> None:
        run(
            *(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"),
            *("--find-links", wheels["nanovllm_core"].parent, requirement),
        )

    install("nanovllm-core")
    assert 'pip install "nanovllm-core[sdpa]"' in run(nanovllm, "plugins", "list")
    refused = fails(nanovllm, "generate", "--model", "demo", "Hello")
    assert 'pip install "nanovllm-core[demo]"' in refused

    assert 'pip install "nanovllm-core[bench]"' in fails(nanovllm, "bench", "throughput")
    assert 'pip install "nanovllm-core[kit]"' in fails(nanovllm, "plugins", "test", "fcfs")

    install("nanovllm-core[qwen3,sdpa,demo]")
    listed = run(nanovllm, "plugins", "list")
    for name in ("nanovllm-attention-sdpa", "nanovllm-model-qwen3", "nanovllm-checkpoint-demo"):
        assert name in listed
    assert "42" in run(nanovllm, "generate", "--model", "demo", "--chat", "What is 27 + 15?")

    install("nanovllm-core[all]")
    assert "nanovllm-kit" not in run(python, "-m", "pip", "list")
    assert "throughput" in run(nanovllm, "bench", "--help")
    for attention, scheduler, ran in (
        ("sdpa", "fcfs", "sdpa"),
        ("triton", "sjf", "triton"),
        ("{prefill: sdpa, decode: triton}", "{name: sjf, options: {}}", "triton"),
    ):
        file = tmp_path / "engine.yaml"
        file.write_text(f"model: demo\nattention: {attention}\nscheduler: {scheduler}\n")
        answer = run(python, "-c", ASK, file, TRITON_INTERPRET="1")
        name, backend, text = answer.strip().splitlines()[-1].split(" | ")
        assert name in scheduler
        assert ran in backend
        assert text == "42"
    (tmp_path / "engine.yaml").write_text("model: demo\nattention: flash\n")
    refused = fails(nanovllm, "generate", "--config", tmp_path / "engine.yaml", "Hello")
    assert "attention 'flash' (nanovllm-attention-flash" in refused
