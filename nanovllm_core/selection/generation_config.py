"""The sampling defaults of a checkpoint, from its generation_config.json.

They stand for the fields of `sampling_params.NEUTRAL` that a request does not state. Lengths
(`max_new_tokens`) are the caller's to choose, and are not read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm_core.errors import CheckpointError, InvalidSamplingError, shown
from nanovllm_core.interfaces.sampling_params import NEUTRAL, SamplingParams
from nanovllm_core.selection.checkpoint_files import read_json

logger = logging.getLogger(__name__)

FILE_NAME = "generation_config.json"
REMEDY = "correct the file, or leave its defaults out with generation_config: none"

WITHOUT_EFFECT: Mapping[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "penalty_alpha": None,
    "typical_p": 1.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": None,
    "min_length": 0,
    "min_new_tokens": None,
    "stop_strings": None,
    "token_healing": False,
    "dola_layers": None,
    "watermarking_config": None,
}
"""Settings of transformers that change answers and are not supported, with neutral values."""


def read_sampling_defaults(folder: Path) -> Mapping[str, float]:
    """The defaults by field of `SamplingParams`; empty where the checkpoint states none.

    `do_sample: false` means greedy, whatever the temperature beside it; `do_sample: true` without a
    temperature means 1, as in transformers. Settings without effect here are logged. Raises
    CheckpointError for a value that is no such parameter.
    """
    path = folder / FILE_NAME
    content = read_json(path)
    stated = {name: content[name] for name in NEUTRAL if content.get(name) is not None}
    sampled = content.get("do_sample")
    if not isinstance(sampled, bool | None):
        raise CheckpointError(f"{path}: do_sample is {shown(sampled)}; must be a bool; {REMEDY}")
    if sampled:
        stated.setdefault("temperature", NEUTRAL["temperature"])
    elif sampled is not None:
        stated["temperature"] = 0.0
    try:
        params = SamplingParams(**stated)
    except InvalidSamplingError as error:
        raise CheckpointError(f"{path}: {error}; {REMEDY}") from error
    for name, neutral in WITHOUT_EFFECT.items():
        if content.get(name) not in (None, neutral):
            logger.warning("%s: %s=%.80r has no effect here", path, name, content[name])
    return {name: getattr(params, name) for name in stated}


def describe_defaults(defaults: Mapping[str, float]) -> str:
    """`temperature=0.6, top_k=20`, or `none`."""
    return ", ".join(f"{name}={value:g}" for name, value in defaults.items()) or "none"
