"""The arguments of requests for logits processors, checked before a request is queued."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from nanovllm_core.config.errors import explain_options
from nanovllm_core.errors import InvalidSamplingError, PluginFailedError, did_you_mean, shown
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.specs import LogitsProcessorSpec
from nanovllm_core.registry.options import read_options

ProcessorArguments = tuple[tuple[str, Mapping[str, Any]], ...]


def check_processor_arguments(
    params: SamplingParams, specs: Mapping[str, LogitsProcessorSpec], vocab_size: int
) -> ProcessorArguments:
    """(name, valid arguments as plain data) of each processor that the parameters ask for.

    `specs` are those of the engine, by name. Raises InvalidSamplingError for a processor that the
    engine does not have, and for arguments that its plugin refuses; PluginFailedError where the
    plugin's own check raises. Either way the engine and the other requests go on.
    """
    asked = params.logits_processors or {}
    return tuple(
        (name, _checked(name, arguments, specs, vocab_size)) for name, arguments in asked.items()
    )


def _checked(
    name: str,
    arguments: Mapping[str, Any],
    specs: Mapping[str, LogitsProcessorSpec],
    vocab_size: int,
) -> Mapping[str, Any]:
    spec, path = specs.get(name), f"logits_processors.{name}"
    if spec is None:
        raise InvalidSamplingError(
            f"{path}: this engine has no logits processor "
            f"{shown(name)}{did_you_mean(name, specs)}; it "
            f"has {', '.join(specs) or 'none'}; list it under logits_processors of the "
            "configuration"
        )
    try:
        valid = read_options(spec.arguments, arguments)
    except ValidationError as error:
        raise InvalidSamplingError(
            explain_options(error, spec.arguments, path, f"logits processor {name}")
        ) from None
    try:
        reasons = [*spec.check(valid, vocab_size)]
    except Exception as error:
        raise PluginFailedError(
            f"{path}: the check of {shown(name)} failed: {type(error).__name__}: {error}"
        ) from error
    if reasons:
        raise InvalidSamplingError(f"{path}: {'; '.join(reasons)}")
    return _as_plain_data(valid, path, name)


def _as_plain_data(arguments: BaseModel, path: str, name: str) -> Mapping[str, Any]:
    """Plain data from which the worker, maybe another process, makes the same arguments."""
    plain = arguments.model_dump(round_trip=True, by_alias=True)
    try:
        type(arguments).model_validate(plain)
    except ValidationError as error:
        raise PluginFailedError(
            f"{path}: {shown(name)} refuses its own arguments when they are read again from "
            "plain data "
            f"({shown(plain)}): {error.errors()[0]['msg']}; a validator must take what it returned"
        ) from error
    return plain
