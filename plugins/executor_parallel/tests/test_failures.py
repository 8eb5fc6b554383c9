"""A rank that ends, raises, stops or hangs ends the engine in time, by name; nothing is left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.api import EngineClosedError, ExecutorError, NanoVLLMError, PluginLoadError
from nanovllm_executor_parallel import executor

pytestmark = pytest.mark.whole_gpu

demo = pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the plugin checkpoint_demo")
pytest.importorskip("nanovllm_model_qwen3", reason="needs the plugin model_qwen3")

PROMPTLY = 3.0
"""Seconds in which the end of a rank is noticed."""
STALL = 2.0
IDLE = 1.0
"""An engine without requests looks so often after its ranks."""
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "attention": "sdpa",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "tensor_parallel_size": 2,
    "load_format": "dummy",
}
PROMPT = [5, 6, 7, 8, 9, 10]
PLUGIN = """
from nanovllm_core.api import ModelSpec, hookimpl

@hookimpl
def nanovllm_models():
    return [ModelSpec(name="FailingForCausalLM", impl="failing:FailingForCausalLM", contract=2)]
"""
FAILING = '''
"""Qwen3 whose rank `rank` does `how` at `where`; each rank leaves its process id in a file."""

import os, signal, time
from pathlib import Path
import torch
from nanovllm_model_qwen3.model import Qwen3ForCausalLM

class FailingForCausalLM(Qwen3ForCausalLM):
    def __init__(self, options, config, context):
        self.fail, self.rank = config["fail"], context.tp.rank
        self.folder = Path(__file__).parent
        (self.folder / f"pid{self.rank}").write_text(str(os.getpid()))
        self.at("load")
        super().__init__(options, config, context)

    def forward(self, input_ids, positions):
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.at("capture")
        self.at("prompt" if len(input_ids) == 6 else "decode" if len(input_ids) == 1 else "")
        return super().forward(input_ids, positions)

    def at(self, where):
        if [self.rank, where] != [self.fail["rank"], self.fail["where"]]:
            return
        (self.folder / "time").write_text(str(time.time()))
        how = self.fail["how"]
        if how == "raise":
            raise ValueError("a bug")
        elif how == "exit":
            os._exit(7)
        elif how == "hang":
            time.sleep(60)
        elif how == "sleep":
            time.sleep(0.8)
        elif how == "linger":
            time.sleep(1.5 * self.fail["stall"])
        elif how == "few blocks":
            from nanovllm_core.worker import kv_cache
            kv_cache.CPU_CACHE_BYTES = 1 << 19
        else:
            os.kill(os.getpid(), getattr(signal, how))
'''
SAYS = {
    "raise": "ValueError: a bug",
    "exit": "ended with exit code 7",
    "SIGKILL": "ended with signal SIGKILL",
    "SIGSTOP": rf"gave no answer for stall_seconds \({STALL:g} s\)",
    "hang": r"did nothing for stall_seconds",
}


@dataclass(frozen=True, slots=True)
class Failing:
    """A checkpoint whose model fails, in a folder on sys.path."""

    folder: Path

    def prepare(self, rank: int, how: str, where: str) -> None:
        config = json.loads((Path(demo.__file__).parent / "checkpoint/config.json").read_text())
        config["architectures"] = ["FailingForCausalLM"]
        config["fail"] = {"rank": rank, "how": how, "where": where, "stall": STALL}
        (self.folder / "config.json").write_text(json.dumps(config))

    def pids(self) -> dict[int, int]:
        """By rank; the other rank may have ended before it left its own."""
        return {int(file.name[3:]): int(file.read_text()) for file in self.folder.glob("pid*")}

    def seconds_since(self) -> float:
        return time.time() - float((self.folder / "time").read_text())

    def settings(self, device: str = "cpu", **bounds: float) -> dict[str, Any]:
        options = {"stall_seconds": STALL, **bounds}
        # Tests beside this one use the same GPUs.
        cache = {} if device == "cpu" else {"cache": {"num_blocks": 64}}
        executor = {"name": "parallel", "options": options}
        return {**SETTINGS, **cache, "device": device, "executor": executor}


@pytest.fixture
def failing(install: Callable[..., None], tmp_path: Path) -> Failing:
    entries = {"nanovllm.models": {"FailingForCausalLM": "failing_plugin"}}
    install("failing", entries, {"failing_plugin": PLUGIN, "failing": FAILING})
    return Failing(tmp_path)


def held() -> set[str]:
    """What outlives a function: this process's sockets, and shared memory that no process maps.

    Nothing where there is no /proc to tell.
    """
    if not Path("/proc/self/fd").exists():
        return set()
    links = map(link_of, Path("/proc/self/fd").iterdir())
    mapped = "".join(map(maps_of, Path("/proc").glob("[0-9]*/maps")))
    shared = {str(file) for file in Path("/dev/shm").iterdir() if str(file) not in mapped}
    return {link for link in links if link.startswith("socket:")} | shared


def link_of(fd: Path) -> str:
    with suppress(FileNotFoundError):  # the listing's own
        return os.readlink(fd)
    return ""


def maps_of(file: Path) -> str:
    with suppress(OSError):  # the process has ended
        return file.read_text(errors="replace")
    return ""


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


QUICK = [
    (1, "raise", "load"),
    (0, "SIGKILL", "prompt"),
    (1, "SIGSTOP", "decode"),
]
LONG = [
    (rank, how, where)
    for rank in (0, 1)
    for how in SAYS
    for where in ("load", "prompt", "decode")
    if (rank, how, where) not in QUICK and (how, where) != ("hang", "load")
]
ON_GPUS = [(rank, how, "capture") for rank in (0, 1) for how in ("raise", "SIGKILL", "SIGSTOP")]
gpus = (
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
)


@pytest.mark.parametrize(
    ("rank", "how", "where"),
    [
        *QUICK,
        *(pytest.param(*one, marks=pytest.mark.slow) for one in LONG),
        *(pytest.param(*one, marks=gpus) for one in ON_GPUS),
    ],
)
def test_a_rank_that_fails_ends_the_engine(
    failing: Failing, rank: int, how: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names rank, process and cause; all processes are gone when it is raised.

    They leave no file, no socket and no shared memory behind, either.
    """
    failing.prepare(rank, how, where)
    before = held()
    temporary = failing.folder / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with pytest.raises((ExecutorError, PluginLoadError)) as caught:  # noqa: PT012 - both may raise
        device = "cuda" if where == "capture" else "cpu"
        llm = LLM(str(failing.folder), **failing.settings(device))
        assert where not in ("load", "capture")
        llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    seconds = failing.seconds_since()
    pids = failing.pids()
    assert re.match(rf"rank {rank} \(process {pids[rank]}\):? .*{SAYS[how]}", str(caught.value))
    assert seconds < PROMPTLY + (STALL if how in ("SIGSTOP", "hang") else 0)
    assert all(map(is_gone, pids.values()))
    assert not [*temporary.iterdir()]
    if where not in ("load", "capture"):
        with pytest.raises(NanoVLLMError) as later:
            llm.generate([PROMPT], SamplingParams(max_tokens=2), use_tqdm=False)
        assert type(later.value).__name__ == "EngineClosedError"
        llm.close()
    assert held() <= before


def test_a_load_may_take_longer_than_a_stall(failing: Failing) -> None:
    """The bound of a rank that does nothing begins with the first step."""
    failing.prepare(1, "linger", "load")
    before = held()
    with LLM(str(failing.folder), **failing.settings()) as llm:
        [output] = llm.generate([PROMPT], SamplingParams(max_tokens=2), use_tqdm=False)
        pids = failing.pids().values()
    assert len(output.token_ids) == 2
    assert all(map(is_gone, pids))
    assert held() <= before


@pytest.mark.slow
def test_a_start_that_does_not_end_is_bounded(failing: Failing) -> None:
    """By `start_seconds`; the ranks are gone when it is raised."""
    failing.prepare(1, "hang", "load")
    bound = r"did not start within start_seconds \(9 s\)"
    with pytest.raises(ExecutorError, match=rf"^rank [01] \(process \d+\).* {bound}"):
        LLM(str(failing.folder), **failing.settings(start_seconds=9.0))
    assert all(map(is_gone, failing.pids().values()))


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=gpus)],
)
def test_a_rank_that_is_killed_or_stopped_in_a_stream_is_named(
    failing: Failing, device: str, rank: int, how: str
) -> None:
    """At any moment of a step, from outside; on GPUs the others wait in a captured collective."""
    failing.prepare(2, "", "")
    with LLM(str(failing.folder), **failing.settings(device)) as llm:
        greedy = SamplingParams(temperature=0, ignore_eos=True, max_tokens=58)
        stream = llm.stream(PROMPT, greedy)
        next(stream)
        os.kill(failing.pids()[rank], getattr(signal, how))
        began = time.monotonic()
        named = rf"^rank {rank} \(process.*{SAYS[how]}"
        with pytest.raises(ExecutorError, match=named):  # noqa: PT012 - the stream may have ended
            list(stream)
            llm.generate([PROMPT], greedy, use_tqdm=False)
    assert time.monotonic() - began < 2 * PROMPTLY + (STALL if how == "SIGSTOP" else 0)
    assert all(map(is_gone, failing.pids().values()))


@pytest.mark.slow
def test_closing_kills_a_rank_that_is_stopped(failing: Failing) -> None:
    """After `close_seconds`; the other rank has closed by itself."""
    failing.prepare(2, "", "")
    settings = failing.settings()
    settings["executor"]["options"]["close_seconds"] = 1.0
    llm = LLM(str(failing.folder), **settings)
    os.kill(failing.pids()[1], signal.SIGSTOP)
    began = time.monotonic()
    llm.close()
    assert 1.0 <= time.monotonic() - began < 1.0 + PROMPTLY
    assert all(map(is_gone, failing.pids().values()))


@pytest.mark.slow
def test_a_rank_that_ends_while_no_request_runs_ends_the_engine(failing: Failing) -> None:
    """Its counters say so; the next request is refused with rank and cause."""
    failing.prepare(2, "", "")
    with LLM(str(failing.folder), **failing.settings()) as llm:
        llm.generate([PROMPT], SamplingParams(max_tokens=2), use_tqdm=False)
        time.sleep(2 * IDLE)
        assert llm.stats.ended == 0
        os.kill(failing.pids()[1], signal.SIGKILL)
        until = time.monotonic() + IDLE + PROMPTLY
        with suppress(ExecutorError):  # which reaches a caller that waits for an answer just then
            while not llm.stats.ended:
                assert time.monotonic() < until
                time.sleep(0.05)
        assert llm.stats.ended == 1
        assert all(map(is_gone, failing.pids().values()))
        with pytest.raises(EngineClosedError, match=r"rank 1 \(process .* signal SIGKILL"):
            llm.generate([PROMPT], SamplingParams(max_tokens=2), use_tqdm=False)


@pytest.mark.slow
def test_no_rank_is_blamed_for_an_engine_that_was_stopped(
    failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's process stood still in a wait, as by Ctrl-Z; its ranks answer afterwards."""
    failing.prepare(1, "sleep", "prompt")
    began = time.monotonic()
    with LLM(str(failing.folder), **failing.settings()) as llm:
        clock, offset = time.monotonic, 0.0

        def later() -> float:
            nonlocal offset
            if clock() > began + 0.1:
                offset = 2 * STALL
            return clock() + offset

        began = clock()
        monkeypatch.setattr(time, "monotonic", later)
        [output] = llm.generate([PROMPT], SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(output.token_ids) == 2


@pytest.mark.slow
def test_the_blocks_are_those_of_the_rank_with_the_fewest(failing: Failing) -> None:
    """Rank 1 has less memory for its cache."""
    failing.prepare(1, "few blocks", "load")
    with LLM(str(failing.folder), **failing.settings()) as llm:
        few = llm.info.num_blocks
    failing.prepare(2, "", "")
    with LLM(str(failing.folder), **failing.settings()) as llm:
        assert few < llm.info.num_blocks


def test_a_rank_with_another_version_of_a_plugin_is_named(
    failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version changes between the engine's choice and the start of the ranks."""

    def spawn(*arguments: Any, spawn: Callable[..., None] = executor.spawn) -> None:
        [info] = failing.folder.glob("*.dist-info/METADATA")
        info.write_text(info.read_text().replace("1.2.3", "1.2.4"))
        spawn(*arguments)

    failing.prepare(2, "", "")
    monkeypatch.setattr(executor, "spawn", spawn)
    with pytest.raises(PluginLoadError, match=r"^rank [01] .*FailingFor.* 1\.2\.3.*here: 1\.2\.4"):
        LLM(str(failing.folder), **failing.settings())


def test_a_rank_that_lacks_a_plugin_is_named(
    failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is uninstalled between the engine's choice and the start of the ranks."""

    def spawn(*arguments: Any, spawn: Callable[..., None] = executor.spawn) -> None:
        [info] = failing.folder.glob("*.dist-info")
        shutil.rmtree(info)
        for module in ("failing.py", "failing_plugin.py"):
            (failing.folder / module).unlink()
        spawn(*arguments)

    failing.prepare(2, "", "")
    monkeypatch.setattr(executor, "spawn", spawn)
    with pytest.raises(PluginLoadError, match=r"^rank [01] .*FailingForCausalLM"):
        LLM(str(failing.folder), **failing.settings())


def test_a_rank_that_cannot_read_the_setup_is_named(
    failing: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of it is of a module that only the engine's process can import."""

    def spawn(
        ranks: Any, setup: Any, *rest: Any, spawn: Callable[..., None] = executor.spawn
    ) -> None:
        config = {**setup.model_config, "part": Unreadable()}
        spawn(ranks, replace(setup, model_config=config), *rest)

    failing.prepare(2, "", "")
    monkeypatch.setattr(executor, "spawn", spawn)
    with pytest.raises(PluginLoadError, match=r"^rank [01] .*set-up cannot be read.*every process"):
        LLM(str(failing.folder), **failing.settings())


class Unreadable:
    """Pickles as a call that fails in another process."""

    def __reduce__(self) -> Any:
        return json.loads, ("no JSON",)
