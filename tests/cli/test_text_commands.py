"""`nanovllm generate`, `chat` and `eval`: what they ask of the engine and what they print."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from nanovllm_core.cli.main import make_app
from nanovllm_core.cli.output import Work
from nanovllm_core.cli.prompts import PromptInput
from nanovllm_core.errors import CheckpointError, ConfigError, InvalidSamplingError, RequestError
from nanovllm_core.frontend import RequestOutput, Transcript
from nanovllm_core.interfaces.sampling_params import NEUTRAL, SamplingParams

ENDS = "stop"
WORDS = ["Hel", "lo ", "[bold]", "you"]


def output(words: list[str], upto: int) -> RequestOutput:
    done = upto == len(words)
    return RequestOutput(
        request_id="0",
        index=0,
        prompt_token_ids=[1],
        new_token_ids=[upto - 1],
        num_token_ids=upto,
        num_texts=upto,
        transcript=Transcript(list(range(len(words))), words),
        new_text=words[upto - 1],
        finish_reason=ENDS if done else None,
    )


class FakeTokenizer:
    template: str | None = "a template"

    def require_chat_template(self) -> str:
        if self.template is None:
            raise RequestError("no template")
        return self.template

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(
        self, messages: list[dict[str, str]], chat_template_kwargs: dict[str, Any] | None = None
    ) -> list[int]:
        said = "".join(f"{key}={value} " for key, value in (chat_template_kwargs or {}).items())
        return self.encode(said + "|".join(message["content"] for message in messages))


class FakeLLM:
    """Answers from `replies` by the last message; WORDS where it knows nothing."""

    made: list[FakeLLM]
    replies: dict[str, str]
    checkpoint: dict[str, float]

    def __init__(self, config: Any) -> None:
        self.config = config
        self.calls: list[tuple[Any, Any]] = []
        self.closed = False
        self.sampling_defaults: dict[str, float] = dict(self.checkpoint)
        self.tokenizer = FakeTokenizer()
        self.info = SimpleNamespace(
            attention="fake attention", device="cpu", dtype="float32", max_model_len=4096
        )
        self.made.append(self)

    @classmethod
    def from_config(cls, config: Any) -> FakeLLM:
        return cls(config)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def _words(self, prompt: Any) -> list[str]:
        key = prompt[-1]["content"] if prompt and isinstance(prompt[-1], dict) else prompt
        if key == "too long":
            raise RequestError("17 tokens, but at most 16 fit")
        return [self.replies[key]] if isinstance(key, str) and key in self.replies else WORDS

    def stream(self, prompt: Any, params: Any, labels: Any = None) -> Iterator[RequestOutput]:
        self.calls.append((list(prompt) if isinstance(prompt, list) else prompt, params))
        words = self._words(prompt)
        if prompt[-1] == {"role": "user", "content": "interrupt me"}:
            os.kill(os.getpid(), signal.SIGINT)
        for upto in range(1, len(words) + 1):
            yield output(words, upto)

    def generate(self, prompts: Any, params: Any, labels: Any = None) -> list[RequestOutput]:
        self.calls.append((list(prompts), params))
        return [output(words, len(words)) for words in map(self._words, prompts)]

    chat = generate


@pytest.fixture(autouse=True)
def llm(monkeypatch) -> type[FakeLLM]:
    """Commands get a fresh fake class instead of the engine."""
    fake = type("LLM", (FakeLLM,), {"made": [], "replies": {}, "checkpoint": {}})
    monkeypatch.setattr("nanovllm_core.frontend.llm.LLM", fake)
    return fake


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(make_app(), [*arguments], input=stdin)


def ok(*arguments: str, stdin: str | None = None) -> Result:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


# -- generate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_generate_prints_prompt_and_text_on_stdout_and_the_speed_on_stderr(llm, flag):
    """Text is printed as it is: brackets are no markup."""
    result = ok("generate", "[red]Say hello", "--model", "m", flag)
    assert result.stdout == "[red]Say helloHello [bold]you\n"
    assert "4 tokens in" in result.stderr
    assert "tokens/s" in result.stderr
    assert llm.made[0].closed


def test_generate_streams_one_prompt_only_on_a_terminal_unless_told(llm):
    ok("generate", "a", "-m", "m")
    assert llm.made[0].calls[0][0] == ["a"], "generate() was called with a list"
    ok("generate", "a", "-m", "m", "--stream")
    assert llm.made[1].calls[0][0] == "a", "stream() was called with one prompt"


def test_generate_completes_several_prompts_in_one_batch(llm):
    result = ok("generate", "one", "two", "-m", "m")
    assert llm.made[0].calls[0][0] == ["one", "two"]
    assert result.stdout == "oneHello [bold]you\ntwoHello [bold]you\n"
    assert "8 tokens in" in result.stderr


def test_generate_streams_several_prompts_one_after_the_other(llm):
    ok("generate", "one", "two", "-m", "m", "--stream")
    assert [prompt for prompt, _ in llm.made[0].calls] == ["one", "two"]


def test_generate_passes_every_sampling_flag_on(llm):
    ok(
        "generate", "a", "-m", "m", "--max-tokens", "9", "--temperature", "0.5", "--top-k", "3",
        "--top-p", "0.9", "--min-p", "0.1", "--repetition-penalty", "1.1", "--presence-penalty",
        "0.2", "--frequency-penalty", "0.3", "--seed", "4", "--stop", "x", "--stop", "y",
        "--ignore-eos",
    )  # fmt: skip
    params = llm.made[0].calls[0][1]
    assert (params.max_tokens, params.temperature, params.top_k) == (9, 0.5, 3)
    assert (params.top_p, params.min_p, params.repetition_penalty) == (0.9, 0.1, 1.1)
    assert (params.presence_penalty, params.frequency_penalty, params.seed) == (0.2, 0.3, 4)
    assert (params.stop_strings, params.ignore_eos) == (("x", "y"), True)


def test_generate_puts_prompts_through_the_chat_template_on_request(llm):
    result = ok("generate", "hi", "-m", "m", "--chat")
    assert llm.made[0].calls[0][0] == [list(b"hi")]
    assert result.stdout == "hi\nHello [bold]you\n"


def test_generate_echoes_a_prompt_into_a_pipe_as_it_is():
    """Tabs, bells and lines of any length included."""
    prompt = "a\tb\a " + "long " * 100
    assert ok("generate", prompt, "-m", "m").stdout == prompt + "".join(WORDS) + "\n"


def test_generate_reads_a_prompt_from_stdin(llm):
    ok("generate", "-m", "m", stdin="from a pipe")
    assert llm.made[0].calls[0][0] == ["from a pipe"]


def test_flags_become_the_configuration_on_top_of_the_file(llm, tmp_path):
    file = tmp_path / "nanovllm.yaml"
    file.write_text("model: in-file\ndtype: float16\nscheduler: sjf\n", encoding="utf-8")
    ok(
        "generate", "a", "--config", str(file), "--attention", "flash+triton", "--device", "cpu",
        "--dtype", "float32", "--set", "cache.block_size=32",
    )  # fmt: skip
    config = llm.made[0].config
    assert (config.model, config.dtype, config.device) == ("in-file", "float32", "cpu")
    assert config.attention.prefill.backend == "flash"
    assert config.attention.decode.backend == "triton"
    assert (config.scheduler.name, config.cache.block_size) == ("sjf", 32)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["a"], ConfigError),
        (["a", "-m", "m", "--temperature", "-1"], InvalidSamplingError),
        (["a", "-m", "m", "--set", "cache.blok_size=3"], ConfigError),
    ],
)
def test_a_wrong_flag_is_an_error_before_anything_is_loaded(llm, arguments, error):
    assert isinstance(run("generate", *arguments).exception, error)
    assert llm.made == []


# -- chat -----------------------------------------------------------------------------------------


def test_chat_sends_the_whole_conversation_each_time(llm):
    llm.replies |= {"hello": "hi", "again": "yes"}
    result = ok("chat", "-m", "m", "--system", "be brief", stdin="hello\nagain\n/exit\nnever\n")
    contents = [[message["content"] for message in prompt] for prompt, _ in llm.made[0].calls]
    assert contents == [["be brief", "hello"], ["be brief", "hello", "hi", "again"]]
    roles = [message["role"] for message in llm.made[0].calls[1][0]]
    assert roles == ["system", "user", "assistant", "user"]
    assert "hi\n" in result.stdout
    assert llm.made[0].closed


def test_chat_ends_with_the_input_and_skips_empty_lines(llm):
    ok("chat", "-m", "m", stdin="\n  \nhello\n")
    assert len(llm.made[0].calls) == 1


def test_chat_forgets_on_clear_but_keeps_its_instructions(llm):
    ok("chat", "-m", "m", "--system", "s", stdin="one\n/clear\ntwo\n")
    assert [message["content"] for message in llm.made[0].calls[1][0]] == ["s", "two"]


def test_chat_ends_at_once_where_the_checkpoint_has_no_template(llm, monkeypatch):
    """No line could ever be answered."""
    monkeypatch.setattr(FakeTokenizer, "template", None)
    result = run("chat", "-m", "m", stdin="hello\n")
    assert str(result.exception) == "no template"
    assert llm.made[0].calls == []


def test_chat_goes_on_after_a_request_that_is_refused(llm):
    result = ok("chat", "-m", "m", stdin="too long\nhello\n")
    assert "at most 16 fit; /clear starts over" in result.stderr
    assert [message["content"] for message in llm.made[0].calls[1][0]] == ["hello"]


def test_chat_has_no_limit_of_its_own_and_says_where_an_answer_is_cut_off(llm, monkeypatch):
    """A fixed limit would refuse every request that it does not fit behind."""
    ended = ok("chat", "-m", "m", stdin="hello\n")
    assert llm.made[0].calls[0][1].max_tokens is None
    assert "cut off" not in ended.stderr
    monkeypatch.setattr(f"{__name__}.ENDS", "length")
    assert "cut off by limits.max_model_len" in ok("chat", "-m", "m", stdin="hello\n").stderr
    limited = ok("chat", "-m", "m", "--max-tokens", "7", stdin="hello\n")
    assert "cut off by --max-tokens" in limited.stderr
    assert llm.made[2].calls[0][1].max_tokens == 7


def test_chat_leaves_to_the_checkpoint_what_no_flag_states(llm):
    """Greedy where neither states a temperature; the template's variables go to the engine."""
    ok("chat", "-m", "m", stdin="hello\n")
    llm.checkpoint |= {"temperature": 0.6}
    flags = ["--top-k", "3", "--generation-config", "checkpoint"]
    flags += ["--chat-template-kwargs", '{"enable_thinking": false}']
    ok("chat", "-m", "m", *flags, stdin="hello\n")
    greedy, sampled = (made.calls[0][1] for made in llm.made)
    assert (greedy.temperature, greedy.top_k) == (0, None)
    assert (sampled.temperature, sampled.top_k) == (None, 3)
    assert llm.made[1].config.chat_template_kwargs == {"enable_thinking": False}


def test_an_interrupted_answer_stops_and_the_conversation_goes_on(llm):
    """Ctrl-C comes as a signal; the answer so far stays in the history."""
    handler = signal.getsignal(signal.SIGINT)
    ok("chat", "-m", "m", stdin="interrupt me\nnext\n")
    contents = [message["content"] for message in llm.made[0].calls[1][0]]
    assert contents == ["interrupt me", WORDS[0], "next"]
    assert signal.getsignal(signal.SIGINT) is handler


# -- eval -----------------------------------------------------------------------------------------


@pytest.fixture
def questions(tmp_path) -> Path:
    """Four sums and two copies, mixed."""
    lines = [("sum", f"{i}+{i}", str(2 * i)) for i in range(4)]
    lines[1:1] = [("copy", "a", "a"), ("copy", "b", " b\n")]
    file = tmp_path / "questions.jsonl"
    text = "\n\n".join(
        json.dumps({"task": t, "messages": [{"role": "user", "content": q}], "answer": a})
        for t, q, a in lines
    )
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture
def right_answers(llm) -> dict[str, str]:
    llm.replies |= {"a": "a ", "b": "b"} | {f"{i}+{i}": f"{2 * i}\n" for i in range(4)}
    return llm.replies


def test_eval_counts_exact_answers_of_stripped_text(llm, questions, right_answers, tmp_path):
    out = tmp_path / "deep" / "result.json"
    result = ok("eval", "-m", "m", "--data", str(questions), "--out", str(out))
    assert "fake attention" in result.stdout
    assert "100.0%" in result.stdout
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["passed"]
    assert written["tasks"]["sum"] == {"correct": 4, "total": 4, "accuracy": 1.0}
    assert written["overall"]["total"] == 6
    assert (written["model"], written["attention"], written["wrong"]) == ("m", "fake attention", [])


def test_eval_asks_greedily_with_room_for_the_longest_answer(llm, questions, right_answers):
    ok("eval", "-m", "m", "--data", str(questions))
    prompts, params = llm.made[0].calls[0]
    assert params.choice(dict.fromkeys(NEUTRAL, 0.5)) == {**NEUTRAL, "temperature": 0}
    assert params.max_tokens == len(" b\n") + 4
    assert prompts[0] == [{"role": "user", "content": "a"}]


def test_eval_fails_below_either_threshold_and_writes_what_was_wrong(
    questions, right_answers, tmp_path
):
    right_answers["2+2"] = "5"
    arguments = ["eval", "-m", "m", "--data", str(questions)]
    out = tmp_path / "result.json"
    assert run(*arguments, "--out", str(out)).exit_code == 1
    written = json.loads(out.read_text(encoding="utf-8"))
    assert not written["passed"]
    assert [(one["item"]["answer"], one["text"]) for one in written["wrong"]] == [("4", "5")]
    ok(*arguments, "--min-task", "0.75", "--min-overall", "0.83")
    assert run(*arguments, "--min-task", "0.76", "--min-overall", "0.83").exit_code == 1
    assert run(*arguments, "--min-task", "0.75", "--min-overall", "0.84").exit_code == 1


def test_eval_limits_each_task(llm, questions, right_answers):
    ok("eval", "-m", "m", "--data", str(questions), "--limit", "1")
    asked = [prompt[0]["content"] for prompt in llm.made[0].calls[0][0]]
    assert asked == ["a", "0+0"]


def test_eval_takes_the_questions_of_the_checkpoint(llm):
    """The demo's own file, found through its plugin; the fake knows no answer."""
    assert run("eval", "-m", "demo", "--limit", "1").exit_code == 1
    assert len(llm.made[0].calls[0][0]) >= 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1"),
        ('{"task": "t", "messages": []}', "line 1: KeyError"),
        ("[1]", "line 1: TypeError"),
        ("\n\n", "holds no questions"),
        ("\udcff", "not UTF-8 text (byte 0)"),
    ],
)
def test_eval_names_what_is_wrong_with_its_questions(llm, tmp_path, text, message):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    error = run("eval", "-m", "m", "--data", str(file)).exception
    assert isinstance(error, CheckpointError)
    assert message in str(error)
    assert llm.made == []


def test_eval_without_questions_says_where_to_name_them(tmp_path):
    error = run("eval", "-m", str(tmp_path), "--data", str(tmp_path / "none")).exception
    assert isinstance(error, CheckpointError)
    assert "--data" in str(error)


@pytest.mark.parametrize(("term", "echo"), [("xterm", "\x1b[1m\thi\x1b[0m"), ("dumb", "\thi")])
def test_a_prompt_is_bold_on_a_terminal_that_has_styles(
    term: str, echo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", term)
    one = PromptInput(SamplingParams(), "\thi")
    Work(None, [one], echo=True).show_prompt(0)  # type: ignore[arg-type]
    assert terminal.getvalue() == echo
