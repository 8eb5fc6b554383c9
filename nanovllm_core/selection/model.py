"""From a checkpoint's config.json to the model plugin for it, its shape and its length."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.errors import (
    ArchitectureError,
    CheckpointNotFoundError,
    ConfigError,
    PluginNotFoundError,
    clip,
    shown,
)
from nanovllm_core.interfaces.model import UNREADABLE_ERRORS, ModelShape
from nanovllm_core.interfaces.specs import ResolvedPlugin
from nanovllm_core.registry.manager import PluginManager
from nanovllm_core.registry.objects import load_object
from nanovllm_core.selection.checkpoint import CONFIG_NAME


def read_model_config(checkpoint: Path) -> Mapping[str, Any]:
    """The checkpoint's config.json."""
    file = checkpoint / CONFIG_NAME
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointNotFoundError(
            f"{checkpoint} holds no config.json, so it is no checkpoint; `model` must name a "
            "folder with config.json, a tokenizer and safetensors files"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointNotFoundError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointNotFoundError(f"{file} holds {type(config).__name__}, not an object")
    return config


def read_architecture(model_config: Mapping[str, Any], checkpoint: Path) -> str:
    """The first of config.json's architectures; ArchitectureError where it names none."""
    architectures = model_config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ArchitectureError(
            f"{checkpoint}/config.json: architectures={shown(architectures)} names no "
            "architecture; "
            'expected a list such as ["Qwen3ForCausalLM"]'
        )
    return str(architectures[0])


def find_model(plugins: PluginManager, architecture: str, checkpoint: Path) -> ResolvedPlugin:
    """The model plugin of an architecture; ArchitectureError where none is installed."""
    try:
        return plugins.resolve("model", architecture, {}, path="model")
    except PluginNotFoundError as error:
        raise ArchitectureError(
            f"{checkpoint}/config.json: no installed plugin runs the architecture "
            f"{shown(architecture)}; install one that does, or use another checkpoint. {error}"
        ) from error


def read_shape(
    model: ResolvedPlugin, model_config: Mapping[str, Any], checkpoint: Path
) -> ModelShape:
    """The facts that the model plugin reads in config.json. Raises ArchitectureError."""
    implementation = load_object(model)
    try:
        return cast(ModelShape, implementation.shape(model_config))
    except UNREADABLE_ERRORS as error:
        raise ArchitectureError(
            f"{checkpoint}/config.json cannot be read by {model.name} ({model.distribution} "
            f"{model.version}): {type(error).__name__}: {clip(str(error), 1000)}; correct that "
            "setting, or fetch the file again"
        ) from error


def resolve_max_model_len(config: EngineConfig, shape: ModelShape) -> int:
    """The configured length, or the model's own, which `fit` may cut; ConfigError beyond that."""
    asked = config.limits.max_model_len
    if not isinstance(asked, int):
        return shape.max_position
    if asked > shape.max_position:
        raise ConfigError(
            f"limits.max_model_len: {asked} is beyond the {shape.max_position} positions that the "
            f"model was trained for (max_position_embeddings); use at most {shape.max_position}"
        )
    return asked
