"""YAML 1.2's core schema, its limits, and hostile text at every door."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from typer.testing import CliRunner

from nanovllm_core.cli.main import make_app
from nanovllm_core.config.sources import load_config, load_with_sources, parse_flags
from nanovllm_core.config.yaml_reader import MAX_SIZE, MAX_VALUES, flow_yaml, parse_yaml
from nanovllm_core.errors import MAX_MESSAGE, ConfigError, NanoVLLMError

Door = Callable[[str], object]


@pytest.fixture
def doors(tmp_path: Path) -> dict[str, Door]:
    """Every way in which text becomes a configuration or an option; each takes one value."""

    def from_file(text: str) -> object:
        file = tmp_path / "engine.yaml"
        file.write_text(f"seed: {text}", encoding="utf-8", errors="surrogatepass", newline="")
        return load_config("demo", file=file, env={}).seed

    def as_option(text: str) -> object:
        arguments = ["plugins", "test", "fcfs", "--option", f"seed={text}"]
        result = CliRunner().invoke(make_app(), arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return None

    return {
        "engine.yaml": from_file,
        "NANOVLLM_SEED": lambda text: load_config("demo", env={"NANOVLLM_SEED": text}).seed,
        "--set seed": lambda text: parse_flags([f"seed={text}"])[0].value,
        "--option seed": as_option,
    }


CORE_SCHEMA: dict[str, Any] = {
    "~": None, "null": None, "Null": None, "NULL": None, "": None, "nULL": "nULL",
    "true": True, "True": True, "TRUE": True, "false": False, "tRUE": "tRUE",
    "yes": "yes", "no": "no", "on": "on", "Off": "Off", "y": "y",
    "0": 0, "17": 17, "+12": 12, "-19": -19, "017": 17, "-08": -8, "0o17": 15, "0x1F": 31,
    "0o8": "0o8", "-0x1": "-0x1", "0b11": "0b11", "1_000": "1_000", "1:30": "1:30",
    "18446744073709551615": 2**64 - 1, "-9223372036854775808": -(2**63),
    "9e-1": 0.9, "1e3": 1000.0, "1.": 1.0, ".5": 0.5, "+12.3E+2": 1230.0, "-0.0": -0.0,
    "685_230.15": "685_230.15", "190:20:30.15": "190:20:30.15", ".": ".", "1e": "1e", "e1": "e1",
    ".inf": math.inf, "-.INF": -math.inf, ".Nan": ".Nan", "inf": "inf", "nan": "nan",
    "2024-01-01": "2024-01-01", "2024-13-45": "2024-13-45", "12:30:45": "12:30:45",
    "=": "=", "<<": "<<", "!!str 5": "5", "!!int '5'": 5, "!!float 1": 1.0,
    "'5'": "5", '"true"': "true", r'"\ud83d\ude00"': "😀", "0." + "3" * 500: 1 / 3,
}  # fmt: skip


def test_a_text_without_quotes_means_what_the_core_schema_of_yaml_1_2_says() -> None:
    """Booleans are true and false, numbers are JSON's, and there are neither dates nor times."""
    for text, meant in CORE_SCHEMA.items():
        read = parse_yaml(text, "text")
        assert (type(read), read) == (type(meant), meant), text
    assert math.isnan(parse_yaml(".nan", "text"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.sampled_from([text for text in CORE_SCHEMA]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text() | st.integers(-9, 9), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@given(JSON)
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_again_as_it_was(value: object) -> None:
    """`nanovllm config show` writes what a file may hold."""
    assert repr(parse_yaml(f"[{flow_yaml(value)}]", "text")) == repr([value])


def test_merge_keys_and_anchors_work_and_own_keys_win() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: {<<: [*a, {z: 4}]}\n"
    read = parse_yaml(text, "text")
    assert read["b"] == {"x": 1, "y": 3}
    assert read["c"] == {"x": 1, "y": 2, "z": 4}


WRONG: dict[str, str] = {
    "!!bool maybe": "'maybe' is not of the type !!bool; correct it, or leave the tag out",
    "!!int abc": "'abc' is not of the type !!int",
    "!!int ''": "'' is not of the type !!int",
    "!!float x": "'x' is not of the type !!float",
    "!!null x": "'x' is not of the type !!null",
    "!!timestamp abc": "the tag !!timestamp is not of YAML 1.2's core schema",
    "!!omap [a: 1]": "the tag !!omap",
    "!!set {a}": "the tag !!set",
    "!!binary /w==": "the tag !!binary",
    "!!python/name:os.system x": "the tag !!python/name:os.system",
    "!own x": "the tag !own",
    "!!int [1]": "the tag !!int is not of YAML 1.2's core schema, or does not go with this value",
    "!!map 3": "the tag !!map",
    "9" * 4301: "does not fit in 64 bits; write a smaller number, .inf, or text in quotes",
    "0x" + "f" * 17: "does not fit in 64 bits",
    "18446744073709551616": "does not fit in 64 bits",
    "1e400": "1e400 does not fit in 64 bits; write a smaller number, .inf, or text in quotes",
    '"\\ud800"': r"'\ud800' has half of a surrogate pair; write the whole character",
    '"\\U00110000"': "not valid YAML",
    "{1: a, 0x1: b}": "the key 1 is there twice",
    "{a: 1, 'a': 2}": "the key 'a' is there twice",
    "{<<: {a: 1}, <<: {b: 1}}": "the key '<<' is there twice",
    "{~: 1}": "a key must be text or a whole number, not None; put it in quotes",
    "{true: 1}": "a key must be text or a whole number, not True",
    "{1.5: 1}": "not 1.5",
    "{[a]: 1}": "not ['a']; put it in quotes",
    "&a [*a]": "the anchor 'a' holds itself",
    f"[&a {'[' * 20}{']' * 20}, {'[' * 20}*a{']' * 20}]": "nested too deeply, beyond 32 levels",
    "*nothing": "found undefined alias 'nothing'",
    "{<<: 3}": "<< takes a mapping or a list of them, not 3",
    "[" * 100 + "]" * 100: "nested too deeply, beyond 32 levels",
    "[[[[[[" + "- " * 100: "not valid YAML",
}


@pytest.mark.parametrize("door", ["engine.yaml", "NANOVLLM_SEED", "--set seed", "--option seed"])
def test_what_cannot_be_read_is_told_by_each_door_with_its_name(
    doors: dict[str, Door], door: str
) -> None:
    for text, problem in WRONG.items():
        with pytest.raises(ConfigError) as caught:
            doors[door](text)
        message = str(caught.value)
        assert problem in message, text
        assert door in message, text
        assert len(message) < 800, text


def bomb(levels: int) -> str:
    """A few lines that stand for 9 ** levels values."""
    lines = ["a: &a0 [" + ",".join("x" * 9) + "]"]
    for i in range(1, levels):
        lines.append(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]")
    return "\n".join(lines)


def merges(levels: int) -> str:
    lines = ["a: &a0 {x: 1}"]
    for i in range(1, levels):
        lines.append(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}")
    return "\n".join(lines)


@pytest.mark.parametrize("text", [bomb(6), bomb(12), bomb(500), merges(20), merges(1000)])
def test_aliases_are_counted_by_what_they_stand_for(text: str) -> None:
    """Before anything is built, and at the alias: the largest would be 9 ** 500 values."""
    with pytest.raises(
        ConfigError, match=f"more than {MAX_VALUES} keys and values, aliases written out"
    ) as caught:
        parse_yaml(text, "text")
    line, column = map(int, re.findall(r"\d+", str(caught.value))[:2])
    assert text.splitlines()[line - 1][column - 1] == "*"


def test_ordinary_aliases_are_within_the_limit() -> None:
    assert len(parse_yaml(bomb(3), "text")) == 3


def test_text_and_values_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"text: longer than the {MAX_SIZE} characters"):
        parse_yaml("x" * (MAX_SIZE + 1), "text")
    monkeypatch.setattr("nanovllm_core.config.yaml_reader.MAX_VALUES", 500)
    assert len(parse_yaml("[" + "1," * 499 + "]", "text")) == 499
    with pytest.raises(ConfigError, match="more than 500 keys and values"):
        parse_yaml("[" + "1," * 500 + "]", "text")


@pytest.mark.parametrize("name", ["/dev/zero", "engine.yaml"])
def test_no_more_than_the_limit_is_read_of_a_file(tmp_path: Path, name: str) -> None:
    """An endless one as well."""
    (tmp_path / "engine.yaml").write_bytes(b"x" * (MAX_SIZE + 1))
    with pytest.raises(ConfigError, match=f"{name}: longer than the {MAX_SIZE} characters"):
        load_config("demo", file=tmp_path / name, env={})


def test_a_file_of_an_impossible_name_is_told() -> None:
    with pytest.raises(ConfigError, match=r"'a\\x00b' cannot be read: embedded null byte$"):
        load_config("demo", file="a\0b", env={})


PIECES = [
    "model: demo", "seed", "cache", "limits", "attention", "observers", "plugins", "options",
    "name", "backend", ": ", ":\n  ", "- ", "[", "]", "{", "}", ", ", "\n", "\n  ", "&a ", "*a",
    "<<: ", "!!int ", "!!bool ", "!!str ", "!!omap ", "!!timestamp ", "!", "!x ", "!<", "'", '"',
    "\\", "\\x", "\\U00110000", "\\ud800", "#", "%YAML 1.2\n---\n", "%", "...\n", "? ", ">", "|-",
    "017", "0x", "1e400", ".inf", ".nan", "~", "true", "yes", "=", "9" * 4301, "-", "1:30",
    "2024-01-01", "\t", "\0", "é", "\ufeff", "\u2028", "\x85", "\ud800", "x", "0", "1",
]  # fmt: skip
HOSTILE = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=40).map("".join)
PATHS = st.lists(st.sampled_from(["a", "", "cache", "scheduler", "options", "1", "x" * 99]))


def hostile_doors(text: str, path: list[str], folder: Path) -> Iterator[Callable[[], object]]:
    file = folder / "hostile.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    name = "__".join(["NANOVLLM_X", *path])
    yield lambda: load_config(file=file, env={})
    yield lambda: load_config("demo", env={"NANOVLLM_CACHE": text})
    yield lambda: load_config("demo", env={name: text})
    yield lambda: load_with_sources(
        "demo", env={}, overrides=parse_flags([text, f"{'.'.join(path)}={text}"])
    )
    yield lambda: load_config("demo", env={}, overrides={".".join(path): text, "model": text})


@given(text=HOSTILE, path=PATHS)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_text_gets_anything_but_a_configuration_or_a_short_typed_error(
    text: str, path: list[str], tmp_path: Path
) -> None:
    messages = []
    for door in hostile_doors(text, path, tmp_path):
        try:
            door()
        except NanoVLLMError as error:
            messages.append(str(error))
    assert all(0 < len(message) <= MAX_MESSAGE for message in messages)
