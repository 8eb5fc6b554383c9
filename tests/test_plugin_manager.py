"""Discovery by metadata, loading of what is chosen, and what is said when that fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint, distribution, entry_points
from pathlib import Path
from typing import Any

import pytest

from nanovllm_core.diagnostics.status import plugin_statuses, typical_requirements
from nanovllm_core.errors import (
    ConfigError,
    PluginConflictError,
    PluginLoadError,
    PluginNotFoundError,
)
from nanovllm_core.interfaces.specs import SchedulerSpec
from nanovllm_core.registry import checks, discovery as plugin_discovery
from nanovllm_core.registry.checks import core_requirement
from nanovllm_core.registry.manager import get_plugin_manager
from nanovllm_core.registry.objects import load_object, make_plugin

Install = Callable[..., None]
ROOT = Path(__file__).parents[1]
SCHEDULERS = "nanovllm.schedulers"

GOOD = """
from collections.abc import Sequence
from pydantic import BaseModel, ConfigDict
from nanovllm_core.api import SchedulerSpec, hookimpl

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    ageing: int = 3
    tail: tuple[int, ...] = ()

SPECS = [SchedulerSpec(name="fair", impl="fair_plugin:Policy", contract=1, options=Options)]

class Policy:
    class Inner: pass

@hookimpl
def nanovllm_schedulers():
    return SPECS

CALLS = []

@hookimpl
def nanovllm_engine_closed():
    CALLS.append("closed")
"""


def install_fair(install: Install, source: str = GOOD) -> None:
    install("nanovllm-fair", {SCHEDULERS: {"fair": "fair_plugin"}}, {"fair_plugin": source})


def test_the_listing_imports_nothing(install: Install) -> None:
    install("nanovllm-broken", {SCHEDULERS: {"broken": "broken_plugin"}}, {})
    install_fair(install)
    listed = [(p.kind, p.name, p.distribution, p.version) for p in get_plugin_manager().installed()]
    assert ("scheduler", "broken", "nanovllm-broken", "1.2.3") in listed
    assert ("scheduler", "fair", "nanovllm-fair", "1.2.3") in listed
    assert "fair_plugin" not in sys.modules


def test_what_is_installed_is_read_once_for_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start waits for it, and so does every check of a conformance suite."""
    asked = 0

    def counted(*arguments: Any, **wanted: Any) -> Any:
        nonlocal asked
        asked += 1
        return entry_points(*arguments, **wanted)

    monkeypatch.setattr("nanovllm_core.registry.manager.metadata.entry_points", counted)
    assert {plugin.kind for plugin in get_plugin_manager().installed()} >= {"scheduler", "executor"}
    assert asked == 1


def test_built_ins_come_by_the_same_path() -> None:
    manager = get_plugin_manager()
    assert manager.spec("scheduler", "fcfs").name == "fcfs"
    assert manager.spec("executor", "single").name == "single"
    assert {"hub", "local"} <= set(manager.names("checkpoint"))


def test_every_built_in_has_its_implementation() -> None:
    manager = get_plugin_manager()
    built_in = [p for p in manager.installed() if p.distribution == "nanovllm-core"]
    assert len(built_in) == 7
    for plugin in built_in:
        assert callable(load_object(manager.resolve(plugin.kind, plugin.name)))


def test_resolving_checks_the_options_and_fills_the_defaults(install: Install) -> None:
    install_fair(install)
    resolved = get_plugin_manager().resolve("scheduler", "fair", {"tail": (1, 2)})
    assert resolved.options.model_dump() == {"ageing": 3, "tail": (1, 2)}
    assert (resolved.distribution, resolved.version) == ("nanovllm-fair", "1.2.3")
    assert load_object(resolved).__name__ == "Policy"


def test_a_wrong_option_names_path_plugin_version_and_the_nearest(install: Install) -> None:
    install_fair(install)
    with pytest.raises(ConfigError) as caught:
        get_plugin_manager().resolve("scheduler", "fair", {"agein": 4}, "scheduler.options")
    assert str(caught.value) == (
        "scheduler.options.agein: unknown option (value 4); did you mean ageing? "
        "(fair 1.2.3, nanovllm-fair)"
    )


def test_a_wrong_value_of_an_option_names_what_is_allowed(install: Install) -> None:
    install_fair(install)
    with pytest.raises(
        ConfigError, match=r"scheduler\.options\.ageing: 'x' must be a whole number"
    ):
        get_plugin_manager().resolve("scheduler", "fair", {"ageing": "x"})


def test_a_limit_that_we_have_no_words_for_is_told_in_those_of_pydantic(install: Install) -> None:
    """A plugin's options may ask for what no field of the configuration does."""
    text = GOOD.replace("ConfigDict\n", "ConfigDict, Field\n", 1)
    install_fair(install, text.replace("ageing: int = 3", "ageing: int = Field(3, multiple_of=3)"))
    with pytest.raises(ConfigError, match=r"scheduler\.options\.ageing: 5 must be a multiple of 3"):
        get_plugin_manager().resolve("scheduler", "fair", {"ageing": 5})


def test_a_missing_option_is_told(install: Install) -> None:
    install_fair(install, GOOD.replace("ageing: int = 3", "ageing: int"))
    with pytest.raises(ConfigError, match=r"scheduler\.options\.ageing: missing"):
        get_plugin_manager().resolve("scheduler", "fair")


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("scheduler", "fcsf", "did you mean fcfs?; installed: fcfs"),
        ("scheduler", "sjf", f"no scheduler 'sjf' is installed; pip install -e {ROOT}/plugins/"),
        ("attention", "tritn",
         f"did you mean triton?; pip install -e {ROOT}/plugins/attention_triton "
         f"-e {ROOT}/plugins/kernels_triton; installed: none"),
        ("model", "Qwen3ForCausalLM", f"pip install -e {ROOT}/plugins/model_qwen3"),
        ("model", "LlamaForCausalLM", "no model 'LlamaForCausalLM' is installed; installed: none"),
        ("attention", "zzz", "no attention 'zzz' is installed; installed: none"),
    ],
)  # fmt: skip
def test_an_unknown_name_says_what_helps(kind: str, name: str, said: str) -> None:
    core_alone = distribution("nanovllm-core").entry_points
    with pytest.raises(PluginNotFoundError) as caught:
        get_plugin_manager(entry_points=core_alone).spec(kind, name)
    assert said in str(caught.value)


def test_outside_a_checkout_the_extra_is_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder `plugins` beside an installed core that holds something else changes nothing."""
    core_alone = distribution("nanovllm-core").entry_points
    monkeypatch.setattr(plugin_discovery, "CHECKOUT", tmp_path)
    for project in (None, 'name = "their-sjf"'):
        if project is not None:
            (tmp_path / "plugins/scheduler_sjf").mkdir(parents=True)
            (tmp_path / "plugins/scheduler_sjf/pyproject.toml").write_text(
                f"[project]\n{project}\n"
            )
        with pytest.raises(PluginNotFoundError, match=r'pip install "nanovllm-core\[sjf\]"'):
            get_plugin_manager(entry_points=core_alone).spec("scheduler", "sjf")


def test_two_distributions_of_one_name_conflict_when_it_is_selected(install: Install) -> None:
    install_fair(install)
    install("other-fair", {SCHEDULERS: {"fair": "other_plugin"}}, {"other_plugin": GOOD}, "0.9")
    manager = get_plugin_manager()
    assert len([p for p in manager.installed() if p.name == "fair"]) == 2
    assert manager.spec("scheduler", "fcfs").name == "fcfs"
    with pytest.raises(PluginConflictError) as caught:
        manager.spec("scheduler", "fair")
    assert "nanovllm-fair 1.2.3 and other-fair 0.9" in str(caught.value)
    assert "plugins: {disable: [other-fair]}" in str(caught.value)


def test_a_name_of_the_core_is_given_up_by_the_other_distribution(install: Install) -> None:
    """The core holds much else, so it can be neither uninstalled nor left out."""
    module = GOOD.replace("fair", "fcfs")
    install("zz-mine", {SCHEDULERS: {"fcfs": "mine_plugin"}}, {"mine_plugin": module}, "0.9")
    with pytest.raises(PluginConflictError) as caught:
        get_plugin_manager().spec("scheduler", "fcfs")
    remedy = str(caught.value).partition("; ")[2]
    assert remedy == (
        "uninstall zz-mine, or leave it out with plugins: {disable: [zz-mine]} "
        "(for a command: NANOVLLM_PLUGINS__DISABLE='[zz-mine]')"
    )


def test_a_conflict_is_settled_by_leaving_one_distribution_out(install: Install) -> None:
    """Workers, which know the resolved plugin only, find the right one too."""
    install_fair(install)
    install("other-fair", {SCHEDULERS: {"fair": "other_plugin"}}, {"other_plugin": GOOD})
    resolved = get_plugin_manager(disable=["other-fair"]).resolve("scheduler", "fair")
    assert resolved.distribution == "nanovllm-fair"
    assert load_object(resolved).__module__ == "fair_plugin"


@pytest.mark.parametrize("label", ["fair", "scheduler:fair", "nanovllm-fair"])
def test_a_disabled_plugin_is_as_if_it_were_not_installed(install: Install, label: str) -> None:
    install_fair(install)
    manager = get_plugin_manager(disable=[label])
    assert "fair" not in manager.names("scheduler")
    assert [p.name for p in manager.disabled()] == ["fair"]
    with pytest.raises(PluginNotFoundError, match=r"disabled; take it out of plugins\.disable"):
        manager.spec("scheduler", "fair")


def test_disabling_what_is_not_there_is_an_error(install: Install) -> None:
    install_fair(install)
    with pytest.raises(PluginNotFoundError, match="no installed plugin is 'fiar'; did you mean fa"):
        get_plugin_manager(disable=["fiar"])


def test_a_selected_plugin_that_does_not_import_is_fatal_and_named(install: Install) -> None:
    install_fair(install, "import no_such_library")
    with pytest.raises(PluginLoadError) as caught:
        get_plugin_manager().spec("scheduler", "fair")
    message = str(caught.value)
    for part in ("nanovllm-fair 1.2.3", "fair_plugin", "No module named 'no_such_library'"):
        assert part in message
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("value", "missing"),
    [
        ("fair_plugn", "fair_plugn"),
        ("fair_plugin.code", "fair_plugin.code"),
        ("fare.code", "fare"),
    ],
)
def test_an_entry_point_of_no_module_is_what_to_correct(
    install: Install, value: str, missing: str
) -> None:
    """No line of the plugin is named, since none of it ran."""
    install("nanovllm-fair", {SCHEDULERS: {"fair": value}}, {"fair_plugin": GOOD})
    with pytest.raises(PluginLoadError) as caught:
        get_plugin_manager().spec("scheduler", "fair")
    said = str(caught.value)
    assert said.startswith(
        f"scheduler 'fair' of nanovllm-fair 1.2.3 (entry point {value}): "
        f"No module named '{missing}'"
    )
    assert said.endswith(f'; correct fair = "{value}" in {SCHEDULERS} and install it again')
    assert ".py:" not in said


def test_a_broken_plugin_that_nobody_selects_does_no_harm(install: Install) -> None:
    install("nanovllm-broken", {SCHEDULERS: {"broken": "broken_plugin"}}, {"broken_plugin": "1/0"})
    assert get_plugin_manager().resolve("scheduler", "fcfs").name == "fcfs"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("def nanovllm_schedulers", "def nanovllm_shedulers"), "nanovllm_shedulers"),
        (("def nanovllm_schedulers():", "def nanovllm_schedulers(surprise):"), "surprise"),
        (("@hookimpl\ndef nanovllm_schedulers", "def nanovllm_schedulers"),
         r"returned \[\] \(is the function marked @hookimpl\?\)"),
        (('name="fair"', 'name="unfair"'),
         r"nanovllm_schedulers must return one spec named 'fair'.*returned \['unfair'\]; "
         "rename the spec or the entry point$"),
        (("return SPECS", "return SPECS * 2"), r"returned \['fair', 'fair'\]$"),
        (("return SPECS", "return ['fair']"), "returned 'fair', not SchedulerSpec objects"),
        (("return SPECS", "return 5"), "its hook nanovllm_schedulers gave no list: TypeError"),
        (("return SPECS", "raise OSError('disk')"), "gave no list: OSError: disk"),
        (("contract=1", "contract=99"), "it is too new: it was written for contract 99"),
        (("contract=1", "contract=0"), "contract 0 is not a version"),
        (("contract=1, ", ""),
         r"its SchedulerSpec lacks 'contract' \(fair_plugin\.py:11\); add contract=1$"),
        (('impl="fair_plugin:Policy", contract=1, ', ""),
         r"its SchedulerSpec lacks 'impl' and 'contract' \(fair_plugin\.py:11\); add contract=1$"),
        (('impl="fair_plugin:Policy", ', ""), r"lacks 'impl' \(fair_plugin\.py:11\)$"),
        (("return SPECS", 'return [SchedulerSpec(name="fair", impl="x:X")]'),
         r"its SchedulerSpec lacks 'contract' \(fair_plugin\.py:18\); add contract=1$"),
        (("fair_plugin:Policy", "fair_plugin.Policy"), "not of the form 'package.module:Object'"),
        (('impl="fair_plugin:Policy"', "impl=Options"), "Options'> is not of the form 'package"),
        (("SPECS = ", "raise SystemExit(0)\nSPECS = "), "it cannot be imported: SystemExit: 0"),
        (("options=Options", "options=dict"), "is not a pydantic model class"),
        (("options=Options", "options=3"), "is not a pydantic model class"),
        (('extra="forbid", ', ""), 'Options must set extra="forbid"'),
    ],
)  # fmt: skip
def test_a_plugin_that_breaks_the_contract_is_refused_by_name(
    install: Install, change: tuple[str, str], said: str
) -> None:
    assert change[0] in GOOD
    install_fair(install, GOOD.replace(*change))
    manager = get_plugin_manager()
    with pytest.raises(PluginLoadError, match=said) as caught:
        manager.spec("scheduler", "fair")
    assert "nanovllm-fair 1.2.3" in str(caught.value)
    assert manager.spec("scheduler", "fcfs").name == "fcfs", "the others go on"


@pytest.mark.parametrize(
    ("hook", "hint"),
    [
        ("nanovllm_scheduler", "; did you mean nanovllm_schedulers?"),
        ("nanovllm_engine_close", "; did you mean nanovllm_engine_closed?"),
        ("nanovllm_zzz", ""),
    ],
)
def test_an_unknown_hook_says_which_one_was_meant(install: Install, hook: str, hint: str) -> None:
    """By what stands behind `nanovllm_`: that much every hook has in common."""
    install_fair(install, GOOD.replace("def nanovllm_schedulers", f"def {hook}"))
    with pytest.raises(PluginLoadError) as caught:
        get_plugin_manager().spec("scheduler", "fair")
    assert str(caught.value).endswith(f"unknown hook {hook!r}{hint}")


@pytest.mark.parametrize(
    ("kind", "hook", "spec", "said"),
    [
        ("attention", "attention", "AttentionSpec(name='x', impl='x:X', contract=2,"
         " capabilities={'gqa': True}, kv_layouts=None)", "not AttentionCapabilities"),
        ("attention", "attention", "AttentionSpec(name='x', impl='x:X', contract=2,"
         " kv_layouts=None, capabilities=AttentionCapabilities(dtypes={'float32'},"
         " devices={'cpu'}, cuda_graphs='all'))", "graphs 'all' is none of none, decode, full"),
        *(("attention", "attention", "AttentionSpec(name='x', impl='x:X', contract=2,"
           f" kv_layouts=len, capabilities=AttentionCapabilities(**({able})))", said)
          for able, said in (
              ("dict(devices={'cpu'}, dtypes=None)", "capabilities.dtypes None is not a set of"),
              ("dict(devices='cpu', dtypes={'float32'})", "capabilities.devices 'cpu' is not a"),
              ("dict(devices={1}, dtypes={'float32'})", "devices .1. is not a set of torch"),
              ("dict(devices=set(), dtypes=set(), phases='decode')", "phases 'decode' is not a"),
              ("dict(devices=set(), dtypes=set(), head_sizes=64)", "head_sizes 64 is neither None"),
              ("dict(devices=set(), dtypes=set(), head_sizes={'64'})", "{'64'} is neither None"),
              ("dict(devices=set(), dtypes=set(), max_compute_capability=9)", "9 is neither None"),
          )),
        *(("attention", "attention", "AttentionSpec(name='x', impl='x:X', contract=2,"
           " capabilities=AttentionCapabilities(devices=set(), dtypes=set()),"
           f" **(dict(kv_layouts=len) | dict({field}=7)))", f"{field} 7 is {said}")
          for field, said in (("kv_layouts", "not a function"), ("check", "not a function"),
                              ("rank", "not a function"), ("provider", "neither None nor a fun"))),
        ("sampler", "samplers", "SamplerSpec(name='x', impl='x:X', contract=1, devices='cuda')",
         "devices 'cuda' is not a set of torch's device types"),
        ("kernels", "kernels", "KernelSetSpec(name='x', impl='x:X', contract=4, devices=None)",
         "devices None is not a set of torch's device types"),
        ("kernels", "kernels", "KernelSetSpec(name='x', impl='x:X', contract=4, devices={'cuda'},"
         " dtypes='float32')", "dtypes 'float32' is not a set of names"),
        ("kernels", "kernels", "KernelSetSpec(name='x', impl='x:X', contract=4, devices={'cuda'},"
         " min_compute_capability=90)", "min_compute_capability 90 is neither None nor a pair"),
        ("kernels", "kernels", "KernelSetSpec(name='x', impl='x:X', contract=4, devices={'cuda'},"
         " rank='high')", "rank 'high' is not an integer"),
        ("kernels", "kernels", "KernelSetSpec(name='x', impl='x:X', contract=4, devices={'cuda'},"
         " rank=True)", "rank True is not an integer"),
        ("scheduler", "schedulers", "SchedulerSpec(name='x', impl='x:X', contract=1, level='p')",
         "level 'p' is none of policy, scheduler"),
        ("model", "models", "ModelSpec(name='x', impl='x:X', contract=2, options=O)",
         "options O are given by no configuration to a model"),
        ("checkpoint", "checkpoints", "CheckpointSpec(name='x', impl='x:X', contract=2, options=O)",
         "options O are given by no configuration to a checkpoint"),
        *((kind, f"{kind}s", f"{spec}(name='x', impl='x:X', contract=1, arguments={model})", said)
          for kind, spec in (("logits_processor", "LogitsProcessorSpec"),
                             ("constraint", "ConstraintSpec"))
          for model, said in (("Loose", 'Loose must set extra="forbid"'),
                              ("dict", "arguments <class 'dict'> is not a pydantic model"))),
    ],
)  # fmt: skip
def test_a_spec_with_a_field_that_cannot_be_acted_upon_is_refused_by_name(
    install: Install, kind: str, hook: str, spec: str, said: str
) -> None:
    """And so a listing, which asks every spec, calls it broken and goes on."""
    source = f"""
from nanovllm_core import api
from nanovllm_core.api import *
class O(NoOptions):
    size: int = 1
class Loose(O, extra="ignore"):
    pass
@api.hookimpl
def nanovllm_{hook}():
    return [{spec}]
"""
    group = f"nanovllm.{hook}"
    install("odd", {group: {"x": "odd_plugin"}}, {"odd_plugin": source})
    manager = get_plugin_manager()
    with pytest.raises(PluginLoadError, match=f"'x' of odd 1.2.3 .*{said}"):
        manager.spec(kind, "x")
    [status] = [
        status
        for status in plugin_statuses(manager, typical_requirements("cpu", None), kind)
        if status.plugin.name == "x"
    ]
    assert status.state == "broken"


@pytest.mark.parametrize(
    "impl", ["no_such_package:Thing", "fair_plugin:Thing", "fair_plugin:Policy.Thing"]
)
def test_an_implementation_that_cannot_be_loaded_is_named(install: Install, impl: str) -> None:
    install_fair(install)
    resolved = replace(get_plugin_manager().resolve("scheduler", "fair"), impl=impl)
    with pytest.raises(PluginLoadError, match=r"of scheduler 'fair' \(nanovllm-fair 1\.2\.3\)"):
        load_object(resolved)
    with pytest.raises(PluginLoadError, match=impl):
        load_object(impl)


@pytest.mark.parametrize(
    ("required", "remedy"),
    [
        (["No.Such-Package>=2"], '; pip install "No.Such-Package>=2"'),
        (['no-such-package; extra == "odd"'], '; pip install "nanovllm-fair[odd]"'),
        ([], ""),
    ],
)
def test_a_package_that_an_implementation_lacks_is_named_with_its_remedy(
    install: Install, monkeypatch: pytest.MonkeyPatch, required: list[str], remedy: str
) -> None:
    """Where the distribution says that it requires it, by itself or by an extra."""
    install_fair(install)
    monkeypatch.setattr(checks, "requires", {"nanovllm-fair": required}.get)
    resolved = get_plugin_manager().resolve("scheduler", "fair")
    with pytest.raises(PluginLoadError) as raised:
        load_object(replace(resolved, impl="no_such_package.part:Thing"))
    assert str(raised.value).endswith(f"No module named 'no_such_package'{remedy}")


def test_a_nested_implementation_is_found(install: Install) -> None:
    install_fair(install)
    assert load_object("fair_plugin:Policy.Inner").__name__ == "Inner"


def test_a_plugin_is_made_with_its_options_and_must_be_what_it_claims(install: Install) -> None:
    made = """
from nanovllm_core.api import ConfigError

def make(options, size):
    if size < 0:
        raise ConfigError("size is negative")
    return [options.ageing] * (10 // size)
"""
    install_fair(install, GOOD.replace("fair_plugin:Policy", "fair_plugin:make") + made)
    manager = get_plugin_manager()
    resolved = manager.resolve("scheduler", "fair")
    assert manager.make(replace(resolved, interface="builtins:list"), 5) == [3, 3]
    with pytest.raises(
        PluginLoadError,
        match=r"fair' \(nanovllm-fair 1\.2\.3\): .* made \[3, 3\], which is no "
        "SchedulingPolicy or Scheduler",
    ):
        manager.make(resolved, 5)
    with pytest.raises(PluginLoadError, match=r"nanovllm-fair 1\.2\.3.*ZeroDivisionError"):
        manager.make(resolved, 0)
    with pytest.raises(ConfigError, match="size is negative"):
        manager.make(resolved, -1)


@pytest.mark.parametrize("change", [{"version": "1.2.4"}, {"distribution": "gone"}])
def test_a_worker_refuses_another_version_than_the_engine_chose(
    install: Install, change: dict[str, str]
) -> None:
    install_fair(install)
    resolved = replace(get_plugin_manager().resolve("scheduler", "fair"), **change)
    with pytest.raises(PluginLoadError, match="install the same version on every machine"):
        make_plugin(resolved)


def test_extensions_are_loaded_only_when_they_are_enabled(install: Install) -> None:
    install(
        "nanovllm-notes",
        {"nanovllm.extensions": {"notes": "notes_plugin"}},
        {"notes_plugin": GOOD},
    )
    manager = get_plugin_manager()
    manager.hook.nanovllm_engine_closed()
    assert "notes_plugin" not in sys.modules
    manager.enable(["notes"])
    manager.enable(["notes"])
    manager.hook.nanovllm_engine_closed()
    assert sys.modules["notes_plugin"].CALLS == ["closed"]


def test_an_unknown_extension_is_an_error() -> None:
    with pytest.raises(PluginNotFoundError, match="no extension 'nope' is installed"):
        get_plugin_manager().enable(["nope"])


def test_two_managers_share_nothing(install: Install) -> None:
    install_fair(install)
    first, second = get_plugin_manager(), get_plugin_manager()
    first.spec("scheduler", "fair")
    second.hook.nanovllm_engine_closed()
    assert sys.modules["fair_plugin"].CALLS == []


def test_entry_points_without_a_distribution_can_be_given() -> None:
    entry = EntryPoint("fcfs", "nanovllm_core.registry.builtins", SCHEDULERS)
    other_group = EntryPoint("x", "y", "console_scripts")
    manager = get_plugin_manager(entry_points=[entry, other_group])
    assert [str(plugin) for plugin in manager.installed()] == ["fcfs ?, ?"]
    assert isinstance(manager.spec("scheduler", "fcfs"), SchedulerSpec)


def test_a_plugin_in_a_group_that_nobody_reads_is_named_where_it_is_asked_for(
    install: Install,
) -> None:
    """The likeliest mistake of an author: `nanovllm.scheduler` for `nanovllm.schedulers`."""
    install("nanovllm-lost", {"nanovllm.scheduler": {"lost": "lost_plugin"}}, {"lost_plugin": ""})
    said = (
        r"no scheduler 'lost' is installed; 'lost' is in the group 'nanovllm\.scheduler' of "
        r"nanovllm-lost 1\.2\.3, which is that of no installed kind; did you mean "
        r"nanovllm\.schedulers\?"
    )
    with pytest.raises(PluginNotFoundError, match=said):
        get_plugin_manager().find("scheduler", "lost")


def test_the_requirement_on_the_core_is_found_among_any_lines() -> None:
    """A line that no installer could read is passed over, one of an extra is not the core's."""
    found = core_requirement(
        ["not a requirement!", "torch>=2", 'nanovllm-core>=9; extra == "dev"', "NanoVLLM_core>=0.1"]
    )
    assert str(found) == "NanoVLLM_core>=0.1"
    assert core_requirement(["torch>=2"]) is None
