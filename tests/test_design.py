"""The design, held by tests: what imports what, what is named, what every hook must have."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

import nanovllm_core
from nanovllm_core import errors
from nanovllm_core.interfaces.attention import GraphSupport, Phase
from nanovllm_core.registry import hookspecs
from nanovllm_core.registry.kinds import DECLARATION, KINDS
from nanovllm_core.registry.manager import get_plugin_manager

Install = Callable[..., None]
ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "triton", "transformers")
HOOKS = [name for name in vars(hookspecs) if name.startswith("nanovllm_")]


def imported_by(statement: str) -> set[str]:
    """The heavy packages that a fresh interpreter has after a statement."""
    code = f"{statement}\nimport sys\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_the_probe_sees_a_heavy_import() -> None:
    assert "torch" in imported_by("import torch")


def test_no_spec_module_imports_torch() -> None:
    """Listing and choosing load every installed plugin's light module, and nothing heavy."""
    modules = {p.entry_point.split(":")[0] for p in get_plugin_manager().installed()}
    assert len(modules) > 1
    assert imported_by("\n".join(f"import {module}" for module in sorted(modules))) == set()


@pytest.mark.parametrize(
    "module",
    [
        "nanovllm_core",
        "nanovllm_core.api",
        "nanovllm_core.interfaces.executor",
        "nanovllm_core.registry.hookspecs",
        "nanovllm_core.engine.engine",
        "nanovllm_core.config.sources",
        "nanovllm_core.diagnostics.schema",
        "nanovllm_core.registry.manager",
        "nanovllm_core.diagnostics.status",
        "nanovllm_core.selection.attention",
        "nanovllm_core.cli.main",
        "nanovllm_kit.scheduler",
    ],
)
def test_the_core_says_what_it_is_without_importing_torch(module: str) -> None:
    assert imported_by(f"import {module}") == set()


def test_the_top_level_of_the_core_holds_rooms_and_four_files() -> None:
    """A module of its own there is a room that nobody drew."""
    top = [path for path in (ROOT / "nanovllm_core").iterdir() if path.name != "__pycache__"]
    files = {path.name for path in top if path.is_file()}
    assert files == {
        "__init__.py",
        "__init__.pyi",
        "__main__.py",
        "api.py",
        "errors.py",
        "py.typed",
    }
    rooms = [
        "interfaces",
        "registry",
        "config",
        "selection",
        "engine",
        "worker",
        "layers",
        "kernels",
        "frontend",
    ]
    # `testing` only says where the suites went.
    assert {path.name for path in top if path.is_dir()} == {*rooms, "diagnostics", "cli", "testing"}


MAX_CORE_LINES = 22_660
"""Lines of Python in the core. Raise it on purpose only, and not by shortening a docstring."""


def test_the_core_stays_small() -> None:
    files = (ROOT / "nanovllm_core").rglob("*.py")
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert lines <= MAX_CORE_LINES, f"{lines} lines in nanovllm_core"


def exceptions() -> Iterator[type[errors.NanoVLLMError]]:
    for value in vars(errors).values():
        if inspect.isclass(value) and issubclass(value, errors.NanoVLLMError):
            yield value


def drawn_tree() -> dict[str, str]:
    """Child -> parent, as drawn at the top of errors.py."""
    parents: dict[str, str] = {}
    stack: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([│├└─\s]*)([A-Z]\w+(?:Error))\b", line)
        if match:
            depth = len(match[1]) // 4
            stack[depth:] = [match[2]]
            if depth:
                parents[match[2]] = stack[depth - 1]
    return parents


def test_the_exceptions_are_the_tree_that_is_drawn() -> None:
    actual = {
        error.__name__: error.__bases__[0].__name__
        for error in exceptions()
        if error is not errors.NanoVLLMError
    }
    assert drawn_tree() == actual


def test_every_exception_says_what_it_means() -> None:
    for error in exceptions():
        assert error.__doc__, error.__name__


def test_every_hook_has_a_one_line_description() -> None:
    for name in HOOKS:
        assert inspect.getdoc(getattr(hookspecs, name)), name


def test_every_hook_is_used_by_the_core_and_named_in_a_test() -> None:
    core = "\n".join(path.read_text() for path in (ROOT / "nanovllm_core").rglob("*.py"))
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    # Each kind's hook is implemented by the parametrised test below.
    kinds = {DECLARATION.hook, *(kind.hook for kind in KINDS.values())}
    for name in HOOKS:
        assert name in kinds or f".hook.{name}" in core, f"nothing calls {name}"
        assert name in kinds or f"def {name}(" in tests, f"no test implements {name}"


def test_every_kind_has_its_hook() -> None:
    assert {kind.hook for kind in KINDS.values()} <= set(HOOKS)
    lifecycle = set(HOOKS) - {DECLARATION.hook, *(kind.hook for kind in KINDS.values())}
    assert lifecycle == {
        "nanovllm_configure",
        "nanovllm_engine_started",
        "nanovllm_engine_closed",
        "nanovllm_cli",
        "nanovllm_doctor",
    }


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_plugin_of_each_kind_is_found_by_its_hook(install: Install, kind: str) -> None:
    """The smallest plugin of every kind loads, and its spec is of the kind's type."""
    wanted = KINDS[kind]
    more = {
        "attention": "capabilities=AttentionCapabilities(devices=frozenset(), dtypes=frozenset()),"
        " kv_layouts=lambda requirements, options: []",
        "sampler": "devices=frozenset({'cpu'})",
        "kernels": "devices=frozenset({'cpu'})",
    }.get(kind, "")
    source = f"""
from nanovllm_core.api import AttentionCapabilities, {wanted.spec.__name__}, hookimpl

@hookimpl
def {wanted.hook}():
    return [{wanted.spec.__name__}(
        name="small", impl="small:Small", contract={wanted.contract}, {more}
    )]
"""
    module = f"small_{kind}"
    install("small", {wanted.group: {"small": module}}, {module: source})
    spec = get_plugin_manager().spec(kind, "small")
    assert type(spec) is wanted.spec


LIFECYCLE = """
from nanovllm_core.api import hookimpl
EVENTS = []

@hookimpl
def nanovllm_configure(config, plugins):
    EVENTS.append(("configure", config.model, "fcfs" in plugins.names("scheduler")))

@hookimpl
def nanovllm_engine_started(info):
    EVENTS.append(("started", info.attention))

@hookimpl
def nanovllm_engine_closed():
    EVENTS.append(("closed",))
"""


def test_an_extension_sees_the_life_of_an_engine(install: Install) -> None:
    pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the demo plugin")
    pytest.importorskip("nanovllm_model_qwen3", reason="needs the qwen3 plugin")
    from nanovllm_core.frontend.llm import LLM

    install(
        "diary", {"nanovllm.extensions": {"diary": "diary_plugin"}}, {"diary_plugin": LIFECYCLE}
    )
    small = {"max_num_seqs": 2, "max_model_len": 64, "num_kvcache_blocks": 8}
    with LLM("demo", device="cpu", attention="sdpa", plugins={"enable": ["diary"]}, **small) as llm:
        attention = llm.info.attention
    events = sys.modules["diary_plugin"].EVENTS
    assert events == [
        ("configure", "demo", True),
        ("started", attention),
        ("closed",),
    ]


def test_a_misspelt_hook_is_an_error(install: Install) -> None:
    source = LIFECYCLE.replace("nanovllm_engine_closed", "nanovllm_engine_close")
    install("diary", {"nanovllm.extensions": {"diary": "diary_typo"}}, {"diary_typo": source})
    with pytest.raises(errors.PluginLoadError, match=r"diary 1\.2\.3 .*nanovllm_engine_close"):
        get_plugin_manager().enable(["diary"])


def test_a_broken_plugin_that_nobody_selected_does_no_harm(install: Install) -> None:
    """It is installed as any plugin is; the engine runs, and only naming it is fatal."""
    pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the demo plugin")
    from nanovllm_core.frontend.llm import LLM
    from nanovllm_core.interfaces.sampling_params import SamplingParams

    groups = {kind.group: {"broken": "broken_everywhere"} for kind in KINDS.values()}
    install("nanovllm-broken", groups, {"broken_everywhere": "raise RuntimeError('boom')"})
    small = {"max_num_seqs": 2, "max_model_len": 64, "num_kvcache_blocks": 8, "device": "cpu"}
    with LLM("demo", **small) as llm:
        [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.token_ids) == 2
    assert "broken_everywhere" not in sys.modules
    for choice in ({"attention": "broken"}, {"scheduler": "broken"}, {"executor": "broken"}):
        with pytest.raises(errors.PluginLoadError, match=r"nanovllm-broken 1\.2\.3.*boom"):
            LLM("demo", **small, **choice)


def test_the_public_names_are_these() -> None:
    assert sorted(nanovllm_core.__all__) == [
        "AsyncLLM",
        "EngineConfig",
        "LLM",
        "NanoVLLMError",
        "RequestOutput",
        "SamplingParams",
        "hookimpl",
        "load_config",
    ]
    for name in nanovllm_core.__all__:
        assert getattr(nanovllm_core, name) is not None
    assert set(nanovllm_core.__all__) <= set(dir(nanovllm_core))


def test_a_name_that_the_core_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="No nanovllm_core attribute LLMs"):
        getattr(nanovllm_core, "LLM" + "s")


def test_the_phases_and_graph_supports_that_plugins_may_state_are_these() -> None:
    """Adding one is a change of the contract, and of its version."""
    assert get_args(Phase) == ("prefill", "decode")
    assert get_args(GraphSupport) == ("none", "decode", "full")


def test_no_message_of_the_core_relies_on_assert() -> None:
    """An assert vanishes under -O; what a user can cause is a typed error."""
    for path in (ROOT / "nanovllm_core").rglob("*.py"):
        if "testing" in path.parts or "templates" in path.parts:  # they hold tests
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not re.match(r"\s*assert\b", line), f"{path}:{number}"


def test_files_stay_of_a_size_that_one_can_read() -> None:
    for path in (ROOT / "nanovllm_core").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 450, path
