"""Plans beside what engines allocate, beside recorded starts, and their own order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from typer.testing import CliRunner, Result

from nanovllm_bench import gpus
from nanovllm_bench.gpus import Gpu, find_gpu, known_gpus
from nanovllm_bench.plan import Layout, PlannedDecisions, _step_bytes, plan_layouts, rank_of
from nanovllm_bench.roofline import Rates, decode_step_seconds
from nanovllm_core.cli.main import make_app
from nanovllm_core.config import EngineConfig, load_config
from nanovllm_core.errors import ArchitectureError, ConfigError, DeviceError, OutOfMemoryError
from nanovllm_core.interfaces.model import AttentionShape, LatentHeads, ModelShape
from nanovllm_core.interfaces.plan import WorkerInfo
from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import Attention, LayerContext, SingleRank
from nanovllm_core.registry import make_plugin
from nanovllm_core.selection import start
from nanovllm_core.worker import Worker
from nanovllm_core.worker.runner import ModelRunner

pytestmark = pytest.mark.whole_gpu

for plugin in ("checkpoint_demo", "model_qwen3", "attention_sdpa"):
    pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks/results/h200"
H200 = find_gpu("H200")

TINY: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "dtype": "bfloat16",
}


def tiny(folder: Path, model: dict[str, Any] | None = None, **fields: Any) -> EngineConfig:
    """A configuration of a small Qwen3 with these changes."""
    (folder / "config.json").write_text(json.dumps({**TINY, **(model or {})}))
    overrides = {"attention": "sdpa", "load_format": "dummy", **fields}
    return load_config(str(folder), overrides=overrides, env={})


def qwen3(size: str, **fields: Any) -> EngineConfig:
    """A benchmark's configuration, on the backend without a library of its own."""
    overrides = {"attention": "sdpa", **fields}
    return load_config(f"{ROOT}/benchmarks/configs/qwen3-{size}", overrides=overrides, env={})


@contextmanager
def started(config: EngineConfig) -> Iterator[tuple[ModelRunner, WorkerInfo]]:
    """The parts of a worker that has started."""
    worker = Worker(start(config).setup)
    try:
        info = worker.start()
        assert worker._runner is not None
        yield worker._runner, info
    finally:
        worker.close()


def test_steps_have_the_keys_of_their_prompts_or_queries_of_rows() -> None:
    """Of latent attention, by whether they are captured; a model without products has neither."""
    plain = ModelShape(
        num_layers=1, hidden_size=8, num_heads=2, num_kv_heads=1, head_size=40, vocab_size=9,
        max_position=64,
    )  # fmt: skip
    module = torch.nn.Module()
    assert _step_bytes(module, plain, torch.bfloat16) == (2 * (24 + 12), 2 * (24 + 12))
    heads = LatentHeads(latent_size=32, key_size=24, value_size=16)
    row = AttentionShape(num_heads=2, num_kv_heads=1, head_size=40, latent=heads)
    latent = replace(plain, attention_layers=(row,))
    eager, captured = _step_bytes(module, latent, torch.bfloat16)
    assert eager == 2 * (24 + 3 * 2 * (24 + 16) // 2)
    assert captured == 2 * (24 + 3 * 2 * (40 + 32) // 2)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_tables_and_blocks_are_as_many_bytes_as_an_engine_allocates(
    tmp_path: Path, tied: bool
) -> None:
    model = {"tie_word_embeddings": tied}
    fields = {"dtype": "float32", "device": "cpu", "max_num_seqs": 3}
    config = tiny(tmp_path, model, **fields, cache={"num_blocks": 32, "block_size": 16})
    rank = rank_of(config, H200, 1)
    with started(config) as (runner, info):
        module, cache = runner.model.module, runner.attention.cache
        tensors = [*module.parameters(), *module.buffers()]
        assert rank.weights == sum(one.nbytes for one in tensors)
        assert rank.layout.block_bytes * info.num_blocks == cache.nbytes
        assert rank.layout.block_size == info.block_size
        tables = runner.tables.arena.nbytes + runner.sampling.logits.nbytes
        assert rank.workspaces > tables


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("model", [{"num_key_value_heads": 1}, {"tie_word_embeddings": True}])
def test_each_of_two_ranks_holds_as_many_bytes_as_planned(
    tmp_path: Path, model: dict[str, Any], rank: int
) -> None:
    """With one KV head, which both ranks hold, and with a head that shares the embedding."""
    config = tiny(tmp_path, model)
    decisions = PlannedDecisions(config, H200)
    context = LayerContext(
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        tp=SingleRank(rank, 2),
        kernels=TorchKernels(),
    )
    module = make_plugin(decisions.model, decisions.model_config, context)
    planned = rank_of(config, H200, 2)
    assert planned.weights == sum(one.nbytes for one in module.parameters())
    built = [one.shape for one in module.modules() if isinstance(one, Attention)]
    assert list(planned.shape.attention_shapes) == built


def test_two_ranks_hold_every_weight_once_or_twice(tmp_path: Path) -> None:
    """Matrices are split; norms are whole on both, and 97 rows are padded to 98."""
    config = tiny(tmp_path, {"tie_word_embeddings": False})
    one, two = (rank_of(config, H200, size) for size in (1, 2))
    norms = 2 * (2 * 48 + 2 * 16) + 48
    padding = 2 * 48  # a row of the embedding and one of the head
    assert 2 * two.weights == one.weights + 2 * (norms + padding)
    assert 2 * two.layout.block_bytes == one.layout.block_bytes
    assert two.num_all_reduces == 2 * 2 + 1


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "qwen3-30b-a3b"])
def test_a_mixture_has_one_all_reduce_with_its_shared_experts(name: str) -> None:
    """Behind attention, MLP or mixture of each layer and the embedding; latent rows are whole."""
    config = load_config(
        str(ROOT / "benchmarks/configs" / name), overrides={"attention": "sdpa"}, env={}
    )
    for plugin in ("model_deepseek", "model_qwen3_moe"):
        pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")
    one, two = (rank_of(config, H200, size) for size in (1, 2))
    assert two.num_all_reduces == 2 * two.shape.num_layers + 1
    parts = 1 if one.costs.latent_key_size else 2
    assert one.layout.block_bytes == parts * two.layout.block_bytes


def test_graphs_are_planned_for_the_steps_that_are_captured(tmp_path: Path) -> None:
    """sdpa captures no steps with prompts, so the number of their tokens does not count."""
    sizes = [{"max_num_batched_tokens": tokens} for tokens in (256, 4096)]
    few, many = (rank_of(tiny(tmp_path, limits=one), H200, 1).graphs for one in sizes)
    assert few == many > 0


@pytest.mark.parametrize(
    ("name", "top_k", "hidden", "intermediate"),
    [("deepseek-v2-lite", 6, 2048, 1408), ("qwen3-30b-a3b", 8, 2048, 768)],
)
def test_a_step_has_room_for_the_results_of_each_token_s_experts(
    name: str, top_k: int, hidden: int, intermediate: int
) -> None:
    """They lie side by side until they are summed; each of two ranks has half of their width."""
    for plugin in ("model_deepseek", "model_qwen3_moe"):
        pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")
    path = str(ROOT / "benchmarks/configs" / name)
    for size in (1, 2):
        few, many = (
            rank_of(
                load_config(
                    path,
                    overrides={"attention": "sdpa", "limits": {"max_num_batched_tokens": tokens}},
                    env={},
                ),
                H200,
                size,
            ).workspaces
            for tokens in (2**16, 2**17)
        )
        assert many - few >= 2**16 * top_k * (hidden + intermediate // size) * 2


def recorded_starts() -> list[tuple[str, dict[str, Any]]]:
    """Result files of benchmark models whose number of blocks the GPU's memory decided."""
    records = {file.name: json.loads(file.read_text()) for file in RESULTS.glob("*.json")}
    return [
        (name, record)
        for name, record in sorted(records.items())
        if isinstance(record, dict)
        and record.get("num_blocks")
        and "qwen3-" in record.get("config", {}).get("model", "")
        and record["config"]["cache"]["num_blocks"] is None
    ]


@pytest.mark.parametrize(
    "record", [pytest.param(record, id=name) for name, record in recorded_starts()]
)
def test_the_blocks_of_recorded_starts_on_an_h200_are_planned_within_3_percent(
    record: dict[str, Any],
) -> None:
    ran = record["config"]
    size = ran["model"].rpartition("qwen3-")[2]
    config = qwen3(size, limits=ran["limits"], cache={"block_size": record["block_size"]})
    memory = rank_of(config, H200, ran["tensor_parallel_size"]).memory(H200)
    assert memory.num_blocks == pytest.approx(record["num_blocks"], rel=0.03)


def recorded_layouts() -> list[Any]:
    """Of files of `benchmarks/parallel.py`: model, ranks, limits, and the blocks of a rank."""
    cases = []
    for file in sorted(RESULTS.glob("parallel_qwen3_*b_[24d]*.json")):
        record = json.loads(file.read_text())
        limits = json.loads(record["settings"]).get("limits", {})
        limits = {"max_model_len": record["max_model_len"], **limits}
        size = record["model"].rpartition("qwen3-")[2]
        for layout, started in record["layouts"].items():
            ranks = 1 if layout.startswith("d") else int(layout.partition(":")[0])
            case = size, ranks, limits, started["num_blocks"]
            cases.append(pytest.param(*case, id=f"{file.stem} {layout}"))
    return cases


@pytest.mark.parametrize(("size", "ranks", "limits", "num_blocks"), recorded_layouts())
def test_the_blocks_of_recorded_ranks_on_h200s_are_planned_within_3_percent(
    size: str, ranks: int, limits: dict[str, int], num_blocks: int
) -> None:
    """All of them ran with `triton`, whose blocks have 256 tokens."""
    config = qwen3(size, limits=limits, cache={"block_size": 256})
    memory = rank_of(config, H200, ranks).memory(H200)
    assert memory.num_blocks == pytest.approx(num_blocks, rel=0.03)


def test_the_weights_of_8b_are_those_of_the_checkpoint() -> None:
    """8.19 billion parameters (the model card's 8.2B) of two bytes."""
    assert rank_of(qwen3("8b"), H200, 1).weights == 2 * 8_190_735_360


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("size", ["0.6b", "8b"])
def test_the_blocks_of_a_start_here_are_planned_within_3_percent(size: str) -> None:
    fields = {"max_model_len": 4096, "load_format": "dummy", "device": "cuda"}
    config = qwen3(size, **fields)
    here = torch.cuda.get_device_properties(0)
    gpu = replace(
        H200,
        memory_bytes=here.total_memory,
        compute_capability=(here.major, here.minor),
    )
    memory = rank_of(config, gpu, 1).memory(gpu)
    worker = Worker(start(config).setup)
    try:
        info = worker.start()
    finally:
        worker.close()  # frees the GPU for the next test, as nobody holds a part of it
    assert memory.block_size == info.block_size
    assert memory.num_blocks == pytest.approx(info.num_blocks, rel=0.03)


def test_a_step_is_as_long_as_the_roofline_says_where_layers_are_alike() -> None:
    rank = rank_of(qwen3("0.6b"), H200, 1)
    for rows, context in ((1, 768), (256, 700), (4096, 10)):
        floor, collectives = rank.step_seconds(rows, context, H200)
        assert floor == decode_step_seconds(rank.costs, rows, context, H200.rates)
        assert collectives == 0


def sequences(layout: Layout) -> dict[int, int]:
    return {room.tokens: room.sequences for room in layout.rooms}


SMALL = qwen3("0.6b", max_model_len=2048)


def with_memory(gib: float) -> Gpu:
    return replace(H200, memory_bytes=int(gib * 2**30))


@settings(max_examples=10, deadline=None)
@given(gib=st.floats(8, 200), more=st.floats(0, 50), length=st.integers(2, 2048))
def test_more_memory_never_fits_fewer_sequences(gib: float, more: float, length: int) -> None:
    """Nor do longer sequences fit more often, nor do all fill more than the usable memory."""
    [less], [greater] = (
        plan_layouts(SMALL, with_memory(one), 1, [length]) for one in (gib, gib + more)
    )
    assert sequences(less)[length] <= sequences(greater)[length]
    assert sequences(less)[2048] <= sequences(less)[length]
    memory = less.memory
    assert memory is not None
    filled = memory.weights + memory.workspaces + memory.graphs + memory.context + memory.blocks
    assert memory.usable - memory.block_bytes < filled <= memory.usable


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 2**28), more=st.integers(0, 2**20), num_gpus=st.integers(1, 8))
def test_larger_sums_never_take_less_time(size: int, more: int, num_gpus: int) -> None:
    for gpu in known_gpus():
        shorter = gpu.all_reduce_seconds(size, num_gpus)
        longer = gpu.all_reduce_seconds(size + more, num_gpus)
        assert shorter is not None
        assert longer is not None
        assert 0 <= shorter <= longer
        assert (shorter == 0) == (num_gpus == 1)


def test_measured_sums_are_met_and_take_longer_than_the_links_alone() -> None:
    assert H200.all_reduce_seconds(32768, 2) == pytest.approx(2.28e-6)
    assert H200.all_reduce_seconds((524288 + 1048576) // 2, 4) == pytest.approx(6.03e-6)
    by_links = replace(H200, all_reduce_points={})
    for num_gpus, points in H200.all_reduce_points.items():
        for size, seconds in points:
            alone = by_links.all_reduce_seconds(size, num_gpus)
            assert alone is not None
            assert alone < seconds


def test_sums_over_unknown_links_are_not_estimated() -> None:
    unknown = replace(H200, link_bytes_per_s=None, all_reduce_points={})
    one, two = plan_layouts(SMALL, unknown, 2, [])
    assert all(speed.with_communication == speed.floor for speed in one.speeds)
    assert all(speed.with_communication is None for speed in two.speeds)


def test_every_split_of_the_gpus_is_a_layout(tmp_path: Path) -> None:
    """Those that do not divide the heads say so, and communication costs speed."""
    layouts = plan_layouts(tiny(tmp_path), H200, 6, [])
    splits = [(one.tensor_parallel, one.data_parallel) for one in layouts]
    assert splits == [(1, 6), (2, 3), (3, 2), (6, 1)]
    assert [one.problem is None for one in layouts] == [True, True, False, False]
    assert "tensor_parallel_size (3) must divide num_attention_heads (4)" in str(layouts[2].problem)
    for speed in layouts[1].speeds:
        assert speed.with_communication is not None
        assert speed.with_communication < speed.floor


def test_what_does_not_fit_says_by_how_much_and_which_number_of_gpus_does() -> None:
    gpu = find_gpu("A100-40GB")
    config = qwen3("32b", max_model_len=4096)
    with pytest.raises(OutOfMemoryError, match=r"short by (\d+\.\d) GiB.*--gpus 2"):
        plan_layouts(config, gpu, 1, [])
    short = rank_of(config, gpu, 1).short_by(gpu)
    enough = replace(gpu, memory_bytes=int((gpu.memory_bytes * 0.9 + short + 2) / 0.9))
    [layout] = plan_layouts(config, enough, 1, [])
    assert layout.max_model_len == 4096
    [*_, whole] = plan_layouts(config, gpu, 2, [])
    assert whole.memory is not None


def test_a_number_of_blocks_that_is_given_is_planned_or_refused() -> None:
    config = qwen3("0.6b", max_model_len=2048, cache={"num_blocks": 1000})
    [layout] = plan_layouts(config, H200, 1, [])
    assert layout.memory is not None
    assert layout.memory.num_blocks == 1000
    with pytest.raises(OutOfMemoryError, match="short by"):
        plan_layouts(config, with_memory(4), 1, [])


def test_a_model_that_nothing_runs_is_no_misfit(tmp_path: Path) -> None:
    config = tiny(tmp_path, {"architectures": ["NobodysForCausalLM"]})
    with pytest.raises(ArchitectureError, match="no installed plugin runs"):
        plan_layouts(config, H200, 1, [])


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DeviceError, match=r"'H2000' is not.*did you mean H200\?.*A100-40GB.*local"):
        find_gpu("H2000")
    assert find_gpu("h200") is find_gpu("H200")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_here_local_names_the_table() -> None:
    with pytest.raises(DeviceError, match=r"no GPU here; name one: .*H200"):
        find_gpu("local")


@pytest.mark.parametrize(("name", "known"), [("NVIDIA H200", True), ("NVIDIA X1", False)])
def test_the_gpu_that_is_here_has_measured_rates_and_links_if_the_table_knows_it(
    monkeypatch: pytest.MonkeyPatch, name: str, known: bool
) -> None:
    properties = SimpleNamespace(name=name, total_memory=2**36, major=9, minor=0)
    measured = Rates(4e12, 7e14)
    monkeypatch.setattr(gpus, "resolve_device", lambda device: "cuda:0")
    monkeypatch.setattr(gpus, "measure_rates", lambda device, dtype: measured)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    here = find_gpu("local")
    assert (here.name, here.memory_bytes, here.rates) == (name, 2**36, measured)
    assert here.link_bytes_per_s == (H200.link_bytes_per_s if known else None)
    assert here.all_reduce_is_measured(2) == known
    assert "measured now" in here.source


def test_every_gpu_of_the_table_has_a_source_and_links() -> None:
    for gpu in known_gpus():
        assert "datasheet" in gpu.source
        assert gpu.link_bytes_per_s


def command(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(), ["plan", *arguments])


def test_the_command_prints_each_layout_and_where_figures_are_from() -> None:
    result = command("--model", "demo", "--gpu", "H200", "--gpus", "2", "--attention", "sdpa")
    assert result.exit_code == 0, result.output
    assert {"2 x 1", "1 x 2"} <= {line[2:7] for line in result.output.splitlines()}
    assert "are estimates" in result.output
    assert "H200 SXM" in result.output


def test_the_command_prints_json() -> None:
    result = command("--model", "demo", "--gpu", "H100", "--attention", "sdpa", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.output)
    [layout] = record["layouts"]
    assert layout["memory"]["num_blocks"] > 0
    assert [speed["rows"] for speed in layout["speeds"]] == [1, 256]
    assert "arithmetic" in " ".join(record["notes"])


def test_a_workload_that_is_cut_is_told() -> None:
    """Beyond the longest sequence of an engine; one that fits has no such note."""
    asked = ("--model", "demo", "--gpu", "H200", "--attention", "sdpa", "--output-len", "100")
    result = command(*asked, "--input-len", "3000", "--json")
    assert result.exit_code == 0, result.output
    first, *others = json.loads(result.output)["notes"]
    assert first.startswith("Sequences of 3,100 tokens are cut to 2,048")
    assert json.loads(command(*asked, "--json").output)["notes"] == others


def test_a_length_beyond_the_model_is_refused() -> None:
    config = qwen3("0.6b", max_model_len=50_000)
    with pytest.raises(ConfigError, match="40960"):
        plan_layouts(config, H200, 1, [])
