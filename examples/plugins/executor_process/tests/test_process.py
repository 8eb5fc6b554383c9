"""The process may be killed, stopped or broken: the engine says so in time, and closes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.api import ExecutorError, WeightsError

pytestmark = pytest.mark.whole_gpu

demo = pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the plugin checkpoint_demo")

PROMPTS = ["Write a story about a fox named Mia.", "What is 27 + 15?"]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "attention": "sdpa",
    "max_model_len": 256,
    "max_num_seqs": 4,
}
ON_A_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
)
PROMPTLY = 3.0
"""Seconds in which the end of a process is noticed."""


def open_llm(**options: float) -> LLM:
    return LLM("demo", executor={"name": "process", "options": options}, **SETTINGS)


def pid_of(llm: LLM) -> int:
    """The process that the engine has started; `llm.engine` would wait for running requests."""
    process = llm._client._loop.engine._executor._process  # type: ignore[attr-defined]
    return int(process.pid)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with open_llm(step_seconds=2.0, close_seconds=1.0) as llm:
        yield llm


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_the_tokens_are_those_of_the_core(device: str) -> None:
    """Greedy and sampled, with log-probabilities; and closing ends the process."""
    settings = {**SETTINGS, "device": device}
    params = [GREEDY, SamplingParams(temperature=0.9, seed=3, top_k=5, logprobs=2, max_tokens=24)]
    with LLM("demo", executor="process", **settings) as llm:
        pid = pid_of(llm)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert is_gone(pid)
    with LLM("demo", **settings) as single:
        expected = single.generate(PROMPTS, params, use_tqdm=False)
    assert [one.new_token_ids for one in outputs] == [one.token_ids for one in expected]
    assert outputs[1].logprobs == expected[1].logprobs


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM], ids=lambda one: one.name)
def test_a_killed_process_is_noticed_and_named(llm: LLM, kill: signal.Signals) -> None:
    """In the midst of a stream: the next token says which process, and what ended it."""
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=200))
    next(stream)
    pid = pid_of(llm)
    os.kill(pid, kill)
    started = time.perf_counter()
    with pytest.raises(ExecutorError, match=rf"rank 0 \(process {pid}\) .* signal {kill.name}"):
        list(stream)
    assert time.perf_counter() - started < PROMPTLY
    llm.close()
    assert time.perf_counter() - started < 2 * PROMPTLY


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process by SIGSTOP")
@pytest.mark.slow
def test_a_process_that_hangs_is_noticed_and_killed(llm: LLM) -> None:
    """No wait without a bound: not for a token, not for the close, not to send a long plan."""
    pid = pid_of(llm)
    os.kill(pid, signal.SIGSTOP)
    started = time.perf_counter()
    llm.engine._executor._send("x" * 1_000_000)  # type: ignore[attr-defined]  # more than a pipe holds
    with pytest.raises(ExecutorError, match=rf"process {pid}\) gave no answer for 2.0 s.*step_sec"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.close()
    assert time.perf_counter() - started < 2.0 + 2 * 1.0 + PROMPTLY
    assert is_gone(pid)


def test_an_error_in_a_step_names_rank_process_and_cause(llm: LLM) -> None:
    """It is raised here as what it is, with the traceback of the process as a note."""
    executor: Any = llm.engine._executor
    executor._send("no plan")
    with pytest.raises(ExecutorError, match=r"rank 0 \(process \d+\): AttributeError: ") as caught:
        llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert "in a step of model 'Qwen3ForCausalLM'" in "".join(caught.value.__notes__)


def test_an_error_of_the_start_keeps_its_type(tmp_path: Path) -> None:
    """Weights that are not there; nothing is left behind."""
    for file in (Path(demo.__file__).parent / "checkpoint").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(WeightsError, match=r"rank 0 \(process \d+\): .*safetensors") as caught:
        LLM(str(tmp_path), executor="process", **SETTINGS)
    assert "in load_weights" in "".join(caught.value.__notes__)


def test_ctrl_c_in_a_wait_loses_no_result(llm: LLM) -> None:
    """The next call waits for the same step; the process ignores Ctrl-C."""
    executor: Any = llm.engine._executor
    prompt = [5, 6, 7]
    [expected] = llm.generate([prompt], GREEDY, use_tqdm=False)
    inbox = executor._inbox
    os.kill(pid_of(llm), signal.SIGINT)
    llm.engine.add_request("again", prompt, GREEDY)
    executor._inbox = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    executor._inbox = inbox
    outputs = []
    while llm.engine.has_unfinished():
        outputs += llm.engine.step()
    assert [one.new_token_ids for one in outputs] == [expected.token_ids]


class Interrupted:
    """An inbox at which Ctrl-C arrives."""

    def get(self, timeout: float) -> None:
        raise KeyboardInterrupt


ENGINE = """
import os, signal
from nanovllm_core import LLM
llm = LLM("demo", executor="process", device="cpu", attention="sdpa", max_num_seqs=4)
print("started", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_the_process_ends_with_the_engine_s() -> None:
    """Both write to one pipe, so `run` returns once neither is left."""
    done = subprocess.run(
        [sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"started\n")
