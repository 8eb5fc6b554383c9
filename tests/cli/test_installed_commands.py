"""Commands of installed distributions: found by metadata, imported when they are called."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from nanovllm_core.cli import installed
from nanovllm_core.cli.main import make_app
from nanovllm_core.diagnostics.doctor import check_commands
from nanovllm_core.errors import PluginConflictError, PluginLoadError, PluginNotFoundError
from nanovllm_core.registry.manager import get_plugin_manager

Install = Callable[..., None]

GREET = """
import typer
app = typer.Typer()

@app.command()
def greet(names: list[str], loud: bool = False):
    "Greet people."
    print("HELLO" if loud else "Hello", *names)

@app.command()
def wave():
    "Wave."
    raise typer.Exit(3)

def single(count: int = 1):
    "One command, as a function."
    print("counted", count)
"""

ONE_TWO = ("nanovllm-one", "nanovllm-two")


def invoke(*words: str) -> tuple[int, str]:
    """Exit status and output of the command."""
    result = CliRunner().invoke(make_app(), words, prog_name="nanovllm")
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_a_distribution_s_command_runs_with_its_own_arguments(install: Install) -> None:
    """Groups, functions, commands inside `plugins`, help, exit statuses and `--` all arrive."""
    entries = {"party": "party:app", "counted": "party:single", "plugins.count": "party:single"}
    install("nanovllm-party", {"nanovllm.commands": entries}, {"party": GREET})
    assert invoke("party", "greet", "--loud", "--", "Ann", "--not-an-option") == (
        0,
        "HELLO Ann --not-an-option\n",
    )
    assert invoke("party", "wave")[0] == 3
    assert invoke("counted", "--count", "2") == (0, "counted 2\n")
    assert invoke("plugins", "count") == (0, "counted 1\n")
    status, text = invoke("party", "-h")
    assert (status, "Usage: nanovllm party" in text, "Greet people." in text) == (0, True, True)
    status, text = invoke("party", "greet", "--nonsense")
    assert status == 2
    assert "nonsense" in text


def test_a_distribution_s_application_offers_no_completion_of_its_own(install: Install) -> None:
    """Its script would take that of `nanovllm` out of the shell, and complete nothing."""
    install("nanovllm-party", {"nanovllm.commands": {"party": "party:app"}}, {"party": GREET})
    assert "completion" not in invoke("party", "--help")[1]
    assert invoke("party", "--show-completion")[0] == 2
    assert "completion" in invoke("--help")[1]


def test_listing_commands_imports_none_of_them(install: Install) -> None:
    install("nanovllm-party", {"nanovllm.commands": {"party": "party_bomb"}}, {"party_bomb": "1/0"})
    status, text = invoke("--help")
    assert status == 0
    assert "nanovllm-party 1.2.3" in text


def test_help_says_what_the_distribution_of_a_command_says_of_itself(
    install: Install, tmp_path: Path
) -> None:
    install("nanovllm-party", {"nanovllm.commands": {"party": "party:app"}}, {"party": GREET})
    metadata = tmp_path / "nanovllm_party-1.2.3.dist-info/METADATA"
    assert "From nanovllm-party 1.2.3." in invoke("--help")[1]
    metadata.write_text(metadata.read_text() + "Summary: Greetings for all\n")
    assert "From nanovllm-party 1.2.3: Greetings for all." in " ".join(invoke("--help")[1].split())


def test_a_broken_command_stops_only_itself(install: Install) -> None:
    install("nanovllm-party", {"nanovllm.commands": {"party": "party_bomb"}}, {"party_bomb": "1/0"})
    assert invoke("config", "--help")[0] == 0
    with pytest.raises(PluginLoadError, match=r"nanovllm party of nanovllm-party.*ZeroDivision"):
        invoke("party")


def test_a_command_that_exits_as_it_is_imported_is_an_error(install: Install) -> None:
    install("nanovllm-party", {"nanovllm.commands": {"party": "quits"}}, {"quits": "exit(0)"})
    with pytest.raises(PluginLoadError, match=r"nanovllm party of nanovllm-party.*SystemExit"):
        invoke("party")


def test_the_doctor_names_commands_and_suites_that_cannot_be_found(install: Install) -> None:
    """A typing mistake in the group, two owners, code that is not there."""
    for owner in ("one", "two"):
        entries = {"nanovllm.commands": {"party": owner}, "nanovllm.suites": {"bell": owner}}
        install(f"nanovllm-{owner}", entries, {owner: GREET})
    mistakes = {"plugin.audit": "one:app", "absent": "nosuch:app", "plugins.count": "one:single"}
    install("nanovllm-three", {"nanovllm.commands": mistakes}, {})
    groups = ("nanovllm.commands", "nanovllm.suites")
    entries = [entry for group in groups for entry in entry_points(group=group)]
    found = {check.name: check.detail for check in check_commands(entries)}
    both = [f"registered by {a} and {b}" for a, b in (ONE_TWO, ONE_TWO[::-1])]
    assert found.pop("nanovllm.commands: party") in both
    assert found.pop("nanovllm.suites: bell") in both
    assert found == {
        "nanovllm.commands: plugin.audit": (
            "the command has no group 'plugin', so 'plugin.audit' is never found"
        ),
        "nanovllm.commands: absent": (
            "its code 'nosuch:app' cannot be loaded: there is no module 'nosuch'"
        ),
    }


def test_no_command_or_suite_is_taken_for_a_misplaced_plugin() -> None:
    manager = get_plugin_manager()
    assert manager.misplaced("bench") == manager.misplaced("scheduler.policy") == ""


def test_a_command_of_ours_that_is_not_installed_names_its_pip_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(installed, "entry_points", lambda **_: EntryPoints())
    for words, extra in ((("bench", "throughput"), "bench"), (("plugins", "test", "x"), "kit")):
        with pytest.raises(PluginNotFoundError, match=rf"not installed: pip install.*{extra}"):
            invoke(*words)
    assert "bench" not in invoke("--help")[1]


def test_two_distributions_with_one_command_conflict(install: Install) -> None:
    for name in ("one", "two"):
        install(f"nanovllm-{name}", {"nanovllm.commands": {"party": name}}, {name: GREET})
    with pytest.raises(PluginConflictError, match=r"nanovllm-(one|two).* and nanovllm-(one|two)"):
        invoke("party")


def test_no_distribution_replaces_a_command_of_the_core(install: Install) -> None:
    install(
        "nanovllm-thief",
        {"nanovllm.commands": {"generate": "thief", "plugins.list": "thief", "plugins": "thief"}},
        {"thief": "1/0"},
    )
    assert "Complete prompts" in invoke("generate", "--help")[1]
    assert "List the installed plugins" in invoke("plugins", "list", "--help")[1]
    assert "doctor" in invoke("plugins", "--help")[1]


def test_a_command_inside_an_unknown_group_is_left_out(install: Install) -> None:
    install("nanovllm-lost", {"nanovllm.commands": {"nowhere.lost": "lost"}}, {"lost": "1/0"})
    assert invoke("--help")[0] == 0


def test_help_imports_neither_kit_nor_benchmarks() -> None:
    code = (
        "import sys\nfrom nanovllm_core.cli.main import make_app\nmake_app()\n"
        "print([m for m in ('nanovllm_kit', 'nanovllm_bench', 'pytest', 'torch')"
        " if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_every_installed_command_can_be_loaded() -> None:
    """What is installed here is a click command whose help can be printed."""
    app = make_app()
    found = typer.main.get_command(app)
    assert {"bench", "eval"} <= set(found.commands)  # type: ignore[attr-defined]
    for words in (("bench",), ("eval",), ("plugins", "new"), ("plugins", "validate")):
        assert "Usage: " in invoke(*words, "--help")[1]
