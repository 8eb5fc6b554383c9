"""`nanovllm chat`: a conversation, with the answers as they come."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Annotated

import typer
from rich.console import Console

import nanovllm_core
from nanovllm_core.cli import engine_options as options, generate as sampling
from nanovllm_core.cli.output import Speed, write_text
from nanovllm_core.cli.prompts import greedy_unless_stated
from nanovllm_core.errors import RequestError
from nanovllm_core.interfaces.sampling_params import SamplingParams

HELP = "/clear starts over, /exit quits; Ctrl-C stops an answer."


def chat(
    ctx: typer.Context,
    model: options.Model = None,
    config: options.ConfigFile = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum output tokens of an answer; default: all that fit.")
    ] = None,
    temperature: sampling.Temperature = None,
    top_k: sampling.TopK = None,
    top_p: sampling.TopP = None,
    min_p: sampling.MinP = None,
    seed: sampling.Seed = None,
    chat_template_kwargs: options.ChatTemplateKwargs = None,
    generation_config: options.GenerationConfig = None,
    attention: options.Attention = None,
    scheduler: options.Scheduler = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    settings: options.Settings = None,
) -> None:
    """Chat with the model; each prompt holds the conversation so far."""
    params = sampling.sampling_params(ctx)
    loaded = options.loaded_config(ctx)
    opening = [] if system is None else [{"role": "system", "content": system}]
    with options.open_llm(loaded.config) as llm:
        llm.tokenizer.require_chat_template()
        Console(stderr=True).print(HELP, style="dim", highlight=False)
        converse(llm, greedy_unless_stated(llm, params), opening)


def converse(llm: nanovllm_core.LLM, params: SamplingParams, opening: list[dict[str, str]]) -> None:
    """Read lines and answer them until /exit or the end of the input."""
    history = list(opening)
    while (line := read_line()) is not None and line != "/exit":
        if line == "/clear":
            history = list(opening)
        elif line:
            history.append({"role": "user", "content": line})
            try:
                text = answer(llm, history, params)
            except RequestError as error:
                # The conversation may have grown too long: it goes on without this line.
                history.pop()
                note = f"error: {error}; /clear starts over"
                Console(stderr=True).print(note, style="red", markup=False)
            else:
                history.append({"role": "assistant", "content": text})


def read_line() -> str | None:
    """One line from the user; None at the end of the input, or at Ctrl-C."""
    try:
        return Console().input("[bold]> [/]").strip()
    except (EOFError, KeyboardInterrupt):
        write_text("\n")
        return None


def answer(llm: nanovllm_core.LLM, history: list[dict[str, str]], params: SamplingParams) -> str:
    """Print the model's answer as it comes, and return it; Ctrl-C ends it early."""
    speed, text, reason = Speed(), "", None
    # Leaving early aborts the request; closing makes that happen now.
    with interruptions() as interrupted, closing(llm.stream(history, params)) as outputs:
        for output in outputs:
            speed.add(len(output.new_token_ids))
            write_text(output.new_text)
            text, reason = output.text, output.finish_reason
            if interrupted.is_set():
                break
    write_text("\n")
    limit = "limits.max_model_len" if params.max_tokens is None else "--max-tokens"
    speed.report(f" (cut off by {limit})" if reason == "length" else "")
    return text


@contextmanager
def interruptions() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that an answer ends behind a whole output."""
    event = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda _signal, _frame: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
