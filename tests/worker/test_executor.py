"""The single-process executor: it starts once, sizes the cache, runs plans, and closes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm_core import LLM, SamplingParams
from nanovllm_core.config.settings import GraphSettings
from nanovllm_core.config.sources import load_config
from nanovllm_core.errors import (
    EngineClosedError,
    OutOfMemoryError,
    RequestTooLongError,
    UnsupportedError,
    WeightsError,
)
from nanovllm_core.interfaces.executor import Executor, WorkerSetup
from nanovllm_core.interfaces.model import ModelShape
from nanovllm_core.interfaces.plan import Admission, PrefillChunk, RowSampling, StepPlan
from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import Attention, SingleRank
from nanovllm_core.selection.startup import start
from nanovllm_core.worker.kv_cache import CacheLayout
from nanovllm_core.worker.model import load_model
from nanovllm_kit.dense_attention import DenseRuntime
from nanovllm_kit.plans import decode_plan

from ..e2e.tiny import Reference, write_checkpoint, write_config

for plugin in ("model_qwen3", "attention_sdpa"):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")

from nanovllm_model_qwen3.model import Qwen3ForCausalLM  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


SETTINGS = {"device": "cpu", "attention": "sdpa", "max_model_len": 64, "max_num_seqs": 5}


def prepare(folder: Path, **changes: Any) -> tuple[Executor, WorkerSetup]:
    startup = start(load_config(str(folder), overrides={**SETTINGS, **changes}))
    return startup.executor, startup.setup


@pytest.fixture
def executor(folder: Path) -> Iterator[Executor]:
    executor, setup = prepare(folder)
    executor.start(setup)
    yield executor
    executor.close()


def plan_for(prompt: list[int], sampling: RowSampling | None = None) -> StepPlan:
    admission = Admission(
        row=2,
        token_ids=np.array(prompt, np.int32),
        num_prompt_tokens=len(prompt),
        num_computed=0,
        block_ids=np.array([(3, 1)], np.int32),
        max_length=20,
        sampling=sampling or RowSampling(),
    )
    return StepPlan(
        admissions=(admission,), prefill=(PrefillChunk(2, 0, len(prompt), samples=True),)
    )


def test_started_it_says_what_it_offers(folder: Path) -> None:
    """A CPU pads no step: every number of rows up to max_num_seqs is a bucket."""
    executor, setup = prepare(folder)
    info = executor.start(setup)
    executor.close()
    assert info.bucket_sizes == (1, 2, 3, 4, 5)
    assert (info.block_size, info.max_model_len, info.vocab_size) == (16, 64, 97)
    assert info.num_blocks == 5 * 4, "as many blocks as five rows of the longest sequence can use"
    assert (info.device, info.cuda_graphs) == ("cpu", False)
    assert "sdpa" in info.attention


def test_a_given_number_of_blocks_is_honoured(folder: Path) -> None:
    """Also where it is more than could ever be used, or exactly one sequence."""
    for num_blocks in (4, 7, 500):
        executor, setup = prepare(folder, cache={"num_blocks": num_blocks})
        assert executor.start(setup).num_blocks == num_blocks
        executor.close()


def test_too_few_blocks_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemoryError, match=r"3 blocks of 16 tokens.*needs 4; set"):
        prepare(write_config(tmp_path), cache={"num_blocks": 3})
    executor, setup = prepare(tmp_path, cache={"num_blocks": 4})
    with pytest.raises(WeightsError, match="download the weights"):
        executor.start(setup)


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("nanovllm_core.worker.worker.load_model", "the model: full; .*smaller model"),
        (
            "nanovllm_model_qwen3.model.Qwen3ForCausalLM.__init__",
            "the model: full; .*smaller model",
        ),
        (
            "nanovllm_attention_sdpa.backend.SdpaAttention.allocate",
            r"steps: full; lower limits.max_num_seqs \(5\)",
        ),
        (
            "nanovllm_core.worker.runner.RowTables.allocate",
            r"steps: full; .*max_model_len \(64\) or max",
        ),
    ],
)
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), MemoryError("full")], ids=["torch", "python"]
)
def test_a_start_says_for_what_there_was_no_room_and_what_helps(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails: str, said: str, error: Exception
) -> None:
    """A neighbour may hold the rest of the GPU; torch's own error names neither."""

    def full(*arguments: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(fails, full)
    executor, setup = prepare(folder)
    with pytest.raises(OutOfMemoryError, match=f"no room on cpu for {said}"):
        executor.start(setup)
    executor.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"max_num_seqs": 3 * 10**7, "max_num_batched_tokens": 3 * 10**7},
            r"max_num_seqs \(30000000\) rows of max_model_len \(64\) ids need tables of",
        ),
        (
            {"max_num_seqs": 10**12, "max_num_batched_tokens": 10**12},
            r"no room on cpu for steps: .*lower limits.max_num_seqs \(1000000000000\)",
        ),
        ({"num_blocks": 2**62}, r"cache.num_blocks: \d+ blocks .*ask for fewer"),
    ],
    ids=["rows", "rows beyond the memory", "blocks"],
)
def test_sizes_beyond_all_bounds_are_refused_by_name(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    """Neither torch's allocator nor an overflow has the last word."""
    executor, setup = prepare(folder)
    # Beyond what a configuration takes, so that only the worker is asked.
    parts = {"limits": setup.config.limits, "cache": setup.config.cache}
    config = setup.config.model_copy(
        update={
            name: part.model_copy(
                update={key: changes[key] for key in changes if key in type(part).model_fields}
            )
            for name, part in parts.items()
        }
        | {"cuda_graphs": GraphSettings(sizes=(changes.get("max_num_seqs", 5),))}
    )
    setup = replace(setup, config=config)
    with pytest.raises(OutOfMemoryError, match=said):
        executor.start(setup)
    executor.close()


def test_fit_takes_the_models_own_length_where_there_is_room(folder: Path) -> None:
    executor, setup = prepare(folder, max_model_len="fit")
    info = executor.start(setup)
    executor.close()
    assert info.max_model_len == 512
    assert info.num_blocks == 5 * 512 // 16


@pytest.mark.parametrize("limit", ["a given number of blocks", "the memory of a CPU's cache"])
def test_fit_takes_the_longest_sequence_that_the_cache_holds(
    limit: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tables are made for that length, a request of it runs, and the log says what was cut."""
    changes: dict[str, Any] = {"max_model_len": "fit"}
    if limit == "a given number of blocks":
        changes["cache"] = {"num_blocks": 5}
    else:
        per_block = 2 * 2 * 16 * 2 * 16 * 4  # K and V, layers, tokens, KV heads, head size, bytes
        monkeypatch.setattr("nanovllm_core.worker.kv_cache.CPU_CACHE_BYTES", 6 * per_block - 1)
    caplog.set_level("INFO")
    with LLM(str(folder), **{**SETTINGS, **changes}) as llm:
        assert (llm.info.num_blocks, llm.info.max_model_len) == (5, 80)
        assert llm.engine._executor._worker._runner.max_model_len == 80
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        [output] = llm.generate([[5] * 30], params, use_tqdm=False)
        assert len(output.token_ids) == 50
        with pytest.raises(RequestTooLongError, match="max_model_len is 80"):
            llm.generate([[5] * 80], params)
    assert "fit: the KV cache holds 80 of the 512 tokens" in caplog.text


def test_random_weights_follow_the_seed(tmp_path: Path) -> None:
    """`load_format: dummy` needs a config.json alone, and two starts of one seed agree."""
    write_config(tmp_path)
    tokens = []
    for seed in (1, 1, 2, 3):
        executor, setup = prepare(tmp_path, load_format="dummy", seed=seed)
        executor.start(setup)
        executor.submit(plan_for([5, 6, 7], RowSampling(logprobs=3)))
        record = executor.collect().logprobs[0]
        tokens.append(record)
        executor.close()
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2] != tokens[3]


def test_results_come_in_the_order_of_the_plans(executor: Executor, folder: Path) -> None:
    """A prompt, then two decode steps submitted before anything is collected."""
    prompt = [9, 8, 7, 6]
    decode = decode_plan((2,))
    executor.submit(plan_for(prompt))
    executor.submit(decode)
    executor.submit(decode)
    tokens = [int(executor.collect().token_ids[0]) for _ in range(3)]
    assert tokens == Reference.of(folder).tokens(prompt, 3)


def test_closed_it_refuses_work_and_closing_again_is_fine(executor: Executor) -> None:
    executor.close()
    executor.close()
    with pytest.raises(EngineClosedError, match="create a new LLM"):
        executor.submit(plan_for([1]))
    with pytest.raises(EngineClosedError, match="create a new LLM"):
        executor.collect()


def test_an_executor_that_never_started_closes_too(folder: Path) -> None:
    executor, _ = prepare(folder)
    executor.close()
    with pytest.raises(EngineClosedError):
        executor.submit(plan_for([1]))


def test_a_pair_of_backends_serves_both_phases(folder: Path) -> None:
    """Two objects where the choices differ, one where they are the same."""
    executor, setup = prepare(
        folder,
        attention={"prefill": {"backend": "sdpa", "options": {"kernel": "math"}}, "decode": "sdpa"},
    )
    info = executor.start(setup)
    assert info.attention.startswith("prefill torch")
    assert ", decode torch" in info.attention
    executor.submit(plan_for([1, 2, 3]))
    assert executor.collect().token_ids.tolist() == Reference.of(folder).tokens([1, 2, 3], 1)
    executor.close()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_on_a_cpu_cost_nothing_until_they_are_used(dtype: torch.dtype) -> None:
    """Half a GiB of zeroed blocks, of which the process holds next to nothing."""
    shape = ModelShape(
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=4,
        head_size=64,
        vocab_size=8,
        max_position=64,
    )
    num_blocks = (512 << 20) // (2 * 4 * 16 * 4 * 64 * dtype.itemsize)
    before = _resident_pages()
    cache = CacheLayout(shape, 16, dtype).allocate(num_blocks, torch.device("cpu"))
    assert cache.nbytes == 512 << 20
    assert (_resident_pages() - before) * 4096 < 64 << 20
    assert not cache[3, 1, -1].any()


def _resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.parametrize(
    ("name", "value"), [("sliding_window", 4), ("soft_cap", 30.0), ("scale", 0.5)]
)
def test_layers_that_no_backend_would_serve_as_they_are_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    """A layer with a window, a soft cap or a scale of its own is refused, not ignored."""
    executor, setup = prepare(folder)

    def changed(model: torch.nn.Module) -> None:
        *_, last = (module for module in model.modules() if isinstance(module, Attention))
        setattr(last, name, value)

    monkeypatch.setattr("nanovllm_core.worker.model.finalize_layers", changed)
    with pytest.raises(UnsupportedError, match=rf"layer 1 has .*{name}.*, not .*{name}"):
        executor.start(setup)


def windowed(monkeypatch: pytest.MonkeyPatch, **rules: Any) -> None:
    """Make every Qwen3 model one whose shape and layers have these rules."""
    shape, make = Qwen3ForCausalLM.shape, Attention.__init__

    def ruled_shape(config: Any) -> ModelShape:
        return replace(shape(config), **rules)

    def ruled_layer(self: Attention, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **{**kwargs, **rules})

    monkeypatch.setattr(Qwen3ForCausalLM, "shape", ruled_shape)
    monkeypatch.setattr(Attention, "__init__", ruled_layer)


@pytest.mark.parametrize("rules", [{"sliding_window": 6}, {"soft_cap": 1.5}])
def test_a_window_or_soft_cap_of_all_layers_is_served(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rules: dict[str, Any]
) -> None:
    """An engine that cuts the prompt in chunks gives the tokens of one plain softmax."""
    prompt = [5, 17, 3, 60, 9, 9, 21, 80, 44, 2, 31, 7, 55, 90, 12, 13, 70, 6, 28, 11]
    settings = {"device": "cpu", "attention": "sdpa", "max_model_len": 64, "max_num_seqs": 4}
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def tokens() -> list[int]:
        with LLM(str(folder), **settings, max_num_batched_tokens=16) as llm:
            return list(llm.generate([prompt], sampling)[0].token_ids)

    plain = tokens()
    windowed(monkeypatch, **rules)
    found = tokens()
    _, setup = prepare(folder)
    model = load_model(setup, TorchKernels(), SingleRank())
    runtime, ids = DenseRuntime(model.module, 64), list(prompt)
    with torch.inference_mode():
        fresh = ids
        for _ in range(12):
            start = len(ids) - len(fresh)
            positions = torch.arange(start, len(ids), dtype=torch.int32)
            hidden = model.module(torch.tensor(fresh, dtype=torch.int32), positions)
            fresh = [int(model.module.compute_logits(hidden)[-1].argmax())]
            ids += fresh
    assert found == ids[len(prompt) :]
    assert found != plain, "the rules change nothing on this prompt"
    assert runtime.caches


def test_start_asks_backends_for_the_models_window_and_soft_cap(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend without them is refused before a weight is read."""
    windowed(monkeypatch, sliding_window=6, soft_cap=30.0)
    monkeypatch.setattr(
        "nanovllm_attention_sdpa.plugin.check",
        lambda requirements, options: [
            f"asked {requirements.sliding_window} {requirements.soft_cap}"
        ],
    )
    with pytest.raises(UnsupportedError, match="asked True True"):
        prepare(folder)
