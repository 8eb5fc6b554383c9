"""Each sampling parameter does what it says, from `generate` to the tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.engine.request_factory import derive_seed
from nanovllm_core.frontend import RequestOutput
from nanovllm_core.interfaces.plan import MAX_DEVICE_STOP_IDS

from .tiny import VOCAB_SIZE, Reference, open_tiny, write_checkpoint

PROMPT = [5, 17, 3, 60, 41, 8, 8, 90]
LENGTH = 16


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(temperature=0, **{"max_tokens": LENGTH, **fields})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def free(reference: Reference) -> list[int]:
    """The greedy tokens after PROMPT when nothing ends them."""
    return reference.tokens(PROMPT, LENGTH)


def assert_same_logprobs(one: RequestOutput, other: RequestOutput) -> None:
    """The same ids, and values to a thousandth: matrices of other heights round otherwise."""
    tops = [[record.top for record in output.logprobs or []] for output in (one, other)]
    for first, second in zip(*tops, strict=True):
        assert [token_id for token_id, _ in first] == [token_id for token_id, _ in second]
        values = [value for _, value in first]
        assert values == pytest.approx([value for _, value in second], abs=1e-3)


def first_tokens(llm: LLM, count: int, **fields: object) -> set[int]:
    """What `count` seeds choose as the first token."""
    params = [
        SamplingParams(max_tokens=1, seed=seed, **fields)  # type: ignore[arg-type]
        for seed in range(count)
    ]
    return {output.token_ids[0] for output in llm.generate([PROMPT] * count, params)}


def probabilities(reference: Reference, temperature: float) -> np.ndarray:
    probabilities: np.ndarray = (reference.logits(PROMPT)[-1] / temperature).softmax(-1).numpy()
    return probabilities


def test_temperature_zero_takes_the_likeliest_token(shared_engine: LLM, free: list[int]) -> None:
    """Greedy, whatever the seed."""
    outputs = shared_engine.generate([PROMPT] * 2, [greedy(seed=1), greedy(seed=2)])
    assert [output.token_ids for output in outputs] == [free, free]


def test_sampling_follows_the_distribution(shared_engine: LLM, reference: Reference) -> None:
    """The frequencies of 600 first tokens are near the softmax at the temperature."""
    expected = probabilities(reference, 1.5)
    params = [SamplingParams(temperature=1.5, max_tokens=1, seed=seed) for seed in range(600)]
    counts = np.zeros(VOCAB_SIZE)
    for output in shared_engine.generate([PROMPT] * 600, params):
        counts[output.token_ids[0]] += 1
    # Half the summed difference; for a true sample of this size it stays below 0.2.
    assert abs(counts / 600 - expected).sum() / 2 < 0.2


def test_top_k_chooses_among_the_k_likeliest(shared_engine: LLM, reference: Reference) -> None:
    likeliest = np.argsort(-probabilities(reference, 3.0))
    for k in (1, 3):
        assert first_tokens(shared_engine, 60, temperature=3.0, top_k=k) == set(likeliest[:k])
    assert len(first_tokens(shared_engine, 60, temperature=3.0, top_k=-1)) > 3


def test_top_p_chooses_among_the_fewest_that_hold_the_share(
    shared_engine: LLM, reference: Reference
) -> None:
    share = probabilities(reference, 3.0)
    order = np.argsort(-share)
    count = int(np.searchsorted(np.cumsum(share[order]), 0.3)) + 1
    assert 1 < count < 12
    chosen = first_tokens(shared_engine, 120, temperature=3.0, top_p=0.3)
    assert chosen == set(order[:count])


def test_min_p_leaves_out_what_is_far_less_likely_than_the_best(
    shared_engine: LLM, reference: Reference
) -> None:
    share = probabilities(reference, 3.0)
    kept = set(np.flatnonzero(share >= 0.5 * share.max()))
    assert 1 <= len(kept) < 12
    assert first_tokens(shared_engine, 120, temperature=3.0, min_p=0.5) == kept


@pytest.mark.parametrize(("presence", "frequency"), [(2.0, 0.0), (0.0, 1.5), (-1.0, 1.0)])
def test_presence_and_frequency_penalties_count_the_output(
    presence: float, frequency: float, shared_engine: LLM, reference: Reference
) -> None:
    """Subtracted once, and once per occurrence; ids of the prompt alone are not punished."""
    prompt = [1, 2, 1, 2, 1, 2]
    params = greedy(max_tokens=24, presence_penalty=presence, frequency_penalty=frequency)
    ids = list(prompt)
    for _ in range(24):
        scores = reference.logits(ids)[-1].numpy().copy()
        counts = np.bincount(ids[len(prompt) :], minlength=VOCAB_SIZE)
        scores -= frequency * counts + presence * (counts > 0)
        ids.append(int(scores.argmax()))
    assert shared_engine.generate([prompt], params)[0].token_ids == ids[len(prompt) :]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_logit_bias_is_added_to_every_step(
    temperature: float, shared_engine: LLM, reference: Reference, free: list[int]
) -> None:
    """In all samples; -100 keeps ids out, 100 lets nothing else come, and logprobs show neither."""
    bias = {free[0]: -100.0, free[2]: -100.0, 11: 4.0}
    params = SamplingParams(
        temperature=temperature, seed=9, n=2, logit_bias=bias, logprobs=1, max_tokens=LENGTH
    )
    for output in shared_engine.generate([PROMPT], params):
        ids = list(PROMPT)
        for index in range(LENGTH):
            scores = reference.logits(ids)[-1]
            logprobs = (output.logprobs or [])[index]
            assert logprobs.top[0][0] == int(scores.argmax())
            assert logprobs.top[0][1] == pytest.approx(float(scores.log_softmax(0).max()), abs=1e-3)
            for token_id, value in bias.items():
                scores[token_id] += value
            seed = derive_seed(9, output.index) if output.index else 9
            ids.append(reference.choose(scores, temperature, seed, index))
        assert output.token_ids == ids[len(PROMPT) :]
    only = SamplingParams(temperature=temperature, seed=1, logit_bias={42: 100}, max_tokens=6)
    assert shared_engine.generate([PROMPT], only)[0].token_ids == [42] * 6


def test_extras_of_one_request_leave_its_neighbours_alone(
    shared_engine: LLM, free: list[int]
) -> None:
    """A batch that mixes every parameter gives each request what it gets alone."""
    mixed = [
        greedy(),
        SamplingParams(temperature=1.1, seed=3, max_tokens=LENGTH),
        greedy(repetition_penalty=1.7),
        greedy(logit_bias={free[0]: -100, 7: 3.5}, logprobs=1),
        SamplingParams(temperature=0.8, seed=4, top_k=5, top_p=0.9, min_p=0.01, max_tokens=LENGTH),
        greedy(logprobs=3, max_tokens=5),
        greedy(presence_penalty=1.0, frequency_penalty=0.5, min_tokens=4, stop_token_ids=free[1:3]),
    ]
    together = shared_engine.generate([PROMPT] * len(mixed), mixed)
    for output, params in zip(together, mixed, strict=True):
        alone = shared_engine.generate([PROMPT], params)[0]
        assert output.token_ids == alone.token_ids
        assert_same_logprobs(output, alone)
    assert together[0].token_ids == free


@pytest.mark.parametrize("count", [1, MAX_DEVICE_STOP_IDS, MAX_DEVICE_STOP_IDS + 1, 40])
@pytest.mark.parametrize("min_tokens", [0, 5])
def test_any_number_of_stop_ids_is_honoured(
    count: int, min_tokens: int, shared_engine: LLM, reference: Reference, free: list[int]
) -> None:
    """The device checks a few; however many there are, the last one ends the request too."""
    end = next(id for index, id in enumerate(free) if index >= 4 and id not in free[:index])
    unused = [id for id in range(VOCAB_SIZE) if id not in free]
    stops = [*unused[: count - 1], end]
    output = shared_engine.generate([PROMPT], greedy(stop_token_ids=stops, min_tokens=min_tokens))[
        0
    ]
    if min_tokens <= free.index(end):
        assert output.token_ids == free[: free.index(end) + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", end)
    else:
        assert len(output.token_ids) >= min_tokens


def test_ending_ids_of_the_checkpoint_end_a_request_unless_it_ignores_them(
    free: list[int], tmp_path: Path
) -> None:
    """All of generation_config.json's; `stop_token_ids` end it even then."""
    folder = write_checkpoint(tmp_path)
    unused = next(id for id in range(VOCAB_SIZE) if id not in free)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{unused}, {free[4]}]}}')
    with open_tiny(folder) as llm:
        ended, ignoring, stopped = llm.generate(
            [PROMPT] * 3,
            [greedy(), greedy(ignore_eos=True), greedy(ignore_eos=True, stop_token_ids=[free[2]])],
        )
    assert ended.token_ids == free[: free.index(free[4]) + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", free[4])
    assert ignoring.token_ids == free
    assert (ignoring.finish_reason, ignoring.stop_reason) == ("length", None)
    assert stopped.token_ids == free[: free.index(free[2]) + 1]


def test_max_tokens_of_none_goes_on_to_the_models_length(tiny: Path) -> None:
    """The sequence fills max_model_len exactly."""
    with open_tiny(tiny, max_model_len=40) as llm:
        output = llm.generate([PROMPT], greedy(max_tokens=None))[0]
    assert len(PROMPT) + len(output.token_ids) == 40
    assert output.finish_reason == "length"


def test_samples_of_one_prompt_share_its_blocks(tiny: Path) -> None:
    """With n=4 and a prompt of three full blocks, the prompt is held once."""
    prompt = [(3 * i) % VOCAB_SIZE for i in range(50)]
    params = SamplingParams(temperature=1.3, seed=2, max_tokens=4, n=4)
    with open_tiny(tiny) as llm:
        most_used = 0
        streamed: dict[int, list[int]] = {}
        total = llm.stats.free_blocks
        for output in llm.stream(prompt, params):
            streamed.setdefault(output.index, []).extend(output.new_token_ids)
            most_used = max(most_used, total - llm.stats.free_blocks)
        # Three shared blocks, and one for each sample's rest; unshared it would be 16.
        assert 0 < most_used <= 3 + 4
        outputs = llm.generate([prompt], params)
        assert [output.index for output in outputs] == [0, 1, 2, 3]
        assert {output.index: output.token_ids for output in outputs} == streamed
        assert len({tuple(output.token_ids) for output in outputs}) > 1
        alone = llm.generate([prompt], dataclasses.replace(params, n=1))[0]
        assert alone.token_ids == outputs[0].token_ids


@pytest.fixture
def story(demo: LLM) -> str:
    """A text of the demo model that is long enough to be stopped in the middle."""
    prompt = "Once upon a time"
    return demo.generate(prompt, greedy(max_tokens=60, ignore_eos=True))[0].text


@pytest.mark.parametrize("steps_ahead", [0, 3])
def test_a_stop_string_cuts_the_text(steps_ahead: int, story: str) -> None:
    """The output ends before the string, which may begin and end inside tokens."""
    prompt, begin = "Once upon a time", 20
    with open_tiny("demo", steps_ahead=steps_ahead) as llm:
        for width in (1, 2, 7):
            stop = story[begin : begin + width]
            output = llm.generate(prompt, greedy(max_tokens=60, stop=[stop, "never there"]))[0]
            assert output.text == story[: story.index(stop)]
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)
            streamed = list(llm.stream(prompt, greedy(max_tokens=60, stop=stop)))
            assert "".join(part.new_text for part in streamed) == output.text


def test_half_a_character_at_the_end_is_not_lost(demo: LLM) -> None:
    """Cut off by max_tokens in a multi-byte character, the text says so with U+FFFD."""
    ids = demo.tokenizer.encode("naïve café ☃ 你好 😀")
    whole = demo.tokenizer.decode(ids)
    assert "\ufffd" not in whole
    stream = demo.tokenizer.detokenizer()
    split = next(
        count for count in range(1, len(ids)) if demo.tokenizer.decode(ids[:count])[-1] == "\ufffd"
    )
    pushed = stream.push(ids[:split])
    assert "\ufffd" not in pushed
    assert pushed + stream.flush() == demo.tokenizer.decode(ids[:split])
    # The same through the engine: whatever ids come, the text is theirs.
    params = SamplingParams(temperature=50.0, seed=0, max_tokens=12, ignore_eos=True, n=40)
    outputs = demo.generate("x", params)
    assert any(output.text.endswith("\ufffd") for output in outputs)
    for output in outputs:
        assert output.text == demo.tokenizer.decode(output.token_ids)
