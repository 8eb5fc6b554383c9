"""Captured steps equal eager ones, whatever changed since the capture."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
import torch

from nanovllm_core.errors import ModelOutputError
from nanovllm_core.interfaces.plan import PrefillChunk
from nanovllm_core.worker.graphs import StepKey
from nanovllm_core.worker.mixed import pack_chunks
from nanovllm_kit.plans import decode_plan
from tests.gpu.conftest import SEVERAL_GROUPS, Machine

BACKENDS = ["triton", "sdpa"]
if "flash-attn-4" in {d.metadata["Name"] for d in metadata.distributions()}:
    BACKENDS.append("flash")


def random_prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4096) for _ in range(length)] for _ in range(count)]


def perturb_allocator() -> None:
    """Make the allocator hand out other addresses than it did at capture."""
    keep = [torch.full((1 << 18,), float("nan"), device="cuda") for _ in range(64)]
    del keep[::2]
    torch.cuda.synchronize()


PARTS: dict[str, dict[str, Any]] = {name: {"attention": name} for name in BACKENDS}
PARTS["torch kernels"] = {"attention": "triton", "kernels": "torch"}
PARTS["several cache groups"] = {"attention": "triton", "model": SEVERAL_GROUPS}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_replay_equals_the_eager_step_bitwise_at_every_bucket(
    machine: Callable[..., Machine], parts: dict[str, Any]
) -> None:
    """Same bucket, same backend: logits, tables and tokens agree to the last bit (bug 22).

    Inputs differ from those at capture, the allocator was perturbed, one entry of the bucket is
    padding, and the blocks are the highest.
    """
    made = machine(**parts, max_num_seqs=64, max_model_len=512)
    runner = made.runner
    graphs = runner._graphs
    assert graphs is not None
    made.prefill(random_prompts(64, 150), computed=150, temperature=0.7)
    for bucket in runner.bucket_sizes:
        made.activate(max(1, bucket - 1))
        perturb_allocator()
        before = runner.tables.arena.clone()
        runner.sampling.logits.fill_(float("nan"))
        graphs.replay(StepKey.decode(bucket))
        logits, after = runner.sampling.logits[:bucket].clone(), runner.tables.arena.clone()
        runner.tables.arena.copy_(before)
        runner.sampling.logits.fill_(float("nan"))
        with torch.inference_mode():
            runner.decode(bucket)
        live = max(1, bucket - 1)
        assert torch.equal(runner.sampling.logits[:live], logits[:live]), f"bucket {bucket}"
        assert torch.equal(runner.tables.arena, after), f"bucket {bucket}"
        assert not torch.equal(after, before)


@pytest.mark.parametrize(
    ("backend", "model"),
    [
        *(pytest.param(name, {}, id=f"{name}-one group") for name in BACKENDS if name != "sdpa"),
        pytest.param("triton", SEVERAL_GROUPS, id="triton-several groups"),
    ],
)
def test_a_replayed_step_with_prompts_equals_the_eager_one_bitwise(
    machine: Callable[..., Machine], backend: str, model: dict[str, Any]
) -> None:
    """Every captured mixed step, padded as it is: nearly empty, full of tokens, full of chunks.

    Chunks differ in number, length and context; all but one sample; the rows that decode are fewer
    than the step has room for. Logits and tables agree to the last bit with the same step launched
    eagerly.
    """
    made = machine(
        model=model,
        attention=backend,
        max_num_seqs=32,
        max_model_len=1024,
        **{"cuda_graphs.prompt_sizes": (131, 500)},
    )
    runner, graphs = made.runner, made.runner._graphs
    assert graphs is not None
    made.prefill(random_prompts(32, 600), computed=100, temperature=0.7)
    assert {key.num_rows for key in runner._mixed_keys} == {8, 32}
    for key in runner._mixed_keys:
        room = runner._captured_steps[key].chunks
        most = min(room.num_chunks, 31)  # a row decodes
        for num_decode, lengths in (
            (1, (key.num_tokens // 10 - 2, 1, 1)),
            (key.num_rows - 3, (key.num_tokens - 2, 1, 1)),
            (1, (key.num_tokens // most,) * most),
        ):
            made.activate(num_decode)
            chunks = tuple(
                PrefillChunk(31 - i, 100 * (i != 1), length, samples=i != 1)
                for i, length in enumerate(lengths)
            )
            packed = torch.from_numpy(pack_chunks(chunks, room.num_chunks, False)).cuda()
            before = runner.tables.arena.clone()
            outcomes = []
            for launch in (graphs.replay, torch.inference_mode()(runner.run_captured)):
                perturb_allocator()
                runner.tables.arena.copy_(before)
                room.packed.copy_(packed)  # in the arena
                runner.sampling.logits.fill_(float("nan"))
                launch(key)
                outcomes.append((runner.sampling.logits.clone(), runner.tables.arena.clone()))
            (replayed, tables), (eager, eager_tables) = outcomes
            sampled = (key.num_rows + i for i, chunk in enumerate(chunks) if chunk.samples)
            live = [*range(num_decode), *sampled]
            assert not eager[live].isnan().any(), f"{key}, {lengths}"
            assert torch.equal(replayed[live], eager[live]), f"{key}, {lengths}"
            assert torch.equal(tables, eager_tables), f"{key}, {lengths}"
            assert not torch.equal(tables, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_beyond_2_to_the_31_elements_are_read_and_written(
    machine: Callable[..., Machine], backend: str
) -> None:
    """The same text from the highest blocks of a large cache as from a small one."""
    logits = []
    for num_blocks in (64, 17_000):
        made = machine(
            model={"num_hidden_layers": 1},
            attention=backend,
            max_num_seqs=4,
            max_model_len=512,
            **{"cache.block_size": 128, "cache.num_blocks": num_blocks},
        )
        cache = made.runner.attention.cache
        assert (cache[0, 0].numel() > 2**31) is (num_blocks > 64)
        made.prefill(random_prompts(4, 300), computed=300)
        made.activate(4)
        graphs = made.runner._graphs
        assert graphs is not None
        graphs.replay(StepKey.decode(4))
        logits.append(made.runner.sampling.logits[:4].clone())
        made.executor.close()
    assert torch.equal(logits[0], logits[1])


def test_sampled_tokens_follow_the_distribution_across_replays(
    machine: Callable[..., Machine],
) -> None:
    """Chi-square of 32 replays of 256 rows, all with one row's logits and seeds of their own."""
    made = machine(
        model={"vocab_size": 32}, attention="triton", max_num_seqs=256, max_model_len=256
    )
    runner, graphs = made.runner, made.runner._graphs
    assert graphs is not None
    prompt = [i % 32 for i in range(40)]
    made.prefill([prompt] * 256, computed=40)  # greedy, so that all rows go on alike
    runner.tables.temperature.fill_(1.0)
    made.activate(256)
    before = runner.tables.arena.clone()
    draws = []
    for replay in range(32):
        runner.tables.arena.copy_(before)
        runner.tables.seed.copy_(torch.arange(256, device="cuda") + 1000 * replay)
        graphs.replay(StepKey.decode(256))
        draws.append(runner.tables.token_ids[:, 41].long().clone())
    samples = torch.stack(draws)
    expected = torch.softmax(runner.sampling.logits[0].double(), 0) * samples.numel()
    observed = torch.bincount(samples.flatten(), minlength=32).double()
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    assert chi_square < 61.1, f"chi-square {chi_square:.1f} with 31 degrees of freedom, p < 1e-3"
    centred = samples.double() - samples.double().mean()
    for shifted in (centred.roll(1, 0), centred.roll(1, 1)):
        correlation = (centred * shifted).mean() / centred.square().mean()
        assert abs(correlation.item()) < 4 / samples.numel() ** 0.5


def test_a_sampled_token_does_not_depend_on_its_batch(machine: Callable[..., Machine]) -> None:
    """With equal logits, seed and output index a row draws the same id alone and among others."""
    made = machine(attention="triton", max_num_seqs=64, max_model_len=256)
    graphs = made.runner._graphs
    assert graphs is not None
    made.prefill([random_prompts(1, 40)[0]] * 64, computed=40)  # greedy: all rows go on alike
    made.runner.tables.temperature.fill_(1.0)
    before = made.runner.tables.arena.clone()
    tokens = []
    for bucket in (1, 8, 64):
        made.runner.tables.arena.copy_(before)
        made.activate(bucket)
        made.runner.tables.seed.fill_(7)
        graphs.replay(StepKey.decode(bucket))
        drawn = made.runner.tables.token_ids[:bucket, 41]
        assert (drawn == drawn[0]).all()
        tokens.append(int(drawn[0]))
    assert len(set(tokens)) == 1


def test_debug_mode_looks_at_the_logits_that_a_graph_left(machine: Callable[..., Machine]) -> None:
    """A weight that becomes NaN after the capture is read by every replay."""
    made = machine(attention="triton", max_num_seqs=8, max_model_len=512, debug=True)
    assert made.runner._graphs is not None
    made.prefill(random_prompts(4, 40), computed=40)
    plan = decode_plan((0, 1, 2))
    made.executor.submit(plan)
    made.executor.collect()
    with torch.inference_mode():
        next(made.runner.model.module.parameters()).fill_(float("nan"))
    with pytest.raises(ModelOutputError, match=r"3 of 3 rows is not finite.*Qwen3ForCausalLM"):
        made.executor.submit(plan)


BEGIN = ["_prepare_decode_kernel", "plan_kernel", "embed_kernel"]
END = ["sample_partial_kernel", "tail_partial_kernel", "tail_merge_kernel", "_finish_step_kernel"]
NORM, ATTENTION, SUMMED = "rms_norm_kernel", "decode_qkv_kernel", "add_norm_kernel"
VECTOR, FEW, TILE = "vector_linear_kernel", "few_rows_kernel", "tile_linear_kernel"
KERNELS = {
    1: ([], [VECTOR, ATTENTION, VECTOR, VECTOR, VECTOR], [NORM, VECTOR]),
    8: ([], [NORM, FEW, ATTENTION, FEW, NORM, FEW, FEW], [NORM, FEW]),
    64: (
        [NORM],
        [TILE, "prepare_qkv_kernel", "decode_kernel", TILE, SUMMED, TILE, TILE, SUMMED],
        [TILE],
    ),
}
"""By rows: before the layers, each layer's, and the head's. A norm is in the product behind it, a
kernel of its own, or sums the parts of the product before it. The vocabulary is a small one."""


@pytest.mark.parametrize("rows", KERNELS)
def test_a_decode_step_launches_these_kernels_and_no_others(
    machine: Callable[..., Machine], rows: int
) -> None:
    """Three before the layers, five to eight for each, and four behind the head."""
    made = machine(attention="triton", max_num_seqs=64, max_model_len=512)
    made.prefill(random_prompts(rows, 150), computed=150)
    made.activate(rows)
    assert made.runner._graphs is not None
    made.runner._graphs.replay(StepKey.decode(rows))
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        made.runner._graphs.replay(StepKey.decode(rows))
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    names = [event.name for event in sorted(events, key=lambda event: event.time_range.start)]
    before, layer, head = KERNELS[rows]
    assert names == [*BEGIN, *before, *layer * 4, *head, *END]
