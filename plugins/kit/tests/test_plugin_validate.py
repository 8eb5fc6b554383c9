"""`nanovllm plugins validate`: each thing that can be wrong with a package is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from nanovllm_core.cli.main import make_app
from nanovllm_core.errors import PluginNotFoundError
from nanovllm_kit.scaffold import new_plugin
from nanovllm_kit.validation import validate_package

Install = Callable[..., None]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package that is right; a test breaks it."""
    return new_plugin("scheduler", "fair", tmp_path)


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def wrong(folder: Path) -> list[str]:
    """What is said to be wrong, one string each."""
    return [f"{c.name}: {c.detail} -> {c.remedy}" for c in validate_package(folder) if not c.ok]


def validate(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(), ["plugins", "validate", *arguments])


def test_a_package_that_is_right_passes(package: Path) -> None:
    result = validate(str(package))
    assert result.exit_code == 0, result.output
    assert "SchedulerSpec, contract 1" in result.output


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("pyproject.toml", "nanovllm.schedulers", "nanovllm.scheduler", "did you mean nanovllm."),
        ("pyproject.toml", "fair.plugin", "fair.plug", "No module named"),
        ("pyproject.toml", "\nfair = ", "\nfare = ", "one spec named 'fare'"),
        ("pyproject.toml", "nanovllm-core>=", "other>=", "nanovllm-core is not among them"),
        ("pyproject.toml", "nanovllm.schedulers", "other.group", "none in a group of nanovllm's"),
        ("plugin", 'extra="forbid", ', "", 'must set extra="forbid"'),
        ("plugin", "contract=1", "contract=99", "it is too new"),
        ("plugin", "def nanovllm_schedulers", "def nanovllm_schedulars", "unknown hook"),
        ("plugin", "policy:Fair", "policy:Fare", "has no attribute 'FarePolicy'"),
        ("plugin", "from pydantic", "import torch\nfrom pydantic", "imports torch"),
        ("plugin", "        description=", "        title=", "ageing without a description"),
        ("plugin", "from pydantic", "import os; os._exit(3)\nfrom pydantic", "ended the process"),
        ("policy", "class Fair", "1/0\nclass Fair", "ZeroDivisionError"),
    ],
)
def test_each_mistake_is_named_and_has_a_remedy(
    file: str, old: str, new: str, problem: str, package: Path
) -> None:
    path = package / (file if "." in file else f"nanovllm_scheduler_fair/{file}.py")
    change(path, old, new)
    [found] = wrong(package)
    assert problem in found
    assert not found.endswith("-> ")


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            '[project.entry-points]\n"nanovllm.kernels" = "x"',
            "nanovllm.kernels: the group is 'x'; it must be a table of NAME = \"package.module\"",
        ),
        (
            '[project.entry-points."nanovllm.kernels"]\nquick = ["x"]',
            "quick: its target in nanovllm.kernels is ['x']; it must be text",
        ),
    ],
    ids=["a group", "a target"],
)
def test_an_entry_point_of_a_wrong_type_hides_no_other(
    tables: str, said: str, package: Path
) -> None:
    project = package / "pyproject.toml"
    change(project, "fair.plugin", "fair.plug")
    project.write_text(f"{project.read_text()}\n{tables}\n")
    misshapen, other = wrong(package)
    assert misshapen.startswith(said)
    assert "No module named" in other


def test_entry_points_that_are_no_tables_are_named(tmp_path: Path) -> None:
    """The only problem but for the README and the requirement, which other tests are about."""
    (tmp_path / "pyproject.toml").write_text('[project]\nentry-points = "x"')
    found = wrong(tmp_path)[-1]
    assert found.startswith("entry points: project.entry-points is 'x'; it must be a table of tabl")


@pytest.mark.parametrize("found", ["3", '"nanovllm-core>=0.1"', "[3]"])
def test_dependencies_that_are_no_list_of_texts_are_named(found: str, package: Path) -> None:
    """pip refuses them; a text is not taken for a list of letters."""
    project = package / "pyproject.toml"
    text = re.sub(
        r"^dependencies = .*?\]$", f"dependencies = {found}", project.read_text(), flags=re.M
    )
    project.write_text(text)
    [problem] = wrong(package)
    assert problem.startswith("dependencies: project.dependencies is ")
    assert 'it must be a list of texts, as in ["nanovllm-core>=VERSION"]' in problem


def test_a_package_of_an_unknown_distribution_is_not_ascribed_to_one(package: Path) -> None:
    change(package / "nanovllm_scheduler_fair/plugin.py", "contract=1", "contract=99")
    [found] = wrong(package)
    assert "scheduler 'fair' (entry point nanovllm_scheduler_fair.plugin): it is too new" in found


@pytest.mark.parametrize("line", ["nanovllm_core >= 0.1", "nanovllm-core[triton]>=0.1"])
def test_the_core_is_known_by_any_spelling_of_its_name(package: Path, line: str) -> None:
    change(package / "pyproject.toml", '"nanovllm-core>=', f'"{line}", "other>=')
    assert wrong(package) == []


@pytest.mark.parametrize("line", ["nanovllm-core-tools>=1", "not a requirement"])
def test_another_distribution_is_not_taken_for_the_core(package: Path, line: str) -> None:
    change(package / "pyproject.toml", '"nanovllm-core>=', f'"{line}", "other>=')
    assert "nanovllm-core is not among them" in wrong(package)[0]


def test_a_module_that_ends_the_process_quietly_is_told(package: Path) -> None:
    module = package / "nanovllm_scheduler_fair/plugin.py"
    change(module, "from pydantic", "import os; os._exit(0)\nfrom pydantic")
    [found] = wrong(package)
    assert "importing nanovllm_scheduler_fair.plugin ended the process: exit status 0" in found


def test_a_missing_readme_is_wrong_only_where_the_metadata_names_it(package: Path) -> None:
    """pip refuses to install such a package; one that names none works, and is told."""
    (package / "README.md").unlink()
    [found] = wrong(package)
    assert found.startswith("README.md: missing, and pyproject.toml names it -> write it, or")
    assert validate(str(package)).exit_code == 1
    change(package / "pyproject.toml", 'readme = "README.md"\n', "")
    result = validate(str(package))
    assert result.exit_code == 0, result.output
    assert "-      README.md: none; whoever chooses the plugin looks there" in result.output


def test_the_package_of_the_documents_page_is_right(tmp_path: Path) -> None:
    """With no file more than docs/write/attention.md shows."""
    page = Path(__file__).parents[3] / "docs/write/attention.md"
    shown = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', page.read_text(), re.M | re.S)
    for name, text in shown:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    result = validate(str(tmp_path))
    assert result.exit_code == 0, result.output


def test_what_is_no_package_is_told_in_words_and_not_as_an_errno(tmp_path: Path) -> None:
    for text, why in (
        (None, "holds no pyproject.toml; give the folder of a package"),
        ("[tool]", r"has no \[project\] table"),
        ("no toml [", "cannot be read: "),
        ("project = 'x'", r"has no \[project\] table, but project = 'x'; give the folder"),
    ):
        if text is not None:
            (tmp_path / "pyproject.toml").write_text(text)
        with pytest.raises(PluginNotFoundError, match=why):
            validate_package(tmp_path)
    with pytest.raises(PluginNotFoundError, match=r"^the folder '.*nope' does not exist; give"):
        validate_package(tmp_path / "nope")


def test_commands_and_suites_are_imported_and_nothing_more(package: Path) -> None:
    """The kit's own package and the benchmarks' are right by the same check."""
    project = package / "pyproject.toml"
    module = next(package.glob("nanovllm_*")).name
    text = project.read_text()
    project.write_text(
        f'{text}\n[project.entry-points."nanovllm.commands"]\nhello = "{module}.plugin:SPEC"\n'
        f'[project.entry-points."nanovllm.suites"]\nbell = "{module}.nowhere:Suite"\n'
    )
    [problem] = wrong(package)
    assert "suite bell" in problem
    assert f"{module}.nowhere" in problem


def test_a_package_in_a_src_folder_is_found(package: Path) -> None:
    (package / "src").mkdir()
    (package / "nanovllm_scheduler_fair").rename(package / "src" / "nanovllm_scheduler_fair")
    assert wrong(package) == []


def test_an_installed_plugin_is_validated_by_name() -> None:
    result = validate("fcfs")
    assert result.exit_code == 0, result.output
    assert "nanovllm_core.engine.scheduler:FcfsPolicy can be imported" in result.output
    assert isinstance(validate("fcsf").exception, PluginNotFoundError)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("conformance:", "conformances:", "No module named"),
        (":SinkConformance", ":SinkKonformance", "has no attribute 'SinkKonformance'"),
    ],
)
def test_a_kind_s_suite_must_be_there(old: str, new: str, said: str, tmp_path: Path) -> None:
    """No plugin of the kind could be tested."""
    folder = new_plugin("kind", "sink", tmp_path)
    change(folder / "nanovllm_kind_sink/plugin.py", old, new)
    [found] = [problem for problem in wrong(folder) if said in problem]
    assert found.startswith("kind sink: its suite cannot be loaded: ")


def test_a_package_that_declares_a_kind_and_uses_it_is_right_before_it_is_installed(
    tmp_path: Path,
) -> None:
    """The entry points of one package are checked together."""
    folder = new_plugin("kind", "sink", tmp_path)
    checks = validate_package(folder)
    assert [check for check in checks if not check.ok] == []
    assert "declares nanovllm.sinks, contract 1" in [check.detail for check in checks]
