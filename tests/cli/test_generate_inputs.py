"""`nanovllm generate`: files of prompts, stdin, JSON lines, and flags that go together."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner, Result

from nanovllm_core.cli import prompts as prompts_module
from nanovllm_core.cli.main import make_app
from nanovllm_core.errors import (
    InvalidPromptError,
    InvalidSamplingError,
    PluginFailedError,
    RequestError,
)
from nanovllm_core.frontend import RequestOutput, Transcript
from nanovllm_core.interfaces.plan import TokenLogprobs
from nanovllm_core.interfaces.sampling_params import SamplingParams


class FakeTokenizer:
    def encode(self, text: str) -> list[int]:
        return [0] * len(text)

    def decode(self, ids: list[int]) -> str:
        return f"text of {ids}"

    def apply_chat_template(
        self, messages: Any, chat_template_kwargs: dict[str, Any] | None = None
    ) -> list[int]:
        if not isinstance(messages, list):
            raise InvalidPromptError("no messages")
        FakeLLM.templates.append((messages, dict(chat_template_kwargs or {})))
        return [7] * len(messages)


class FakeLLM:
    """Answers "-> PROMPT", as often as `n` says; a prompt with "long" is refused.

    An error ends the output of one with "fails".
    """

    made: ClassVar[list[FakeLLM]] = []
    templates: ClassVar[list[tuple[Any, dict[str, Any]]]] = []
    sampling_defaults: ClassVar[dict[str, float]] = {}
    info = SimpleNamespace(max_model_len=1000)

    def __init__(self, config: Any) -> None:
        self.config, self.tokenizer = config, FakeTokenizer()
        self.made.append(self)

    from_config = classmethod(lambda cls, config: cls(config))

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, prompts: list[Any], params: Any, labels: Any) -> list[RequestOutput]:
        self.prompts, self.params, self.labels = prompts, params, labels
        each = params if isinstance(params, list) else [params] * len(prompts)
        for index, prompt in enumerate(prompts):
            if "long" in prompt:
                error = RequestError("9 tokens are too many")
                if len(prompts) == 1:
                    raise error
                named = RequestError(f"prompts[{index}]: {error}")
                named.prompt_index = index
                raise named from error
        return [
            self.answer(prompt, one, sample)
            for prompt, one in zip(prompts, each, strict=True)
            for sample in range(one.n)
        ]

    def stream(self, prompt: Any, params: SamplingParams, labels: Any) -> Any:
        self.params, self.labels = params, labels
        if "long" in prompt:
            raise RequestError("9 tokens are too many")
        yield self.answer(prompt, params, 0)

    def answer(self, prompt: Any, params: SamplingParams, sample: int) -> RequestOutput:
        known = TokenLogprobs(-0.5, ((4, -0.25), (6, float("-inf"))))
        text = f"-> {prompt}\u2028é"
        return RequestOutput(
            request_id="0", index=sample, prompt_token_ids=[1, 2], new_token_ids=[4],
            new_text=text, finish_reason="stop", stop_reason=4, num_token_ids=1, num_texts=1,
            error=PluginFailedError("no mask") if "fails" in prompt else None,
            transcript=Transcript([4], [text], [known] if params.logprobs is not None else None),
        )  # fmt: skip


@pytest.fixture(autouse=True)
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    monkeypatch.setattr("nanovllm_core.frontend.llm.LLM", FakeLLM)
    for name in ("made", "templates"):
        monkeypatch.setattr(FakeLLM, name, [])
    return FakeLLM


def run(*arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(
        make_app(), ["generate", "-m", "m", *map(str, arguments)], input=stdin
    )


def ok(*arguments: str | Path, stdin: str | None = None) -> str:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def write(path: Path, *lines: object) -> Path:
    """Texts as they are, anything else as JSON."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


# -- where prompts come from ----------------------------------------------------------------------


def test_a_dash_reads_stdin_as_one_prompt_among_others(llm: type[FakeLLM]) -> None:
    ok("one", "-", "two", stdin="a\nb\n")
    assert llm.made[0].prompts == ["one", "a\nb\n", "two"]


def test_each_line_of_a_text_file_is_a_prompt_and_blank_lines_are_none(
    llm: type[FakeLLM], tmp_path: Path
) -> None:
    """Lines end at \\n or \\r\\n alone; JSON in them is text."""
    file = tmp_path / "prompts.txt"
    file.write_bytes('\ufeffone\r\n\n  \ntwo\u2028same\x0bline\n{"prompt": 1}'.encode())
    ok("--prompts", file)
    assert llm.made[0].prompts == ["one", "two\u2028same\x0bline", '{"prompt": 1}']


def test_a_line_of_a_jsonl_file_is_a_text_or_an_object_with_its_own_sampling(
    llm: type[FakeLLM], tmp_path: Path
) -> None:
    """What it does not state is that of the flags; null states nothing."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file = write(
        tmp_path / "p.jsonl",
        '"a\\nb"',
        "",
        {"prompt": "c", "temperature": 0.5, "n": 2, "stop": None, "logit_bias": {"5": 1}},
        {"prompt": [3, 4], "max_tokens": 2},
        {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}},
    )
    ok("--prompts", file, "--top-k", "3")
    made = llm.made[0]
    assert made.prompts == ["a\nb", "c", [3, 4], [7, 7]]
    shared = SamplingParams(temperature=0.0, max_tokens=256, top_k=3)
    assert made.params == [
        shared,
        replace(shared, temperature=0.5, n=2, logit_bias={5: 1}),
        replace(shared, max_tokens=2),
        shared,
    ]
    assert llm.templates == [(messages, {"enable_thinking": False})]


def test_outputs_are_as_long_as_fits_where_nobody_says_how_long(
    llm: type[FakeLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 256 tokens. A limit that is stated, also null for none, counts as it is."""
    monkeypatch.setattr(FakeLLM, "info", SimpleNamespace(max_model_len=100))
    file = write(
        tmp_path / "p.jsonl",
        '"abc"',
        {"prompt": [1]},
        {"prompt": [1], "max_tokens": 200},
        {"prompt": [1], "max_tokens": None},
        {"prompt": "x" * 100},
    )
    ok("--prompts", file)
    assert [one.max_tokens for one in llm.made[0].params] == [97, 99, 200, None, 1]
    ok("--max-tokens", "300", "abc")
    assert llm.made[1].params.max_tokens == 300


def test_labels_of_a_line_go_with_its_request(llm: type[FakeLLM], tmp_path: Path) -> None:
    """To schedulers and observers; what cannot be labels is refused with the line."""
    file = write(tmp_path / "p.jsonl", {"prompt": "a", "labels": {"user": "u"}}, '"b"')
    ok("--prompts", file)
    assert llm.made[0].labels == [{"user": "u"}, None]
    ok(
        "--prompts",
        write(tmp_path / "one.jsonl", {"prompt": "a", "labels": {"k": "v"}}),
        "--stream",
    )
    assert llm.made[1].labels == {"k": "v"}
    error = run("--prompts", write(file, {"prompt": "a", "labels": {"user": 1}})).exception
    assert str(error).startswith(f"{file}, line 1: labels['user'] is")


def test_with_chat_each_text_of_a_file_is_a_users_message(
    llm: type[FakeLLM], tmp_path: Path
) -> None:
    ok("--chat", "--prompts", write(tmp_path / "p.jsonl", '"a"', {"prompt": "b"}))
    assert [messages for messages, _ in llm.templates] == [
        [{"role": "user", "content": text}] for text in "ab"
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("5", "int 5; a line is a JSON string"),
        ("[1]", "list"),
        ("{}", "neither of prompt and messages"),
        ({"prompt": "a", "messages": []}, "both prompt and messages"),
        ({"promt": "a"}, "unknown key 'promt'; did you mean prompt?"),
        ({"prompt": "a", "max_token": 3}, "did you mean max_tokens?"),
        ({"prompt": 5}, "prompt is 5; it must be text or a list of token ids"),
        ({"prompt": "a", "chat_template_kwargs": {"x": 1}}, "without a conversation"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1"),
        ({"prompt": "a", "logit_bias": [5]}, "logit_bias is [5]"),
    ],
)
def test_a_bad_line_is_refused_with_file_and_line_before_anything_is_loaded(
    llm: type[FakeLLM], tmp_path: Path, line: object, message: str
) -> None:
    """Nothing is run, the good lines neither."""
    file = write(tmp_path / "p.jsonl", '"good"', "", line)
    error = run("--prompts", file).exception
    assert isinstance(error, InvalidPromptError | InvalidSamplingError)
    assert str(error).startswith(f"{file}, line 3: ")
    assert message in str(error)
    assert len(str(error)) < 1000
    assert llm.made == []


def test_ids_are_no_message(tmp_path: Path) -> None:
    error = run("--chat", "--prompts", write(tmp_path / "p.jsonl", {"prompt": [1]})).exception
    assert "line 1: prompt is [1]; it must be text" in str(error)


def test_text_in_another_encoding_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(b"good\ncaf\xe9\n")
    error = run("--prompts", file).exception
    assert isinstance(error, InvalidPromptError)
    assert str(error).startswith(f"{file}, line 2: not UTF-8 text (byte 8 of the file)")


@pytest.mark.parametrize("lines", [['"a"', '"long"'], ["", '"long"']])
def test_what_only_the_engine_can_refuse_names_the_line_too(
    tmp_path: Path, lines: list[str]
) -> None:
    """Among others and alone; of a conversation also what the template refuses."""
    file = write(tmp_path / "p.jsonl", *lines)
    for flag in ("--no-stream", "--stream"):
        error = run("--prompts", file, flag).exception
        assert str(error) == f"{file}, line 2: 9 tokens are too many"
    file = write(tmp_path / "m.jsonl", {"messages": 5})
    assert str(run("--prompts", file).exception) == f"{file}, line 1: no messages"


def test_an_error_of_what_was_typed_names_no_line() -> None:
    assert str(run("a long one").exception) == "9 tokens are too many"
    assert str(run("a", "long").exception) == "prompts[1]: 9 tokens are too many"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--prompts", "FILE"], "not both"),
        (["--prompts", "EMPTY"], "holds no prompts"),
        (["--prompts", "nowhere"], "does not exist"),
        (["--prompts", "."], "is a directory"),
        (["-", "-"], "only once"),
        (["a", "--json", "--stream"], "leave --stream out"),
        (["a", "--stream", "--n", "2"], "one output for each prompt"),
        (["a", "--logprobs", "1"], "with --json only"),
        (["a", "--chat-template-kwargs", '{"a": 1}'], "goes with --chat"),
        (["a", "--chat", "--chat-template-kwargs", "{"], "is not JSON"),
        (["a", "--chat", "--chat-template-kwargs", "[]"], "no JSON object"),
        (["a", "--logit-bias", "5"], "as in 17=-100"),
        (["a", "--logit-bias", "5=1", "--logit-bias", "5=2"], "twice"),
        (["--prompts", "LARGE"], "more than 64 bytes"),
        (["--prompts", "MANY"], "more than 9 prompts"),
        (["-"], "more than 64 characters"),
    ],
)
def test_flags_that_do_not_go_together_are_a_usage_error(
    llm: type[FakeLLM],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    """Exit status 2, and no engine is started. Input that never ends is among them."""
    monkeypatch.setattr(prompts_module, "MAX_SIZE", 64)
    monkeypatch.setattr(prompts_module, "MAX_PROMPTS", 9)
    texts = {"FILE": "a", "EMPTY": "\n \n", "LARGE": "a" * 65, "MANY": "a\n" * 10}
    files = {name: write(tmp_path / f"{name}.txt", text) for name, text in texts.items()}
    result = run(*(files.get(argument, argument) for argument in arguments), stdin="x" * 65)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert llm.made == []


# -- what is printed ------------------------------------------------------------------------------


def test_no_echo_leaves_prompts_out(tmp_path: Path) -> None:
    assert ok("a", "b", "--no-echo") == "-> a\u2028é\n-> b\u2028é\n"
    assert ok("a", "--no-echo", "--stream") == "-> a\u2028é\n"
    ids = write(
        tmp_path / "p.jsonl", {"prompt": [3]}, {"messages": [{"role": "user", "content": "u"}]}
    )
    assert ok("--prompts", ids) == "text of [3]-> [3]\u2028é\nu\n-> [7]\u2028é\n"


def test_json_is_one_object_a_line_for_each_output(tmp_path: Path) -> None:
    """With the index of its prompt, and the prompt as it was given; ASCII alone."""
    messages = [{"role": "user", "content": "u"}]
    file = write(
        tmp_path / "p.jsonl",
        {"prompt": "a", "n": 2},
        {"prompt": [3], "logprobs": 2},
        {"messages": messages},
    )
    printed = ok("--prompts", file, "--json")
    assert printed.isascii()
    records = [json.loads(line) for line in printed.splitlines()]
    common = {
        "token_ids": [4], "finish_reason": "stop", "stop_reason": 4, "error": None,
        "num_prompt_tokens": 2, "num_output_tokens": 1, "num_cached_tokens": 0,
    }  # fmt: skip
    logprobs = [
        {
            "token_id": 4,
            "logprob": -0.5,
            "top": [{"token_id": 4, "logprob": -0.25}, {"token_id": 6, "logprob": None}],
        }
    ]
    assert records == [
        {"index": 0, "sample": 0, "prompt": "a", "text": "-> a\u2028é", **common},
        {"index": 0, "sample": 1, "prompt": "a", "text": "-> a\u2028é", **common},
        {
            "index": 1, "sample": 0, "prompt_token_ids": [3], "text": "-> [3]\u2028é", **common,
            "logprobs": logprobs,
        },
        {"index": 2, "sample": 0, "messages": messages, "text": "-> [7]\u2028é", **common},
    ]  # fmt: skip


@pytest.mark.parametrize("flag", ["--json", "--no-stream"])
def test_an_output_that_an_error_ended_is_told_when_all_are_printed(
    tmp_path: Path, flag: str
) -> None:
    """With the prompt that it is of, or its line; the command fails."""
    result = run("a", "fails", "b", "--no-echo", flag)
    lines = result.stdout.removesuffix("\n").split("\n")
    if flag == "--json":
        assert [json.loads(line)["error"] for line in lines] == [None, "no mask", None]
    else:
        assert lines == ["-> a\u2028é", "-> fails\u2028é", "-> b\u2028é"]
    assert isinstance(result.exception, PluginFailedError)
    assert str(result.exception) == "prompts[1]: no mask"
    file = write(tmp_path / "p.jsonl", '"a"', '"fails"', '"fails"')
    said = str(run("--prompts", file, flag).exception)
    assert said == f"{file}, line 2: no mask\n{file}, line 3: no mask"


def test_an_error_ends_a_stream_and_the_command() -> None:
    result = run("fails", "--stream", "--no-echo")
    assert result.stdout == "-> fails\u2028é\n"
    assert str(result.exception) == "prompts[0]: no mask"


def test_json_without_echo_holds_no_prompt() -> None:
    assert "prompt" not in json.loads(ok("a", "--json", "--no-echo"))


def test_json_on_a_terminal_is_not_streamed(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are several samples, which would run into one another."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    fake = SimpleNamespace(stdout=terminal, stdin=io.StringIO())
    monkeypatch.setattr("nanovllm_core.cli.generate.sys", fake)
    assert json.loads(ok("a", "--json"))["index"] == 0
    assert ok("a", "--n", "2") == "a-> a\u2028é\n" * 2


# -- what is asked --------------------------------------------------------------------------------


def test_a_temperature_that_nobody_states_is_0_and_a_checkpoints_counts(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag counts more than either; the engine adds the checkpoint's other defaults."""
    ok("a")
    monkeypatch.setattr(llm, "sampling_defaults", {"temperature": 0.6})
    ok("a")
    ok("a", "--temperature", "0.2")
    assert [made.params.temperature for made in llm.made] == [0.0, None, 0.2]
    assert {made.params.top_p for made in llm.made} == {None}


def test_flags_of_the_request_reach_it_and_those_of_the_engine_the_configuration(
    llm: type[FakeLLM],
) -> None:
    ok(
        "a", "--json", "--chat", "--logit-bias", "17=-100", "--logit-bias", "3=2.5", "--n", "2",
        "--logprobs", "1", "--generation-config", "none",
        "--chat-template-kwargs", '{"enable_thinking": false}',
    )  # fmt: skip
    [made] = llm.made
    assert made.params.logit_bias == {17: -100.0, 3: 2.5}
    assert (made.params.n, made.params.logprobs) == (2, 1)
    assert made.config.generation_config == "none"
    assert made.config.chat_template_kwargs == {"enable_thinking": False}
