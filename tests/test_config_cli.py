"""`nanovllm config schema|show|check` and `nanovllm plugins list`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import nanovllm_core
from nanovllm_core.cli.main import main, make_app
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.config.sources import load_config
from nanovllm_core.diagnostics.schema import config_schema
from nanovllm_core.diagnostics.status import plugin_statuses, typical_requirements
from nanovllm_core.errors import ConfigError, PluginFailedError
from nanovllm_core.registry.discovery import install_command
from nanovllm_core.registry.manager import get_plugin_manager
from nanovllm_core.selection.fit import get_one

Install = Callable[..., None]

ATTENTION = """
from typing import Literal
from pydantic import BaseModel, ConfigDict, Field
from nanovllm_core.registry.hookspecs import hookimpl
from nanovllm_core.interfaces.attention import AttentionCapabilities, KVLayout
from nanovllm_core.interfaces.specs import AttentionSpec

class Tuning(BaseModel):
    model_config = ConfigDict(extra="forbid")
    warps: int = 4

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    tuning: Tuning = Field(default_factory=Tuning, description="How to run.")

@hookimpl
def nanovllm_attention():
    return [AttentionSpec(
        name="fake", impl="fake_code:Fake", contract=2, options=Options, summary="Made up.",
        capabilities=AttentionCapabilities(
            devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), gqa=True
        ),
        kv_layouts=lambda requirements, options: [KVLayout("NPKD", 16)],
    )]
"""

EXTENSION = """
from nanovllm_core.registry.hookspecs import hookimpl

@hookimpl
def nanovllm_cli(app):
    @app.command()
    def greet():
        print("hello from an extension")
"""


def run(*arguments: str) -> str:
    """What a command prints; its error, if it fails."""
    result = CliRunner().invoke(make_app(), arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def fake(install: Install) -> None:
    modules = {"fake_cli": ATTENTION, "fake_code": "class Fake: pass"}
    install("fake-attention", {"nanovllm.attention": {"fake": "fake_cli"}}, modules)


def test_show_prints_the_effective_values_with_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("attention: {backend: triton, options: {chunk: 3}}\nseed: 7\n")
    monkeypatch.setenv("NANOVLLM_DEBUG", "true")
    shown = run("config", "show", str(file), "--model", "demo", "--set", "cache.block_size=32")
    lines = [line.strip() for line in shown.splitlines()]
    for line in (
        f"seed: 7  # {file}",
        f"chunk: 3  # {file}",
        "debug: true  # NANOVLLM_DEBUG",
        "block_size: 32  # argument",
        "model: demo  # argument",
        "max_num_seqs: 256  # default",
    ):
        assert line in lines


def test_what_show_prints_is_a_configuration_file_of_the_same_meaning(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(
        "model: demo\nattention: {prefill: sdpa, decode: {backend: x, options: {a: [1, b]}}}\n"
        "cuda_graphs: {sizes: [1, 256]}\n"
        "plugins: {enable: [e], options: {e: {k: 'yes', 'no': {'': [], '5': 1}}}}\n"
        "scheduler: {name: s, options: {d: 2024-01-01, n: .nan, i: .inf, o: '0o17', e: '1e3', "
        "z: '017', t: 'true', m: <<, k: {7: [~, '~']}}}\n"
    )
    again = tmp_path / "again.yaml"
    again.write_text(run("config", "show", str(file)))
    # As text, for .nan is not equal to itself.
    assert repr(load_config(file=again, env={})) == repr(load_config(file=file, env={}))


def test_check_says_ok(tmp_path: Path, fake: None) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("model: a/b\nattention: {prefill: fake, decode: auto}\nscheduler: fcfs\n")
    assert run("config", "check", str(file)) == f"{file}: OK\n"
    assert run("config", "check", "--config", str(file)) == f"{file}: OK\n"


def test_check_looks_at_the_router_that_the_options_of_an_engine_client_name(
    tmp_path: Path, fake: None
) -> None:
    pytest.importorskip("nanovllm_engine_processes", reason="needs the plugin")
    file = tmp_path / "engine.yaml"
    file.write_text("model: a/b\nengine_client: {name: processes, options: {router: prefx}}\n")
    with pytest.raises(ConfigError, match="no router 'prefx' is installed; did you mean prefix"):
        run("config", "check", str(file))


def test_check_and_show_say_that_a_section_is_of_another_command(
    tmp_path: Path, fake: None, install: Callable[..., None]
) -> None:
    install("nanovllm-party", {"nanovllm.commands": {"party": "party:app"}}, {})
    file = tmp_path / "engine.yaml"
    file.write_text("model: a/b\nparty: {guests: nonsense}\n")
    checked, shown = (run("config", command, str(file)) for command in ("check", "show"))
    assert checked == f"{file}: OK; party: is left to nanovllm party\n"
    assert "\n# party: is left to nanovllm party\n" in shown
    assert "guests" not in shown


def test_check_takes_the_model_from_the_command_line_where_the_file_names_none(
    tmp_path: Path,
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("")
    assert "OK" in run("config", "check", str(file), "--model", "a/b")
    with pytest.raises(ConfigError, match=r"^model: missing; name a folder"):
        run("config", "check", str(file))


@pytest.fixture
def demo_config() -> dict[str, Any]:
    """The config.json of the embedded model, whose architecture has a plugin."""
    pytest.importorskip("nanovllm_model_qwen3", reason="needs the plugin model_qwen3")
    demo = pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the plugin")
    found = json.loads((Path(demo.__file__).parent / "checkpoint/config.json").read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("changed", "text", "said"),
    [
        (None, "", "holds no config.json"),
        ({"architectures": ["Nosuch"]}, "", "no installed plugin runs the architecture 'Nosuch'"),
        ({"max_position_embeddings": 64}, "limits: {max_model_len: 65}", "65 is beyond the 64 pos"),
        ({}, "limits: {max_model_len: 8}\nscheduler: nosuch", "no scheduler 'nosuch'"),
        ({}, "limits: {max_model_len: 8}\ndevice: cuda:9\nkernels: triton", "OK"),
    ],
)
def test_check_reads_the_checkpoint_and_leaves_the_device_to_explain(
    tmp_path: Path,
    demo_config: dict[str, Any],
    changed: dict[str, Any] | None,
    text: str,
    said: str,
) -> None:
    if changed is not None:
        (tmp_path / "config.json").write_text(json.dumps(demo_config | changed))
    file = tmp_path / "engine.yaml"
    file.write_text(f"model: {tmp_path}\n{text}\n")
    result = CliRunner().invoke(make_app(), ["config", "check", str(file)])
    assert said in f"{result.output} {result.exception}"
    assert (result.exit_code == 0) == (said == "OK")


def test_check_fetches_no_checkpoint(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source may download gigabytes: only that it is installed is asked."""
    file = tmp_path / "engine.yaml"
    monkeypatch.setattr(
        "nanovllm_core.selection.checkpoint.from_hub", lambda options, reference: 1 / 0
    )
    file.write_text("model: organisation/name")
    assert "OK" in run("config", "check", str(file))
    file.write_text("model: nosuch:name")
    with pytest.raises(ConfigError, match="'nosuch:name' is no folder and no checkpoint plugin"):
        run("config", "check", str(file))


@pytest.mark.parametrize("command", [["config", "show"], ["config", "check"], ["explain"]])
def test_a_file_is_named_by_place_or_by_flag_and_not_by_both(
    command: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("seed: x")
    for named in ([str(file)], ["--config", str(file)]):
        with pytest.raises(ConfigError, match="seed: 'x' must be a whole number"):
            run(*command, *named)
    both = CliRunner().invoke(make_app(), [*command, str(file), "--config", str(file)])
    assert both.exit_code == 2
    assert "two files are named" in both.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["config", "show", "--set", "seed=1", "--set", "seed=2"], "seed: .* 1 by --set seed and"),
        (["config", "show", "--set", "model=m"], "'m' by --set model and 'demo' by --model"),
        (["explain", "--set", "seed=1", "--set", "seed=2"], "seed: given twice, 1 by --set seed"),
        (
            ["explain", "--scheduler", "sjf", "--set", "scheduler=fcfs"],
            "scheduler: given twice, 'fcfs' by --set scheduler and 'sjf' by --scheduler; give",
        ),
        (
            ["generate", "hi", "--generation-config", "none", "--set", "generation_config=none"],
            "by --set generation_config and 'none' by --generation-config",
        ),
    ],
)
def test_a_field_given_twice_on_the_command_line_is_refused(
    arguments: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run(*arguments, "--model", "demo")


def test_check_tells_the_first_twenty_wrong_plugins(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(f"model: a/b\nobservers: [{', '.join(f'no{i}' for i in range(60))}]\n")
    with pytest.raises(ConfigError) as caught:
        run("config", "check", str(file))
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "... and perhaps more: the rest was not checked"


def test_check_without_a_file_says_how_it_is_called() -> None:
    result = CliRunner().invoke(make_app(), ["config", "check"])
    assert result.exit_code == 2
    assert "nanovllm config check engine.yaml" in result.output


def test_version_prints_what_a_report_of_a_bug_needs() -> None:
    shown = run("--version")
    assert shown.startswith(f"nanovllm {nanovllm_core.__version__}, Python {sys.version_info[0]}.")
    assert f"torch {metadata.version('torch')}" in shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cache: {blok_size: 16}", "did you mean block_size?"),
        ("attention: {backend: fake, options: {tunin: 1}}",
         "attention.options.tunin: unknown option (value 1); did you mean tuning? "
         "(fake 1.2.3, fake-attention)"),
        ("attention: {prefill: fake, decode: {backend: fake, options: {tuning: {wraps: 1}}}}",
         "attention.decode.options.tuning.wraps: unknown option"),
        ("scheduler: nosuch", "no scheduler 'nosuch' is installed"),
        ("sampler: nosuch", "no sampler 'nosuch' is installed"),
        ("sampler: {name: gumbel, options: {a: 1}}", "sampler.options.a: unknown option"),
        ("kernels: nosuch", "no kernels 'nosuch' is installed"),
        ("kernels: {name: torch, options: {a: 1}}", "kernels.options.a: unknown option"),
        ("logits_processors: [nosuch]", "no logits_processor 'nosuch' is installed"),
        ("observers: [nosuch, other]", "no observer 'other' is installed"),
        ("scheduler: nosuch\nattention: {backend: fake, options: {tunin: 1}}",
         "\nno scheduler 'nosuch' is installed"),
        ("tensor_parallel_size: 2\nexecutor: single",
         "tensor_parallel_size: 2, but the executor 'single' runs at"),
        ("plugins: {enable: [nosuch]}", "no extension 'nosuch' is installed"),
    ],
)  # fmt: skip
def test_check_says_what_is_wrong_and_exits_with_1(
    tmp_path: Path,
    fake: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    said: str,
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["nanovllm", "config", "check", str(file), "-m", "a/b"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert str(caught.value.code).startswith("error: ")
    assert said in str(caught.value.code)
    assert "OK" not in capsys.readouterr().out


def test_the_schema_holds_the_options_of_installed_plugins(fake: None, install: Install) -> None:
    install("broken", {"nanovllm.attention": {"broken": "broken_cli"}}, {"broken_cli": "1/0"})
    schema = json.loads(run("config", "schema"))
    assert set(schema["properties"]) == set(EngineConfig.model_fields)
    forms = schema["$defs"]["AttentionChoice"]["anyOf"]
    assert {"auto", "fake", "broken"} <= set(forms[0]["enum"])
    by_name = {form["properties"]["backend"]["const"]: form["properties"] for form in forms[1:]}
    tuning = by_name["fake"]["options"]["properties"]["tuning"]
    assert tuning["$ref"] == "#/$defs/attention.fake.Tuning"
    assert "warps" in schema["$defs"]["attention.fake.Tuning"]["properties"]
    assert "ZeroDivisionError" in by_name["broken"]["options"]["description"]
    assert {"fcfs"} <= set(schema["$defs"]["SchedulerSettings"]["anyOf"][0]["enum"])


def test_every_reference_of_the_schema_leads_somewhere(fake: None) -> None:
    schema = config_schema(get_plugin_manager())

    def references(node: object) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [ref for child in node.values() for ref in references(child)]
        if isinstance(node, list):
            return [ref for child in node for ref in references(child)]
        return []

    found = references(schema)
    assert found
    assert {ref.removeprefix("#/$defs/") for ref in found} <= set(schema["$defs"])


def test_the_listing_tells_ready_unsupported_broken_and_disabled_apart(
    fake: None, install: Install
) -> None:
    install("broken", {"nanovllm.attention": {"broken": "broken_cli"}}, {"broken_cli": "1/0"})
    install("notes", {"nanovllm.extensions": {"notes": "notes_cli"}}, {})
    manager = get_plugin_manager(disable=["fcfs"])
    on_cpu = {s.plugin.name: s for s in plugin_statuses(manager, typical_requirements("cpu", None))}
    assert on_cpu["fake"].state == "ready"
    assert on_cpu["fake"].note == "fake 1.2.3"
    assert on_cpu["broken"].state == "broken"
    assert "ZeroDivisionError" in on_cpu["broken"].reasons[0]
    assert on_cpu["fcfs"].state == "disabled"
    assert on_cpu["single"].state == "ready"
    assert on_cpu["notes"].state == "ready"
    on_gpu = plugin_statuses(manager, typical_requirements("cuda", (9, 0)))
    unsupported = next(status for status in on_gpu if status.plugin.name == "fake")
    assert unsupported.state == "unsupported"
    assert "does not run on cuda, only on cpu" in unsupported.reasons
    assert unsupported.note == "Made up."


def test_plugins_list_prints_a_line_for_each_plugin(
    fake: None, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("broken", {"nanovllm.attention": {"broken": "broken_cli"}}, {"broken_cli": "1/0"})
    monkeypatch.setenv("NANOVLLM_PLUGINS__DISABLE", "[executor:single]")
    shown = run("plugins", "list")
    for word in ("fake-attention", "1.2.3", "no, broken", "fcfs", "no, disabled"):
        assert word in shown
    listed = {entry["name"]: entry for entry in json.loads(run("plugins", "list", "--json"))}
    assert listed["broken"]["state"] == "broken"
    assert listed["fcfs"]["distribution"] == "nanovllm-core"
    assert listed["single"]["state"] == "disabled"


def test_without_an_attention_backend_the_listing_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Enable one where all are disabled, install one where none is there."""
    names = sorted({p.distribution for p in get_plugin_manager().installed()} - {"nanovllm-core"})
    monkeypatch.setenv("NANOVLLM_PLUGINS__DISABLE", yaml.safe_dump(names))
    shown = " ".join(run("plugins", "list").split())
    remedy = "of those disabled, take one out of plugins.disable: flash, sdpa, triton"
    assert f"No attention can be selected: {remedy}" in shown


def test_where_some_cannot_serve_the_remedy_is_to_enable_or_to_install() -> None:
    """Those that are disabled may not serve, too."""
    names = get_plugin_manager().names("attention")
    install = get_one(get_plugin_manager(entry_points=()), "attention")
    assert install.startswith(install_command("attention", "sdpa"))
    enable = "of those disabled, take one out of plugins.disable: "
    assert get_one(get_plugin_manager(disable=names), "attention") == enable + ", ".join(names)
    mixed = get_plugin_manager(disable=["flash"])
    assert get_one(mixed, "attention") == f"{enable}flash, or {install}"


def test_an_enabled_extension_adds_a_command(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("greeter", {"nanovllm.extensions": {"greeter": "greeter_cli"}}, {
        "greeter_cli": EXTENSION
    })  # fmt: skip
    assert "greet" not in run("--help")
    monkeypatch.setenv("NANOVLLM_PLUGINS__ENABLE", "[greeter]")
    assert "hello from an extension" in run("greet")


def test_an_extension_whose_commands_fail_is_named_with_what_to_do(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = EXTENSION.replace("    @app.command()", "    1/0\n    @app.command()")
    install("greeter", {"nanovllm.extensions": {"greeter": "broken_cli"}}, {"broken_cli": broken})
    monkeypatch.setenv("NANOVLLM_PLUGINS__ENABLE", "[greeter]")
    with pytest.raises(PluginFailedError, match=r"greeter failed: ZeroDivisionError.*take it out"):
        make_app()
