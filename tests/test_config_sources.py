"""Where values come from, what wins, and what the errors say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm_core.config.errors import FLAT_KEYWORDS
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.config.sources import (
    load_config,
    load_with_sources,
    parse_flags,
)
from nanovllm_core.errors import ConfigError

WriteYaml = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> WriteYaml:
    def write_yaml(text: str) -> Path:
        file = tmp_path / "engine.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return write_yaml


def load(
    file: Path | None = None, env: dict[str, str] | None = None, **overrides: Any
) -> EngineConfig:
    return load_config("demo", file=file, env=env or {}, overrides=overrides)


def test_arguments_win_over_environment_over_file_over_defaults(write: WriteYaml) -> None:
    file = write("seed: 1\nsteps_ahead: 2\ncache: {block_size: 32, num_blocks: 10}\n")
    env = {"NANOVLLM_STEPS_AHEAD": "3", "NANOVLLM_CACHE__NUM_BLOCKS": "20", "PATH": "/bin"}
    config = load(file, env, cache={"num_blocks": 30})
    assert config.seed == 1
    assert config.steps_ahead == 3
    assert (config.cache.block_size, config.cache.num_blocks) == (32, 30)
    assert config.limits.max_num_seqs == 256


def test_the_source_of_every_value_is_known(write: WriteYaml) -> None:
    file = write("seed: 1\nattention: triton\n")
    loaded = load_with_sources(
        "demo", file=file, env={"NANOVLLM_DEBUG": "true"}, overrides={"max_num_seqs": 4}
    )
    assert loaded.sources == {
        "seed": str(file),
        "attention.prefill.backend": str(file),
        "attention.decode.backend": str(file),
        "debug": "NANOVLLM_DEBUG",
        "limits.max_num_seqs": "argument",
        "model": "argument",
    }


def test_the_environment_is_read_as_yaml() -> None:
    env = {
        "NANOVLLM_ATTENTION": "{prefill: flash, decode: triton}",
        "NANOVLLM_CUDA_GRAPHS__SIZES": "[1, 256]",
        "NANOVLLM_LIMITS__MAX_MODEL_LEN": "null",
        "NANOVLLM_CACHE__PREFIX_CACHING": "false",
    }
    config = load(env=env)
    assert config.attention.prefill.backend == "flash"
    assert config.cuda_graphs.sizes == (1, 256)
    assert config.limits.max_model_len is None
    assert config.cache.prefix_caching is False


def test_another_backend_by_name_drops_the_options_of_the_first(write: WriteYaml) -> None:
    file = write("attention: {backend: triton, options: {chunk: 1}}\nscheduler: {name: sjf}\n")
    config = load(file, {"NANOVLLM_ATTENTION__BACKEND": "flash"}, scheduler="fcfs")
    assert config.attention.prefill.backend == "flash"
    assert config.attention.decode.options == {}
    assert config.scheduler.name == "fcfs"


def test_the_same_backend_again_keeps_the_options(write: WriteYaml) -> None:
    file = write("attention: {backend: triton, options: {chunk: 1, depth: 2}}")
    config = load(file, attention={"backend": "triton", "options": {"chunk": 3}})
    assert config.attention.decode.options == {"chunk": 3, "depth": 2}


def test_one_phase_may_be_changed_by_a_higher_layer(write: WriteYaml) -> None:
    file = write("attention: sdpa")
    config = load(file, {"NANOVLLM_ATTENTION__DECODE__BACKEND": "triton"})
    assert config.attention.prefill.backend == "sdpa"
    assert config.attention.decode.backend == "triton"


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("max_num_batched_tokens", 512),
        ("max_num_seqs", 8),
        ("max_model_len", 99),
        ("gpu_memory_utilization", 0.5),
        ("kvcache_block_size", 64),
        ("num_kvcache_blocks", 7),
        ("enforce_eager", True),
        ("tensor_parallel_size", 2),
    ],
)
def test_flat_keywords_of_nano_vllm_set_the_nested_fields(keyword: str, value: Any) -> None:
    field: Any = load(**{keyword: value})
    for part in FLAT_KEYWORDS[keyword].split("."):
        field = getattr(field, part)
    assert field == value


@pytest.mark.parametrize("keyword", ["num_kvcache_blocks", "cache.num_blocks"])
def test_nano_vllms_default_for_as_many_blocks_as_fit_gets_its_remedy(keyword: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**{keyword: -1})
    assert str(caught.value) == (
        "cache.num_blocks: -1 must be at least 1; leave it out for as many as fit [argument]"
    )


def test_every_flat_keyword_is_tested_above() -> None:
    parameters = test_flat_keywords_of_nano_vllm_set_the_nested_fields.pytestmark[0].args[1]
    assert {keyword for keyword, _ in parameters} == set(FLAT_KEYWORDS)


def test_a_dotted_path_sets_a_nested_field() -> None:
    settings = parse_flags(["cache.block_size=32"])
    assert load_with_sources("m", overrides=settings, env={}).config.cache.block_size == 32


@pytest.mark.parametrize("text", ["cache.block_size", "=3", " =3"])
def test_a_setting_without_a_path_or_a_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected path=value"):
        parse_flags([text])


@pytest.mark.parametrize("name_first", [True, False])
def test_a_short_form_and_a_dotted_option_are_both_heard(name_first: bool) -> None:
    """As flags give them: `--attention sdpa --set attention.options.kernel=math`."""
    names = {"attention": "sdpa", "scheduler": "sjf"}
    options = {"attention.options.kernel": "math", "scheduler.options.ageing": 3}
    overrides = names | options if name_first else options | names
    config = load_config("demo", overrides=overrides, env={})
    for choice in (config.attention.prefill, config.attention.decode):
        assert (choice.backend, choice.options) == ("sdpa", {"kernel": "math"})
    assert (config.scheduler.name, config.scheduler.options) == ("sjf", {"ageing": 3})


def test_a_section_of_an_installed_command_is_left_to_it(
    write: WriteYaml, install: Callable[..., None]
) -> None:
    """From every source, merged by key as other sections are; the engine's fields stay its own."""
    entries = {"party": "party:app", "plugins.hosts": "party:hosts", "seed": "party:seed"}
    install("nanovllm-party", {"nanovllm.commands": entries}, {})
    loaded = load_with_sources(
        "demo",
        file=write("party: {guests: 3, place: {name: hall}}\nseed: 5"),
        env={"NANOVLLM_PARTY__PLACE__FLOOR": "2"},
        overrides=parse_flags(["party.guests=4"]),
    )
    assert loaded.sections == {"party": {"guests": 4, "place": {"name": "hall", "floor": 2}}}
    assert loaded.config.seed == 5
    assert {path.partition(".")[0] for path in loaded.sources} == {"model", "seed"}


def test_a_misspelt_section_of_an_installed_command_is_recognised(
    write: WriteYaml, install: Callable[..., None]
) -> None:
    """At the top of the file, where it may stand, and nowhere else."""
    install("nanovllm-party", {"nanovllm.commands": {"party": "party:app"}}, {})
    with pytest.raises(ConfigError, match=r"parti: unknown key .*; did you mean party\?"):
        load(write("parti: {guests: 3}"))
    with pytest.raises(ConfigError, match=r"cache.parti: unknown key .*; known here: block_size"):
        load(write("cache: {parti: {guests: 3}}"))


def test_a_section_of_no_installed_command_is_an_unknown_key(write: WriteYaml) -> None:
    with pytest.raises(ConfigError, match="party: unknown key"):
        load(write("party: {guests: 3}"))


def test_the_defaults_of_a_command_are_below_every_source(write: WriteYaml) -> None:
    defaults = {"model": "demo", "seed": 3}
    loaded = load_with_sources(file=write("seed: 4"), env={}, defaults=defaults)
    assert (loaded.config.model, loaded.config.seed) == ("demo", 4)
    assert loaded.sources == {"model": "default", "seed": str(write("seed: 4"))}


def test_the_same_field_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice, 3 by limits and 4 by max_num_seqs; g"):
        load(limits={"max_num_seqs": 3}, max_num_seqs=4)


KWARGS = "chat_template_kwargs"


def test_one_path_set_twice_is_refused() -> None:
    """As an option that is given twice is."""
    for again, said in ((" seed =x", "'x'"), ("seed=1", "1")):
        settings = parse_flags(["seed=1", "debug=true", again])
        with pytest.raises(
            ConfigError, match=f"seed: given twice, 1 by --set seed and {said} by --set seed;"
        ):
            load_with_sources("demo", env={}, overrides=settings)
    for texts in (["scheduler=", "scheduler=sjf"], [f"{KWARGS}={{}}", f"{KWARGS}={{a: 1}}"]):
        with pytest.raises(ConfigError, match=r"given twice, (None|\{\}) by --set"):
            load_with_sources("demo", env={}, overrides=parse_flags(texts))


def test_one_key_as_a_number_and_as_text_is_given_twice() -> None:
    with pytest.raises(ConfigError, match=r"kwargs\.3: given twice, 1 by chat.* and 2 by chat"):
        load(**{KWARGS: {3: 1, "3": 2}})


def test_an_iterator_is_read_once_and_whole() -> None:
    config = load(
        observers=({"name": name} for name in "ab"),
        cuda_graphs={"prompt_sizes": (size for size in (128, 256))},
    )
    assert [one.name for one in config.observers] == ["a", "b"]
    assert config.cuda_graphs.prompt_sizes == (128, 256)


def test_a_field_given_twice_in_the_environment_is_refused() -> None:
    names = {"NANOVLLM_LIMITS": "{max_num_seqs: 3}", "NANOVLLM_LIMITS__MAX_NUM_SEQS": "3"}
    with pytest.raises(
        ConfigError, match="twice, 3 by NANOVLLM_LIMITS and 3 by NANOVLLM_LIMITS__M"
    ):
        load(env=names)
    with pytest.raises(
        ConfigError, match="seed: given twice, 1 by NANOVLLM_SEED and 2 by NANOVLLM_S"
    ):
        load(env={"NANOVLLM_SEED": "1", "NANOVLLM_Seed": "2"})


def test_a_model_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="model: given twice"):
        load(model="other")


@pytest.mark.parametrize("keyword", ["eos", "hf_config"])
def test_keywords_without_a_field_say_what_to_do(keyword: str) -> None:
    with pytest.raises(ConfigError, match=f"{keyword}: not a setting .* drop it"):
        load(**{keyword: 3})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cache: {blok_size: 16}",
         "cache.blok_size: unknown key (value 16); did you mean block_size?"),
        ("max_num_seqs: 4",
         "max_num_seqs: unknown key (value 4); did you mean limits.max_num_seqs?"),
        ("block_size: 16", "did you mean cache.block_size?"),
        ("blok_size: 16", "did you mean cache.block_size?"),
        ("backend: triton", "did you mean attention.backend?"),
        ("prefill: triton", "did you mean attention.prefill?"),
        ("attention: {bakend: triton}", "attention.bakend: unknown key (value 'triton'); "
         "did you mean backend?"),
        ("attention: {prefill: {bakend: 1}}", "attention.prefill.bakend: unknown key"),
        ("cache.block_size: 32", "cache.block_size: unknown key (value 32); in a file, write "
         "cache: {block_size: 32} ["),
        ("attention.decode.backend: flash", 'write attention: {decode: {backend: "flash"}} ['),
        ("scheduler.options.x: [1]", "write scheduler: {options: {x: [1]}} ["),
        ("cache.block_siz: 3", "unknown key (value 3); did you mean cache.block_size?"),
        ("cache.blok: 32", "cache.blok: unknown key (value 32); "),
        ("cache: {zzz: 1}", "known here: block_size, gpu_memory_utilization"),
        ("dtype: bfloat61", "dtype: 'bfloat61' must be 'auto', 'float32', 'float16' or 'bfloat16'; "
         "did you mean bfloat16?"),
        ("device: gpu", "device: 'gpu' must be auto, cpu, cuda or cuda:N"),
        ("limits: {max_num_seqs: many}", "limits.max_num_seqs: 'many' must be a whole number"),
        ("seed: 1.5", "seed: 1.5 must be a whole number"),
        ("steps_ahead: 9", "steps_ahead: 9 must be at most 8"),
        ("seed: -1", "seed: -1 must be at least 0"),
        ("cache: {gpu_memory_utilization: 0}", "gpu_memory_utilization: 0 must be above 0"),
        ("cache: {gpu_memory_utilization: much}", "'much' must be a number"),
        ("debug: 3", "debug: 3 must be true or false"),
        ("debug: yes", "debug: 'yes' must be true or false; write true ["),
        ("debug: Off", "debug: 'Off' must be true or false; write false ["),
        ("debug: 0", "debug: 0 must be true or false; write false ["),
        ("seed: '5'", "seed: '5' must be a whole number; write 5 ["),
        ("seed: '0.5'", "seed: '0.5' must be a whole number ["),
        ("cache: {gpu_memory_utilization: '9e-1'}", "'9e-1' must be a number; write 0.9 ["),
        ("cache: {gpu_memory_utilization: 'nan'}", "'nan' must be a number ["),
        ("cache: {num_blocks: '-1'}", "'-1' must be a whole number; leave it out for as many as"),
        ("seed: 1:30", "seed: '1:30' must be a whole number"),
        ("seed: 2024-13-45", "seed: '2024-13-45' must be a whole number"),
        ("seed: 1_000", "seed: '1_000' must be a whole number"),
        ("observers: [lines, {}]", "observers[1].name: missing; name the plugin; nanovllm plugins"),
        ("1: 2", "the key 1 must be text; put it in quotes ["),
        ("scheduler: {name: s, options: {1: 2}}", "scheduler.options: the key 1 must be text"),
        ("plugins: {options: {1: {a: 2}}}", "plugins.options: the key 1 must be text"),
        ("limits: {max_num_seqs: 65537}", "limits.max_num_seqs: 65537 must be at most 65536"),
        (f"observers: [{'a, ' * 101}]", "must be a list of at most 100 items ["),
        (f"device: cuda:{'9' * 5000}", "must be auto, cpu, cuda or cuda:N"),
        ("observers: 3", "observers: 3 must be a list"),
        ("plugins: {options: 3}", "plugins.options: 3 must be a section of `key: value` lines"),
        ("tokenizer: ''", "tokenizer: '' must be text of 1 or more characters"),
        ("attention: {backend: 5}", "attention.backend: 5 must be text"),
        ("attention: {prefill: {backend: 5}}", "attention.prefill.backend: 5 must be text"),
        ("attention: 5", "attention: 5 must be the name of a plugin, or a section of `key: value`"),
        ("scheduler: [sjf]", "scheduler: ['sjf'] must be the name of a plugin, or a section"),
        ("observers: [[a]]", "observers[0]: ['a'] must be the name of a plugin, or a section"),
        ("attention: flash+triton",
         "'flash+triton' is a pair; in YAML write {prefill: flash, decode: triton} ["),
        ("cach: {}", "cach: unknown key (value {}); did you mean cache? ["),
        ("cache: {block_size: 32, blok: {}}", "cache.blok: unknown key (value {}); "),
        ("attention: {backend: a, prefill: b}", "attention: give either backend and options"),
        ("cache: 3", "cache: 3 must be a section of `key: value` lines"),
        ("cache: {1: 2}", "cache: the key 1 must be text; put it in quotes"),
        ("cache: {block_size: 24}", "cache.block_size: 24 must be one of 16, 32, 64, 128, 256"),
        ("limits: {max_num_seqs: 9, max_num_batched_tokens: 8}",
         "limits: max_num_batched_tokens (8) must be at least max_num_seqs (9)"),
        ("cuda_graphs: {sizes: [1, x]}", "cuda_graphs.sizes[1]: 'x' must be a whole number"),
        ("cuda_graphs: {sizes: []}",
         "cuda_graphs.sizes [] must increase and end with limits.max_num_seqs (256) ["),
        ("cuda_graphs: {prompt_sizes: [16385]}", "no step has more prompt tokens ["),
    ],
)  # fmt: skip
def test_an_error_names_path_value_remedy_and_file(write: WriteYaml, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(text))
    message = str(caught.value)
    assert said in message
    assert "engine.yaml" in message
    assert message.count("\n") == 0, "one mistake is told once"


def test_every_mistake_is_told(write: WriteYaml) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write("seed: x\ncache: {blok_size: 16}"), {"NANOVLLM_DEBUG": "3"})
    message = str(caught.value)
    paths = {line.split(":")[0] for line in message.splitlines()}
    assert paths == {"seed", "debug", "cache.blok_size"}
    assert "NANOVLLM_DEBUG" in message


def test_a_missing_model_is_told_with_what_it_may_be() -> None:
    with pytest.raises(ConfigError, match=r"model: missing; name a folder .*demo.*Qwen/Qwen3"):
        load_config(env={})


@pytest.mark.parametrize("text", ["", "# nothing\n", "seed: 1\n"])
def test_the_file_that_names_no_model_is_told(write: WriteYaml, text: str) -> None:
    with pytest.raises(ConfigError, match=r"^model: missing; name a folder .* \[.*engine\.yaml\]$"):
        load_config(file=write(text), env={})


@pytest.mark.parametrize("section", ["", "cache.", "attention.", "attention.prefill."])
def test_of_many_mistakes_the_first_twenty_are_told_and_the_others_counted(
    monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    """Likenesses are looked for in those twenty alone, a fixed number of times each."""
    looked: list[str] = []

    def nearest(name: str, known: object) -> None:
        looked.append(name)

    monkeypatch.setattr("nanovllm_core.errors.nearest", nearest)
    with pytest.raises(ConfigError) as caught:
        load(**{f"{section}k{i}": i for i in range(3000)})
    lines = str(caught.value).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "... and 2980 more"
    assert len(looked) <= 40


def test_what_is_wrong_in_both_phases_alike_counts_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(attention={"backend": "x", "options": {i: i for i in range(30)}})
    assert str(caught.value).splitlines()[-1] == "... and 10 more"


LONG = "x" * 10**6


@pytest.mark.parametrize(
    "overrides",
    [
        {"seed": LONG},
        {"dtype": LONG},
        {"debug": [LONG]},
        {"device": LONG},
        {"limits": LONG},
        {"limits": {"max_num_seqs": {LONG: LONG}}},
        {LONG: LONG},
        {f"cache.{LONG}": 1},
        {"cache": {"cache.block_size": LONG}},
        {"attention": [LONG]},
        {"attention": {"options": {LONG: 1}}},
        {"observers": [{LONG: LONG}]},
        {"logits_processors": [LONG, LONG]},
        {"plugins": {"options": {LONG: {}}}},
        {"cuda_graphs": {"sizes": [*range(9000, 0, -1)]}},
        {"eos": LONG},
    ],
    ids=lambda overrides: next(iter(overrides))[:20],
)
def test_a_long_value_or_key_is_cut_in_the_message(overrides: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**overrides)
    assert len(str(caught.value)) < 1000


def circle() -> dict[str, Any]:
    inner: dict[str, Any] = {}
    inner["again"] = [inner]
    return inner


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"seed": 10**5000}, "seed: <a whole number of 16610 bits> does not fit in 64 bits"),
        ({"seed": 2**70}, f"seed: {2**70} does not fit in 64 bits; write a smaller number .arg"),
        ({"observers": [10**5000]}, r"observers\[0\]: <a whole number of 16610 bits> does not fit"),
        ({"scheduler": {"options": {10**5000: 1}}}, r"options: <a whole .* bits> does not fit"),
        ({"scheduler": {"options": {None: 1}}}, "options: the key None must be text"),
        ({"observers": [{"options": {0.5: 1}}]}, r"observers\[0\].options: the key 0.5 must"),
        ({"scheduler.options.x": {True: 1}}, "options.x: the key True must be text; put it in qu"),
        ({"cache": circle()}, "cache.again.* nested too deeply, beyond 32 levels .argument"),
        ({"observers": [circle()]}, r"observers\[0\].again.* nested too deeply"),
        ({"a." * 1000: 1}, "nested too deeply, beyond 32 levels"),
        ({"model": "\ud800"}, "model: .* has half of a surrogate pair; write .*argument"),
        ({"\ud800": 1}, r"^'.ud800' has half of a surrogate pair"),
        ({5: 1}, "the argument 5 must be text: the name of a field"),
    ],
)
def test_what_no_text_could_say_is_refused(overrides: dict[Any, Any], said: str) -> None:
    """Python's arguments may hold what no file can: circles, huge numbers, other keys."""
    with pytest.raises(ConfigError, match=said):
        load_config(env={}, overrides=overrides)


def test_a_path_of_a_thousand_parts_is_refused_by_each_door() -> None:
    with pytest.raises(ConfigError, match=r"nested too deeply, .* \[NANOVLLM_A__A"):
        load(env={"NANOVLLM_" + "A__" * 1000: "1"})
    with pytest.raises(ConfigError, match=r"nested too deeply, beyond 32 levels"):
        load_with_sources(env={}, overrides=parse_flags(["a." * 1000 + "=1"]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cache: [", "engine.yaml, line 1, column 9: not valid YAML: expected the node content"),
        ("seed: 1\nseed: 2\n", "line 2, column 1: not valid YAML: the key 'seed' is there twice"),
        ("- demo", "holds list ['demo']; expected `key: value` lines"),
        ("seed: \x00", "engine.yaml: not valid YAML"),
        (
            "? [a]\n: 1\n",
            "line 1, column 3: not valid YAML: a key must be text or a whole number",
        ),
        ("limits: &a {x: *a}", "line 1, column 16: not valid YAML: the anchor 'a' holds itself"),
        ("observers: &a [*a]", "line 1, column 16: not valid YAML: the anchor 'a' holds itself"),
        ("[" * 3000, "line 1, column 33: not valid YAML: nested too deeply, beyond 32 levels"),
        ("a: " + "{a: " * 400 + "}" * 400, "not valid YAML: nested too deeply, beyond 32 levels"),
    ],
)
def test_unreadable_yaml_names_file_line_and_problem(
    write: WriteYaml, text: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(text))
    assert said in str(caught.value)


def test_an_anchor_that_does_not_hold_itself_is_what_it_names(write: WriteYaml) -> None:
    config = load(write("limits: &a {max_num_seqs: 3}\ncache: {<<: {block_size: 32}}\n"))
    assert (config.limits.max_num_seqs, config.cache.block_size) == (3, 32)


@pytest.mark.parametrize(
    ("text", "env", "said"),
    [
        ("", {"LIMITS": "5", "LIMITS__MAX_NUM_SEQS": "3"}, "limits: 5 .*NANOVLLM_LIMITS]"),
        ("limits: 5", {"LIMITS__MAX_NUM_SEQS": "3"}, "limits: 5 .*engine.yaml]"),
        ("scheduler: {options: 5}", {"SCHEDULER__OPTIONS__X": "3"}, "scheduler.options: 5 "),
    ],
)
def test_a_wrong_section_is_an_error_though_a_key_of_it_is_set_above(
    write: WriteYaml, text: str, env: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load(write(text), {f"NANOVLLM_{name}": value for name, value in env.items()})


def test_an_argument_for_a_whole_section_and_one_for_a_key_of_it_are_refused_too() -> None:
    with pytest.raises(ConfigError, match="limits: 5 must be a section"):
        load(**{"limits": 5, "limits.max_num_seqs": 3})


def test_a_section_that_is_empty_and_an_option_of_another_form_are_laid_over(
    write: WriteYaml,
) -> None:
    """An option's form is the plugin's affair: a mapping may take the place of a number."""
    file = write("limits:\nscheduler: {name: s, options: {x: 5}}\n")
    env = {"NANOVLLM_LIMITS__MAX_NUM_SEQS": "3", "NANOVLLM_SCHEDULER__OPTIONS__X__Y": "1"}
    config = load(file, env)
    assert config.limits.max_num_seqs == 3
    assert config.scheduler.options == {"x": {"y": 1}}


def test_an_unreadable_environment_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="NANOVLLM_SEED, line 1, column 2: not valid YAML"):
        load(env={"NANOVLLM_SEED": "["})


def test_an_empty_file_means_the_defaults(write: WriteYaml) -> None:
    assert load(write("# nothing\n")) == EngineConfig(model="demo")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"none\.yaml' cannot be read: No such file or directory$"
    ):
        load(tmp_path / "none.yaml")


def test_a_folder_is_a_model_and_no_file(tmp_path: Path) -> None:
    """As `nanovllm explain FOLDER` takes it."""
    with pytest.raises(ConfigError, match=r"Is a directory; give a file, with .* as `model`$"):
        load(tmp_path)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(b"seed: \xff")
    with pytest.raises(
        ConfigError,
        match=r"weights\.bin' cannot be read: .utf-8. codec can.t decode byte 0xff in position 6",
    ):
        load(file)


def test_lists_of_plugins_take_names_and_mappings_from_every_source(tmp_path: Path) -> None:
    """A list of a higher source replaces that of a lower one whole."""
    file = tmp_path / "engine.yaml"
    file.write_text("observers: [{name: lines, options: {path: x}}]\nlogits_processors: [ban]\n")
    config = load_config("demo", file=file, env={"NANOVLLM_OBSERVERS": "[a, {name: b}]"})
    assert [one.name for one in config.observers] == ["a", "b"]
    assert [one.name for one in config.logits_processors] == ["ban"]
    config = load_config("demo", file=file, env={}, overrides={"observers": []})
    assert config.observers == ()
    assert load_config("demo", file=file, env={}).observers[0].options == {"path": "x"}


@pytest.mark.parametrize("section", ["sampler", "kernels"])
def test_naming_another_sampler_or_kernel_set_drops_the_lower_ones_options(
    tmp_path: Path, section: str
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(f"{section}: {{name: one, options: {{x: 1}}}}\n")
    same = load_config("demo", file=file, env={}, overrides={f"{section}.options.y": 2})
    assert getattr(same, section).options == {"x": 1, "y": 2}
    other = load_config("demo", file=file, env={}, overrides={section: "other"})
    assert (getattr(other, section).name, getattr(other, section).options) == ("other", {})
