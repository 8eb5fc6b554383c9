"""The logits processors of an engine, and what its rows asked of them.

They run in the tail, eagerly: once per step for all rows that asked, on copies of those rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from pydantic import BaseModel
from torch import Tensor

from nanovllm_core.errors import PluginFailedError
from nanovllm_core.interfaces.executor import WorkerSetup
from nanovllm_core.interfaces.logits_processor import LogitsContext, LogitsProcessor, LogitsRequest
from nanovllm_core.interfaces.specs import LogitsProcessorSpec
from nanovllm_core.registry.manager import get_plugin_manager
from nanovllm_core.registry.objects import make_plugin
from nanovllm_core.worker.logits import StepRows

ProcessorArguments = Sequence[tuple[str, Mapping[str, Any]]]


@dataclass(slots=True)
class LoadedProcessor:
    """A processor, the model of its arguments, and the rows that asked, with their state.

    `label` names the plugin and its distribution. `checks`: look at what it leaves of each row, and
    wait for the device to do so.
    """

    label: str
    arguments: type[BaseModel]
    processor: LogitsProcessor
    checks: bool = False
    rows: dict[int, tuple[BaseModel, object]] = field(default_factory=dict)

    def failure(self, call: str, error: Exception) -> PluginFailedError:
        """The error of a call that raised `error`."""
        return PluginFailedError(f"{self.label}: {call} failed: {type(error).__name__}: {error}")


class RowProcessors:
    """The processors by name, in the order in which they run."""

    def __init__(self, processors: Mapping[str, LoadedProcessor]) -> None:
        self._processors = processors

    def admit(self, row: int, asked: ProcessorArguments) -> None:
        """A row is given to a request that asks for these; what it asked before is forgotten."""
        for loaded in self._processors.values():
            loaded.rows.pop(row, None)
        for name, plain in asked:
            loaded = self._processors[name]
            try:
                arguments = loaded.arguments.model_validate(dict(plain))
                state = loaded.processor.prepare(arguments)
            except Exception as error:
                raise loaded.failure("prepare", error) from error
            loaded.rows[row] = (arguments, state)

    def asked_of(
        self, asked: Sequence[ProcessorArguments]
    ) -> list[tuple[LoadedProcessor, list[int]]]:
        """Each processor that some of these rows asked for, with the positions of those rows."""
        return [
            (loaded, positions)
            for name, loaded in self._processors.items()
            if (positions := [i for i, one in enumerate(asked) if name in dict(one)])
        ]


def make_processors(setup: WorkerSetup, device: torch.device, vocab_size: int) -> RowProcessors:
    """The logits processors of this worker, in the order of the configuration."""
    if not setup.logits_processors:
        return RowProcessors({})
    context = LogitsContext(
        device=device,
        vocab_size=vocab_size,
        max_model_len=setup.max_model_len,
        max_num_seqs=setup.config.limits.max_num_seqs,
        tokenizer=setup.tokenizer,
    )
    plugins = get_plugin_manager(disable=setup.config.plugins.disable)
    loaded = {}
    for one in setup.logits_processors:
        spec = cast(LogitsProcessorSpec, plugins.spec(one.kind, one.name))
        loaded[one.name] = LoadedProcessor(
            str(one), spec.arguments, make_plugin(one, context), checks=setup.config.debug
        )
    return RowProcessors(loaded)


def run_processor(
    loaded: LoadedProcessor,
    rows: Sequence[int],
    logits_SV: Tensor,
    step: StepRows,
    which_N: Tensor,
) -> None:
    """Change the rows `which_N` (positions, int64) of `logits_SV`; `rows` are theirs in the tables.

    Rows that are not among them are not touched.
    """
    # Nothing is known of a row that the device has ended; a prompt is never empty.
    num_prompt_N = step.num_prompt[which_N].clamp_(min=1)
    num_known_N = step.num_known[which_N].clamp_(min=1)
    requests = [
        LogitsRequest(
            arguments=arguments,
            state=state,
            token_ids=step.token_ids[row],
            num_prompt=num_prompt_N[i],
            num_known=num_known_N[i],
        )
        for i, row in enumerate(rows)
        for arguments, state in (loaded.rows[row],)
    ]
    logits_NV = logits_SV[which_N]
    try:
        loaded.processor.process(logits_NV, requests)
    except Exception as error:
        raise loaded.failure("process", error) from error
    if loaded.checks:
        _check(loaded, logits_SV[which_N], logits_NV)
    logits_SV.index_copy_(0, which_N, logits_NV)


def _check(loaded: LoadedProcessor, before_NV: Tensor, after_NV: Tensor) -> None:
    """Look at what a processor made of these rows; waits for the device."""
    # What a broken model gives is no fault of the processor's. NaN is not below infinity either.
    sound_N = (before_NV < math.inf).all(dim=1)
    if not (after_NV[sound_N] < math.inf).all():
        raise PluginFailedError(f"{loaded.label}: process made a logit NaN or +inf")
    if not (after_NV > -math.inf).any(dim=1).all():
        raise PluginFailedError(f"{loaded.label}: process left a row no id above -inf")
