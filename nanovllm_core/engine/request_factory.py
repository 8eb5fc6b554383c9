"""From what a caller asks to the requests that are served: one per sample, checked before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.engine.limits import EngineLimits
from nanovllm_core.engine.processor_arguments import ProcessorArguments, check_processor_arguments
from nanovllm_core.engine.request import Request
from nanovllm_core.engine.rows import RowTable
from nanovllm_core.engine.seeds import derive_seed, sample_seed
from nanovllm_core.errors import RequestError, shown
from nanovllm_core.interfaces.plan import RowSampling
from nanovllm_core.interfaces.request_labels import check_labels
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.specs import LogitsProcessorSpec


def sample_ids_of(request_id: str, n: int) -> list[str]:
    """One id per sample that schedulers can tell apart; a single sample keeps the request's."""
    return [request_id] + [f"{request_id}#{index}" for index in range(1, n)]


class RequestFactory:
    """Makes the requests of one engine, whose rows they will stand in.

    `eos_token_ids` end a request unless it ignores them, `processors` are what it may ask for,
    `seed` is what the seeds of requests without one are derived from, and `sampling_defaults` hold
    for the fields of `sampling_params.NEUTRAL` that a request does not state.
    """

    def __init__(
        self,
        limits: EngineLimits,
        table: RowTable[Request],
        eos_token_ids: Iterable[int],
        processors: Mapping[str, LogitsProcessorSpec],
        seed: int,
        sampling_defaults: Mapping[str, float],
    ) -> None:
        self._limits = limits
        self._table = table
        self._eos_token_ids = tuple(eos_token_ids)
        self._processors = processors
        self._seed = seed
        self._sampling_defaults = sampling_defaults

    def make_samples(
        self,
        sample_ids: Sequence[str],
        prompt_token_ids: Sequence[int] | NDArray[np.integer],
        params: SamplingParams,
        *,
        arrival_step: int,
        arrival_index: int,
        stream: bool,
        cache_salt: bytes,
        labels: Mapping[str, str] | None,
    ) -> list[Request]:
        """The samples of one request, the first of which lends the group its id.

        Raises RequestError for a salt that is not bytes, InvalidLabelsError, InvalidPromptError,
        InvalidSamplingError and RequestTooLongError.
        """
        if not isinstance(cache_salt, bytes):
            raise RequestError(
                f"cache_salt is {shown(cache_salt)}; it must be bytes, as in b'tenant'"
            )
        checked_labels = check_labels(labels)
        prompt = self._limits.check_prompt(prompt_token_ids)
        max_length = self._limits.check_length(len(prompt), params)
        self._limits.check_stop_ids(params)
        self._limits.check_biased_ids(params)
        processors = check_processor_arguments(params, self._processors, self._limits.vocab_size)
        seed = derive_seed(self._seed, arrival_index) if params.seed is None else params.seed
        prompt_list: list[int] = prompt.tolist()
        arrival_time = perf_counter()
        return [
            Request(
                request_id=sample_id,
                group_id=sample_ids[0],
                index=index,
                params=params,
                sampling=self._row_sampling(params, processors, sample_seed(seed, index)),
                prompt_token_ids=prompt_list,
                token_ids=prompt,
                max_length=max_length,
                arrival_step=arrival_step,
                arrival_index=arrival_index + index,
                arrival_time=arrival_time,
                table=self._table,
                labels=checked_labels,
                stream=stream,
                cache_salt=cache_salt,
            )
            for index, sample_id in enumerate(sample_ids)
        ]

    def _row_sampling(
        self, params: SamplingParams, processors: ProcessorArguments, seed: int
    ) -> RowSampling:
        """The sampling parameters that the device needs."""
        eos = () if params.ignore_eos else self._eos_token_ids
        choice = params.choice(self._sampling_defaults)
        if not 0 < choice["top_k"] < self._limits.vocab_size:
            choice["top_k"] = 0
        return RowSampling(
            **choice,
            seed=seed,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            min_tokens=params.min_tokens,
            logprobs=params.logprobs,
            stop_token_ids=tuple(dict.fromkeys((*eos, *params.stop_ids))),
            logits_processors=processors,
            logit_bias=tuple(pair for pair in (params.logit_bias or {}).items() if pair[1]),
        )
