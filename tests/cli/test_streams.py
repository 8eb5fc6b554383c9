"""The standard streams of the command: odd bytes, other encodings, closed ones and full disks."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from nanovllm_core.cli.main import main
from nanovllm_core.frontend import RequestOutput, Transcript


class Echo:
    """An engine that answers with the prompt, or with the last message."""

    sampling_defaults: ClassVar[dict[str, float]] = {}
    info = SimpleNamespace(max_model_len=4096)
    tokenizer = SimpleNamespace(
        encode=lambda text: [1] * len(text), require_chat_template=lambda: ""
    )

    @classmethod
    def from_config(cls, config: Any) -> Echo:
        return cls()

    def __enter__(self) -> Echo:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, prompts: list[str], params: Any, labels: Any) -> list[RequestOutput]:
        return [self._answer(prompt) for prompt in prompts]

    def stream(
        self, prompt: list[dict[str, str]], params: Any, labels: Any = None
    ) -> Iterator[RequestOutput]:
        yield self._answer(prompt[-1]["content"])

    @staticmethod
    def _answer(text: str) -> RequestOutput:
        fields: Any = {"new_text": text, "finish_reason": "stop"}
        tokens: Any = {"prompt_token_ids": [1], "new_token_ids": [1], "num_token_ids": 1}
        so_far: Any = {"transcript": Transcript([1], [text]), "num_texts": 1}
        return RequestOutput(request_id="0", index=0, **tokens, **so_far, **fields)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `main()` with streams of its own; gives its status and what it wrote."""
    monkeypatch.setattr("nanovllm_core.frontend.llm.LLM", Echo)

    def run(*arguments: str, stdin: Any = b"", stdout: Any = b"", encoding: str = "utf-8") -> Any:
        written = io.BytesIO() if stdout == b"" else stdout
        reader = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
        monkeypatch.setattr(sys, "stdin", reader)
        monkeypatch.setattr(sys, "stdout", written and io.TextIOWrapper(written, encoding))
        monkeypatch.setattr(sys, "argv", ["nanovllm", *arguments, "-m", "m"])
        with pytest.raises(SystemExit) as ended:
            main()
        text = written.getvalue() if isinstance(written, io.BytesIO) else b""
        return SimpleNamespace(status=ended.value.code, text=text)

    return run


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_bytes_on_stdin_that_are_no_utf8_become_replacement_marks(command: Any, name: str) -> None:
    done = command(name, stdin=b"hi\n\xff\nhello\n")
    assert done.status == 0
    assert "\N{REPLACEMENT CHARACTER}\n" in done.text.decode()
    assert "hello\n" in done.text.decode(), "the lines after it are read"


def test_a_character_that_stdout_cannot_write_becomes_a_question_mark(command: Any) -> None:
    done = command("generate", "café", encoding="ascii")
    assert (done.status, done.text) == (0, b"caf?caf?\n")


def test_closed_streams_are_empty_ones(command: Any) -> None:
    """`nanovllm generate <&-` gets no prompt, `>&-` writes to nowhere."""
    assert command("generate", stdin=None).status == 0
    assert command("generate", "hi", stdout=None).status == 0


class Refusing(io.RawIOBase):
    """As /dev/full, or a pipe that nobody reads: each write fails."""

    def __init__(self, error: OSError) -> None:
        self.error = error

    def writable(self) -> bool:
        return True

    def write(self, _data: Any) -> int:
        raise self.error


@pytest.mark.parametrize("arguments", [("generate", "hi"), ("config", "show")])
def test_a_full_disk_is_one_message_and_status_1(command: Any, arguments: tuple[str, ...]) -> None:
    """Whether text is flushed by the command or left to the end; nothing is left to fail again."""
    full = OSError(28, "No space left on device")
    done = command(*arguments, stdout=io.BufferedWriter(Refusing(full)))
    assert done.status == "error: [Errno 28] No space left on device"
    sys.stdout.flush()


@pytest.mark.parametrize("arguments", [("generate", "hi"), ("config", "show")])
def test_a_pipe_that_is_read_no_further_ends_the_command_without_a_word(
    command: Any, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    gone = BrokenPipeError(32, "Broken pipe")
    done = command(*arguments, stdout=io.BufferedWriter(Refusing(gone)))
    assert done.status == 1
    assert "Broken" not in capsys.readouterr().err
