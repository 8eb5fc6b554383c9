"""`nanovllm generate`: complete prompts, with the text as it is generated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from nanovllm_core.cli import engine_options as options
from nanovllm_core.cli.output import Work, print_json, show_all, stream_each
from nanovllm_core.cli.prompts import MAX_TOKENS, PromptInput, read_prompts
from nanovllm_core.interfaces.sampling_params import SamplingParams


def parse_biases(flags: Sequence[str] | None) -> dict[int, float] | None:
    """`["17=-100"]` -> `{17: -100.0}`, or a usage error."""
    biases: dict[int, float] = {}
    for flag in flags or ():
        token_id, _, bias = flag.partition("=")
        try:
            key, value = int(token_id), float(bias)
        except ValueError:
            raise typer.BadParameter(
                f"{flag!r:.80} must be a token id and a number, as in 17=-100"
            ) from None
        if key in biases:
            raise typer.BadParameter(f"token id {key} is given twice; leave one out")
        biases[key] = value
    return biases or None


Prompts = Annotated[
    list[str] | None,
    typer.Argument(help="Prompts; - reads one from stdin, which is also done without any."),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        exists=True,
        dir_okay=False,
        help="A file with one prompt on each line; of .jsonl a line is a JSON string or an object "
        'with "prompt" or "messages", labels, and sampling fields of its own.',
    ),
]
Chat = Annotated[bool, typer.Option("--chat", help="Apply the chat template to the prompts.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per output, each on a line.")
]
Stream = Annotated[
    bool | None,
    typer.Option(help="Print text as it is generated; default for one prompt on a terminal."),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="0 takes the likeliest token, 1 samples from the model as it is; default: the "
        "checkpoint's, else 0."
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        help="Sample from the k likeliest tokens, 0: from all; default: the checkpoint's."
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the likeliest tokens that add up to this; default: the checkpoint's."
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Drop tokens below this fraction of the likeliest one; default: the checkpoint's."
    ),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1, tokens repeat less; default: the checkpoint's.")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID=BIAS",
        callback=parse_biases,
        help="Add -100 to 100 to the logit of a token id (repeatable).",
    ),
]
Logprobs = Annotated[
    int | None,
    typer.Option(help="Report log-probabilities, and of so many likeliest tokens; with --json."),
]
Seed = Annotated[int | None, typer.Option(help="Seed for sampling.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the output at this text (repeatable).")]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Continue past end-of-sequence tokens.")
]


def sampling_params(ctx: typer.Context) -> SamplingParams:
    """The parameters that the flags of a command give, which are named as the fields are."""
    names = {one.name for one in fields(SamplingParams)}
    return SamplingParams(**{name: ctx.params[name] for name in names & ctx.params.keys()})


def generate(
    ctx: typer.Context,
    prompts: Prompts = None,
    model: options.Model = None,
    config: options.ConfigFile = None,
    prompt_file: PromptFile = None,
    chat: Chat = False,
    chat_template_kwargs: options.ChatTemplateKwargs = None,
    as_json: AsJson = False,
    echo: Annotated[bool, typer.Option(help="Print each prompt before its completion.")] = True,
    stream: Stream = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of output tokens.", show_default=f"{MAX_TOKENS}, or all that fit"
        ),
    ] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: Annotated[float, typer.Option(help="Above 0, tokens repeat less.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="Above 0, tokens repeat less.")] = 0.0,
    logit_bias: LogitBias = None,
    logprobs: Logprobs = None,
    n: Annotated[int, typer.Option("--n", help="Outputs for each prompt.")] = 1,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    generation_config: options.GenerationConfig = None,
    attention: options.Attention = None,
    scheduler: options.Scheduler = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    settings: options.Settings = None,
) -> None:
    """Complete prompts: print each with its completion; the speed goes to stderr."""
    params = sampling_params(ctx)
    inputs = read_prompts(prompts, prompt_file, chat, params)
    if chat_template_kwargs and not any(one.messages for one in inputs):
        raise typer.BadParameter("--chat-template-kwargs goes with --chat")
    show = _how_to_show(inputs, params, stream, as_json)
    loaded = options.loaded_config(ctx)
    with options.open_llm(loaded.config) as llm:
        show(Work(llm, [one.prepare(llm) for one in inputs], echo))


def _how_to_show(
    inputs: Sequence[PromptInput], params: SamplingParams, stream: bool | None, as_json: bool
) -> Callable[[Work], None]:
    """The function that prints the outputs; a usage error for flags that exclude each other."""
    if as_json:
        if stream:
            raise typer.BadParameter("--json prints finished outputs; leave --stream out")
        return print_json
    if params.logprobs is not None:
        raise typer.BadParameter("--logprobs are printed with --json only; add it")
    several = any(one.params.n > 1 for one in inputs)
    if stream and several:
        raise typer.BadParameter("--stream prints one output for each prompt; leave it or n out")
    if stream is None:
        stream = len(inputs) == 1 and not several and sys.stdout.isatty()
    return stream_each if stream else show_all
