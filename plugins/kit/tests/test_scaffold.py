"""`nanovllm plugins new`: what is written, how it is named, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import nanovllm_core
from nanovllm_core.cli.main import make_app
from nanovllm_core.errors import ConfigError
from nanovllm_core.registry.discovery import known_groups
from nanovllm_core.registry.kinds import EXTENSION, KIND, KINDS
from nanovllm_core.registry.manager import get_plugin_manager
from nanovllm_kit import scaffold
from nanovllm_kit.scaffold import (
    MAX_NAME,
    TEMPLATES,
    VARIANTS,
    ScaffoldError,
    check_name,
    new_plugin,
)
from nanovllm_kit.validation import validate_package

Install = Callable[..., None]

PACKAGES = [(kind, None) for kind in TEMPLATES] + [("scheduler", "scheduler"), ("model", "moe")]
PLACEHOLDERS = ("my_plugin", "my-plugin", "MyPlugin", "my_kind", "my-kind", "MY_")


def test_every_kind_has_a_template() -> None:
    assert set(TEMPLATES) == {*KINDS, EXTENSION, KIND}


def test_the_first_variant_of_a_kind_is_its_own_template() -> None:
    """So that no variant and the first one write the same."""
    for kind, variants in VARIANTS.items():
        assert next(iter(variants.templates.values())) is TEMPLATES[kind]


@pytest.mark.parametrize(("kind", "variant"), PACKAGES)
def test_a_package_has_all_its_parts_and_no_place_holder_is_left(
    kind: str, variant: str | None, tmp_path: Path
) -> None:
    """Folder, distribution, package and classes are named by one stem."""
    folder = new_plugin(kind, "blue_moon", tmp_path, variant)
    assert folder == tmp_path / f"{kind}_blue_moon"
    package = f"nanovllm_{kind}_blue_moon"
    for part in (
        "pyproject.toml",
        "README.md",
        ".gitignore",
        ".github/workflows/test.yml",
        f"{package}/__init__.py",
        f"{package}/plugin.py",
        f"{package}/py.typed",
        "tests/test_blue_moon.py",
    ):
        assert (folder / part).is_file(), part
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == f"nanovllm-{kind.replace('_', '-')}-blue-moon"
    assert project["license"] == "MIT"
    assert project["dependencies"] == [f"nanovllm-core>={nanovllm_core.__version__}"]
    [group] = [group for group, its_kind in known_groups().items() if its_kind == kind]
    name = "BlueMoonForCausalLM" if kind == "model" else "blue_moon"
    assert project["entry-points"][group] == {name: f"{package}.plugin"}
    for path in folder.rglob("*"):
        written = str(path) + (path.read_text() if path.is_file() else "")
        assert not any(word in written for word in PLACEHOLDERS), path


@pytest.mark.parametrize("cache", [".ruff_cache/0.12", ".mypy_cache", "tests/__pycache__"])
def test_what_tools_left_in_the_templates_stays_there(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linting them where they lie leaves caches, of bytes that are no text. They may lie in one."""
    templates = tmp_path / "pip_cache/templates"
    ignore = shutil.ignore_patterns("*cache*")
    shutil.copytree(scaffold._FOLDER, templates, ignore=ignore)
    monkeypatch.setattr(scaffold, "_FOLDER", templates)
    monkeypatch.setattr(scaffold, "_SHARED", templates / "shared")
    written = [*new_plugin("sampler", "fair", tmp_path / "clean").rglob("*")]
    left = templates / "sampler" / cache
    left.mkdir(parents=True)
    (left / "12345").write_bytes(b"\xff\xfe\x00")
    (left / ".gitignore").write_text("*")
    folder = new_plugin("sampler", "fair", tmp_path / "linted")
    assert {path.relative_to(folder) for path in folder.rglob("*")} == {
        path.relative_to(tmp_path / "clean/sampler_fair") for path in written
    }
    assert len(written) > 8


@pytest.mark.parametrize(
    ("architecture", "stem", "test"),
    [
        ("Phi3ForCausalLM", "phi3", "TestPhi3"),
        ("SmolLM3ForCausalLM", "smollm3", "TestSmolLM3"),
        ("GPT2LMHeadModel", "gpt2", "TestGPT2"),
        ("MistralModel", "mistralmodel", "TestMistralModel"),
    ],
)
def test_a_model_may_be_named_by_its_architecture(
    architecture: str, stem: str, test: str, tmp_path: Path
) -> None:
    """As config.json has it, letter for letter; its tests compare with transformers' class."""
    folder = new_plugin("model", architecture, tmp_path)
    assert folder == tmp_path / f"model_{stem}"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    package = f"nanovllm_model_{stem}"
    assert project["entry-points"]["nanovllm.models"] == {architecture: f"{package}.plugin"}
    assert f'name="{architecture}"' in (folder / package / "plugin.py").read_text()
    assert f"class {architecture}(" in (folder / package / "model.py").read_text()
    tests = (folder / f"tests/test_{stem}.py").read_text()
    assert f"from transformers import {architecture}\n" in tests
    assert f"class {test}(" in tests
    assert "Llama" not in tests
    assert [check for check in validate_package(folder) if not check.ok] == []


def test_a_model_of_another_name_is_compared_with_a_class_that_there_is(tmp_path: Path) -> None:
    """Until its author says which."""
    tests = new_plugin("model", "blue_moon", tmp_path) / "tests/test_blue_moon.py"
    assert "from transformers import LlamaForCausalLM\n" in tests.read_text()


@pytest.mark.parametrize(
    ("like", "reference"), [("dense", "LlamaForCausalLM"), ("moe", "Qwen3MoeForCausalLM")]
)
def test_an_architecture_that_transformers_lacks_is_compared_with_one_that_it_has(
    like: str, reference: str, tmp_path: Path
) -> None:
    """The test could not be collected otherwise; the command says where to name another."""
    arguments = ["plugins", "new", "model", "MyOwnForCausalLM", "--into", str(tmp_path)]
    result = CliRunner().invoke(make_app(), [*arguments, "--like", like])
    tests = (tmp_path / "model_myown/tests/test_myown.py").read_text()
    assert f"from transformers import {reference}\n" in tests
    assert (
        f"transformers has no MyOwnForCausalLM: the test compares with {reference}. Name another "
        "in tests/test_myown.py.\n"
    ) in result.output


@pytest.mark.parametrize(
    ("architecture", "problem"),
    [
        ("Qwen3ForCausalLM", "has the model 'Qwen3ForCausalLM' already"),
        (f"{'X' * (MAX_NAME + 1)}ForCausalLM", f"at most {MAX_NAME} characters"),
        ("Phi-3ForCausalLM", "cannot name a plugin"),
    ],
)
def test_an_architecture_that_cannot_name_a_package_is_refused(
    architecture: str, problem: str, tmp_path: Path
) -> None:
    """Taken, too long, or not the name of a class."""
    pytest.importorskip("nanovllm_model_qwen3", reason="needs the qwen3 plugin")
    with pytest.raises(ScaffoldError, match=problem):
        new_plugin("model", architecture, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "sample", "x" * MAX_NAME])
def test_packages_of_short_and_long_names_are_linted_and_formatted(
    name: str, tmp_path: Path
) -> None:
    """By the settings that they are written with, not by this repository's."""
    for kind, variant in PACKAGES:
        new_plugin(kind, name, tmp_path / str(variant), variant)
    for variant in VARIANTS["model"].templates:
        new_plugin("model", f"{name.upper()}LMHeadModel", tmp_path / "named" / variant, variant)
    for command in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        result = subprocess.run(
            [sys.executable, "-m", "ruff", *command, tmp_path],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("kind", "variant"), PACKAGES)
def test_a_package_is_valid_before_it_is_installed(
    kind: str, variant: str | None, tmp_path: Path
) -> None:
    checks = validate_package(new_plugin(kind, "blue_moon", tmp_path, variant))
    assert [check for check in checks if not check.ok] == []
    assert any("blue_moon" in check.name or "BlueMoon" in check.name for check in checks)


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("Blue Moon", "blue_moon"),
        ("blue-moon", "blue_moon"),
        ("BlueMoon", "blue_moon"),
        ("2fast", "fast"),
        ("Mine2", "mine2"),
        ("_7_up_", "up"),
        ("blue__moon", "blue_moon"),
        ("x" * (MAX_NAME + 1), "x" * MAX_NAME),
        ("class/../../etc", "class_etc"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused_with_one_that_can(name: str, better: str) -> None:
    with pytest.raises(ScaffoldError, match=rf"cannot name a plugin.*; try {better}$"):
        check_name(name)
    check_name(better)


@pytest.mark.parametrize("name", ["", "___", "é", "auto"])
def test_a_name_without_a_better_one_is_refused(name: str) -> None:
    with pytest.raises(ScaffoldError):
        check_name(name)


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    folder = new_plugin("scheduler", "fair", tmp_path)
    (folder / "README.md").write_text("mine")
    with pytest.raises(ScaffoldError, match="exists already; choose another name"):
        new_plugin("scheduler", "fair", tmp_path)
    assert (folder / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("kind", "name", "problem"),
    [
        ("scheduler", "fcfs", "nanovllm-core has the scheduler 'fcfs' already"),
        ("kind", "sampler", "'sampler' is a kind already"),
        # nanovllm.kernels is the core's own group, by another rule than that of declared kinds.
        ("kind", "kernel", "'kernel' is a kind already"),
    ],
)
def test_a_name_that_is_taken_is_refused(
    kind: str, name: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ScaffoldError, match=f"{problem}; choose another name"):
        new_plugin(kind, name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_entry_point_of_a_package_must_be_free(install: Install, tmp_path: Path) -> None:
    """A kind's package has an observer of the same name."""
    install("taker", {"nanovllm.observers": {"taken": "x"}}, {})
    with pytest.raises(ScaffoldError, match="taker has the observer 'taken' already; choose"):
        new_plugin("kind", "taken", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ScaffoldError, match=r"cannot be written.*Not a directory; choose another"):
        new_plugin("scheduler", "fair", tmp_path / "file")


def test_a_kind_or_variant_that_is_none_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ScaffoldError, match=r"did you mean scheduler.*kinds: attention"):
        new_plugin("schedular", "fair", tmp_path)
    with pytest.raises(ScaffoldError, match=r"'policy'; did you mean scheduler --level policy\?"):
        new_plugin("policy", "fair", tmp_path)
    with pytest.raises(ScaffoldError, match=r"--level 'boss' .* policy or scheduler"):
        new_plugin("scheduler", "fair", tmp_path, "boss")
    with pytest.raises(ScaffoldError, match=r"--like 'llama' .* dense or moe"):
        new_plugin("model", "fair", tmp_path, "llama")
    with pytest.raises(ScaffoldError, match="sampler has one template, and no variant 'moe'"):
        new_plugin("sampler", "fair", tmp_path, "moe")
    assert list(tmp_path.iterdir()) == []


def test_a_kind_that_a_plugin_declares_has_no_template_and_says_whose_it_is(
    install: Install, tmp_path: Path
) -> None:
    """By metadata alone: the declaration need not be importable for that."""
    install("my-kind", {"nanovllm.kinds": {"notifier": "broken_kind"}}, {"broken_kind": "1/0"})
    with pytest.raises(ScaffoldError, match=r"'notifier'\. my-kind declares this kind\.") as caught:
        new_plugin("notifier", "mailbox", tmp_path / "new")
    for word in ("'nanovllm.notifiers'", "nanovllm_notifiers", "the documents of my-kind"):
        assert word in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_our_own_declared_kinds_are_referred_to_their_pages(tmp_path: Path) -> None:
    for kind, page in scaffold._PAGES.items():
        assert (Path(__file__).parents[3] / page).is_file()
        if kind in get_plugin_manager().names(KIND):
            with pytest.raises(
                ScaffoldError, match=f"declares this kind. Copy the plugin of {page}"
            ):
                new_plugin(kind, "mine", tmp_path)


def test_the_command_writes_where_it_is_told_and_says_what_is_next(tmp_path: Path) -> None:
    arguments = ["plugins", "new", "scheduler", "fair", "--into", str(tmp_path)]
    result = CliRunner().invoke(make_app(), [*arguments, "--level", "scheduler"])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "scheduler_fair"
    assert f"{folder}/nanovllm_scheduler_fair/scheduler.py" in result.output
    assert f'pip install -e "{folder}[dev]" && pytest {folder}' in result.output


@pytest.mark.parametrize(
    ("kind", "option", "problem"),
    [
        ("sampler", "--level policy", "--level policy: only for a scheduler, not for sampler"),
        ("scheduler", "--like moe", "--like moe: only for a model, not for scheduler"),
        ("model", "--level policy", "--level policy: only for a scheduler, not for model"),
    ],
)
def test_an_option_of_another_kind_is_refused(
    kind: str, option: str, problem: str, tmp_path: Path
) -> None:
    """It would go unnoticed."""
    arguments = ["plugins", "new", kind, "fair", "--into", str(tmp_path)]
    result = CliRunner().invoke(make_app(), [*arguments, *option.split()])
    assert isinstance(result.exception, ConfigError)
    assert problem in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_a_model_may_begin_with_a_mixture_of_experts(tmp_path: Path) -> None:
    """Named by an architecture, it is compared with that; else with a mixture of transformers."""
    arguments = ["plugins", "new", "model", "--like", "moe", "--into", str(tmp_path)]
    for name, reference in (("OlmoeForCausalLM", "OlmoeForCausalLM"), ("fair", "Qwen3Moe")):
        result = CliRunner().invoke(make_app(), [*arguments, name])
        assert result.exit_code == 0, result.output
        shown = f"nanovllm plugins show {name.removesuffix('ForCausalLM').title()}ForCausalLM"
        assert shown in result.output
        stem = name.removesuffix("ForCausalLM").lower()
        folder = tmp_path / f"model_{stem}"
        assert "SparseMLP(" in (folder / f"nanovllm_model_{stem}/model.py").read_text()
        tests = (folder / f"tests/test_{stem}.py").read_text()
        assert f"from transformers import {reference}" in tests
        assert tests.count("Qwen3Moe") == (0 if name == reference else 2)
