"""Both routers keep the contract; `prefix` keeps prompts that begin alike together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanovllm_engine_processes import EngineLoad
from nanovllm_engine_processes.plugin import LOAD, PREFIX, PROCESSES, ROUTER, PrefixOptions
from nanovllm_engine_processes.routers import LoadRouter, PrefixRouter
from nanovllm_engine_processes.testing import RouterConformance, request
from nanovllm_kit import (
    EngineClientConformance,
    KindConformance,
    KindUnderTest,
    PluginUnderTest,
    kind_under_test,
    plugin_under_test,
)


class TestRouter(KindConformance):
    @pytest.fixture
    def kind(self) -> KindUnderTest:
        return kind_under_test(ROUTER)


class TestLoad(RouterConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(LOAD)


class TestPrefix(RouterConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(PREFIX, block_size=16, max_blocks=100)


@pytest.mark.slow
class TestProcesses(EngineClientConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(PROCESSES)


def loads(*requests: int) -> dict[int, EngineLoad]:
    return {number: EngineLoad(count, 100 * count) for number, count in enumerate(requests)}


def prefix_router(**options: int) -> PrefixRouter:
    return PrefixRouter(PrefixOptions(block_size=4, **options), 3)


def test_the_least_loaded_engine_is_that_with_the_fewest_tokens() -> None:
    router = LoadRouter(PrefixOptions(), 3)
    given = {0: EngineLoad(1, 500), 1: EngineLoad(3, 90), 2: EngineLoad(2, 90)}
    assert router.choose(request(0, [1]), given) == 2


def test_a_prompt_goes_where_its_longest_prefix_went() -> None:
    """Though that engine has more work; of equal prefixes the least loaded one gets it."""
    router = prefix_router()
    assert router.choose(request(0, [1] * 8), loads(0, 1, 1)) == 0
    assert router.choose(request(1, [2] * 8), loads(1, 0, 1)) == 1
    assert router.choose(request(2, [1] * 8 + [3] * 8), loads(9, 0, 0)) == 0
    assert router.choose(request(3, [1] * 8 + [3] * 8 + [4]), loads(5, 0, 0)) == 0
    assert router.choose(request(4, [1] * 3), loads(5, 2, 1)) == 2, "less than a block"
    assert router.choose(request(5, [2] * 4 + [9] * 8), loads(0, 3, 0)) == 1


def test_prefixes_of_other_salts_are_not_shared() -> None:
    """No tenant is sent to an engine by what another one has asked."""
    router = prefix_router()

    def choose(salt: bytes, *given: int) -> int:
        return router.choose(replace(request(0, [1] * 8), cache_salt=salt), loads(*given))

    assert choose(b"a", 0, 1, 1) == 0
    assert choose(b"b", 2, 0, 1) == 1
    assert choose(b"", 3, 3, 0) == 2
    assert [choose(salt, 3, 2, 3) for salt in (b"a", b"b", b"")] == [0, 1, 2]
    assert choose(b"c", 3, 2, 3) == 1, "the least loaded one"


def test_an_engine_with_too_many_requests_gets_none_for_their_prefix() -> None:
    router = prefix_router(max_excess_requests=4)
    assert router.choose(request(0, [1] * 8), loads(0, 1, 1)) == 0
    assert router.choose(request(1, [1] * 8), loads(5, 1, 2)) == 0
    assert router.choose(request(2, [1] * 8), loads(6, 1, 2)) == 1
    assert router.choose(request(3, [1] * 8), loads(6, 3, 2)) == 1, "it has the prefix by now"


def test_what_an_engine_was_sent_is_forgotten_in_time() -> None:
    """The oldest blocks first, the last of a prompt before its first; all of them at its end."""
    router = prefix_router(max_blocks=3)
    router.choose(request(0, [1] * 12), loads(0, 9, 9))
    router.choose(request(1, [2] * 4), loads(0, 9, 9))
    assert [router._num_shared(0, [*router._names([1] * 12)]), len(router._sent[0])] == [2, 3]
    router.forget(0)
    assert not router._sent[0]
