"""What a device reaches: bandwidth of a large copy, rate of a large matrix product, both measured.

Also the costs of a model, read from the model plugin itself: no figure here knows an architecture.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import torch

from nanovllm_bench.roofline import AttentionCosts, ModelCosts, Rates
from nanovllm_core.config import EngineConfig
from nanovllm_core.interfaces.model import ModelShape
from nanovllm_core.interfaces.specs import ResolvedPlugin
from nanovllm_core.kernels import TorchKernels
from nanovllm_core.layers import LayerContext, SingleRank, SparseMLP
from nanovllm_core.registry import get_plugin_manager, load_object, make_plugin
from nanovllm_core.selection import find_checkpoint, read_model_config

GPU_COPY_BYTES, CPU_COPY_BYTES = 2**30, 2**28
"""Larger than any cache, so that the copy goes through memory."""

GPU_MATMUL_SIZE, CPU_MATMUL_SIZE = 8192, 1536


def model_costs(config: EngineConfig, dtype: torch.dtype, tp_size: int = 1) -> ModelCosts:
    """The sizes of one of `tp_size` ranks' part of a model, built on torch's meta device."""
    plugins = get_plugin_manager(disable=config.plugins.disable)
    model_config = read_model_config(find_checkpoint(plugins, config.model))
    model = plugins.resolve("model", model_config["architectures"][0], {}, path="model")
    shape: ModelShape = load_object(model).shape(model_config)
    module = build_on_meta(model, model_config, dtype, tp_size)
    return costs_on_rank(module, shape, dtype, tp_size)


def build_on_meta(
    model: ResolvedPlugin, model_config: Mapping[str, Any], dtype: torch.dtype, tp_size: int = 1
) -> torch.nn.Module:
    """The first rank's model as a start builds it, but without memory."""
    context = LayerContext(
        device=torch.device("meta"),
        dtype=dtype,
        tp=SingleRank(size=tp_size),
        kernels=TorchKernels(),
    )
    module: torch.nn.Module = make_plugin(model, model_config, context)
    return module


def costs_on_rank(
    module: torch.nn.Module, shape: ModelShape, dtype: torch.dtype, tp_size: int = 1
) -> ModelCosts:
    """The sizes of one of `tp_size` ranks; `shape` is that of the whole model."""
    mixtures = [one for one in module.modules() if isinstance(one, SparseMLP)]
    kinds = attention_on_rank(shape, tp_size)
    return ModelCosts(
        **{**asdict(kinds[0]), "num_layers": shape.num_layers},
        num_parameters=num_elements(module),
        expert_parameters=sum(num_elements(one.experts) for one in mixtures),
        num_experts=mixtures[0].experts.num_experts if mixtures else 1,
        experts_per_token=mixtures[0].gate.routing.top_k if mixtures else 1,
        hidden_size=shape.hidden_size,
        vocab_size=-(-shape.vocab_size // tp_size),
        tied_embeddings=shape.tied_embeddings,
        itemsize=dtype.itemsize,
        attention=kinds if len(kinds) > 1 else (),
    )


def attention_on_rank(shape: ModelShape, tp_size: int) -> tuple[AttentionCosts, ...]:
    """The kinds of a rank's attention layers, in the order of their first layers."""
    layers = (replace(one.on_rank(tp_size), soft_cap=None) for one in shape.attention_shapes)
    return tuple(
        AttentionCosts(
            num_layers=count,
            num_heads=one.num_heads,
            num_kv_heads=one.num_kv_heads,
            head_size=one.head_size,
            sliding_window=one.sliding_window,
            latent_key_size=one.latent.key_size if one.latent else None,
            latent_value_size=one.latent.value_size if one.latent else None,
        )
        for one, count in Counter(layers).items()
    )


def num_elements(module: torch.nn.Module) -> int:
    """The numbers that a module's parameters hold."""
    return sum(parameter.numel() for parameter in module.parameters())


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Copy a buffer larger than the caches and multiply large matrices; the best of several.

    On a GPU the buffers are smaller where less than eight times their size is free. What was taken
    is given back.
    """
    num_bytes, size = CPU_COPY_BYTES, CPU_MATMUL_SIZE
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        num_bytes, size = min(GPU_COPY_BYTES, free // 8), GPU_MATMUL_SIZE
    copy_rate = _copy_rate(device, num_bytes)
    _give_back(device)  # before the first product, whose library keeps a workspace for good
    matmul_rate = _matmul_rate(device, dtype, size)
    _give_back(device)
    return Rates(copy_rate, matmul_rate)


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _copy_rate(device: torch.device, num_bytes: int) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * num_bytes / best_seconds(lambda: target.copy_(source), device)


def _matmul_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    seconds = best_seconds(lambda: torch.mm(left, right, out=product), device)
    return 2 * size**3 / seconds


def best_seconds(call: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """The shortest of `repeats` runs after one that is not counted; on a GPU, by its own clock."""
    return min(times_of(call, device, repeats))


def times_of(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each of `repeats` runs after one that is not counted."""
    call()
    if device.type != "cuda":
        return [_host_seconds(call) for _ in range(repeats)]
    with torch.cuda.device(device):
        return _device_seconds(call, repeats)


def _host_seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _device_seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """By events, without a wait between runs, which would add a launch to all but the first."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    marks[-1].synchronize()
    return [1e-3 * start.elapsed_time(end) for start, end in pairwise(marks)]
