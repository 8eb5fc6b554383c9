"""The conformance suite of engine clients: a door cannot tell where its engine runs.

A checkpoint's config.json with random weights is enough; which model it is does not matter. The
client is started on a CPU, and so is the core's own, `thread`, whose answers are the expected ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nanovllm_core.config import EngineConfig, load_config
from nanovllm_core.errors import EngineClosedError, InvalidPromptError
from nanovllm_core.frontend import EngineClient, Mailbox, NewRequest, ThreadClient
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_core.registry import get_plugin_manager
from nanovllm_kit.conformance import PluginUnderTest, SpecConformance
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
PATIENCE = 60.0
"""Seconds in which an answer has come."""


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
        client = plugin.load()(plugin.options, config, "engine", get_plugin_manager())
        assert isinstance(client, EngineClient)
        client.start()
        try:
            yield client
        finally:
            client.close()

    def test_a_started_client_answers_as_a_thread_does(
        self, plugin: PluginUnderTest, config: EngineConfig
    ) -> None:
        """Tokens, counters, refusals and aborts."""
        expected = ThreadClient(NoOptions(), config, "engine", get_plugin_manager())
        expected.start()
        answers = [complete(expected, request) for request in requests(expected)]
        expected.close()
        with self.started(plugin, config) as client:
            assert client.info.vocab_size == LLAMA_LIKE["vocab_size"]
            assert client.info.max_model_len == SETTINGS["max_model_len"]
            assert client.tokenizer is None
            assert client.new_request_id() != client.new_request_id()
            assert [complete(client, request) for request in requests(client)] == answers
            check_refusal(client)
            check_abort(client)
            client.reset_prefix_cache()
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


def new_request(client: EngineClient, ids: list[int], params: SamplingParams) -> NewRequest:
    """A streamed request under an id of the client's."""
    name = client.new_request_id()
    return NewRequest(request_id=name, prompt_token_ids=ids, params=params, stream=True)


def requests(client: EngineClient) -> list[NewRequest]:
    """Greedy ones, and two samples with a seed."""
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    drawn = SamplingParams(temperature=1, seed=5, n=2, max_tokens=8, ignore_eos=True)
    return [new_request(client, ids, params) for ids in PROMPTS for params in (greedy, drawn)]


def complete(client: EngineClient, request: NewRequest) -> list[list[int]]:
    """The ids of each sample. Each delta brings new ones, and the last of a sample says so."""
    ids: list[list[int]] = [[] for _ in range(request.params.n)]
    with Mailbox(client) as mailbox:
        mailbox.add([request])
        while mailbox.unfinished:
            for delta in mailbox.deltas():
                assert delta.request_id == request.request_id
                ids[delta.index] += delta.new_token_ids
    return ids


def check_refusal(client: EngineClient) -> None:
    """The requests of one message are added together or refused together, by the one at fault."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with Mailbox(client) as mailbox:
        mailbox.add([new_request(client, ids, params) for ids in ([1], [], [2])])
        with pytest.raises(InvalidPromptError):
            for _ in mailbox.deltas():
                pass
        assert mailbox.refused == 1


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
