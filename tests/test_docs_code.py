"""The plugins of docs/write are whole: they install, pass their suite, import what they may."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nanovllm_core.registry.kinds import EXTENSION_GROUP, KIND_GROUP, KINDS

from .environments import freeze_what_is_imported, made_once

ROOT = Path(__file__).parents[1]
DOORS = {f"nanovllm_core.{door}" for door in ("api", "frontend", "kernels", "layers", "worker")} | {
    "nanovllm_kit",
    "nanovllm_server.watch.routes",
    "nanovllm_server.watch.testing",
}
FOLDER = ROOT / "docs/write"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


def files(page: Path) -> dict[str, str]:
    """The files that a page shows, by path."""
    return dict(FILE.findall(page.read_text(encoding="utf-8")))


def write(page: Path, folder: Path) -> Path:
    """Write a page's package, with the empty `__init__.py` that no page wastes a block on."""
    for name, text in files(page).items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        if file.parent != folder:
            (file.parent / "__init__.py").touch()
    return folder


def test_every_kind_has_a_page() -> None:
    """By the entry-point group that its package names; two levels of schedulers have one each."""
    groups = [
        group
        for page in PAGES
        for group in tomllib.loads(files(page)["pyproject.toml"])["project"]["entry-points"]
    ]
    assert set(groups) >= {kind.group for kind in KINDS.values()} | {EXTENSION_GROUP, KIND_GROUP}
    assert groups.count("nanovllm.schedulers") == 2


CODE, DECLARATION = 30, 25
"""Lines of a page's package, and of the module that declares it, as docs/write/README.md says."""


@every_page
def test_a_page_s_plugin_is_as_short_as_is_said(page: Path) -> None:
    """Every line of its Python counts that is not blank, imports and docstrings too.

    The plugin stands above the page's first heading; what follows shows single parts of others.
    """
    declaration = code = 0
    plugin = page.read_text(encoding="utf-8").partition("\n## ")[0]
    for name, text in FILE.findall(plugin):
        if name.endswith(".py") and not name.startswith("test_"):
            lines = sum(bool(line.strip()) for line in text.splitlines())
            if name.endswith("/plugin.py"):
                declaration += lines
            else:
                code += lines
    assert 0 < declaration <= DECLARATION
    assert code <= CODE


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of all pages, in `source`, and installed by pip, in `site`."""
    return made_once(tmp_path_factory, "pages", install_pages)


def install_pages(folder: Path) -> None:
    packages = [write(page, folder / "source" / page.stem) for page in PAGES]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
            *("--no-build-isolation", "--disable-pip-version-check"),
            *("--target", folder / "site", *packages),
        ],
        check=True,
    )


def run(installed: Path, *arguments: str | Path, **variables: str) -> str:
    """Run Python where the pages' packages are installed; all that it prints."""
    path = os.pathsep.join(filter(None, [str(installed / "site"), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": path} | variables,
        cwd=installed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


@pytest.mark.slow
@pytest.mark.long
def test_the_plugins_of_the_pages_pass_their_suites(installed: Path) -> None:
    """As an author would prove it: pytest on the page's own test file."""
    tests = [
        file for page in PAGES for file in (installed / "source" / page.stem).glob("test_*.py")
    ]
    report = installed / "report.xml"
    freeze_what_is_imported(installed)
    options = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib")
    arguments = ("-m", "pytest", *options, "--rootdir", installed, "--junitxml", report, *tests)
    run(installed, *arguments, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    cases = ElementTree.parse(report).iter("testcase")
    names = [case.get("classname", "") for case in cases if not len(case)]
    passed = {part for name in names for part in name.split(".")}
    assert passed >= {test.stem for test in tests}, "nothing passed in the others"


@pytest.mark.slow
def test_an_installed_processor_is_tested_by_the_command_of_its_page(installed: Path) -> None:
    """With the arguments that it requires, only what two requests ask is skipped."""
    text = (FOLDER / "logits_processor.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^\$ nanovllm (.*)$", text, re.MULTILINE)
    printed = run(installed, "-m", "nanovllm_core", *shlex.split(command))
    assert "skipped  each row gets what it asked for: all rows ask for the same" in printed
    assert re.search("favour keeps the contract .* 0 failed, 1 skipped", printed), printed


def test_an_installed_command_is_there_without_a_setting(installed: Path) -> None:
    """As docs/write/extension.md says: from its entry point alone, imported when it is called."""
    assert run(installed, "-m", "nanovllm_core", "tally", "a", "b", "c") == "3\n"
    assert "my-extension" in run(installed, "-m", "nanovllm_core", "--help")


ALL_AT_ONCE = """
from nanovllm_core import LLM, SamplingParams

with LLM(
    "shelf:demo",
    device="cpu",
    attention="pages",
    scheduler="one_by_one",
    executor="threaded",
    sampler="hashed",
    kernels="fused_norm",
    logits_processors=["favour"],
    constraints=["only"],
    observers=["slowest"],
    plugins={"enable": ["tally", "notify"]},
    limits={"max_model_len": 128, "max_num_seqs": 2},
    cache={"num_blocks": 16},
) as llm:
    question = [{"role": "user", "content": "What is 27 + 15?"}]
    answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=4))[0]
    print(answer.text)
    [nine] = llm.tokenizer.encode("9")
    favour = {"favour": {"bias": {str(nine): 1000.0}}}
    asked = SamplingParams(temperature=0.5, max_tokens=4, logits_processors=favour)
    print(llm.chat(question, asked)[0].text)
    only = SamplingParams(temperature=0.5, constraints={"only": {"ids": [nine], "length": 3}})
    print(llm.chat(question, only)[0].text)
"""


def test_the_plugins_of_the_pages_serve_together_in_one_engine(installed: Path) -> None:
    """Ten parts are exchanged by name, and the model still knows its sums."""
    demo = pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the embedded model")
    (installed / "shelf").mkdir()
    (installed / "shelf/demo").symlink_to(Path(demo.__file__).parent / "checkpoint")
    printed = run(installed, "-c", ALL_AT_ONCE, MODEL_SHELF=str(installed / "shelf")).splitlines()
    assert "42" in printed, "greedy"
    assert "9999" in printed, "what was favoured"
    assert "999" in printed, "what alone was allowed"
    starts = r"^shelf:demo is about to start$"
    for expected in (r"PagesBackend.*: room for 256 tokens", "slowest: step", starts):
        assert any(re.search(expected, line) for line in printed), printed


@every_page
def test_a_page_s_code_imports_public_doors_and_nothing_else_of_the_core(page: Path) -> None:
    for name, text in files(page).items():
        if name.endswith(".py"):
            modules = {
                node.module
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.ImportFrom) and node.module
            }
            core = {module for module in modules if module.startswith("nanovllm")}
            assert core <= DOORS, name


@pytest.mark.parametrize(
    "command",
    [
        ("check", "--extend-ignore", "RUF012"),  # the pages leave annotations out, ClassVar too
        ("format", "--check"),
    ],
    ids=lambda command: command[0],
)
def test_the_code_of_all_pages_is_kept_as_ours_is(command: tuple[str, ...], tmp_path: Path) -> None:
    """ruff's rules and format; a page's own package is first-party, nanovllm is not."""
    folders = [write(page, tmp_path / page.stem) for page in PAGES]
    settings = tmp_path / "ruff.toml"
    settings.write_text(
        f'extend = "{ROOT / "pyproject.toml"}"\nsrc = {[str(f) for f in folders]}\n'
    )
    result = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--no-cache", "--config", settings, tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
