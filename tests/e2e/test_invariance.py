"""In fp32 a request's tokens are its own: no setting, neighbour or accident changes them.

Every run is compared with a reference that recomputes the whole sequence for each token, so a fault
that all settings share is found as well.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from nanovllm_core import LLM, SamplingParams

from .tiny import VOCAB_SIZE, Reference, open_tiny

MAX_TOKENS = 20


@dataclass(frozen=True)
class Case:
    """A prompt and its sampling."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, seed=self.seed, max_tokens=MAX_TOKENS, ignore_eos=True
        )


def make_cases() -> list[Case]:
    """Lengths round block ends, three blocks and more of 16, and prompts that begin alike."""
    rng = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB_SIZE) for _ in range(count))

    prompts = [ids(length) for length in (1, 3, 15, 16, 17, 33, 48, 49, 270, 70, 130)]
    long = prompts[-1]
    prompts += [long[:64], long[:65] + ids(4), long[:80], long[:16] + ids(40), prompts[5]]
    # The first block differs and the later ones do not: their hashes must know the parent.
    prompts.append(ids(16) + long[16:70])
    return [
        Case(prompt, 0.0 if index % 2 else 0.9, seed=index) for index, prompt in enumerate(prompts)
    ]


CASES = make_cases()


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[list[int]]:
    return [
        reference.tokens(case.prompt, MAX_TOKENS, temperature=case.temperature, seed=case.seed)
        for case in CASES
    ]


def run(llm: LLM, cases: list[Case]) -> list[list[int]]:
    outputs = llm.generate([case.prompt for case in cases], [case.params for case in cases])
    return [output.token_ids for output in outputs]


SETTINGS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "no prefix cache": {"cache": {"prefix_caching": False}},
    "blocks of 64": {"cache": {"block_size": 64}},
    "blocks of 256": {"cache": {"block_size": 256}},
    "a budget of one token per row": {"max_num_batched_tokens": 8},
    "chunks of 17": {"max_num_batched_tokens": 17},
    "chunks of 33, blocks of 64": {"max_num_batched_tokens": 33, "cache": {"block_size": 64}},
    "chunks without a prefix cache": {
        "max_num_batched_tokens": 17,
        "cache": {"prefix_caching": False},
    },
    "never ahead": {"steps_ahead": 0},
    "three steps ahead": {"steps_ahead": 3},
    "three steps ahead in chunks": {"steps_ahead": 3, "max_num_batched_tokens": 12},
    "two at a time": {"max_num_seqs": 2},
    "buckets 3 and 8": {"cuda_graphs": {"sizes": (3, 8)}},
    "shortest job first": {"scheduler": "sjf"},
    "longest answer first": {"scheduler": "lpt", "max_num_batched_tokens": 17},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_setting_changes_a_token(setting: str, tiny: Path, expected: list[list[int]]) -> None:
    """Prefix cache, block size, chunks, depth, rows, order: greedy and sampled tokens stay."""
    if name := SETTINGS[setting].get("scheduler"):
        pytest.importorskip(f"nanovllm_scheduler_{name}", reason=f"needs the scheduler {name}")
    with open_tiny(tiny, **SETTINGS[setting]) as llm:
        assert run(llm, CASES) == expected
        assert run(llm, CASES) == expected, "the second time, on whatever is cached"
        assert (llm.stats.prefix_hit_tokens > 0) == llm.config.cache.prefix_caching


@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_giving_way_loses_no_token(
    steps_ahead: int, prefix_caching: bool, tiny: Path, expected: list[list[int]]
) -> None:
    """With blocks for hardly more than one sequence, requests are preempted again and again."""
    with open_tiny(
        tiny,
        **{"cache.num_blocks": 20, "cache.prefix_caching": prefix_caching},
        steps_ahead=steps_ahead,
    ) as llm:
        assert run(llm, CASES) == expected
        assert llm.stats.preemptions > 0
        assert llm.stats.free_blocks == 20


@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
def test_a_preempted_stream_repeats_no_token(
    steps_ahead: int, tiny: Path, expected: list[list[int]]
) -> None:
    """What a stream has given is not given again after the prompt is computed anew.

    A stream begins when the one before it has given a token, so a slow reader may find that all
    have room: the streams run again until one was preempted.
    """
    cases = dict(list(enumerate(CASES))[-8:])
    with open_tiny(tiny, steps_ahead=steps_ahead, **{"cache.num_blocks": 20}) as llm:
        for _ in range(20):
            llm.reset_prefix_cache()
            streams = [llm.stream(case.prompt, case.params) for case in cases.values()]
            tokens: dict[int, list[int]] = {i: [] for i in cases}
            for outputs in zip_longest(*streams):  # one that missed steps catches up at once
                for i, output in zip(cases, outputs, strict=True):
                    tokens[i] += output.new_token_ids if output else []
            assert tokens == {i: expected[i] for i in cases}
            if llm.stats.preemptions:
                return
        pytest.fail("no stream was preempted")


def test_alone_or_among_others_is_the_same(tiny: Path, expected: list[list[int]]) -> None:
    """Each request on its own, and the batch in another order."""
    with open_tiny(tiny) as llm:
        assert [run(llm, [case])[0] for case in CASES] == expected
        assert run(llm, CASES[::-1]) == expected[::-1]


@pytest.mark.parametrize("steps_ahead", [0, 1, 3])
def test_neighbours_that_are_aborted_midway_change_nothing(
    steps_ahead: int, tiny: Path, expected: list[list[int]]
) -> None:
    """Streams left in the middle free rows and blocks under everybody else's feet."""
    with open_tiny(tiny, steps_ahead=steps_ahead, **{"cache.num_blocks": 24}) as llm:
        neighbours = [
            llm.stream(case.prompt[::-1], SamplingParams(temperature=1.0, max_tokens=30))
            for case in CASES[5:9]
        ]
        for stop_after, stream in enumerate(neighbours, start=1):
            for _ in range(stop_after):
                next(stream)
        outputs = llm.stream(CASES[10].prompt, CASES[10].params)
        tokens: list[int] = []
        for count, output in enumerate(outputs):
            tokens += output.new_token_ids
            if count % 3 == 1 and neighbours:
                neighbours.pop().close()
        assert tokens == expected[10]
        assert not neighbours
        assert run(llm, CASES) == expected
        assert llm.stats.free_blocks == 24


def test_a_seed_gives_the_same_tokens_in_any_batch(tiny: Path) -> None:
    """Three requests with one seed and one prompt agree, and another seed differs."""
    params = [
        SamplingParams(temperature=1.2, seed=seed, max_tokens=MAX_TOKENS) for seed in (7, 7, 8, 7)
    ]
    with open_tiny(tiny) as llm:
        first, second, other, third = [
            output.token_ids for output in llm.generate([CASES[6].prompt] * 4, params)
        ]
        alone = llm.generate(CASES[6].prompt, params[0])[0].token_ids
    assert first == second == third == alone != other


def test_without_a_seed_the_engines_seed_decides(tiny: Path) -> None:
    """Two engines with one seed agree; requests of one engine do not repeat each other."""
    params = SamplingParams(temperature=1.2, max_tokens=MAX_TOKENS)
    runs = []
    for seed in (3, 3, 4):
        with open_tiny(tiny, seed=seed) as llm:
            runs.append([o.token_ids for o in llm.generate([CASES[6].prompt] * 2, params)])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]
