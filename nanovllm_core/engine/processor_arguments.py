"""The arguments of requests for logits processors, checked before a request is queued."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from nanovllm_core.config.errors import explain_options
from nanovllm_core.errors import InvalidSamplingError, PluginFailedError, did_you_mean, shown
from nanovllm_core.interfaces.specs import LogitsProcessorSpec
from nanovllm_core.registry.options import read_options


def read_arguments(
    name: str,
    arguments: Mapping[str, Any],
    specs: Mapping[str, LogitsProcessorSpec],
    vocab_size: int,
) -> Mapping[str, Any]:
    """Valid arguments, as plain data from which the worker, maybe another process, makes the same.

    `specs` are those of the engine, by name. Raises InvalidSamplingError for a processor that the
    engine does not have, and for arguments that its plugin refuses; PluginFailedError where the
    plugin's own check raises, or its validators refuse what they returned. Either way the engine
    and the other requests go on.
    """
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
        plain = valid.model_dump(round_trip=True, by_alias=True)
        spec.arguments.model_validate(plain)
    except Exception as error:
        raise PluginFailedError(
            f"{path}: the check of {shown(name)} failed: {type(error).__name__}: {error}; it must "
            "give reasons, and a validator must take what it returned"
        ) from error
    if reasons:
        raise InvalidSamplingError(f"{path}: {'; '.join(reasons)}")
    return plain
