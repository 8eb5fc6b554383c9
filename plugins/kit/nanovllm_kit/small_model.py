"""A small model for suites of other kinds: whichever installed plugin serves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nanovllm_core.errors import ArchitectureError, PluginError
from nanovllm_core.registry import get_plugin_manager, load_object
from nanovllm_kit.model_settings import LLAMA_LIKE


def write_small_model(folder: Path) -> bool:
    """Write the config.json of a small model that an installed plugin serves; False: none does.

    Plugins that cannot be loaded, or read these sizes otherwise, are left out: they are no matter
    of the suite that asks.
    """
    import transformers

    manager = get_plugin_manager()
    for name in manager.names("model"):
        model_class: Any = getattr(transformers, name, None)
        try:
            implementation = load_object(manager.spec("model", name).impl)
            if model_class is None:
                continue
            settings = {**LLAMA_LIKE, "architectures": [name]}
            model_class.config_class(**settings).save_pretrained(folder)
            implementation.shape(json.loads((folder / "config.json").read_text("utf-8")))
        except (PluginError, ArchitectureError):
            continue
        return True
    return False
