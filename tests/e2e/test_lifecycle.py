"""Plugins hear of an engine's life: extensions that are enabled, and plugins that are selected."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

from nanovllm_core import SamplingParams
from nanovllm_core.errors import ConfigError, EngineClosedError, PluginLoadError, WeightsError
from nanovllm_core.frontend import gc_freeze as garbage
from nanovllm_core.worker.executor import SingleProcessExecutor

from .tiny import open_tiny, write_config

Install = Callable[..., None]

DIARY = """
from nanovllm_core.registry.hookspecs import hookimpl
from nanovllm_core.interfaces.scheduler import SchedulingPolicy
from nanovllm_core.interfaces.specs import NoOptions, SchedulerSpec
from nanovllm_core.errors import ConfigError

EVENTS = []

@hookimpl
def nanovllm_configure(config):
    EVENTS.append(("configure", config.limits.max_num_seqs))
    if config.limits.max_num_seqs == 7:
        raise ConfigError("limits.max_num_seqs: 7 is refused by the diary")

@hookimpl
def nanovllm_engine_started(info):
    EVENTS.append(("started", info.num_blocks))

@hookimpl
def nanovllm_engine_closed():
    EVENTS.append(("closed",))
"""

SCHEDULER = (
    DIARY
    + """
class Backwards(SchedulingPolicy):
    def __init__(self, options):
        pass

    def service_key(self, request):
        return (-request.arrival_index,)

@hookimpl
def nanovllm_schedulers():
    return [SchedulerSpec(name="backwards", impl=__name__ + ":Backwards", contract=1)]
"""
)

INCOMPLETE = """
class Made(SchedulingPolicy):
    def __init__(self, options):
        pass
"""

LIFE = [("configure", 8), ("started", 32), ("closed",)]


@pytest.fixture
def diaries(install: Install) -> Callable[[str], list[Any]]:
    """Installs an extension and a scheduler that note their hooks; returns what one noted."""
    install(
        "diary",
        {
            "nanovllm.extensions": {"diary": "diary_extension"},
            "nanovllm.schedulers": {"backwards": "diary_scheduler"},
        },
        {"diary_extension": DIARY, "diary_scheduler": SCHEDULER},
    )
    return lambda module: sys.modules[module].EVENTS


def test_enabled_extensions_and_selected_plugins_hear_of_everything_once(
    tiny: Path, diaries: Callable[[str], list[Any]]
) -> None:
    """Configured, started, closed; closing a second time is no second event."""
    with open_tiny(
        tiny,
        plugins={"enable": ["diary"]},
        scheduler="backwards",
        cache={"num_blocks": 32},
    ) as llm:
        assert diaries("diary_extension") == diaries("diary_scheduler") == LIFE[:2]
        assert len(llm.generate([[1, 2], [3]])) == 2
    llm.close()
    assert diaries("diary_extension") == diaries("diary_scheduler") == LIFE


def test_what_is_neither_enabled_nor_selected_is_not_imported(
    tiny: Path, diaries: Callable[[str], list[Any]]
) -> None:
    with open_tiny(tiny):
        assert "diary_extension" not in sys.modules
        assert "diary_scheduler" not in sys.modules


def test_a_plugin_may_refuse_a_configuration(
    tiny: Path, diaries: Callable[[str], list[Any]]
) -> None:
    """Its error reaches the caller as it is, and nothing is started."""
    with pytest.raises(ConfigError, match="7 is refused by the diary"):
        open_tiny(tiny, plugins={"enable": ["diary"]}, max_num_seqs=7)
    assert diaries("diary_extension") == [("configure", 7)]


def test_an_engine_that_did_not_start_is_not_closed(
    tmp_path_factory: pytest.TempPathFactory, diaries: Callable[[str], list[Any]]
) -> None:
    """A checkpoint without weights: configured, and that was all."""
    folder = write_config(tmp_path_factory.mktemp("empty"))
    with pytest.raises(WeightsError):
        open_tiny(folder, plugins={"enable": ["diary"]})
    assert diaries("diary_extension") == LIFE[:1]


def test_an_extension_that_fails_at_the_start_leaves_no_device_held(
    tiny: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error reaches the caller, and the executor that had started is closed."""
    closed: list[SingleProcessExecutor] = []
    monkeypatch.setattr(SingleProcessExecutor, "close", lambda executor: closed.append(executor))
    failing = DIARY.replace('EVENTS.append(("started", info.num_blocks))', "1 / 0")
    install(
        "failing",
        {"nanovllm.extensions": {"failing": "failing_plugin"}},
        {"failing_plugin": failing},
    )
    with pytest.raises(ZeroDivisionError):
        open_tiny(tiny, plugins={"enable": ["failing"]})
    assert len(closed) == 1


def test_a_selected_plugin_that_is_broken_is_fatal_and_named(tiny: Path, install: Install) -> None:
    install(
        "broken", {"nanovllm.schedulers": {"broken": "broken_plugin"}}, {"broken_plugin": "1/0"}
    )
    with open_tiny(tiny) as llm:
        assert llm.generate([[1]])
    with pytest.raises(PluginLoadError, match=r"'broken' of broken 1\.2\.3 .*ZeroDivisionError"):
        open_tiny(tiny, scheduler="broken")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (INCOMPLETE, r"cannot be made: TypeError: .*service_key"),
        ("Made = dict", r"made .*, which is no SchedulingPolicy or Scheduler"),
    ],
)
def test_a_plugin_that_is_not_what_its_kind_needs_is_named(
    body: str, message: str, tiny: Path, install: Install
) -> None:
    """A class with a method missing, or something else altogether."""
    source = SCHEDULER.replace(":Backwards", ":Made") + body + "\n"
    install("odd", {"nanovllm.schedulers": {"backwards": "odd_plugin"}}, {"odd_plugin": source})
    with pytest.raises(
        PluginLoadError, match=r"'backwards' \(odd 1\.2\.3\): odd_plugin:Made " + message
    ):
        open_tiny(tiny, scheduler="backwards")


def test_one_that_nobody_holds_is_closed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file is: the device is free for the next one, as in a notebook whose cell runs again."""
    closed: list[SingleProcessExecutor] = []
    close = SingleProcessExecutor.close
    monkeypatch.setattr(
        SingleProcessExecutor, "close", lambda executor: (closed.append(executor), close(executor))
    )
    before = garbage._num_frozen
    llm = open_tiny(tiny)
    assert garbage._num_frozen == before + 1
    next(llm.stream([1, 2, 3]))  # a step may be in flight
    del llm
    assert len(closed) == 1
    assert garbage._num_frozen == before


def test_an_interrupt_at_the_end_of_the_start_closes_what_had_started(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collection before the first request takes a while: a Ctrl-C may come in it."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    closed: list[object] = []
    before = garbage._num_frozen
    with monkeypatch.context() as patch:
        patch.setattr(SingleProcessExecutor, "close", lambda executor: closed.append(executor))
        patch.setattr(garbage.gc, "freeze", interrupt)
        with pytest.raises(KeyboardInterrupt):
            open_tiny(tiny)
    assert len(closed) == 1
    assert garbage._num_frozen == before


def test_a_server_that_ends_sets_aside_no_more() -> None:
    before = garbage._num_frozen
    with garbage.frozen_objects():
        assert garbage._num_frozen == before + 1
    assert garbage._num_frozen == before


def test_an_engine_is_of_no_use_after_a_fork(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's threads are not there, and a GPU's context neither: said, and not waited for."""
    with open_tiny(tiny) as llm:
        parent = os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: parent + 1)
            with pytest.raises(EngineClosedError, match=f"created in process {parent}.* here"):
                llm.generate([[1, 2, 3]])
        assert llm.generate([[1, 2, 3]])


def test_threads_may_share_an_engine(tiny: Path) -> None:
    """Six callers at once: each gets the texts that it would get alone."""
    prompts = [[i + 1] * (4 + i) for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with open_tiny(tiny, debug=True) as llm:
        alone = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
        with ThreadPoolExecutor(6) as pool:
            for _ in range(3):
                together = pool.map(lambda prompt: llm.generate([prompt], params), prompts)
                assert [outputs[0].token_ids for outputs in together] == alone
