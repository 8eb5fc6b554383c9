"""The experts that decode steps touch, counted beside the timed runs.

To count within a captured step would slow it. So the requests of a workload run once more, untimed,
on an engine without graphs, and the routers of each of its steps are watched.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from nanovllm_bench.roofline import ModelCosts, Rates, generate_floor, roofline_record
from nanovllm_bench.throughput import sampling_params
from nanovllm_bench.workloads import Workload
from nanovllm_core.config import EngineConfig
from nanovllm_core.engine import Engine
from nanovllm_core.errors import NanoVLLMError
from nanovllm_core.frontend import LLM
from nanovllm_core.layers import Router, SparseMLP

_OF_ONE_PROCESS = ("tensor_parallel_size", "data_parallel_size", "executor", "engine_client")


@dataclass(frozen=True, slots=True)
class TouchedExperts:
    """The experts that the layers of decode steps read, without those that all tokens choose.

    `histogram[k]` counts the pairs of a step and a layer that touched k experts.
    """

    decode_steps: int
    histogram: list[int]

    @property
    def mean(self) -> float | None:
        """Touched experts of a layer in a step; None where no step was counted."""
        pairs = sum(self.histogram)
        return sum(k * count for k, count in enumerate(self.histogram)) / pairs if pairs else None


def with_touched_experts(
    record: Mapping[str, Any], config: EngineConfig, workload: Workload
) -> dict[str, Any]:
    """The record of a throughput, its engine closed, with the histogram and the floor that follows.

    That of a model without experts is as it was. Where the experts cannot be counted, because one
    GPU does not hold the model of several for example, `touched_experts` says why, and the floor
    assumes an even choice.
    """
    roofline = record["roofline"]
    costs, rates = ModelCosts.from_record(roofline["costs"]), Rates(**roofline["rates"])
    if costs.num_experts == 1:
        return dict(record)
    num_engines = roofline["num_engines"]
    workload = workload.share(num_engines)
    try:
        touched = count_touched_experts(config, workload, record["temperature"])
    except NanoVLLMError as error:  # the throughput was measured, and is not thrown away
        return {**record, "touched_experts": {"not_counted": str(error)}}
    floor = generate_floor(costs, workload.lengths, record["max_num_seqs"], rates, touched.mean)
    seconds = min(record["seconds"])
    return {
        **record,
        "roofline": roofline_record(costs, rates, floor, seconds, touched.mean, num_engines),
        "touched_experts": asdict(touched),
    }


def count_touched_experts(
    config: EngineConfig, workload: Workload, temperature: float
) -> TouchedExperts:
    """Run the workload once, eagerly, on one device, each step waited for.

    Steps with prompts are left out, and so is padding.
    """
    with LLM.from_config(_eager(config)) as llm, _watched_routers() as routed:
        workload = workload.within(llm.info.vocab_size)
        _add_requests(llm.engine, workload, temperature)
        counts: Counter[int] = Counter()
        num_experts = decode_steps = 0
        for num_rows in _decode_steps(llm.engine, llm.info.bucket_sizes, routed):
            decode_steps += 1
            counts.update(_num_touched(routed, num_rows))
            num_experts = max(router.num_experts for router in routed)
    histogram = [counts[k] for k in range(num_experts + 1)]
    return TouchedExperts(decode_steps, histogram)


def _num_touched(routed: Mapping[Router, Tensor], num_rows: int) -> list[int]:
    """The experts that each layer's first rows chose; the device is waited for once."""
    touched = []
    for router, ids_TC in routed.items():
        chosen = ids_TC[:num_rows, : router.routing.top_k].long().flatten()
        seen = torch.zeros(router.num_experts, dtype=torch.bool, device=chosen.device)
        touched.append(seen.index_fill_(0, chosen, True).sum())
    return [int(count) for count in torch.stack(touched).tolist()]


def _eager(config: EngineConfig) -> EngineConfig:
    """The configuration of an engine of this process, which launches and awaits step by step."""
    graphs = config.cuda_graphs.model_copy(update={"enforce_eager": True})
    here = {name: EngineConfig.model_fields[name].get_default() for name in _OF_ONE_PROCESS}
    return config.model_copy(update={**here, "cuda_graphs": graphs, "steps_ahead": 0})


@contextmanager
def _watched_routers() -> Iterator[dict[Router, Tensor]]:
    """By router, the experts [T, C] that it chose last; to be cleared.

    A kernel set may compute a whole mixture without a call of its router, which is called before.
    """
    routed: dict[Router, Tensor] = {}

    def call_router(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, SparseMLP):
            module.gate(*inputs)

    def watch(module: nn.Module, _: object, output: Any) -> None:
        if isinstance(module, Router):
            routed[module] = output[1]

    handles = (register_module_forward_pre_hook(call_router), register_module_forward_hook(watch))
    try:
        yield routed
    finally:
        for handle in handles:
            handle.remove()


def _add_requests(engine: Engine, workload: Workload, temperature: float) -> None:
    params = sampling_params(workload, temperature)
    for index, (prompt, param) in enumerate(zip(workload.prompts, params, strict=True)):
        engine.add_request(str(index), prompt, param, stream=True)


def _decode_steps(
    engine: Engine, bucket_sizes: Sequence[int], routed: dict[Router, Tensor]
) -> Iterator[int]:
    """Take all steps, and give the rows of each that decodes alone, its padding left out.

    Such a step has a token for each of its rows, none of them the first of a request.
    """
    begun: set[str] = set()
    while engine.has_unfinished():
        routed.clear()
        deltas = engine.step()
        ids = {delta.request_id for delta in deltas if delta.new_token_ids}
        is_new = not ids <= begun
        begun |= ids
        if ids and not is_new and _has_rows(routed, bucket_sizes, len(ids)):
            yield len(ids)


def _has_rows(routed: Mapping[Router, Tensor], bucket_sizes: Sequence[int], num_rows: int) -> bool:
    """Whether a step computed so many rows, padded to a bucket, and no prompt beside them."""
    bucket = bucket_sizes[bisect_left(bucket_sizes, num_rows)]
    return bool(routed) and all(len(ids_TC) == bucket for ids_TC in routed.values())
