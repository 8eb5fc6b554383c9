"""A plugin declares a whole new kind, and its plugins are found, checked and made as any others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nanovllm_core.diagnostics.status import plugin_statuses, typical_requirements
from nanovllm_core.errors import (
    ConfigError,
    PluginConflictError,
    PluginLoadError,
    PluginNotFoundError,
)
from nanovllm_core.registry.manager import get_plugin_manager

Install = Callable[..., None]
KINDS_GROUP, SINKS = "nanovllm.kinds", "nanovllm.sinks"

HOOKSPECS = """
from nanovllm_core.api import hookspec

@hookspec
def nanovllm_sinks():
    "Places for numbers."

@hookspec
def nanovllm_sinks_flushed(count):
    "Numbers were written."
"""

SPEC = """
from dataclasses import dataclass
from nanovllm_core.api import PluginSpec

@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSpec(PluginSpec):
    unit: str = "s"
"""

DECLARATION = """
from nanovllm_core.api import KindSpec, hookimpl
from sink_spec import SinkSpec

@hookimpl
def nanovllm_kinds():
    return [KindSpec(
        name="sink", contract=2, current_contract=3, oldest_contract=2, changed="sum twice",
        spec=SinkSpec, hookspecs="sink_hookspecs",
        conformance="sink_tests:SinkConformance", summary="Places for numbers.",
    )]
"""

PLUGIN = """
from pydantic import BaseModel, ConfigDict
from nanovllm_core.api import hookimpl
from sink_spec import SinkSpec

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    path: str = "numbers"

class Sink:
    def __init__(self, options, unit):
        self.options, self.unit = options, unit

FLUSHED = []

@hookimpl
def nanovllm_sinks():
    return [SinkSpec(name="lines", impl="line_sink:Sink", contract=3, unit="ms", options=Options)]

@hookimpl
def nanovllm_sinks_flushed(count):
    FLUSHED.append(count)
"""


WRITER = """
from pydantic import BaseModel, ConfigDict
from nanovllm_core.api import NamedPlugin, ObserverSpec, hookimpl

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sink: NamedPlugin = NamedPlugin(name="lines")

@hookimpl
def nanovllm_observers():
    return [ObserverSpec(name="writer", impl="writer:Writer", contract=1, options=Options)]
"""


def declare(install: Install, declaration: str = DECLARATION, hookspecs: str = HOOKSPECS) -> None:
    modules = {"sink_kind": declaration, "sink_hookspecs": hookspecs, "sink_spec": SPEC}
    install("nanovllm-sinks", {KINDS_GROUP: {"sink": "sink_kind"}}, modules)


def add_plugin(install: Install, source: str = PLUGIN) -> None:
    install("nanovllm-line-sink", {SINKS: {"lines": "line_sink"}}, {"line_sink": source}, "0.2")


def test_a_plugin_of_a_declared_kind_is_resolved_and_made_as_any_other(install: Install) -> None:
    declare(install)
    add_plugin(install)
    manager = get_plugin_manager()
    assert manager.names("sink") == ["lines"]
    assert getattr(manager.spec("sink", "lines"), "unit", None) == "ms"
    resolved = manager.resolve("sink", "lines", {"path": "here"})
    assert (resolved.kind, resolved.distribution, resolved.version) == (
        "sink", "nanovllm-line-sink", "0.2",
    )  # fmt: skip
    made = manager.make(resolved, "ms")
    assert (made.options.path, made.unit) == ("here", "ms")
    with pytest.raises(ConfigError, match=r"sinks\.0\.pth: unknown option .* did you mean path"):
        manager.resolve("sink", "lines", {"pth": "x"}, path="sinks.0")


def test_a_plugin_that_options_name_is_checked_with_them(install: Install) -> None:
    """`config check` and `explain` then say what a start would."""
    declare(install)
    add_plugin(install)
    install("writer", {"nanovllm.observers": {"writer": "writer"}}, {"writer": WRITER})
    manager = get_plugin_manager()
    named = {"name": "lines", "options": {"path": "here"}}
    for right in ({}, {"sink": "lines"}, {"sink": named}):
        manager.resolve("observer", "writer", right)
    with pytest.raises(PluginNotFoundError, match="no sink 'lins' is installed; did you mean line"):
        manager.resolve("observer", "writer", {"sink": "lins"})
    wrong = {"sink": {**named, "options": {"pth": "here"}}}
    with pytest.raises(ConfigError, match=r"observers\[0\]\.options\.sink\.options\.pth: unknown"):
        manager.resolve("observer", "writer", wrong, "observers[0].options")


def test_listing_a_declared_kind_imports_nothing(install: Install) -> None:
    declare(install)
    add_plugin(install)
    manager = get_plugin_manager()
    listed = {(p.kind, p.name, p.distribution) for p in manager.installed()}
    assert {
        ("kind", "sink", "nanovllm-sinks"),
        ("sink", "lines", "nanovllm-line-sink"),
    } <= listed
    assert {"attention", "extension", "kind", "sink"} <= set(manager.kinds())
    assert not {"sink_kind", "sink_spec", "line_sink"} & set(sys.modules)


def test_the_hooks_that_a_kind_brings_are_reached_through_the_manager(install: Install) -> None:
    declare(install)
    add_plugin(install)
    manager = get_plugin_manager()
    manager.spec("sink", "lines")
    manager.hook.nanovllm_sinks_flushed(count=3)
    assert sys.modules["line_sink"].FLUSHED == [3]


def test_one_module_may_declare_a_kind_and_hold_its_plugins_and_others(install: Install) -> None:
    """Whichever of them is asked for first."""
    declare_more = """
from nanovllm_core.api import ObserverSpec

@hookimpl
def nanovllm_observers():
    return [ObserverSpec(name="feeder", impl="everything:Sink", contract=1)]
"""
    source = PLUGIN.replace("line_sink", "everything") + DECLARATION + declare_more
    groups = {
        KINDS_GROUP: {"sink": "everything"},
        SINKS: {"lines": "everything"},
        "nanovllm.observers": {"feeder": "everything"},
    }
    install(
        "nanovllm-everything",
        groups,
        {"everything": source, "sink_hookspecs": HOOKSPECS, "sink_spec": SPEC},
    )
    for first in (("sink", "lines"), ("observer", "feeder")):
        manager = get_plugin_manager()
        assert manager.spec(*first).name == first[1]
        assert manager.kind("sink").contract == 3
        assert manager.spec("sink", "lines").name == "lines"
        assert manager.spec("observer", "feeder").name == "feeder"


def test_two_kinds_may_implement_each_others_hooks(install: Install) -> None:
    other = """
from nanovllm_core.api import KindSpec, hookimpl
from sink_spec import SinkSpec

@hookimpl
def nanovllm_kinds():
    return [KindSpec(name="tap", contract=2, spec=SinkSpec, hookspecs="tap_hookspecs",
                     conformance="a:B")]

@hookimpl
def nanovllm_sinks():
    return [SinkSpec(name="tapped", impl="tap_kind:Sink", contract=3)]
"""
    taps = """
@hookimpl
def nanovllm_taps():
    return []
"""
    declare(install, DECLARATION + taps)
    install(
        "nanovllm-taps",
        {KINDS_GROUP: {"tap": "tap_kind"}, SINKS: {"tapped": "tap_kind"}},
        {"tap_kind": other, "tap_hookspecs": HOOKSPECS.replace("sinks", "taps")},
    )
    assert get_plugin_manager().spec("sink", "tapped").name == "tapped"


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        (4, "too new: it was written for contract 4 of sink, and nanovllm-sinks takes 2 to 3; "
            "upgrade nanovllm-sinks"),
        (3, None),
        (2, None),
        (1, "too old: it was written for contract 1 of sink, and nanovllm-sinks takes 2 to 3; "
            "upgrade the plugin, .*; if it is yours: sum twice"),
    ],
)  # fmt: skip
def test_contracts_from_the_oldest_that_is_stated_to_the_current_are_taken(
    install: Install, stated: int, said: str | None
) -> None:
    declare(install)
    add_plugin(install, PLUGIN.replace("contract=3", f"contract={stated}"))
    manager = get_plugin_manager()
    if said is None:
        assert manager.spec("sink", "lines").contract == stated
    else:
        with pytest.raises(PluginLoadError, match=said) as caught:
            manager.spec("sink", "lines")
        assert "nanovllm-line-sink 0.2" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("contract=2, cur", "contract=3, cur"), "too new: it was written for contract 3 of kind"),
        (("contract=2, cur", "contract=1, cur"), "contract 1 of kind.* interface= in its KindSpec"),
        (
            ("oldest_contract=2", "oldest_contract=4"),
            "oldest_contract 4 and current_contract 3 must be integers with 1 <= oldest",
        ),
        (("spec=SinkSpec", "interface='x', spec=SinkSpec"), "interface 'x' is not of the form"),
        (('name="sink"', 'name="sinks"'), "must return one spec named 'sink'"),
        (("spec=SinkSpec", "spec=dict"), "must be a class derived from PluginSpec"),
        (("current_contract=3", "current_contract=0"), "and current_contract 0 must be integers"),
        (("current_contract=3", "current_contract='3'"), "and current_contract '3' must be in"),
        (("sink_tests:Sink", "sink_tests.Sink"), "not of the form 'package.module:Object'"),
        (('"sink_hookspecs"', '"no_hookspecs"'), "hookspecs 'no_hookspecs' fail: ModuleNotFound"),
    ],
)
def test_a_declaration_that_cannot_be_used_is_refused_by_name(
    install: Install, change: tuple[str, str], said: str
) -> None:
    assert change[0] in DECLARATION
    declare(install, DECLARATION.replace(*change))
    add_plugin(install)
    manager = get_plugin_manager()
    with pytest.raises(PluginLoadError, match=said) as caught:
        manager.spec("sink", "lines")
    assert "nanovllm-sinks 1.2.3" in str(caught.value)
    assert manager.spec("scheduler", "fcfs").name == "fcfs", "the others go on"


@pytest.mark.parametrize(
    ("hookspecs", "said"),
    [
        (HOOKSPECS.replace("def nanovllm_sinks()", "def nanovllm_sink()"), "must declare the hook"),
        (HOOKSPECS.replace("@hookspec", ""), "declare the hook nanovllm_sinks, marked @hookspec"),
        (HOOKSPECS + "\ndef nanovllm_cli(): pass\n", "declares nanovllm_cli, a hook of nanovllm"),
        (HOOKSPECS.replace("flushed(count)", "flushed()"), "it does not fit the hooks"),
    ],
)
def test_hookspecs_that_cannot_be_used_are_refused(
    install: Install, hookspecs: str, said: str
) -> None:
    declare(install, hookspecs=hookspecs)
    add_plugin(install)
    with pytest.raises(PluginLoadError, match=said):
        get_plugin_manager().spec("sink", "lines")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("executor", "'executor' is a kind or a group of nanovllm-core; declare another name"),
        ("kind", "'kind' is a kind or a group of nanovllm-core"),
        ("command", "'command' is a kind or a group"),
        ("suite", "'suite' is a kind or a group"),
        ("kernel", "'kernel' is a kind or a group"),
        ("Sink", "must be of lower-case letters"),
    ],
)
def test_a_name_that_no_kind_can_have_is_refused(install: Install, name: str, said: str) -> None:
    """And where it is a name of the core's, the core's own kind stays what it is."""
    modules = {"sink_kind": DECLARATION.replace('name="sink"', f'name="{name}"')}
    modules |= {"sink_hookspecs": HOOKSPECS, "sink_spec": SPEC}
    install("nanovllm-sinks", {KINDS_GROUP: {name: "sink_kind"}}, modules)
    manager = get_plugin_manager()
    with pytest.raises(PluginLoadError, match=said):
        manager.declaration(name)
    assert manager.spec("executor", "single").name == "single"


def test_a_kind_that_two_distributions_declare_is_a_conflict(install: Install) -> None:
    declare(install)
    add_plugin(install)
    install("other-sinks", {KINDS_GROUP: {"sink": "other_kind"}}, {"other_kind": DECLARATION})
    with pytest.raises(PluginConflictError, match="kind 'sink' is registered by nanovllm-sinks"):
        get_plugin_manager().spec("sink", "lines")
    assert get_plugin_manager(disable=["other-sinks"]).spec("sink", "lines").name == "lines"


def test_without_its_declaration_a_kind_is_not_known(install: Install) -> None:
    add_plugin(install)
    manager = get_plugin_manager()
    assert manager.names("sink") == []
    with pytest.raises(PluginNotFoundError, match="no kind 'sink' is installed"):
        manager.spec("sink", "lines")
    with pytest.raises(PluginNotFoundError, match="kind 'extension' have no spec"):
        manager.kind("extension")


def test_the_listing_tells_a_declared_kind_and_a_broken_declaration(install: Install) -> None:
    declare(install)
    add_plugin(install)
    install("bad-kind", {KINDS_GROUP: {"bad": "bad_kind"}}, {"bad_kind": "1/0"})
    statuses = plugin_statuses(get_plugin_manager(), typical_requirements("cpu", None))
    told = {(s.plugin.kind, s.plugin.name): s for s in statuses}
    assert told["kind", "sink"].note == "Places for numbers."
    assert told["sink", "lines"].state == "ready"
    assert told["kind", "bad"].state == "broken"
    assert "ZeroDivisionError" in told["kind", "bad"].reasons[0]


@pytest.mark.parametrize("meant", ["nanovllm_sinks", "nanovllm_sinks_flushed"])
def test_an_unknown_hook_may_be_meant_for_one_of_a_declared_kind(
    install: Install, meant: str
) -> None:
    """Of the kind's own module too, where the kind is read."""
    declare(install)
    add_plugin(install, PLUGIN.replace(f"def {meant}(", f"def {meant.replace('sinks', 'sinkz')}("))
    with pytest.raises(PluginLoadError, match=rf"unknown hook .*; did you mean {meant}\?"):
        get_plugin_manager().spec("sink", "lines")


def test_a_hook_that_only_may_exist_is_no_error(install: Install) -> None:
    """`@hookimpl(optionalhook=True)`: for a kind that may not be installed."""
    optional = PLUGIN.replace(
        "@hookimpl\ndef nanovllm_sinks_", "@hookimpl(optionalhook=True)\ndef x_"
    )
    optional = optional.replace("def x_flushed", "def nanovllm_pipes")
    declare(install)
    add_plugin(install, optional)
    assert get_plugin_manager().spec("sink", "lines").name == "lines"


def test_the_light_modules_of_a_declared_kind_need_no_torch(
    install: Install, tmp_path: Path
) -> None:
    declare(install)
    add_plugin(install)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from nanovllm_core.registry.manager import get_plugin_manager\n"
        "get_plugin_manager().spec('sink', 'lines')\nprint('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr


def add_feeder(install: Install) -> None:
    """A module with an observer beside its sink."""
    observer = """
from nanovllm_core.api import ObserverSpec

@hookimpl
def nanovllm_observers():
    return [ObserverSpec(name="feeder", impl="line_sink:Sink", contract=1)]
"""
    install(
        "nanovllm-feeder", {"nanovllm.observers": {"feeder": "line_sink"}},
        {"line_sink": PLUGIN + observer},
    )  # fmt: skip


def test_hookspecs_that_do_not_fit_a_plugin_loaded_before_are_refused(install: Install) -> None:
    """The observer is asked for first; its module answers the kind's hooks too."""
    declare(install, hookspecs=HOOKSPECS.replace("flushed(count)", "flushed()"))
    add_feeder(install)
    with pytest.raises(PluginLoadError, match="hookspecs 'sink_hookspecs' fail: PluginValidation"):
        get_plugin_manager().spec("observer", "feeder")


def test_a_plugin_that_also_serves_a_broken_kind_is_refused_each_time(install: Install) -> None:
    """Its other hooks are not called either: it is not half loaded."""
    declare(install, "1/0")
    add_feeder(install)
    manager = get_plugin_manager()
    for _ in range(2):
        with pytest.raises(PluginLoadError, match=r"nanovllm-sinks .* ZeroDivisionError"):
            manager.spec("observer", "feeder")
    assert manager.hook.nanovllm_observers() == []
