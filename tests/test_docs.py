"""What the documents say is true: code runs, tables are current, links lead on."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import pytest
import typer
import yaml
from typer.testing import CliRunner

from nanovllm_core.cli.config import check_plugins
from nanovllm_core.cli.main import make_app
from nanovllm_core.cli.plugins import one_plugin
from nanovllm_core.cli.prompts import MAX_TOKENS
from nanovllm_core.config.errors import FLAT_KEYWORDS
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.config.sources import REFUSED_KEYWORDS, load_config
from nanovllm_core.errors import ConfigError, InvalidSamplingError, NanoVLLMError
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.scheduler import SchedulerState
from nanovllm_core.registry import hookspecs
from nanovllm_core.registry.kinds import DECLARATION, EXTENSION_GROUP, KIND_GROUP, KINDS
from nanovllm_core.registry.manager import PluginManager, get_plugin_manager
from nanovllm_core.selection.decisions import Decisions
from nanovllm_core.selection.startup import make_scheduler

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CONFIGURATION = ROOT / "docs/configuration.md"
COMING_FROM = ROOT / "docs/coming_from_nano_vllm.md"
PLUGINS = ROOT / "docs/plugins.md"
GLOBS = "*.md", "docs/**/*.md", "plugins/*/*.md", "examples/plugins/**/README.md"
DOCUMENTS = sorted(document for glob in GLOBS for document in ROOT.glob(glob))
OUR_DOCUMENTS = [path for path in DOCUMENTS if "plugins" not in path.parent.parts]


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: Path
    line: int
    language: str
    info: str
    text: str

    @property
    def title(self) -> str | None:
        match = re.search(r'title="([^"]+)"', self.info)
        return match[1] if match else None

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path, language: str) -> Iterator[Block]:
    text = document.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w+)([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if match[1] == language:
            line = text[: match.start()].count("\n") + 1
            yield Block(document, line, match[1], match[2], match[3])


def blocks_of_all(language: str) -> list[Block]:
    return [block for document in OUR_DOCUMENTS for block in blocks(document, language)]


def by_place(value: object) -> str:
    return str(value)


@pytest.fixture
def demo_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where `auto` would take Triton's interpreter because these tests switch it on."""
    monkeypatch.setenv("NANOVLLM_DEVICE", "cpu")
    monkeypatch.setenv("NANOVLLM_ATTENTION__BACKEND", "sdpa")
    monkeypatch.setenv("NANOVLLM_CACHE__NUM_BLOCKS", "256")  # not gigabytes of zeros
    for name in ("checkpoint_demo", "model_qwen3", "attention_sdpa"):
        pytest.importorskip(f"nanovllm_{name}", reason=f"needs the plugin {name}")


# -- code blocks ----------------------------------------------------------------------------------

PROGRAMS = [block for block in blocks_of_all("python") if not block.title]


def test_there_are_programs_and_commands_to_check() -> None:
    assert len(PROGRAMS) >= 3
    assert len(COMMANDS) >= 8


@pytest.mark.usefixtures("demo_plugins")
@pytest.mark.parametrize("block", PROGRAMS, ids=by_place)
def test_every_program_in_the_documents_runs(
    block: Block, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert printed.strip()
    if block.document == README:
        assert printed.endswith("apple cat moon tree"), "the model answers the question"


@pytest.mark.parametrize("block", [b for b in blocks_of_all("yaml") if b.info == ""], ids=by_place)
def test_every_yaml_file_in_the_documents_is_right(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(block.text, encoding="utf-8")
    check_plugins(get_plugin_manager(), load_config(file=file, env={}))


WRONG = [
    (wrong, right)
    for document in OUR_DOCUMENTS
    for wrong in blocks(document, "yaml")
    if wrong.info.strip() == "error"
    for right in [next(b for b in blocks(document, "text") if b.line > wrong.line)]
]


def installed_by_make_demo() -> PluginManager:
    """The plugins of a reader who has run `make demo` on a machine without a GPU."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.split(".run-installed:")[1].split("\n\n")[0]
    names = re.findall(r"-e plugins/,([\w ]+)", recipe)[0].split()  # without those for a GPU
    there = {f"nanovllm-{name.replace('_', '-')}" for name in names}
    there.add("nanovllm-core")
    installed = {plugin.distribution for plugin in get_plugin_manager().installed()}
    assert there <= installed
    return get_plugin_manager(disable=sorted(installed - there))


def test_the_quick_start_chooses_only_what_make_demo_installs(tmp_path: Path) -> None:
    for block in blocks(ROOT / "docs/quick_start.md", "yaml"):
        file = tmp_path / "engine.yaml"
        file.write_text(block.text, encoding="utf-8")
        check_plugins(installed_by_make_demo(), load_config(file=file, env={}))


def test_commands_about_one_plugin_name_one_that_make_demo_installs() -> None:
    named = [
        match[1]
        for _, line in commands()
        if (match := re.match(r"nanovllm plugins (?:show|schema|validate|test) (\w+)", line))
    ]
    assert named
    for name in named:
        one_plugin(installed_by_make_demo(), name, None)


@pytest.mark.parametrize(("block", "message"), WRONG, ids=by_place)
def test_every_shown_error_is_what_one_gets(block: Block, message: Block, tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(block.text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        check_plugins(get_plugin_manager(), load_config(file=file, env={}))
    assert str(caught.value).replace(str(file), file.name) == message.text.strip()


# -- commands -------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, str]]:
    """(where, command) of every `nanovllm ...` line in a bash block, continued lines joined."""
    for block in blocks_of_all("bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.startswith("nanovllm "):
                yield str(block), line


COMMANDS = list(commands())
NOT_RUN_HERE = ("bench", "Qwen/", "tiny-moe")
"""They need a GPU, a download, or the folder that tests/test_tiny_checkpoints.py writes; their
flags are checked all the same."""


@pytest.mark.parametrize(("where", "line"), COMMANDS, ids=by_place)
def test_every_command_is_one_with_flags_that_exist(where: str, line: str) -> None:
    command: click.Command = typer.main.get_command(make_app())
    words = shlex.split(line, comments=True)[1:]
    context = None
    while hasattr(command, "resolve_command"):
        context = command.context_class(command, parent=context, info_name=command.name)
        _, found, words = command.resolve_command(context, words)
        assert found is not None, where
        command = found
    command.make_context(command.name, words, parent=context)


@pytest.mark.usefixtures("demo_plugins")
@pytest.mark.parametrize(
    ("where", "line"),
    [c for c in COMMANDS if not any(word in c[1] for word in NOT_RUN_HERE)],
    ids=by_place,
)
def test_every_command_that_needs_no_gpu_runs(
    where: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(line, comments=True)[1:]
    if words[0] == "eval":
        words += ["--limit", "1"]
    result = CliRunner().invoke(make_app(), words, input="/exit\n")
    assert result.exit_code == 0, f"{where}: {result.output} {result.exception!r}"


def test_make_knows_the_targets_that_the_documents_name() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {
        (document.name, target)
        for document in OUR_DOCUMENTS
        for target in re.findall(r"\bmake ([a-z-]+)\b(?=[`\s])", _code_of(document))
    }
    assert {target for _, target in named} >= {"demo", "test"}
    for document, target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document}: make {target}"


def _code_of(document: Path) -> str:
    """Fenced blocks and inline code of a document."""
    text = document.read_text(encoding="utf-8")
    inline = re.findall(r"`[^`\n]+`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return "\n".join([*(b.text for b in blocks(document, "bash")), *inline])


# -- tables ---------------------------------------------------------------------------------------


def test_the_tables_of_the_configuration_are_what_the_code_says(generator: ModuleType) -> None:
    text = CONFIGURATION.read_text(encoding="utf-8")
    current = generator.render(text)
    assert current == text, "run: python docs/generate.py"


@pytest.mark.usefixtures("demo_plugins")
@pytest.mark.parametrize(
    "name",
    [
        "capabilities",
        "limits",
        "scale",
        "scheduling",
        "attention",
        "moe",
        "write/policy",
        "write/scheduler",
    ],
)
def test_the_tables_of_what_plugins_declare_and_measure_here_are_current(
    generator: ModuleType, name: str
) -> None:
    """What needs no GPU is made anew: declarations, arithmetic, waits of a real engine."""
    file = ROOT / f"docs/{name}.md"
    text = file.read_text(encoding="utf-8")
    assert generator.render(text, generator.DOCUMENTS[f"{name}.md"]) == text, (
        "run: python docs/generate.py"
    )


def test_a_changed_description_would_be_noticed(generator: ModuleType) -> None:
    """The comparison above is not one of a text with itself."""
    text = CONFIGURATION.read_text(encoding="utf-8")
    changed = text.replace("at the same time; further ones wait", "at once; further ones wait")
    assert changed != text
    assert generator.render(changed) == generator.render(text) != changed


def table_rows(document: Path, first_header: str) -> list[list[str]]:
    """The rows of the table whose first column has this header."""
    lines = iter(document.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith(f"| {first_header} |"):
            next(lines)
            break
    rows = []
    for line in lines:
        if not line.startswith("|"):
            return rows
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def test_the_keywords_of_nano_vllm_are_told_with_their_fields_and_defaults() -> None:
    rows = table_rows(COMING_FROM, "keyword")
    assert {row[0].strip("`"): row[1].strip("`") for row in rows} == dict(FLAT_KEYWORDS)
    config = load_config("demo", env={})
    for _, field, _, here in rows:
        value: object = config
        for name in field.strip("`").split("."):
            value = getattr(value, name)
        assert (str(value) == here) == (value is not None), f"{field} is {value}"
    text = COMING_FROM.read_text(encoding="utf-8")
    assert all(f"`{keyword}`" in text for keyword in REFUSED_KEYWORDS)


@pytest.mark.parametrize(
    ("what", "limit", "name", "inside", "outside"),
    [
        ("`max_tokens`", "1 to 2^63 - 1", "max_tokens", (1, 2**63 - 1), (0, 2**63)),
        ("`min_tokens`", "0 to `max_tokens`", "min_tokens", (0, 64), (-1, 65)),
        ("presence penalty", "-2 to 2", "presence_penalty", (-2, 2), (-2.1, 2.1)),
        ("frequency penalty", "-2 to 2", "frequency_penalty", (-2, 2), (-2.1, 2.1)),
        ("`top_k`", "-1 to 2^63 - 1", "top_k", (-1, 2**63 - 1), (-2, 2**63)),
        ("`top_p`", "above 0, at most 1", "top_p", (1e-9, 1), (0, 1.1)),
        ("`min_p`", "0 to 1", "min_p", (0, 1), (-0.1, 1.1)),
    ],
)
def test_a_limit_of_sampling_is_told_as_it_is_kept(
    what: str, limit: str, name: str, inside: tuple[float, ...], outside: tuple[float, ...]
) -> None:
    told = {row[0]: row[1] for row in table_rows(ROOT / "docs/limits.md", "what")}
    assert told[what] == limit
    for value in inside:
        SamplingParams(**{name: value})
    for value in outside:
        with pytest.raises(InvalidSamplingError):
            SamplingParams(**{name: value})


REFUSALS: list[tuple[str, dict[str, Any]]] = [
    ("ConfigError", {"dtype": "float23"}),
    ("ConfigError", {"max_model_len": 999_999}),
    ("PluginNotFoundError", {"scheduler": "nosuch"}),
    ("UnsupportedError", {"kernels": "triton"}),
    ("CheckpointNotFoundError", {"model": "/no/such"}),
    ("DeviceError", {"device": "cuda:99"}),
    ("ExecutorError", {"tensor_parallel_size": 2, "executor": "single"}),
    ("OutOfMemoryError", {"num_kvcache_blocks": 1}),
]


@pytest.mark.usefixtures("demo_plugins")
@pytest.mark.parametrize(("name", "wrong"), REFUSALS, ids=by_place)
def test_a_configuration_that_cannot_run_gets_the_error_that_the_table_names(
    name: str, wrong: dict[str, Any]
) -> None:
    from nanovllm_core import LLM

    with pytest.raises(NanoVLLMError) as caught:
        LLM(**{"model": "demo", **wrong})
    assert type(caught.value).__name__ == name
    told = {row[1]: row[2] for row in table_rows(CONFIGURATION, "what is wrong at start")}
    assert told[f"`{name}`"] == f"`{type(caught.value).__base__.__name__}`"


def test_the_defaults_of_the_commands_that_differ_are_told() -> None:
    """`generate` and `chat` are greedy where the checkpoint states no temperature, and write more
    than a request does by default."""
    command: Any = typer.main.get_command(make_app())
    found = {
        name: {p.name: p.default for p in command.commands[name].params}
        for name in ("generate", "chat")
    }
    assert {found[name]["temperature"] for name in found} == {None}
    text = " ".join(CONFIGURATION.read_text(encoding="utf-8").split())
    assert "take temperature 0 where neither a flag nor the checkpoint states one" in text
    assert {found[name]["max_tokens"] for name in found} == {None}
    assert f"at most {MAX_TOKENS} output tokens for `generate`" in text
    assert "for `chat` as many as fit" in text


def test_the_kinds_of_plugins_are_told_with_group_hook_and_spec() -> None:
    told = {row[0]: row[1:4] for row in table_rows(PLUGINS, "kind")}
    actual = {
        f"`{name}`": [f"`{kind.group}`", f"`{kind.hook}`", f"`{kind.spec.__name__}`"]
        for name, kind in KINDS.items()
    }
    assert told.pop("`extension`")[0] == f"`{EXTENSION_GROUP}`"
    assert told.pop("`kind`") == [f"`{KIND_GROUP}`", f"`{DECLARATION.hook}`", "`KindSpec`"]
    assert told == actual


def test_the_page_of_plugins_links_to_every_plugin_of_the_repository() -> None:
    text = PLUGINS.read_text(encoding="utf-8").split("| kind | in this repository |")[1]
    told = {row.split("|")[1].strip(" `"): row for row in text.split("\n\n")[0].splitlines()[2:]}
    assert set(told) == {*KINDS, "kind", "extension"}
    groups = {kind.group: name for name, kind in KINDS.items()}
    for project in ROOT.glob("plugins/*/pyproject.toml"):
        entries = tomllib.loads(project.read_text())["project"].get("entry-points", {})
        for group in groups.keys() & entries:
            for name in entries[group]:
                link = f"[{name}](../plugins/{project.parent.name}/README.md)"
                assert link in told[groups[group]]


def test_the_lifecycle_hooks_are_told_with_their_arguments() -> None:
    lifecycle = {
        f"`{name}({', '.join(key for key in hook.__annotations__ if key != 'return')})`"
        for name, hook in vars(hookspecs).items()
        if name.startswith("nanovllm_")
        and name not in {DECLARATION.hook, *(kind.hook for kind in KINDS.values())}
    }
    assert {row[0] for row in table_rows(PLUGINS, "hook")} == lifecycle


# -- places ---------------------------------------------------------------------------------------


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading_that_exist(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = (document.parent / path).resolve() if path else document
        assert place.exists(), f"{document.name}: {target}"
        assert not anchor or anchor in anchors(place), f"{document.name}: no heading {target}"


@pytest.mark.parametrize("document", OUR_DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_of_the_project_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = re.findall(r"`((?:nanovllm_core|tests|docs|examples|plugins)/[\w./-]+)`", text)
    missing = [name for name in named if not (ROOT / name).exists()]
    assert missing == []


# -- the plugin that is shown ---------------------------------------------------------------------


def write_titled_blocks(folder: Path) -> None:
    """Write the files of docs/plugins.md where their titles say."""
    for language in ("toml", "python", "yaml"):
        for block in blocks(PLUGINS, language):
            if block.title:
                file = folder / block.title
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(block.text, encoding="utf-8")


@pytest.fixture
def shown_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The plugins of docs/plugins.md, installed by pip from what the document shows."""
    source, target = tmp_path / "source", tmp_path / "site"
    write_titled_blocks(source)
    # A package needs a module `__init__`, which the document does not waste a block on.
    (source / "nanovllm_scheduler_brief/__init__.py").touch()
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"),
            *("--no-build-isolation", "--disable-pip-version-check", "--target", target),
            *(source, source / "extension"),
        ],
        check=True,
    )
    monkeypatch.syspath_prepend(target)
    known = set(sys.modules)
    yield source
    for module in set(sys.modules) - known:
        if module.startswith(("nanovllm_scheduler_brief", "nanovllm_extension_hello")):
            del sys.modules[module]


@pytest.mark.usefixtures("demo_plugins")
def test_the_plugins_of_the_document_install_load_and_do_what_it_says(
    shown_plugins: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert metadata.version("nanovllm-scheduler-brief") == "0.1.0"
    config = load_config(file=shown_plugins / "engine.yaml", env={})
    assert config.scheduler.options == {"ageing": 0.5}
    assert shown_order(config, arrival_steps=(0, 0)) == ["short", "long"]
    assert shown_order(config, arrival_steps=(0, 1000)) == ["long", "short"], "waiting counts"

    from nanovllm_core import LLM, SamplingParams

    small = {"max_model_len": 64, "max_num_seqs": 2}
    plugins = {"enable": ["hello"]}
    file = str(shown_plugins / "engine.yaml")
    with LLM(config_file=file, plugins=plugins, **small) as llm:
        [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=4), use_tqdm=False)
        blocks = llm.info.num_blocks
    assert output.token_ids
    assert f": {blocks} blocks of" in capsys.readouterr().out

    monkeypatch.setenv("NANOVLLM_PLUGINS__ENABLE", "[hello]")
    assert CliRunner().invoke(make_app(), ["hello"]).stdout == "hello\n"


def shown_order(config: EngineConfig, arrival_steps: tuple[int, int]) -> list[str]:
    """The order in which the configured scheduler admits a long answer, then a short one."""
    decisions = Decisions(config)
    scheduler = make_scheduler(decisions.plugins, *decisions.named("scheduler"))
    requests = [
        SimpleNamespace(
            request_id=name,
            arrival_step=step,
            arrival_index=index,
            priority=0,
            num_prompt_tokens=10,
            num_tokens=10,
            num_scheduled=0,
            max_length=length,
        )
        for index, (name, length, step) in enumerate(
            zip(("long", "short"), (200, 20), arrival_steps, strict=True)
        )
    ]
    for request in requests:
        scheduler.add(request)
    state = SchedulerState(
        step=0,
        waiting=requests,
        prefilling=(),
        decoding=(),
        token_budget=100,
        free_rows=2,
        free_blocks=100,
        num_cached_tokens=lambda _request: 0,
        num_new_blocks=lambda _request, _tokens: 1,
    )
    return [share.request_id for share in scheduler.schedule(state)]


# -- files beside the documents -------------------------------------------------------------------


def test_the_configuration_example_is_right_and_sets_what_it_explains() -> None:
    file = ROOT / "examples/config.yaml"
    check_plugins(get_plugin_manager(), load_config(file=file, env={}))
    assert {"model", "attention", "scheduler", "cache", "limits"} <= set(
        yaml.safe_load(file.read_text(encoding="utf-8"))
    )


def test_no_document_speaks_of_the_machine_it_was_written_on() -> None:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert not re.search(r"(?<![\w.])/(work|opt|root|home)/", text), document


LEFT_BEHIND = re.compile(
    r"\b(nobody|anybody|somebody|whoever|gives? way|gave way|giving way|(?:is|are|was) told)\b",
    re.I,
)
"""Words that a reader of vLLM's or PyTorch's documents does not expect: the term is preempt, and a
sentence names the request, the plugin or the user that it is about."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_uses_the_field_s_words(document: Path) -> None:
    """What commands print, in `console` blocks, is not prose."""
    if document.name == "CHANGELOG.md":
        pytest.skip("it is a record")
    text = re.sub(r"^```console.*?^```", "", document.read_text("utf-8"), flags=re.M | re.S)
    assert LEFT_BEHIND.findall(text) == []
