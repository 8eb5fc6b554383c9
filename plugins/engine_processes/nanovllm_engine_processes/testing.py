"""The suite that every router must pass; `nanovllm plugins test NAME` runs it.

class TestMyRouter(RouterConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)
"""

from __future__ import annotations

import time
from copy import deepcopy
from random import Random

import pytest

from nanovllm_core.api import SamplingParams
from nanovllm_core.frontend import NewRequest
from nanovllm_engine_processes.routing import EngineLoad, Router, RouterSpec
from nanovllm_kit import PluginUnderTest, SpecConformance

NUM_ENGINES = 4
AT_MOST_S = 0.002
"""What a choice may cost on average, of a prompt of 1,024 ids: tokens wait for it."""


def request(number: int, ids: list[int]) -> NewRequest:
    """A request of up to 16 outputs."""
    params = SamplingParams(max_tokens=16, n=1 + number % 2)
    return NewRequest(request_id=str(number), prompt_token_ids=ids, params=params)


class RouterConformance(SpecConformance):
    """What every router holds."""

    @pytest.fixture
    def router(self, plugin: PluginUnderTest) -> Router:
        """A router of four engines with the options under test."""
        made: Router = plugin.load()(plugin.options, NUM_ENGINES)
        return made

    def test_the_spec_names_a_router(self, plugin: PluginUnderTest) -> None:
        """`impl` is a `Router` class, in a `RouterSpec`."""
        assert isinstance(plugin.spec, RouterSpec)
        assert issubclass(plugin.load(), Router)

    def test_it_chooses_among_the_engines_that_run(self, router: Router) -> None:
        """While requests come and go, and engines end; it leaves the loads as they are."""
        draws, loads = Random(0), {engine: EngineLoad() for engine in range(NUM_ENGINES)}
        for number in range(300):
            if number % 90 == 89:
                lost = draws.choice([*loads])
                del loads[lost]
                router.forget(lost)
            ids = [draws.randrange(3)] * draws.randrange(1, 400)
            before = deepcopy(loads)
            chosen = router.choose(request(number, ids), loads)
            assert loads == before
            assert chosen in loads
            loads[chosen].requests += 1
            loads[chosen].tokens += len(ids)
            other = loads[draws.choice([*loads])]
            other.requests = other.tokens = draws.choice([0, other.requests])

    def test_no_engine_stays_idle_while_others_are_full(self, router: Router) -> None:
        """A hundred prompts that share nothing: every engine gets some."""
        loads = {engine: EngineLoad() for engine in range(NUM_ENGINES)}
        for number in range(100):
            chosen = router.choose(request(number, [number] * 100), loads)
            loads[chosen].requests += 1
            loads[chosen].tokens += 116
        assert min(load.requests for load in loads.values()) >= 10

    def test_a_choice_takes_no_time(self, router: Router) -> None:
        """Of long prompts, one after the other."""
        loads = {engine: EngineLoad() for engine in range(NUM_ENGINES)}
        prompts = [request(number, [number] * 1024) for number in range(200)]
        started = time.perf_counter()
        for prompt in prompts:
            router.choose(prompt, loads)
        assert time.perf_counter() - started < len(prompts) * AT_MOST_S
