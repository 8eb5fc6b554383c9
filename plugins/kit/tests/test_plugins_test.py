"""`nanovllm plugins test`: the suite of a kind on an installed plugin, a line per check."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import Result
from typer.testing import CliRunner

from nanovllm_core.cli.main import make_app
from nanovllm_core.errors import ConfigError, NanoVLLMError, PluginNotFoundError

Install = Callable[..., None]

BROKEN = """
from nanovllm_core.registry.hookspecs import hookimpl
from nanovllm_core.interfaces.attention import AttentionCapabilities, KVLayout
from nanovllm_core.interfaces.specs import AttentionSpec

@hookimpl
def nanovllm_attention():
    return [AttentionSpec(
        name="broken", impl="broken_plugin:Backend", contract=2,
        capabilities=AttentionCapabilities(
            devices=frozenset({"cpu"}), dtypes=frozenset({"float32"}), phases=frozenset({"decode"}),
        ),
        kv_layouts=lambda requirements, options: [],
    )]
"""


UNEVEN = """
from nanovllm_core.api import SchedulerSpec, SchedulingPolicy, hookimpl

@hookimpl
def nanovllm_schedulers():
    return [SchedulerSpec(name="uneven", impl="uneven_plugin:Uneven", contract=1, level="policy")]

class Uneven(SchedulingPolicy):
    def __init__(self, options):
        self.options = options

    def service_key(self, request):
        return (0,) * (1 + request.num_prompt_tokens % 2)
"""
NO_VICTIM = """
    def victim_key(self, request):
        raise TypeError("no key")
"""
DECLARED = """
from nanovllm_core.api import KindSpec, PluginSpec, hookimpl

@hookimpl
def nanovllm_kinds():
    return [KindSpec(
        name="cup", contract=2, spec=PluginSpec, hookspecs="cup_hookspecs",
        conformance="cup_tests:CupConformance",
    )]

@hookimpl
def nanovllm_cups():
    return [PluginSpec(name="mug", impl="cup_plugin:Mug", contract=1)]

class Mug:
    def __init__(self, options):
        self.holds = 3
"""
CUP_HOOKSPECS = """
from nanovllm_core.api import hookspec

@hookspec
def nanovllm_cups():
    "Cups."
"""
CUP_TESTS = """
from nanovllm_kit import SpecConformance

class CupConformance(SpecConformance):
    def test_it_holds_enough(self, plugin):
        assert plugin.load()(plugin.options).holds >= 3
"""


SKIPPED_CASES = """
    import pytest

    @pytest.mark.parametrize("hours", range(20))
    def test_it_keeps_warm(self, plugin, hours):
        self.pytest.skip(f"{plugin.spec.name} declares no lid")
"""
WORDY = """
from pydantic import BaseModel, ConfigDict, Field
from nanovllm_core.api import LogitsProcessor, LogitsProcessorSpec, hookimpl

class Wanted(BaseModel):
    model_config = ConfigDict(extra="forbid")
    words: list[str] = Field(min_length=1)

@hookimpl
def nanovllm_logits_processors():
    return [LogitsProcessorSpec(name="wordy", impl="wordy_code:Wordy", contract=1,
                                arguments=Wanted)]
"""
WORDY_CODE = """
from pathlib import Path
import tokenizers
import torch
from nanovllm_core.api import LogitsProcessor

class Wordy(LogitsProcessor):
    def __init__(self, options, context):
        super().__init__(options, context)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(Path(context.tokenizer, FILE)))

    def prepare(self, arguments):
        return torch.tensor([self.tokenizer.encode(word).ids[0] for word in arguments.words])

    def process(self, logits_SV, requests):
        for logits_V, request in zip(logits_SV, requests, strict=True):
            logits_V.index_fill_(0, request.state, 30.0)
""".replace("FILE", "'tokenizer.json'")

SHELF = """
from pathlib import Path
from nanovllm_core.api import CheckpointNotFoundError, CheckpointSpec, hookimpl

@hookimpl
def nanovllm_checkpoints():
    return [CheckpointSpec(name="shelf", impl="shelf_plugin:find", contract=2)]

def find(options, reference):
    folder = Path(WANTED)
    if not (folder / "config.json").is_file():
        raise CheckpointNotFoundError(f"model: shelf:{reference} is not there")
    return folder
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(), ["plugins", "test", *arguments])


def refused(*arguments: str) -> NanoVLLMError:
    error = run(*arguments).exception
    assert isinstance(error, NanoVLLMError), error
    return error


def test_each_check_is_a_line_and_the_verdict_is_the_last() -> None:
    result = run("sdpa", "-k", "equals the reference or tail or behind or layouts")
    assert result.exit_code == 0, result.output
    first, *checks, verdict = result.output.strip().splitlines()
    assert first == "attention sdpa 0.1.0, nanovllm-attention-sdpa: AttentionConformance, seed 0"
    assert "passed   decode equals the reference" in checks
    assert "skipped  nothing is read behind the last key: declares that it needs finite tails" in (
        checks
    )
    assert len(checks) == 4
    assert all(re.match("(passed |skipped)  ", line) for line in checks)
    passed, skipped = (sum(line.startswith(kind) for line in checks) for kind in ("pas", "ski"))
    counts = f"{passed} passed, 0 failed, {skipped} skipped"
    assert verdict == f"sdpa keeps the contract of attention plugins here: {counts}"


LEVELS = """
from nanovllm_kit import SpecConformance
from nanovllm_kit.conformance import full_level

class CupConformance(SpecConformance):
    def test_it_holds_enough(self, plugin, draws):
        assert plugin.load()(plugin.options).holds >= 3
        raise AssertionError(f"drew {draws.randrange(10**9)}")

    @full_level("a swimming pool")
    def test_it_floats(self, plugin):
        pass
"""


def test_the_default_level_says_what_it_did_not_try(install: Install) -> None:
    """A check that is left to the level `full` is skipped with what it takes, and listed."""
    modules = {"cup_plugin": DECLARED, "cup_hookspecs": CUP_HOOKSPECS, "cup_tests": LEVELS}
    groups = {"nanovllm.kinds": {"cup": "cup_plugin"}, "nanovllm.cups": {"mug": "cup_plugin"}}
    install("cups", groups, modules)
    left, tried = run("mug", "-k", "floats"), run("mug", "-k", "floats", "--level", "full")
    assert "skipped  it floats: left to the level `full`: a swimming pool\n" in left.output
    assert "\nnot tried, left to --level full: it floats\n" in left.output
    assert "passed   it floats\n" in tried.output
    assert "not tried" not in tried.output


@pytest.mark.slow
def test_the_seed_decides_what_a_check_draws(install: Install) -> None:
    """Whichever checks run beside it; the first line names the seed."""
    modules = {"cup_plugin": DECLARED, "cup_hookspecs": CUP_HOOKSPECS, "cup_tests": LEVELS}
    groups = {"nanovllm.kinds": {"cup": "cup_plugin"}, "nanovllm.cups": {"mug": "cup_plugin"}}
    install("cups", groups, modules)
    outputs = [run("mug", *more).output for more in (["-k", "enough"], [], ["--seed", "7"])]
    alone, beside, other = (re.findall(r"drew (\d+)", output)[0] for output in outputs)
    assert alone == beside != other
    assert outputs[2].startswith("cup mug 1.2.3, cups: CupConformance, seed 7\n")


def test_a_distribution_that_the_environment_leaves_out_conflicts_with_no_suite(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them claim a name; the command's own test run leaves out the same one."""
    install("other-sjf", {"nanovllm.schedulers": {"sjf": "other_sjf"}}, {"other_sjf": "1/0"})
    assert "NANOVLLM_PLUGINS__DISABLE='[other-sjf]'" in str(refused("sjf"))
    monkeypatch.setenv("NANOVLLM_PLUGINS__DISABLE", "[other-sjf]")
    result = run("sjf", "-k", "heavy")
    assert result.exit_code == 0, result.output


def test_a_plugin_that_breaks_its_contract_fails_with_the_details(install: Install) -> None:
    install(
        "broken", {"nanovllm.attention": {"broken": "broken_plugin"}}, {"broken_plugin": BROKEN}
    )
    result = run("broken", "-k", "layouts")
    assert result.exit_code == 1
    assert re.search("FAILED   layouts name .*: AssertionError: no layout for", result.output)
    assert re.search("_ layouts name blocks that both phases read _", result.output)
    assert result.output.splitlines()[-1].startswith("broken BREAKS the contract of attention")


@pytest.mark.parametrize("chosen", [(), ("-k", "reference or scale")])
def test_code_that_cannot_be_loaded_is_said_once_and_ends_the_run(
    chosen: tuple[str, ...], install: Install
) -> None:
    source = BROKEN.replace("options: []", "options: [KVLayout('NPKD', 16)]")
    install(
        "broken", {"nanovllm.attention": {"broken": "broken_plugin"}}, {"broken_plugin": source}
    )
    result = run("broken", *chosen)
    assert result.exit_code == 1
    [failed] = [line for line in result.output.splitlines() if line.startswith("FAILED")]
    assert "cannot load 'broken_plugin:Backend'" in failed
    assert re.search(r"1 failed, \d skipped; \d+ not run, for its code cannot be", result.output)


def install_wrong(install: Install, method: str, bug: str) -> None:
    """The backend `wrong`: sdpa, with a line of its own behind one of its methods."""
    source = f"""
from dataclasses import replace
from nanovllm_attention_sdpa.backend import SdpaAttention
from nanovllm_attention_sdpa import plugin
from nanovllm_core.api import hookimpl

@hookimpl
def nanovllm_attention():
    [spec] = plugin.nanovllm_attention()
    return [replace(spec, name="wrong", impl="wrong_plugin:Wrong")]

class Wrong(SdpaAttention):
    def {method}(self, *args):
        super().{method}(*args)
        {bug}
"""
    install("wrong", {"nanovllm.attention": {"wrong": "wrong_plugin"}}, {"wrong_plugin": source})


@pytest.mark.slow
def test_the_first_failure_is_of_the_plainest_batch_and_the_report_is_short(
    install: Install,
) -> None:
    """A bug that fails a dozen checks: a line for each, and one traceback without tensors."""
    install_wrong(install, "run_prefill", "args[-1].mul_(2)")
    result = run("wrong", "-k", "not imports nothing heavy")
    lines = result.output.splitlines()
    failed = [line for line in lines if line.startswith("FAILED")]
    assert failed[0].startswith(
        "FAILED   prefill equals the reference: AssertionError: prefill, one block: query_lens [16]"
    )
    assert len(failed) > 10
    assert len(lines) < 100
    assert "tensor(" not in result.output
    assert result.output.count("_ prefill equals the reference _") == 1
    assert "def assert_near" not in result.output, "the suite's own code says nothing"
    assert "--verbose has every failure in full" in lines[-1]


def test_all_failures_are_shown_in_full_where_that_is_asked_for(install: Install) -> None:
    install_wrong(install, "run_prefill", "args[-1].mul_(2)")
    result = run("wrong", "-k", "prefill equals the reference or a batch may have many", "-v")
    assert "_ prefill equals the reference _" in result.output
    assert "_ a batch may have many rows _" in result.output
    assert "def test_a_batch_may_have_many_rows" in result.output
    assert "--verbose" not in result.output


def test_an_error_of_the_author_s_code_is_shown_where_it_happened(install: Install) -> None:
    install_wrong(install, "run_decode", "1 / 0")
    result = run("wrong", "-k", "decode equals the reference")
    assert re.search(r"wrong_plugin\.py:\d+: in run_decode\n    1 / 0\n", result.output)
    assert "attention_checks.py" not in result.output, "the suite's helpers only lead there"


@pytest.mark.parametrize(
    ("words", "checks"),
    [
        ("behind the last", ["nothing is read behind the last key"]),
        (
            "behind_the_last or (rows own blocks and not caches)",
            ["only the rows own blocks are read", "nothing is read behind the last key"],
        ),
        (
            "both parts of a step and all its layers",
            ["both parts of a step and all its layers"],
        ),
    ],
)
def test_checks_are_chosen_by_the_words_that_are_printed(words: str, checks: list[str]) -> None:
    _, *lines, _ = run("sdpa", "-k", words).output.splitlines()
    assert [line[9:].partition(":")[0] for line in lines] == checks


def test_a_printed_name_with_not_in_it_is_no_expression() -> None:
    result = run("fcfs", "-k", "a cached prefix is not computed again")
    assert "passed   a cached prefix is not computed again" in result.output.splitlines()


def test_words_that_cannot_be_read_are_refused() -> None:
    assert "-k 'tail or (' cannot be read" in str(refused("sdpa", "-k", "tail or ("))


def in_its_own_process(*arguments: str) -> str:
    """What the command prints where no suite was imported before."""
    command = [sys.executable, "-m", "nanovllm_core", "plugins", "test", *arguments]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, check=False
    ).stdout


@pytest.mark.slow
def test_a_failed_assert_beside_a_suite_shows_the_values(install: Install) -> None:
    """Suites call checks of other modules of the kit, whose values are shown as well."""
    newest_first = UNEVEN.replace(
        "(0,) * (1 + request.num_prompt_tokens % 2)", "(-request.arrival_index,)"
    ).replace('level="policy"', 'level="policy", max_overtaking_steps=lambda options, request: 0')
    install(
        "uneven",
        {"nanovllm.schedulers": {"uneven": "uneven_plugin"}},
        {"uneven_plugin": newest_first},
    )
    shown = in_its_own_process("uneven", "-k", "passed over")
    assert re.search(r"^E? *assert \d+ <= \d+$", shown, re.MULTILINE), shown


@pytest.mark.slow
def test_a_failed_assert_of_a_suite_shows_the_values(install: Install) -> None:
    """Of the core's suites, and of a suite that belongs to a declared kind."""
    install(
        "uneven", {"nanovllm.schedulers": {"uneven": "uneven_plugin"}}, {"uneven_plugin": UNEVEN}
    )
    assert "assert 2 == 1" in in_its_own_process("uneven", "-k", "keys are tuples").splitlines()[1]
    install(
        "nanovllm-cups",
        {"nanovllm.kinds": {"cup": "cup_plugin"}, "nanovllm.cups": {"mug": "cup_plugin"}},
        {
            "cup_plugin": DECLARED.replace("holds = 3", "holds = 2"),
            "cup_hookspecs": CUP_HOOKSPECS,
            "cup_tests": CUP_TESTS,
        },
    )
    assert "assert 2 >= 3" in in_its_own_process("mug", "-k", "enough").splitlines()[1]


@pytest.mark.slow
def test_cases_that_are_skipped_for_one_reason_are_one_line(install: Install) -> None:
    install(
        "nanovllm-cups",
        {"nanovllm.kinds": {"cup": "cup_plugin"}, "nanovllm.cups": {"mug": "cup_plugin"}},
        {
            "cup_plugin": DECLARED,
            "cup_hookspecs": CUP_HOOKSPECS,
            "cup_tests": CUP_TESTS + SKIPPED_CASES,
        },
    )
    why = "mug declares no lid"
    _, line, verdict = run("mug", "-k", "keeps warm").output.splitlines()
    assert line == f"skipped  it keeps warm (20 cases): {why}"
    assert verdict.endswith("0 passed, 0 failed, 20 skipped")
    _, *lines, _ = run("mug", "-k", "keeps warm", "--verbose").output.splitlines()
    assert len(lines) == 20
    assert lines[0].startswith("skipped  it keeps warm[0]: ")


def test_of_cases_that_fail_the_first_is_named(install: Install) -> None:
    source = UNEVEN + NO_VICTIM
    install(
        "uneven", {"nanovllm.schedulers": {"uneven": "uneven_plugin"}}, {"uneven_plugin": source}
    )
    result = run("uneven", "-k", "a request as large as the cache ends")
    cases = r"\(3 cases, first \[0_steps_ahead\]\): .*victim_key failed: TypeError: no key"
    assert re.search(f"FAILED   a request as large as the cache ends {cases}", result.output)


def test_a_plugin_of_a_declared_kind_is_tested_by_the_suite_that_the_kind_names(
    install: Install,
) -> None:
    install(
        "nanovllm-cups",
        {"nanovllm.kinds": {"cup": "cup_plugin"}, "nanovllm.cups": {"mug": "cup_plugin"}},
        {"cup_plugin": DECLARED, "cup_hookspecs": CUP_HOOKSPECS, "cup_tests": CUP_TESTS},
    )
    result = run("mug")
    assert result.exit_code == 0, result.output
    first, *checks, verdict = result.output.strip().splitlines()
    assert first == "cup mug 1.2.3, nanovllm-cups: CupConformance, seed 0"
    assert "passed   it holds enough" in checks
    assert verdict.startswith("mug keeps the contract of cup plugins here: ")


def install_wordy(install: Install) -> None:
    """A processor that reads the tokenizer, and that requests must tell something."""
    modules = {"wordy_plugin": WORDY, "wordy_code": WORDY_CODE}
    install("wordy", {"nanovllm.logits_processors": {"wordy": "wordy_plugin"}}, modules)


def test_a_processor_that_reads_the_tokenizer_is_tested_with_stated_arguments(
    install: Install,
) -> None:
    """There is a tokenizer, and rows ask for what `--argument` says."""
    install_wordy(install)
    asked = ("--argument", "words=[fox, Mia, \U0001f98a]")
    result = run("wordy", *asked, "-k", "every row keeps an id or rows are changed in place")
    assert result.exit_code == 0, result.output
    assert result.output.endswith("here: 2 passed, 0 failed, 0 skipped\n")


def test_a_missing_argument_is_named_with_how_to_state_it(install: Install) -> None:
    """And not taken for a fault of the processor's, which is not even made."""
    install_wordy(install)
    (Path(sys.path[0]) / "wordy_code.py").write_text("class Wordy:\n    pass\n")
    result = run("wordy", "-k", "every row keeps an id")
    assert result.exit_code == 0, result.output
    assert "words: missing; it has no default (wordy)" in result.output
    assert "--argument KEY=VALUE" in result.output


def test_a_missing_option_is_named_as_the_flag_is_typed(install: Install) -> None:
    source = WORDY.replace("LogitsProcessorSpec", "ObserverSpec").replace(
        "logits_processors", "observers"
    )
    modules = {
        "wordy": source.replace("wordy_code:Wordy", "wordy:Wanted").replace("arguments", "options")
    }
    install("wordy", {"nanovllm.observers": {"wordy": "wordy"}}, modules)
    error = str(refused("wordy"))
    assert error.startswith("--option words: missing; give it with --option words=... (wordy 1.2.3")
    assert str(refused("wordy", "--option", "wrods=[a]")).count("--option ") == 3


def test_arguments_that_no_request_may_ask_are_refused(install: Install) -> None:
    install_wordy(install)
    assert "did you mean words?" in str(refused("wordy", "--argument", "wrods=[fox]"))
    assert "--argument words: 3 must be a list" in str(refused("wordy", "--argument", "words=3"))
    assert "--argument 'words' must be KEY=VALUE" in str(refused("wordy", "--argument", "words"))
    error = refused("sdpa", "--argument", "words=[fox]")
    assert "sdpa is of the kind attention" in str(error)
    assert "--option KEY=VALUE" in str(error)


def install_shelf(install: Install, wanted: str) -> None:
    """A source that looks into the folder which `wanted` gives from the reference."""
    source = SHELF.replace("WANTED", wanted)
    install("shelf", {"nanovllm.checkpoints": {"shelf": "shelf_plugin"}}, {"shelf_plugin": source})


def test_a_source_is_asked_for_the_checkpoint_that_is_stated(
    install: Install, tmp_path: Path
) -> None:
    """And one that asks its shelf for something else does not find it."""
    checkpoint = tmp_path / "small"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    install_shelf(install, "reference")
    result = run("shelf", "--reference", str(checkpoint))
    assert result.exit_code == 0, result.output
    assert "passed   a checkpoint is a folder with a configuration" in result.output
    assert result.output.endswith("here: 6 passed, 0 failed, 0 skipped\n")


def test_a_source_that_changes_the_reference_is_found_out(install: Install, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    install_shelf(install, "reference[:-1]")
    result = run("shelf", "--reference", str(tmp_path))
    assert result.exit_code == 1, result.output
    assert "shelf BREAKS the contract of checkpoint plugins" in result.output


def test_a_source_that_was_asked_for_nothing_is_hardly_tested(install: Install) -> None:
    """Without a reference it opens no checkpoint, however many checks all kinds share."""
    install_shelf(install, "reference[:-1] or 'nowhere'")
    result = run("shelf")
    assert result.exit_code == 0, result.output
    assert "--reference" in result.output
    assert result.output.splitlines()[-1] == (
        "shelf was hardly tested here, and broke nothing: 4 passed, 0 failed, 2 skipped"
    )


def test_only_a_source_is_given_a_reference() -> None:
    error = refused("sdpa", "--reference", "/models/small")
    assert isinstance(error, ConfigError)
    assert "--reference '/models/small' is a checkpoint that a source finds" in str(error)
    assert "sdpa is of the kind attention; leave it out" in str(error)


@pytest.mark.parametrize("flag", ["--option", "--argument"])
def test_a_key_that_is_given_twice_is_refused_with_both_values(flag: str) -> None:
    """Of which the last would have won, unseen."""
    error = refused("sdpa", flag, "kernel=math", flag, "a=1", flag, "kernel=auto")
    assert isinstance(error, ConfigError)
    assert f"{flag} kernel is given twice, as 'math' and as 'auto'; give it once" in str(error)


def test_a_plugin_that_cannot_run_here_is_not_said_to_keep_its_contract() -> None:
    result = run("flash", "-k", "devices or device_runs or in_chunks or reference")
    if "runs on cuda, which is not here" not in result.output:
        pytest.skip("flash runs on this machine")
    assert result.exit_code == 0
    assert result.output.splitlines()[-1].startswith("flash was hardly tested here")


def test_checks_are_chosen_and_a_report_is_written(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    result = run("sdpa", "-k", "layouts", "--junit", str(report), "--option", "kernel=math")
    assert result.output.splitlines()[1:] == [
        "passed   layouts name blocks that both phases read",
        "sdpa keeps the contract of attention plugins here: 1 passed, 0 failed, 0 skipped",
    ]
    [case] = ElementTree.parse(report).iter("testcase")
    assert case.get("name") == "test_layouts_name_blocks_that_both_phases_read"


def test_what_cannot_be_run_is_refused_by_name(install: Install) -> None:
    error = refused("sdqa")
    assert isinstance(error, PluginNotFoundError)
    assert "did you mean sdpa?" in str(error)
    assert "AttentionConformance has a name with 'xyz'" in str(refused("sdpa", "-k", "xyz"))
    error = refused("sdpa", "--option", "kernal=math")
    assert isinstance(error, ConfigError)
    assert "did you mean kernel?" in str(error)
    assert "'kernel' must be KEY=VALUE" in str(refused("sdpa", "--option", "kernel"))
    install("two", {"nanovllm.schedulers": {"sdpa": "two_plugin"}}, {"two_plugin": ""})
    assert "say which with --kind attention or scheduler" in str(refused("sdpa"))


def test_a_plugin_whose_group_is_misspelt_is_found_out(install: Install) -> None:
    """A plugin of that very name in an unknown group comes before one of a similar name."""
    install("odd", {"nanovllm.observer": {"singular": "odd_plugin"}}, {"odd_plugin": ""})
    why = (
        "'singular' is in the group 'nanovllm.observer' of odd 1.2.3, which is that of no "
        "installed kind; did you mean nanovllm.observers?"
    )
    for arguments in (["singular"], ["singular", "--kind", "observer"]):
        error = refused(*arguments)
        assert isinstance(error, PluginNotFoundError)
        assert why in str(error)
        assert "single?" not in str(error)


def test_a_plugin_whose_kind_is_not_installed_is_found_out(install: Install) -> None:
    install("cups", {"nanovllm.cups": {"mug": "cup_plugin"}}, {"cup_plugin": ""})
    error = str(refused("mug"))
    assert "'mug' is in the group 'nanovllm.cups' of cups 1.2.3, which is that of no" in error
    assert "did you mean" not in error


def test_an_option_that_cannot_be_read_is_refused() -> None:
    assert "--option ageing, line 1, column 2: not valid YAML" in str(
        refused("fcfs", "--option", "ageing=[")
    )
    assert "must be KEY=VALUE" in str(refused("fcfs", "--option", "ageing"))


HEADS_ALONE = """
from nanovllm_core.api import ModelSpec, hookimpl
from nanovllm_core.layers import DecoderConfig, DecoderForCausalLM, positive_int, refuse_unless

@hookimpl
def nanovllm_models():
    return [ModelSpec(name="MinistralForCausalLM", impl="alone_plugin:Model", contract=2{stated})]

class Model(DecoderForCausalLM):
    @classmethod
    def read_config(cls, config):
        refuse_unless(config, num_key_value_heads=positive_int(config, "num_attention_heads"))
        refuse_unless(config, attention_bias=False, mlp_bias=False)
        return DecoderConfig.from_config(config)
"""


def install_heads_alone(install: Install, stated: str = "") -> None:
    """A model with a KV head for each head, which the suite's small configuration has not."""
    modules = {"alone_plugin": HEADS_ALONE.format(stated=stated)}
    install("alone", {"nanovllm.models": {"MinistralForCausalLM": "alone_plugin"}}, modules)


def test_a_model_that_cannot_be_built_is_one_failure_with_what_to_state(install: Install) -> None:
    """Every other check would have failed for that reason."""
    install_heads_alone(install)
    result = run("MinistralForCausalLM", "-k", "not heavy and not imported and not longest")
    assert result.exit_code == 1
    assert result.output.count("FAILED") == 1
    assert "FAILED   the model of the test configuration can be built" in result.output
    assert re.search(r"num_key_value_heads 2 is not supported, .*--test-config", result.output)
    assert re.search(r"1 passed, 1 failed, \d\d skipped", result.output)


PHI3 = """
from nanovllm_core.api import ModelSpec, hookimpl
from nanovllm_core.layers import DecoderConfig, DecoderForCausalLM

@hookimpl
def nanovllm_models():
    return [ModelSpec(name="Phi3ForCausalLM", impl="phi_plugin:Model", contract=2)]

class Model(DecoderForCausalLM):
    @classmethod
    def read_config(cls, config):
        return DecoderConfig.from_config(config)
"""


def test_weights_under_other_names_are_said_to_need_packed_modules(install: Install) -> None:
    """The reference of a model that was just begun; no checkpoint was downloaded in part."""
    install("phi", {"nanovllm.models": {"Phi3ForCausalLM": "phi_plugin"}}, {"phi_plugin": PHI3})
    result = run("Phi3ForCausalLM", "-k", "built")
    said = " ".join(result.output.split())
    assert result.exit_code == 1
    assert "Phi3ForCausalLM of transformers has weights under other names" in said
    assert "qkv_proj" in said
    assert "map the names in packed_modules" in said
    assert "download" not in said


def test_a_model_of_a_new_name_is_compared_with_the_class_that_is_named(install: Install) -> None:
    """Without one the command ends at once: nothing has been tested, so nothing is broken."""
    source = HEADS_ALONE.format(stated=", test_config={'num_key_value_heads': 4}")
    modules = {"alone_plugin": source.replace("MinistralForCausalLM", "OwnForCausalLM")}
    install("alone", {"nanovllm.models": {"OwnForCausalLM": "alone_plugin"}}, modules)
    for named in ([], ["--reference", "OwnerForCausalLM"]):
        error = str(refused("OwnForCausalLM", *named))
        assert re.search(r"no class 'Own(er)?ForCausalLM' to compare .*--reference", error)
    result = run("OwnForCausalLM", "--reference", "MinistralForCausalLM", "-k", "built")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("where", ["the spec", "the command"])
def test_a_stated_test_configuration_is_used(where: str, install: Install) -> None:
    """By the checks of one size, and by those that draw theirs."""
    told = where == "the command"
    install_heads_alone(install, "" if told else ", test_config={'num_key_value_heads': 4}")
    stated = ["--test-config", "num_key_value_heads=4"] if told else []
    chosen = "built or sizes equal"
    result = run("MinistralForCausalLM", *stated, "-k", chosen)
    assert result.exit_code == 0, result.output
    assert "passed   drawn sizes equal transformers (7 cases)" in result.output


def test_a_test_configuration_is_for_models_alone() -> None:
    error = refused("sdpa", "--test-config", "hidden_size=64")
    assert isinstance(error, ConfigError)
    assert re.search(r"hidden_size is for models, and sdpa is of the kind attention", str(error))
