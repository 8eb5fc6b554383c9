"""The requests of a benchmark: prompts as ids, and how many tokens each asks for."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nanovllm_core.errors import ConfigError, shown

VOCABULARY = 10_000
"""Prompt ids are drawn from 0 to this, as nano-vllm's are."""

_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law"
)
WORDS = _WORDS.split()


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts (token ids) and output lengths, in order."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(prompt tokens, output tokens) of every request."""
        return [
            (len(prompt), length)
            for prompt, length in zip(self.prompts, self.output_lens, strict=True)
        ]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return max(prompt + output for prompt, output in self.lengths)

    def within(self, vocab_size: int) -> Workload:
        """The same lengths, with ids that a small vocabulary holds."""
        if vocab_size > VOCABULARY:
            return self
        return replace(self, prompts=[[i % vocab_size for i in ids] for ids in self.prompts])

    def share(self, num_engines: int) -> Workload:
        """The requests of the first of `num_engines` engines that take turns."""
        return replace(
            self, prompts=self.prompts[::num_engines], output_lens=self.output_lens[::num_engines]
        )

    def relabelled(self, shift: int) -> Workload:
        """The same lengths, with every id moved by `shift`: no prefix cache knows the prompts."""
        if not shift:
            return self
        end = max(map(max, self.prompts)) + 1
        return replace(self, prompts=[[(i + shift) % end for i in ids] for ids in self.prompts])


def nano_workload(num_seqs: int = 256) -> Workload:
    """nano-vllm's benchmark: lengths uniform in 100 to 1024, seed 0; prompts are drawn first."""
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, VOCABULARY) for _ in range(rng.randint(100, 1024))] for _ in range(num_seqs)
    ]
    return Workload("nano", prompts, [rng.randint(100, 1024) for _ in range(num_seqs)])


def fixed_workload(num_seqs: int, input_len: int, output_len: int) -> Workload:
    """`num_seqs` random prompts of one length, each asking for `output_len` tokens."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, VOCABULARY) for _ in range(input_len)] for _ in range(num_seqs)]
    name = f"{num_seqs} x {input_len}/{output_len}"
    return Workload(name, prompts, [output_len] * num_seqs)


def ragged_workload(num_seqs: int, shortest: int = 16, longest: int = 256) -> Workload:
    """Prompts and outputs of uniform lengths, seed 0; a request's two are drawn together."""
    if shortest > longest:
        raise ConfigError(f"shortest is {shortest} and longest {longest}; give a longest above it")
    rng = random.Random(0)
    lengths = [
        (rng.randint(shortest, longest), rng.randint(shortest, longest)) for _ in range(num_seqs)
    ]
    prompts = [[rng.randint(0, VOCABULARY) for _ in range(prompt)] for prompt, _ in lengths]
    name = f"{num_seqs} ragged {shortest}-{longest}"
    return Workload(name, prompts, [output for _, output in lengths])


def load_format(model: str) -> Literal["auto", "dummy"]:
    """How a benchmark loads `model`: a folder without weights gets random ones."""
    folder = Path(model)
    return "auto" if not folder.is_dir() or any(folder.glob("*.safetensors")) else "dummy"


def fixed_lengths(name: str) -> tuple[int, int] | None:
    """(prompt tokens, output tokens) of a fixed workload by its name; None for another's."""
    match = re.fullmatch(r"\d+ x (\d+)/(\d+)", name)
    return (int(match[1]), int(match[2])) if match else None


def recorded_workload(record: Mapping[str, Any]) -> Workload:
    """The requests of a result file, made again from its `workload` and `num_seqs`."""
    name, num_seqs = record["workload"], record["num_seqs"]
    if name == "nano":
        return nano_workload(num_seqs)
    if lengths := fixed_lengths(name):
        return fixed_workload(num_seqs, *lengths)
    if match := re.fullmatch(r"\d+ ragged (\d+)-(\d+)", name):
        return ragged_workload(num_seqs, int(match[1]), int(match[2]))
    raise ConfigError(
        f"workload {shown(name)} is none that can be made again; expected 'nano', 'N x "
        "INPUT/OUTPUT' or "
        "'N ragged SHORTEST-LONGEST'"
    )


def text_of(ids: Sequence[int]) -> str:
    """A common word for each id; most tokenizers make one token of it."""
    count = len(WORDS)
    return " ".join(WORDS[(i ^ i // count) % count] for i in ids)
