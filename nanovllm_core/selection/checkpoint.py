"""The checkpoint that `model` names: its source, and its folder; and the built-in sources."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import BaseModel

from nanovllm_core.errors import (
    CheckpointConflictError,
    CheckpointNotFoundError,
    PluginLoadError,
    PluginNotFoundError,
    clip,
    shown,
)
from nanovllm_core.interfaces.specs import ResolvedPlugin
from nanovllm_core.registry.manager import PluginManager
from nanovllm_core.registry.objects import make_plugin
from nanovllm_core.selection.checkpoint_files import CONFIG_NAME

HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model")
"""The files of a checkpoint: config, tokenizer, chat template, weights; no pickled weights."""
HUB_STRAYS = ("consolidated*.safetensors",)
"""The weights a second time, by names that no model here reads."""


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """The checkpoint plugin that a `model` asks, for what, and why that one."""

    plugin: ResolvedPlugin
    reference: str
    why: str


def find_checkpoint(plugins: PluginManager, model: str) -> Path:
    """The folder of a checkpoint, from the source that `find_source` finds."""
    return fetch_checkpoint(find_source(plugins, model), model)


def fetch_checkpoint(source: CheckpointSource, model: str) -> Path:
    """The folder that a source gives; PluginLoadError, with what to do, where it gives none."""
    try:
        return cast(Path, make_plugin(source.plugin, source.reference))
    except PluginLoadError as error:
        raise PluginLoadError(
            f"model: {shown(model)}: {clip(str(error), 1000)}; correct the reference, or update "
            f"{source.plugin.distribution}"
        ) from error


def find_source(plugins: PluginManager, model: str) -> CheckpointSource:
    """The source of a `model`: a path, an installed source's name, `source:reference` or a hub id.

    Nothing is fetched. An installed source wins over a folder of its name that holds no checkpoint.
    Raises CheckpointConflictError where the folder holds one, and CheckpointNotFoundError where
    `model` is none of these.
    """
    name, colon, reference = model.partition(":")
    is_hub_id, why = "/" in model and not colon, "a checkpoint source of that name is installed"
    if name in plugins.names("checkpoint"):
        if not colon and holds_checkpoint(model):
            meanings, remedy = conflict(plugins, model)
            raise CheckpointConflictError(f"model: {shown(model)} is {meanings}; {remedy}")
    elif model.startswith((".", "/", "~")):
        name, reference, why = "local", model, "it is a path"
    elif is_hub_id and os.path.isdir(model) and not holds_checkpoint(model):
        # An incomplete copy must not become a download in silence.
        raise CheckpointNotFoundError(
            f"model: the folder {shown(model)} holds no {CONFIG_NAME}, so it is no checkpoint; "
            f"complete it, or write 'hub:{model}' for the Hugging Face hub's model of that name"
        )
    elif os.path.exists(model):
        name, reference, why = "local", model, "a folder of that path is there"
    elif is_hub_id:
        name, reference, why = "hub", model, "organisation/name is a model of the hub"
    try:
        plugin = plugins.resolve("checkpoint", name, {}, path="model")
    except PluginNotFoundError as error:
        raise CheckpointNotFoundError(
            f"model: {shown(model)} is no folder and no checkpoint plugin; give a path, a hub id "
            f"(organisation/name) or an installed source. {error}"
        ) from error
    return CheckpointSource(plugin, reference, why)


def holds_checkpoint(folder: str) -> bool:
    """Whether a folder with a config.json is there."""
    return os.path.isfile(os.path.join(folder, CONFIG_NAME))


def conflict(plugins: PluginManager, name: str) -> tuple[str, str]:
    """The two meanings of a source's name that is also a checkpoint folder here; the remedy."""
    source = plugins.find("checkpoint", name)
    meanings = (
        f"the checkpoint in {Path(name).resolve()} and the checkpoint source of "
        f"{source.distribution} {source.version}"
    )
    return meanings, f"write './{name}' for the folder or '{name}:' for the source"


def from_folder(options: BaseModel, reference: str) -> Path:
    """The folder itself; CheckpointNotFoundError if there is none, or it is a file."""
    folder = os.path.expanduser(reference)
    if not os.path.isdir(folder):
        name = shown(reference)
        missing = f"the folder {name} does not exist"
        what = f"{name} is a file" if os.path.isfile(folder) else missing
        raise CheckpointNotFoundError(
            f"model: {what}; give the folder that holds config.json and the safetensors files"
        )
    return Path(folder).resolve()


def from_hub(options: BaseModel, reference: str) -> Path:
    """Download `organisation/name` (or `organisation/name@revision`) once; return the local folder.

    Without a network, or with HF_HUB_OFFLINE=1, what was downloaded before is used.
    """
    # Imported here because it takes a moment, and folders need none of it.
    from huggingface_hub import snapshot_download

    name, _, revision = reference.partition("@")
    try:
        folder = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=list(HUB_FILES),
            ignore_patterns=list(HUB_STRAYS),
        )
    except Exception as error:
        raise CheckpointNotFoundError(
            f"model: {shown(reference)} is no folder here and could not be fetched from the "
            f"Hugging Face hub ({type(error).__name__}: {clip(str(error), 1000)}); check the name, "
            "the network, and your access to the model"
        ) from error
    return Path(folder)
