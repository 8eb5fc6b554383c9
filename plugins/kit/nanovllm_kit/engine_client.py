"""The conformance suite of engine clients: a door cannot tell where its engine runs.

A checkpoint's config.json with random weights is enough; which model it is does not matter. The
client is started on a CPU, and so is the core's own, `thread`, whose answers are the expected ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from nanovllm_core.config import EngineConfig, load_config
from nanovllm_core.errors import EngineClosedError, InvalidLabelsError, InvalidPromptError
from nanovllm_core.frontend import EngineClient, Mailbox, NewRequest, OutputDelta, ThreadClient
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_kit.conformance import PluginUnderTest, SpecConformance
from nanovllm_kit.enabled import enabled_plugins
from nanovllm_kit.model_settings import LLAMA_LIKE, save_served

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "load_format": "dummy",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "cache": {"num_blocks": 16, "block_size": 16},
}
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6], [5] * 20]
COMPARED = ("new_token_ids", "finish_reason", "stop_reason", "num_cached_tokens")
"""The fields of a sample that are those of a thread. The number of steps it waited may differ."""
ATTEMPTS = 10
"""Samples with a stop string. `end_at` ends at least one of them before its length does."""
PATIENCE = 60.0
"""Seconds in which an answer has come."""

Answers = Mapping[str, Sequence[OutputDelta]]
"""By the name of a request: its samples, each as one delta."""


class EngineClientConformance(SpecConformance):
    """The same answers as those of a thread, refusals, aborts, and an end that everybody hears."""

    @pytest.fixture
    def config(self, tmp_path: Path) -> EngineConfig:
        """Of a small model that some installed plugin serves."""
        if not save_served(tmp_path):
            pytest.skip("no model plugin serves a model like Llama; override `config`")
        return load_config(str(tmp_path), overrides=SETTINGS)

    @contextmanager
    def started(self, plugin: PluginUnderTest, config: EngineConfig) -> Iterator[EngineClient]:
        """A started client, closed at the end."""
        client = plugin.load()(plugin.options, config, "engine", enabled_plugins())
        assert isinstance(client, EngineClient)
        client.start()
        try:
            yield client
        finally:
            client.close()

    def test_a_started_client_answers_as_a_thread_does(
        self, plugin: PluginUnderTest, config: EngineConfig
    ) -> None:
        """Samples and how they ended, counters, refusals, stop strings and aborts."""
        thread = ThreadClient(NoOptions(), config, "engine", enabled_plugins())
        thread.start()
        with closing(thread):
            answers = answers_of(thread)
        with self.started(plugin, config) as client:
            assert client.info.vocab_size == LLAMA_LIKE["vocab_size"]
            assert client.info.max_model_len == SETTINGS["max_model_len"]
            assert client.tokenizer is None
            assert client.new_request_id() != client.new_request_id()
            check_answers(client, answers)
            check_refusals(client)
            check_end_at(client)
            check_abort(client)
            check_reset(client)
            assert client.stats().output_tokens > 0

    def test_closing_ends_calls_that_wait_and_later_ones(
        self, plugin: PluginUnderTest, config: EngineConfig
    ) -> None:
        """Closing twice is fine, and the counters stay."""
        with self.started(plugin, config) as client:
            mailbox = Mailbox(client)
            params = SamplingParams(max_tokens=60, ignore_eos=True)
            mailbox.add([new_request(client, [1, 2], params)])
            client.close()
            with pytest.raises(EngineClosedError, match="closed"):
                mailbox.wait()
            with pytest.raises(EngineClosedError, match="closed"):
                client.check_open()
            client.abort(["gone"])
            client.close()
            client.stats()


def new_request(
    client: EngineClient, ids: list[int], params: SamplingParams, **fields: Any
) -> NewRequest:
    """A streamed request under an id of the client's."""
    name = client.new_request_id()
    return NewRequest(request_id=name, prompt_token_ids=ids, params=params, stream=True, **fields)


def requests(client: EngineClient) -> dict[str, NewRequest]:
    """By name, in their order: a request finds the prefixes of those before it in the cache."""
    greedy = partial(SamplingParams, temperature=0, max_tokens=8, ignore_eos=True)
    drawn = partial(SamplingParams, temperature=1, seed=5, max_tokens=8, ignore_eos=True)
    every_third = [*range(0, LLAMA_LIKE["vocab_size"], 3)]
    short, _, long = PROMPTS
    make = partial(new_request, client)
    made = {f"greedy, with {len(ids)} ids": make(ids, greedy()) for ids in PROMPTS}
    made |= {f"two samples, with {len(ids)} ids": make(ids, drawn(n=2)) for ids in PROMPTS}
    return made | {
        "with log-probabilities": make(short, greedy(logprobs=2)),
        "with stop ids": make(short, drawn(stop_token_ids=every_third)),
        "with outputs of another engine": make(short, greedy(), output_token_ids=(7, 8)),
        "with a cache salt": make(long, greedy(), cache_salt=b"a"),
        "with the same cache salt": make(long, greedy(), cache_salt=b"a"),
        "with another cache salt": make(long, greedy(), cache_salt=b"b"),
    }


def complete(client: EngineClient, request: NewRequest) -> list[OutputDelta]:
    """The samples of a request, the deltas of each joined to one.

    A stop string counts as found in the first delta of a sample.
    """
    samples: dict[int, OutputDelta] = {}
    with Mailbox(client) as mailbox:
        mailbox.add([request])
        while mailbox.unfinished:
            for delta in mailbox.deltas():
                name, index = delta.request_id, delta.index
                assert name == request.request_id
                if index in samples:
                    samples[index].extend(delta)
                    continue
                samples[index] = delta
                for stop in request.params.stop_strings:
                    client.end_at(name, index, len(delta.new_token_ids), stop)
    return [samples[index] for index in range(request.params.n)]


def answers_of(client: EngineClient) -> Answers:
    """The answers to all requests, one request after another."""
    return {name: complete(client, request) for name, request in requests(client).items()}


def check_answers(client: EngineClient, expected: Answers) -> None:
    """All samples are as expected, and end for the same reason."""
    for name, samples in answers_of(client).items():
        for given, wanted in zip(samples, expected[name], strict=True):
            for field in COMPARED:
                one, other = getattr(given, field), getattr(wanted, field)
                assert one == other, f"{name}: {field} is {one!r}, of a thread {other!r}"
            assert given.wait_steps is not None, f"{name}: wait_steps is None at its end"
            numbers = pytest.approx(log_probabilities(wanted), abs=1e-3)
            assert log_probabilities(given) == numbers, f"{name}: its log-probabilities differ"


def log_probabilities(sample: OutputDelta) -> list[float]:
    """Those of each token and of the likeliest ids, and these ids."""
    each = sample.new_logprobs or ()
    return [number for one in each for number in (one.token_logprob, *chain(*one.top))]


def check_refusals(client: EngineClient) -> None:
    """The requests of one message are added together or refused together, by the one at fault."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    make = partial(new_request, client, params=params)
    for bad, error in (
        (make([]), InvalidPromptError),
        (make([3], labels={"": "a label without a name"}), InvalidLabelsError),
    ):
        with Mailbox(client) as mailbox:
            mailbox.add([make([1]), bad, make([2])])
            with pytest.raises(error):
                for _ in mailbox.deltas():
                    pass
            assert mailbox.refused == 1


def check_end_at(client: EngineClient) -> None:
    """A found stop string ends the sample. A fast engine may be at its length before."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, stop=["found"])
    for _ in range(ATTEMPTS):
        [sample] = complete(client, new_request(client, [1, 2], params))
        if (sample.finish_reason, sample.stop_reason) == ("stop", "found"):
            return
    raise AssertionError(
        f"end_at ended none of {ATTEMPTS} samples: the last has {len(sample.new_token_ids)} ids, "
        f"finish_reason {sample.finish_reason!r} and stop_reason {sample.stop_reason!r}"
    )


def check_reset(client: EngineClient) -> None:
    """A prefix that was computed before the reset is computed again."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    complete(client, new_request(client, PROMPTS[2], params))
    client.reset_prefix_cache()
    [sample] = complete(client, new_request(client, PROMPTS[2], params))
    assert sample.num_cached_tokens == 0, f"{sample.num_cached_tokens} ids are still cached"


def check_abort(client: EngineClient) -> None:
    """What is aborted is gone at the next look at the counters."""
    with Mailbox(client) as mailbox:
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        mailbox.add([new_request(client, [1, 2], params)])
        next(mailbox.deltas())
    until = time.monotonic() + PATIENCE
    while (stats := client.stats()).free_blocks != stats.blocks:
        assert time.monotonic() < until, f"blocks are not free after an abort: {stats}"
    assert (stats.running, stats.waiting) == (0, 0)
