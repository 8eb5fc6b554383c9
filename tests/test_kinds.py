"""What `Kind` carries: a kind is added in five files, and its objects are made in one way."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from nanovllm_core.config.choices import choice_models
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.errors import PluginLoadError
from nanovllm_core.registry.discovery import UNKNOWN
from nanovllm_core.registry.kinds import KINDS
from nanovllm_core.registry.manager import get_plugin_manager
from nanovllm_core.registry.objects import load_object, make_plugin

Install = Callable[..., None]
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_every_kind_says_what_its_plugins_make_and_where_they_are_named(kind: Any) -> None:
    interface = load_object(kind.interface)
    assert all(isinstance(one, type) for one in get_args(interface) or (interface,))
    assert 1 <= kind.oldest_contract <= kind.contract
    assert (kind.oldest_contract > 1) == bool(kind.changed)
    assert not kind.choice or kind.choice in EngineConfig.model_fields


def test_every_field_that_names_a_plugin_is_that_of_a_kind() -> None:
    named = {path[0] for path, _ in choice_models(EngineConfig)}
    assert named <= {kind.choice for kind in KINDS.values()}


CHANGED = [kind for kind in KINDS.values() if kind.oldest_contract > 1]


@pytest.mark.parametrize("kind", CHANGED, ids=lambda kind: kind.name)
def test_a_plugin_of_an_older_contract_is_refused_by_name_with_what_to_change(
    kind: Any, install: Install
) -> None:
    """Where calls changed, nothing would tell until the call itself failed."""
    needed = {"attention": "capabilities=None, kv_layouts=None", "kernels": "devices={'cpu'}"}
    source = f"""
from nanovllm_core import api
@api.hookimpl
def {kind.hook}():
    return [api.{kind.spec.__name__}(
        name="old", impl="x:X", contract={kind.oldest_contract - 1}, {needed.get(kind.name, "")}
    )]
"""
    install("older", {kind.group: {"old": f"old_{kind.name}"}}, {f"old_{kind.name}": source})
    with pytest.raises(PluginLoadError) as caught:
        get_plugin_manager().spec(kind.name, "old")
    for part in (f"{kind.name} 'old' of older 1.2.3", "it is too old", kind.changed):
        assert part in str(caught.value)


# -- objects ---------------------------------------------------------------------------------------

SCHEDULER = """
from pydantic import BaseModel, ConfigDict
from nanovllm_core.api import SchedulerSpec, SchedulingPolicy, hookimpl

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = 3

class Policy(SchedulingPolicy):
    def __init__(self, options):
        self.options = options
    def service_key(self, request):
        return (self.options.size,)

@hookimpl
def nanovllm_schedulers():
    return [SchedulerSpec(name="sized", impl="sized:Policy", contract=1, options=Options)]
"""


@pytest.fixture
def sized(install: Install) -> None:
    install("nanovllm-sized", {"nanovllm.schedulers": {"sized": "sized"}}, {"sized": SCHEDULER})


def test_options_are_parsed_once_and_travel_to_workers_as_they_are(
    sized: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker needs neither the configuration nor the metadata of what is installed."""
    resolved = get_plugin_manager().resolve("scheduler", "sized", {"size": 7})
    travelled = pickle.loads(pickle.dumps(resolved))
    assert travelled == resolved
    for place in ("manager.read_options", "manager.find_plugins"):
        monkeypatch.setattr(f"nanovllm_core.registry.{place}", None)
    made = make_plugin(travelled)
    assert made.options is travelled.options
    assert made.service_key(None) == (7,)


def test_options_that_no_other_process_could_read_are_refused(install: Install) -> None:
    local = SCHEDULER.replace("class Options", "def make():\n  class Options").replace(
        "    model_config", "      model_config").replace(
        "    size: int = 3", "      size: int = 3\n  return Options\nOptions = make()")  # fmt: skip
    install("nanovllm-local", {"nanovllm.schedulers": {"sized": "sized_here"}}, {
        "sized_here": local
    })  # fmt: skip
    with pytest.raises(PluginLoadError, match=r"make\.<locals>\.Options must be a class of a mod"):
        get_plugin_manager().spec("scheduler", "sized")


def test_every_error_of_making_names_kind_name_distribution_and_version(sized: None) -> None:
    resolved = get_plugin_manager().resolve("scheduler", "sized")
    who = r"scheduler 'sized' \(nanovllm-sized 1\.2\.3\)"
    cases: list[tuple[dict[str, Any], tuple[object, ...], str]] = [
        ({"impl": "no_such:X"}, (), f"cannot load 'no_such:X' of {who}: ModuleNotFoundError"),
        ({}, (int,), f"{who}: make takes no type any more: leave <class 'int'> out, and state"),
        ({}, (int | str,), f"{who}: make takes no type any more: "),
        ({}, (1,), f"{who}: sized:Policy cannot be made: TypeError: .*positional argument"),
        ({"impl": "sized:Options.model_copy"}, (), f"{who}: .* made Options.*, which is no Sched"),
        ({"interface": "no_such:X"}, (), f"{who}: the interface 'no_such:X' .* is no type: "),
        ({"interface": "os:sep"}, (), f"{who}: the interface 'os:sep' of its kind is no type"),
        ({"version": "9"}, (), r"'sized' \(nanovllm-sized 9\), but installed here: 1\.2\.3"),
    ]
    for change, arguments, said in cases:
        with pytest.raises(PluginLoadError, match=said):
            make_plugin(replace(resolved, **change), *arguments)


def test_what_a_given_entry_point_names_has_no_version_to_compare(sized: None) -> None:
    resolved = get_plugin_manager().resolve("scheduler", "sized")
    unknown = replace(resolved, distribution=UNKNOWN, version=UNKNOWN)
    assert make_plugin(unknown).options.size == 3


# -- a new kind ------------------------------------------------------------------------------------

FIVE_FILES = {
    "interfaces/clock.py": ("", '''
"""Clocks tell the time."""

from dataclasses import dataclass

from nanovllm_core.interfaces.specs import DeviceSpec

@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSpec(DeviceSpec):
    """A clock."""

class Clock:
    def __init__(self, options, zone):
        self.options, self.zone = options, zone
'''),
    "api.py": ("from nanovllm_core.interfaces.doctor import", '''
from nanovllm_core.interfaces.clock import Clock as Clock, ClockSpec as ClockSpec
'''),
    "registry/hookspecs.py": ("@hookspec\ndef nanovllm_kinds", '''
@hookspec
def nanovllm_clocks():
    """Clocks."""
'''),
    "registry/kinds.py": ('    Kind(\n        "observer",', '''
    Kind("clock", clock.ClockSpec, f"{INTERFACES}.clock:Clock", choice="clock"),
'''),
    "config/settings.py": ("class EngineConfig(Section):", '''
class ClockSettings(NamedPlugin):
    name: str = Field(default="wall", description="The clock.")
'''),
}  # fmt: skip
"""What to add to which file of the core, and before what."""

CLOCKS = """
from nanovllm_core.api import Clock, ClockSpec, hookimpl

class Sun(Clock):
    pass

@hookimpl
def nanovllm_clocks():
    here = frozenset({"cpu", "cuda"})
    return [
        ClockSpec(name="wall", impl="clocks:Clock", contract=1, devices=here, summary="Hands."),
        ClockSpec(name="sun", impl="clocks:Sun", contract=1, devices=here),
    ]
"""

PROGRAM = """
import sys
from nanovllm_core.cli.config import check_plugins
from nanovllm_core.config.sources import load_config, load_with_sources
from nanovllm_core.diagnostics import details, doctor, explain, schema, status
from nanovllm_core.errors import ConfigError
from nanovllm_core.registry.manager import get_plugin_manager
from nanovllm_core.selection.decisions import Decisions

manager = get_plugin_manager()
assert manager.names("clock") == ["sun", "wall"]
config = load_config("nosuch", overrides={"clock": "sun"})
[made] = [manager.make(one, "UTC") for one in Decisions(config).named("clock")]
assert (type(made).__name__, made.zone) == ("Sun", "UTC")

found = schema.config_schema(manager)
assert found["$defs"]["ClockSettings"]["anyOf"][0] == {"enum": ["sun", "wall"]}
wrong = {"name": "sun", "options": {"x": 1}}
try:
    check_plugins(manager, load_config("x", overrides={"clock": wrong}))
    sys.exit("a wrong option was taken")
except ConfigError as error:
    assert "clock.options.x: unknown option" in str(error), error

asked = status.typical_requirements("cpu", None)
statuses = status.plugin_statuses(manager, asked)
[wall] = [one for one in statuses if one.plugin.name == "wall"]
assert (wall.state, wall.note) == ("ready", "Hands.")
assert details.plugin_details(manager, wall)["devices"] == ["cpu", "cuda"]
elsewhere = status.plugin_statuses(manager, status.typical_requirements("mps", None), "clock")
assert {one.state for one in elsewhere} == {"unsupported"}
assert "clock" not in {one.name for one in doctor.check_defaults(manager, statuses, asked)}
without = get_plugin_manager(disable=["clock:wall"])
assert "clock" in {one.name for one in doctor.check_defaults(without, [], asked)}

loaded = load_with_sources("x", overrides={"clock": "sun"})
seams = {one.name: one for one in explain.explain(loaded)}
assert seams["clock"].chosen == "sun 1.2.3, clocks", seams["clock"]
assert seams["clock"].why == "clock.name, from the command line"
assert seams["clock"].others == {"wall": "installed, and not named"}
print("known everywhere")
"""


def test_a_built_in_kind_is_added_in_five_files_of_the_core(
    install: Install, tmp_path: Path
) -> None:
    """Its plugins import the public door; every command knows the kind, and none names it."""
    core = tmp_path / "core"
    shutil.copytree(ROOT / "nanovllm_core", core / "nanovllm_core")
    for name, (before, text) in FIVE_FILES.items():
        file = core / "nanovllm_core" / name
        source = file.read_text(encoding="utf-8") if file.exists() else ""
        assert source.count(before) == 1 or not source, name
        file.write_text(source.replace(before, f"{text.lstrip(chr(10))}\n\n{before}", 1) or text)
    kinds = core / "nanovllm_core/registry/kinds.py"
    kinds.write_text(
        kinds.read_text().replace("import constraint, specs", "import clock, constraint, specs", 1)
    )
    settings = core / "nanovllm_core/config/settings.py"
    settings.write_text(
        settings.read_text()
        .replace("    KernelSettings,\n", "    KernelSettings,\n    NamedPlugin,\n", 1)
        .replace("    cache: CacheSettings", "    clock: ClockSettings = ClockSettings()\n\n"
                 "    cache: CacheSettings", 1)
    )  # fmt: skip
    install("clocks", {"nanovllm.clocks": {"wall": "clocks", "sun": "clocks"}}, {"clocks": CLOCKS})
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(core), *sys.path])}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, text=True, check=False,
        capture_output=True,
    )  # fmt: skip
    assert result.stdout == "known everywhere\n", result.stderr
