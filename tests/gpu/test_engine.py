"""The whole engine on a GPU: what a steady step does, and that nothing changes the answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.worker.graphs import StepGraphs, StepKey
from tests.gpu.test_graphs import BACKENDS

pytestmark = pytest.mark.whole_gpu

SMALL: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 512, "device": "cuda"}
BLOCKS = {"cache.num_blocks": 2048, "cache.block_size": 16}


@pytest.fixture(scope="module")
def questions() -> list[list[dict[str, str]]]:
    """A spread of the demo's held-out items."""
    from nanovllm_checkpoint_demo.plugin import FOLDER

    lines = (FOLDER / "eval.jsonl").read_text().splitlines()[::24]
    return [json.loads(line)["messages"] for line in lines]


def answers(llm: LLM, questions: list[list[dict[str, str]]]) -> list[list[int]]:
    outputs = llm.chat(questions, SamplingParams(temperature=0, max_tokens=128), use_tqdm=False)
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(questions: list[list[dict[str, str]]]) -> Iterator[list[list[int]]]:
    """The tokens of the plainest engine: fp32, eager, no prefix cache, no step ahead."""
    with LLM(
        "demo", attention="sdpa", dtype="float32", enforce_eager=True, steps_ahead=0,
        **SMALL, **BLOCKS, **{"cache.prefix_caching": False},
    ) as llm:  # fmt: skip
        yield answers(llm, questions)


VARIANTS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "a cache that is sized": {"cache.num_blocks": None, "cache.gpu_memory_utilization": 0.2},
    "eager, a cache that is sized": {
        "enforce_eager": True,
        "cache.num_blocks": None,
        "cache.gpu_memory_utilization": 0.2,
    },
    "three steps ahead": {"steps_ahead": 3},
    "small chunks": {"max_num_batched_tokens": 48},
    "large blocks": {"cache.block_size": 128, "cache.num_blocks": 256},
    "forced preemption": {"cache.num_blocks": 40},
    "debug": {"debug": True},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_do_not_depend_on_how_they_are_computed(
    questions: list[list[dict[str, str]]],
    expected: list[list[int]],
    backend: str,
    variant: str,
    dtype: str,
) -> None:
    """Exact tokens in fp32; in bf16 too, since the demo's top two logits are far apart."""
    if backend == "flash" and (dtype == "float32" or variant == "three steps ahead"):
        pytest.skip("flash has no fp32, and compiles for each engine")
    changes = {**SMALL, **BLOCKS, **VARIANTS[variant]}
    with LLM("demo", attention=backend, dtype=dtype, **changes) as llm:
        assert answers(llm, questions) == expected
        assert (llm.stats.preemptions > 0) is (variant == "forced preemption")


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[StepKey]:
    """What was replayed, in order."""
    keys: list[StepKey] = []
    replay = StepGraphs.replay

    def note(graphs: StepGraphs, key: StepKey) -> None:
        keys.append(key)
        replay(graphs, key)

    monkeypatch.setattr(StepGraphs, "replay", note)
    return keys


def test_a_prompt_beside_decoding_rows_is_one_replay_and_never_waits(
    replays: list[StepKey],
) -> None:
    """With a backend whose prefill can be captured; with and without a tail of the sampler."""
    with LLM("demo", attention="triton", **SMALL, **BLOCKS) as llm:
        engine = llm.engine
        for index in range(4):
            engine.add_request(str(index), [1 + index, 2, 3], SamplingParams(max_tokens=300))
        for _ in range(5):
            engine.step()
        replays.clear()
        for index, changes in enumerate(({}, {"top_p": 0.8}), start=4):
            params = SamplingParams(max_tokens=300, ignore_eos=True, **changes)
            engine.add_request(str(index), [7] * 200, params)
            torch.cuda.set_sync_debug_mode("error")
            try:
                engine.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert replays == [StepKey("mixed", 256, 8)] * 2


def test_all_work_of_an_engine_is_on_one_stream() -> None:
    """Start, captures, prompts, log-probabilities: with another, captured kernels begin later."""
    params = SamplingParams(temperature=0.8, logprobs=2, top_p=0.9, max_tokens=8, ignore_eos=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with LLM("demo", attention="triton", **SMALL, **BLOCKS) as llm:
            llm.generate([[1, 2, 3], [4] * 300], params, use_tqdm=False)
        torch.cuda.synchronize()
    work = [event for event in profile.events() if event.device_type.name == "CUDA"]
    assert len(work) > 100
    assert len({event.device_resource_id for event in work}) == 1


def test_a_steady_step_is_one_replay_and_never_waits(replays: list[StepKey]) -> None:
    """50 steps under the sync debug mode "error", each with exactly one replay."""
    with LLM("demo", attention="triton", **SMALL, **BLOCKS) as llm:
        engine = llm.engine
        params = SamplingParams(temperature=0.8, max_tokens=400, ignore_eos=True)
        for index in range(32):
            engine.add_request(str(index), [1 + index, 2, 3], params)
        for _ in range(5):
            engine.step()
        replays.clear()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(50):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert replays == [StepKey.decode(32)] * 50


TRAFFIC = """
import triton
from nanovllm_core import LLM, SamplingParams

compiled = []
settings = {"device": "cuda", "max_num_seqs": 32, "max_model_len": 512, "cache.num_blocks": 1024}
with LLM("demo", attention="triton", **settings) as llm:
    triton.knobs.runtime.jit_post_compile_hook = lambda **seen: compiled.append(seen["fn"].name)
    plain = {"temperature": 0.8, "max_tokens": 4}
    everything = plain | {
        "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1, "logprobs": 2,
        "min_tokens": 2, "logit_bias": {5: 1.0},
    }
    for count in (1, 2, 3, 9, 20):
        for asked in (plain, everything):
            for length in (1, 7, 40):
                prompts = [[3 + row] * (length + row) for row in range(count)]
                late = llm.stream([9] * length, SamplingParams(temperature=0.8, max_tokens=9))
                next(late)
                llm.generate(prompts, SamplingParams(**asked), use_tqdm=False)
                list(late)
print(compiled)
"""


def test_no_kernel_is_compiled_once_requests_come() -> None:
    """Few prompts or many, alone or beside another's answer, sampled as they like.

    In a process of its own, where no other test has had a kernel compiled.
    """
    process = subprocess.run(
        [sys.executable, "-c", TRAFFIC], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "[]"


def test_three_generate_calls_in_a_row_leave_peak_memory_unchanged() -> None:
    """What the allocator has taken after the first call is enough for the next two."""
    params = SamplingParams(temperature=0.8, max_tokens=64, ignore_eos=True)
    prompts = [[1 + i] * (20 + 8 * i) for i in range(48)]
    peaks = []
    with LLM("demo", attention="triton", **SMALL, **BLOCKS) as llm:
        torch.cuda.reset_peak_memory_stats()  # the start's own was larger
        for _ in range(3):
            llm.reset_prefix_cache()
            llm.generate(prompts, params, use_tqdm=False)
            peaks.append(torch.cuda.max_memory_reserved())
    assert peaks == [peaks[0]] * 3


def test_the_cache_is_sized_by_this_process_on_a_shared_gpu() -> None:
    """Half the GPU is the same number of blocks while another process holds 30 GiB (bug 7)."""
    hold = (
        "import sys, torch; x = torch.empty(30 << 30, dtype=torch.uint8, device='cuda'); "
        "torch.cuda.synchronize(); print('held', flush=True); sys.stdin.read()"
    )

    def num_blocks() -> int:
        with LLM(
            "demo", attention="triton", **SMALL, **{"cache.gpu_memory_utilization": 0.5}
        ) as llm:
            return llm.info.num_blocks

    alone = num_blocks()
    neighbour = subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == b"held\n"
        shared = num_blocks()
    finally:
        neighbour.communicate()
    assert abs(shared - alone) <= 0.01 * alone
