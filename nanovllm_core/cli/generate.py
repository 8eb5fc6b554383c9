"""`nanovllm generate`: complete prompts, with the text as it is generated."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from nanovllm_core.cli import engine_options as options
from nanovllm_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm_core.engine import RequestOutput
    from nanovllm_core.llm import LLM

Prompts = Annotated[
    list[str] | None, typer.Argument(help="Prompts; with none, one is read from stdin.")
]
MaxTokens = Annotated[int, typer.Option(help="Maximum number of output tokens.")]
Temperature = Annotated[
    float, typer.Option(help="0 takes the likeliest token, 1 samples from the model as it is.")
]
TopK = Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0: from all.")]
TopP = Annotated[float, typer.Option(help="Sample from the likeliest tokens that add up to this.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this fraction of the likeliest one.")]
Seed = Annotated[int | None, typer.Option(help="Seed for sampling.")]


def generate(
    prompts: Prompts = None,
    model: options.Model = None,
    config: options.ConfigFile = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Apply the chat template to the prompts.")
    ] = False,
    stream: Annotated[
        bool | None,
        typer.Option(help="Print text as it is generated; default for one prompt on a terminal."),
    ] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1, tokens repeat less.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Above 0, tokens repeat less.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Above 0, tokens repeat less.")] = 0.0,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the output at this text (repeatable).")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue past end-of-sequence tokens.")
    ] = False,
    attention: options.Attention = None,
    scheduler: options.Scheduler = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    settings: options.Settings = None,
) -> None:
    """Complete prompts: print each with its completion; the speed goes to stderr."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        max_tokens=max_tokens,
        seed=seed,
        stop=stop or (),
        ignore_eos=ignore_eos,
    )
    texts = _texts(prompts)
    if stream is None:
        stream = len(texts) == 1 and sys.stdout.isatty()
    engine_config = options.engine_config(
        model, config, attention, scheduler, device, dtype, settings
    )
    with options.open_llm(engine_config) as llm:
        inputs = (
            [llm.tokenizer.apply_chat_template(_user(text)) for text in texts] if chat else texts
        )
        show = _stream_each if stream else _show_all
        show(llm, texts, inputs, params)


def _texts(prompts: list[str] | None) -> list[str]:
    if prompts:
        return prompts
    if sys.stdin.isatty():
        raise typer.BadParameter('give a prompt, as in: nanovllm generate "Once upon a time"')
    return [sys.stdin.read()]


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@dataclass(slots=True)
class Speed:
    """Counts output tokens from now on."""

    started: float
    num_tokens: int = 0
    first: float | None = None

    @classmethod
    def start(cls) -> Speed:
        return cls(perf_counter())

    def add(self, num_tokens: int) -> None:
        """Some more tokens came."""
        if self.first is None:
            self.first = perf_counter() - self.started
        self.num_tokens += num_tokens

    def report(self, note: str = "") -> None:
        """One line on stderr, so that stdout holds text alone."""
        seconds = perf_counter() - self.started
        first = "" if self.first is None else f", first after {self.first * 1000:.0f} ms"
        rate = self.num_tokens / seconds
        line = f"{self.num_tokens} tokens in {seconds:.2f} s: {rate:.1f} tokens/s{first}{note}"
        Console(stderr=True).print(line, style="dim", highlight=False, soft_wrap=True)


def write_text(text: str) -> None:
    """Print model text as it is: no markup, no wrapping, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def show_prompt(text: str, end: str = "") -> None:
    """Print a prompt: on a terminal set off from the answer, elsewhere as it is."""
    if not sys.stdout.isatty():  # rich would expand tabs and drop control characters
        write_text(text + end)
        return
    Console().print(text, style="bold", markup=False, highlight=False, soft_wrap=True, end=end)


def _stream_each(
    llm: LLM, texts: Sequence[str], inputs: Sequence[str | list[int]], params: SamplingParams
) -> None:
    for text, prompt in zip(texts, inputs, strict=True):
        show_prompt(text, end="" if prompt is text else "\n")
        speed, reason = Speed.start(), None
        for output in llm.stream(prompt, params):
            speed.add(len(output.new_token_ids))
            write_text(output.new_text)
            reason = output.finish_reason
        write_text("\n")
        speed.report(f" ({reason})")


def _show_all(
    llm: LLM, texts: Sequence[str], inputs: Sequence[str | list[int]], params: SamplingParams
) -> None:
    speed = Speed.start()
    outputs: list[RequestOutput] = llm.generate(inputs, params)
    speed.num_tokens = sum(len(output.token_ids) for output in outputs)
    for text, prompt, output in zip(texts, inputs, outputs, strict=True):
        show_prompt(text, end="" if prompt is text else "\n")
        write_text(output.text + "\n")
    speed.report()
