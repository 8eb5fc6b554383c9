"""The prompts of `nanovllm generate`: arguments, stdin, or a file with one on each line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import typer

import nanovllm_core
from nanovllm_core.errors import InvalidPromptError, RequestError, did_you_mean, shown
from nanovllm_core.interfaces.request_labels import Labels, check_labels
from nanovllm_core.interfaces.sampling_params import SamplingParams

STDIN = "-"
MAX_SIZE = 64 << 20
"""Bytes of a file, characters of stdin: what never ends must not fill the memory."""
MAX_PROMPTS = 100_000

MAX_TOKENS = 256
"""Of an output, where neither a flag nor the prompt's line says it: as many of these as fit."""

TEMPLATE_KEY = "chat_template_kwargs"
LABELS_KEY = "labels"
LINE_KEYS = (
    "prompt",
    "messages",
    TEMPLATE_KEY,
    LABELS_KEY,
    *(each.name for each in fields(SamplingParams)),
)
LINE_HINT = 'a line is a JSON string, {"prompt": ...} or {"messages": [...]}'


@dataclass(frozen=True, slots=True)
class PromptInput:
    """One prompt: text, token ids, or the messages of a conversation.

    `params` are those of all prompts, with what its own line states; where neither states
    `max_tokens`, `is_default_length`. `place` names the file and the line; "" where there is none.
    """

    params: SamplingParams
    prompt: str | list[int] = ""
    messages: list[dict[str, str]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    labels: Labels | None = None
    is_default_length: bool = False
    place: str = ""

    def prepare(self, llm: nanovllm_core.LLM) -> PromptInput:
        """The same for this engine; a conversation's template is applied, which gives `prompt`."""
        prompt = self.prompt
        if self.messages is not None:
            with naming(self.place):
                prompt = llm.tokenizer.apply_chat_template(
                    self.messages, chat_template_kwargs=self.template_kwargs
                )
        params = greedy_unless_stated(llm, self.params)
        if self.is_default_length:
            ids = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            room = max(llm.info.max_model_len - len(ids), 1)
            params = replace(params, max_tokens=min(MAX_TOKENS, room))
        return replace(self, prompt=prompt, params=params)

    def shown(self, llm: nanovllm_core.LLM) -> str:
        """The text to echo: the last message of a conversation, the text of token ids."""
        if self.messages is not None:
            return self.messages[-1]["content"]
        return self.prompt if isinstance(self.prompt, str) else llm.tokenizer.decode(self.prompt)

    def to_json(self) -> dict[str, Any]:
        """The prompt under a key that says what it is."""
        if self.messages is not None:
            return {"messages": self.messages}
        key = "prompt" if isinstance(self.prompt, str) else "prompt_token_ids"
        return {key: self.prompt}


def greedy_unless_stated(llm: nanovllm_core.LLM, params: SamplingParams) -> SamplingParams:
    """Temperature 0 where neither a flag nor the checkpoint states one."""
    if params.temperature is None and "temperature" not in llm.sampling_defaults:
        return replace(params, temperature=0.0)
    return params


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Errors of a request are prefixed with the file and the line that it comes from."""
    try:
        yield
    except RequestError as error:
        if not place:
            raise
        raise type(error)(f"{place}: {error}") from error


def read_prompts(
    arguments: Sequence[str] | None, file: Path | None, chat: bool, shared: SamplingParams
) -> list[PromptInput]:
    """Every prompt, checked as far as is possible without a model.

    With `chat` a text is a user's message. Raises typer.BadParameter for wrong usage, and for what
    is in a file InvalidPromptError and InvalidSamplingError, which name the line.
    """
    if file is None:
        return [_make(text, chat, shared) for text in _texts(arguments)]
    if arguments:
        raise typer.BadParameter("give prompts as arguments or with --prompts, not both")
    inputs = []
    for place, line in _lines(file):
        with naming(place):
            read = _parse if file.suffix == ".jsonl" else _make
            inputs.append(replace(read(line, chat, shared), place=place))
    if not inputs:
        raise typer.BadParameter(f"{file} holds no prompts; write one on each line")
    return inputs


def _texts(arguments: Sequence[str] | None) -> list[str]:
    if not arguments and sys.stdin.isatty():
        raise typer.BadParameter('give a prompt, as in: nanovllm generate "Once upon a time"')
    arguments = arguments or [STDIN]
    if arguments.count(STDIN) > 1:
        raise typer.BadParameter(f"{STDIN} reads all of stdin, so it can be given only once")
    read = sys.stdin.read(MAX_SIZE + 1) if STDIN in arguments else ""
    if len(read) > MAX_SIZE:
        raise typer.BadParameter(
            f"stdin holds more than {MAX_SIZE:,} characters, the limit of a prompt; give less"
        )
    return [read if text == STDIN else text for text in arguments]


def _lines(file: Path) -> list[tuple[str, str]]:
    """(place, line) of each line that is not blank."""
    with file.open("rb") as opened:
        data = opened.read(MAX_SIZE + 1)
    if len(data) > MAX_SIZE:
        raise typer.BadParameter(f"{file} has more than {MAX_SIZE:,} bytes; split it")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidPromptError(
            f"{file}, line {line}: not UTF-8 text (byte {error.start} of the file); save the file "
            "as UTF-8"
        ) from None
    # Not `splitlines`, which also ends lines at characters that a prompt may hold.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    numbered = [(f"{file}, line {at}", line) for at, line in enumerate(lines, 1) if line.strip()]
    if len(numbered) > MAX_PROMPTS:
        raise typer.BadParameter(f"{file} has more than {MAX_PROMPTS:,} prompts; split it")
    return numbered


def _make(text: str, chat: bool, params: SamplingParams) -> PromptInput:
    is_default = params.max_tokens is None
    if chat:
        messages = [{"role": "user", "content": text}]
        return PromptInput(params, messages=messages, is_default_length=is_default)
    return PromptInput(params, text, is_default_length=is_default)


def _parse(line: str, chat: bool, shared: SamplingParams) -> PromptInput:
    """A line of a .jsonl file."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidPromptError(f"not JSON: {error!s:.200}; {LINE_HINT}") from None
    if isinstance(value, str):
        return _make(value, chat, shared)
    if not isinstance(value, dict):
        raise InvalidPromptError(f"{type(value).__name__} {shown(value)}; {LINE_HINT}")
    for key in value:
        if key not in LINE_KEYS:
            raise InvalidPromptError(
                f"unknown key {shown(key)}{did_you_mean(key, LINE_KEYS)}; it takes "
                f"{', '.join(LINE_KEYS)}"
            )
    if ("prompt" in value) == ("messages" in value):
        both = "both" if "prompt" in value else "neither of"
        raise InvalidPromptError(f"{both} prompt and messages; give one of them")
    prompt, messages = value.pop("prompt", None), value.pop("messages", None)
    kwargs = value.pop(TEMPLATE_KEY, None) or {}
    labels = check_labels(value.pop(LABELS_KEY, None)) or None
    is_default = shared.max_tokens is None and "max_tokens" not in value
    params = replace(shared, **value)
    if isinstance(prompt, str):
        made = _make(prompt, chat, params)
    elif messages is not None:
        made = PromptInput(params, messages=messages)
    elif isinstance(prompt, list) and not chat:
        made = PromptInput(params, prompt)
    else:
        wanted = "text" if chat else "text or a list of token ids"
        raise InvalidPromptError(f"prompt is {shown(prompt)}; it must be {wanted}")
    if kwargs and made.messages is None:
        raise InvalidPromptError(f"{TEMPLATE_KEY} without a conversation; give messages, or --chat")
    return replace(made, template_kwargs=kwargs, labels=labels, is_default_length=is_default)
