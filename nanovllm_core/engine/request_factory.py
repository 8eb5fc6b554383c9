"""From what a caller asks to the requests that are served: one per sample, checked before."""

from __future__ import annotations

import struct
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TypedDict, Unpack

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from nanovllm_core.config.errors import explain_options
from nanovllm_core.engine.constraints import LoadedConstraint, SampleConstraints
from nanovllm_core.engine.limits import EngineLimits
from nanovllm_core.engine.request import Request
from nanovllm_core.engine.rows import RowTable
from nanovllm_core.errors import (
    InvalidSamplingError,
    PluginFailedError,
    RequestError,
    RequestTooLongError,
    did_you_mean,
    shown,
)
from nanovllm_core.interfaces.constraint import ConstraintSpec
from nanovllm_core.interfaces.plan import RowSampling
from nanovllm_core.interfaces.request_labels import check_labels
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.specs import LogitsProcessorSpec
from nanovllm_core.registry.options import read_options


def derive_seed(seed: int, index: int) -> int:
    """A seed from 0 to 2**63 - 1: the upper 63 bits of xxh3_64 over (seed, index), little-endian.

    The engine uses it twice: (engine seed, arrival index) where a request names no seed, and
    (request seed, sample index) for the second and later samples; sample 0 keeps its request's.
    """
    return xxhash.xxh3_64_intdigest(struct.pack("<qq", seed, index)) >> 1


def read_arguments(
    kind: str,
    name: str,
    arguments: Mapping[str, Any],
    specs: Mapping[str, LogitsProcessorSpec] | Mapping[str, ConstraintSpec],
    vocab_size: int,
) -> BaseModel:
    """Valid arguments of a logits processor or constraint that a request uses.

    `kind` names it in errors; `specs` are those of the engine, by name. Raises InvalidSamplingError
    for one that the engine does not have, and for arguments that its plugin refuses;
    PluginFailedError where the plugin's own check raises. Either way the engine and the other
    requests go on.
    """
    field = f"{kind.replace(' ', '_')}s"
    spec, path = specs.get(name), f"{field}.{name}"
    if spec is None:
        raise InvalidSamplingError(
            f"{path}: this engine has no {kind} {shown(name)}{did_you_mean(name, specs)}; it has "
            f"{', '.join(specs) or 'none'}; list it under {field} of the configuration"
        )
    try:
        valid = read_options(spec.arguments, arguments)
    except ValidationError as error:
        problem = explain_options(error, spec.arguments, path, f"{kind} {name}")
        raise InvalidSamplingError(problem) from None
    try:
        reasons = [*spec.check(valid, vocab_size)]
    except Exception as error:
        raise PluginFailedError(
            f"{path}: the check of {shown(name)} failed: {type(error).__name__}: {error}"
        ) from error
    if reasons:
        raise InvalidSamplingError(f"{path}: {'; '.join(reasons)}")
    return valid


def plain_arguments(
    name: str,
    arguments: Mapping[str, Any],
    specs: Mapping[str, LogitsProcessorSpec],
    vocab_size: int,
) -> Mapping[str, Any]:
    """Arguments as plain data from which the worker, maybe another process, makes the same.

    Raises PluginFailedError where the plugin's validators refuse what they returned, and what
    `read_arguments` raises.
    """
    valid = read_arguments("logits processor", name, arguments, specs, vocab_size)
    plain = valid.model_dump(round_trip=True, by_alias=True)
    try:
        type(valid).model_validate(plain)
    except ValidationError as error:
        raise PluginFailedError(
            f"logits_processors.{name}: {shown(name)} refuses its own arguments when they are read "
            f"again from plain data ({shown(plain)}): {error.errors()[0]['msg']}; a validator must "
            "take what it returned"
        ) from error
    return plain


def sample_ids(request_id: str, n: int) -> list[str]:
    """The ids of a request's samples: its own for the first, one made of it for each other."""
    return [request_id, *(f"{request_id}#{index}" for index in range(1, n))]


class RequestOptions(TypedDict, total=False):
    """What a request may have beside its prompt and parameters: see `Engine.add_request`."""

    stream: bool
    searched: bool
    cache_salt: bytes
    labels: Mapping[str, str] | None
    output_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFactory:
    """Makes the requests of one engine, whose rows they will stand in; see `Engine` for the fields.

    `seed` is what the seeds of requests without one are derived from.
    """

    limits: EngineLimits
    table: RowTable
    eos_token_ids: tuple[int, ...]
    processors: Mapping[str, LogitsProcessorSpec]
    constraints: Mapping[str, LoadedConstraint]
    sampling_defaults: Mapping[str, float]
    seed: int

    def make_samples(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | NDArray[np.integer],
        params: SamplingParams,
        *,
        arrival_step: int,
        arrival_index: int,
        stream: bool = False,
        searched: bool = False,
        cache_salt: bytes = b"",
        labels: Mapping[str, str] | None = None,
        output_token_ids: Sequence[int] = (),
    ) -> list[Request]:
        """The samples of one request: the first goes by its id, each other by one of its own.

        Raises RequestError for a salt that is not bytes, InvalidLabelsError, InvalidPromptError,
        InvalidSamplingError and RequestTooLongError.
        """
        if params.stop and not searched:
            raise InvalidSamplingError(
                f"stop is {shown(params.stop_strings)}, but the engine knows ids and no text; "
                "search the text (`searched`), or use stop_token_ids"
            )
        if not isinstance(cache_salt, bytes):
            raise RequestError(
                f"cache_salt is {shown(cache_salt)}; it must be bytes, as in b'tenant'"
            )
        if output_token_ids and params.n > 1:
            raise RequestError(
                f"{len(output_token_ids)} output_token_ids for n={params.n} samples; a request "
                "that goes on behind outputs has one sample, so add one for each"
            )
        checked_labels = check_labels(labels)
        prompt = self.limits.check_prompt(prompt_token_ids)
        max_length = self.limits.check_length(len(prompt), params)
        seed = derive_seed(self.seed, arrival_index) if params.seed is None else params.seed
        known = prompt
        if output_token_ids:
            known = self.limits.check_prompt([*prompt.tolist(), *output_token_ids])
        if len(known) >= max_length:
            raise RequestTooLongError(
                f"{len(output_token_ids)} output_token_ids leave no token to compute: the request "
                f"ends with its {max_length - len(prompt)}th; raise max_tokens"
            )
        sampling = self._row_sampling(params, seed)
        asked = self._asked_constraints(params)
        arrival_time, vocab_size = perf_counter(), self.limits.vocab_size
        return [
            Request(
                request_id=sample_id,
                group_id=request_id,
                index=index,
                params=params,
                sampling=replace(sampling, seed=derive_seed(seed, index)) if index else sampling,
                num_prompt_tokens=len(prompt),
                token_ids=known,
                max_length=max_length,
                arrival_step=arrival_step,
                arrival_index=arrival_index + index,
                arrival_time=arrival_time,
                table=self.table,
                labels=checked_labels,
                stream=stream,
                searched=searched,
                cache_salt=cache_salt,
                constraints=SampleConstraints(asked, prompt, vocab_size) if asked else None,
            )
            for index, sample_id in enumerate(sample_ids(request_id, params.n))
        ]

    def _row_sampling(self, params: SamplingParams, seed: int) -> RowSampling:
        """The sampling parameters that the device needs."""
        vocab_size = self.limits.vocab_size
        self.limits.check_token_ids(params)
        choice = params.choice(self.sampling_defaults)
        if not 0 < choice["top_k"] < vocab_size:
            choice["top_k"] = 0
        eos = () if params.ignore_eos else self.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *params.stop_ids)))
        if params.min_tokens and sum(one < vocab_size for one in stop_ids) == vocab_size:
            raise InvalidSamplingError(
                f"min_tokens is {params.min_tokens}, and stop_token_ids with the end-of-sequence "
                f"ids are all {vocab_size} ids of the vocabulary, so no id may come first; set "
                "min_tokens to 0, or leave stop ids out"
            )
        return RowSampling(
            **choice,
            seed=seed,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            min_tokens=params.min_tokens,
            logprobs=params.logprobs,
            stop_token_ids=stop_ids,
            logits_processors=tuple(
                (name, plain_arguments(name, given, self.processors, vocab_size))
                for name, given in (params.logits_processors or {}).items()
            ),
            logit_bias=tuple(pair for pair in (params.logit_bias or {}).items() if pair[1]),
            constrained=bool(params.constraints),
        )

    def _asked_constraints(
        self, params: SamplingParams
    ) -> list[tuple[LoadedConstraint, BaseModel]]:
        """The constraints that a request uses, with its valid arguments."""
        specs = {name: loaded.spec for name, loaded in self.constraints.items()}
        size = self.limits.vocab_size
        return [
            (self.constraints[name], arguments)
            for name, given in (params.constraints or {}).items()
            for arguments in (read_arguments("constraint", name, given, specs, size),)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBatch:
    """Requests that are checked, and then queued together: see `Engine.new_batch`."""

    factory: RequestFactory
    arrival_step: int
    num_arrived: int
    """Samples before those of the batch."""
    in_use: tuple[Container[str], ...]
    """Where the ids of other requests and samples are."""
    samples: list[list[Request]] = field(default_factory=list)
    """Of each request."""
    sample_ids: set[str] = field(default_factory=set)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int] | NDArray[np.integer],
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> None:
        """Check a request, as `Engine.add_request` does, and keep it."""
        ids = sample_ids(request_id, params.n)
        for sample_id in ids:
            if any(sample_id in used for used in (*self.in_use, self.sample_ids)):
                raise RequestError(
                    f"request id {shown(sample_id)} is in use; choose another, or wait until it "
                    "finishes"
                )
        samples = self.factory.make_samples(
            request_id,
            prompt_token_ids,
            params,
            arrival_step=self.arrival_step,
            arrival_index=self.num_arrived + len(self.sample_ids),
            **options,
        )
        self.samples.append(samples)
        self.sample_ids.update(ids)
