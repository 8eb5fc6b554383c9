"""How the commands print what a model writes: as text, as it comes, or as JSON lines."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import typer
from rich.console import Console

import nanovllm_core
from nanovllm_core.cli.prompts import PromptInput, naming
from nanovllm_core.errors import PluginFailedError, RequestError


@dataclass(slots=True)
class Speed:
    """Counts output tokens from now on."""

    started: float = field(default_factory=perf_counter)
    num_tokens: int = 0
    first: float | None = None

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


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts that are prepared for an engine."""

    llm: nanovllm_core.LLM
    inputs: Sequence[PromptInput]
    echo: bool

    def run(self) -> Iterator[tuple[int, nanovllm_core.RequestOutput]]:
        """Every finished output with the index of its prompt, in the order of the prompts.

        All prompts are checked before any is run; an error names the line that it comes from.
        The speed is reported at the end. Then PluginFailedError tells of outputs that an error
        ended.
        """
        speed = Speed()
        params = [one.params for one in self.inputs]
        same = all(one == params[0] for one in params)
        try:
            outputs = self.llm.generate(
                [one.prompt for one in self.inputs],
                params[0] if same else params,
                labels=[one.labels for one in self.inputs],
            )
        except RequestError as error:
            alone = len(self.inputs) == 1
            index = 0 if alone else error.prompt_index
            if index is not None and (place := self.inputs[index].place):
                raise type(error)(f"{place}: {error if alone else error.__cause__}") from error
            raise
        speed.num_tokens = sum(len(output.token_ids) for output in outputs)
        indices = (index for index, one in enumerate(params) for _ in range(one.n))
        failed: list[str] = []
        for index, output in zip(indices, outputs, strict=True):
            yield index, output
            failed += self.failures(index, output)
        speed.report()
        if failed:
            raise PluginFailedError("\n".join(failed))

    def failures(self, index: int, output: nanovllm_core.RequestOutput) -> list[str]:
        """The error that ended an output, if one did, and which prompt it was."""
        place = self.inputs[index].place or f"prompts[{index}]"
        return [] if output.error is None else [f"{place}: {output.error}"]

    def show_prompt(self, index: int) -> None:
        """Echo a prompt: on a terminal set off from the answer, elsewhere as it is."""
        if self.echo:
            one = self.inputs[index]
            text = one.shown(self.llm) + ("" if one.messages is None else "\n")
            # rich knows the terminals without styles; its print would expand tabs.
            has_styles = sys.stdout.isatty() and Console().color_system is not None
            write_text(typer.style(text, bold=True) if has_styles else text)


def stream_each(work: Work) -> None:
    """One prompt after the other, the text as it comes."""
    for index, one in enumerate(work.inputs):
        work.show_prompt(index)
        speed, reason = Speed(), None
        failed: list[str] = []
        with naming(one.place):
            for output in work.llm.stream(one.prompt, one.params, labels=one.labels):
                speed.add(len(output.new_token_ids))
                write_text(output.new_text)
                reason = output.finish_reason
                failed += work.failures(index, output)
        write_text("\n")
        speed.report(f" ({reason})")
        if failed:
            raise PluginFailedError(*failed)


def show_all(work: Work) -> None:
    """All prompts at once, the text of each when all are finished."""
    for index, output in work.run():
        work.show_prompt(index)
        write_text(output.text + "\n")


def print_json(work: Work) -> None:
    """All prompts at once, one JSON object on a line for each output."""
    for index, output in work.run():
        prompt = work.inputs[index].to_json() if work.echo else {}
        record = {"index": index, "sample": output.index, **prompt, **_as_json(output)}
        # ASCII alone, so that no reader ends a line at another separator of Unicode's.
        write_text(json.dumps(record, allow_nan=False) + "\n")


def _as_json(output: nanovllm_core.RequestOutput) -> dict[str, Any]:
    """The fields of a finished output; see "Outputs as JSON" in docs/configuration.md."""
    record: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "error": None if output.error is None else str(output.error),
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_output_tokens": len(output.token_ids),
        "num_cached_tokens": output.num_cached_tokens,
    }
    if output.logprobs is not None:
        record["logprobs"] = [
            {**_logprob(token_id, one.token_logprob), "top": [_logprob(*pair) for pair in one.top]}
            for token_id, one in zip(output.token_ids, output.logprobs, strict=True)
        ]
    return record


def _logprob(token_id: int, value: float) -> dict[str, Any]:
    """JSON has no infinity: null stands for the log-probability of what cannot come."""
    return {"token_id": token_id, "logprob": value if math.isfinite(value) else None}
