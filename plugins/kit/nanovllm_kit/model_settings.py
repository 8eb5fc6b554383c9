"""What config.json may say of a small model: a base, and settings to serve or to refuse.

`nanovllm_kit.model` runs every model plugin through them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanovllm_core.errors import ArchitectureError, PluginError
from nanovllm_core.registry import load_object
from nanovllm_kit.enabled import enabled_plugins

Settings = Mapping[str, Any]

LLAMA_LIKE: Settings = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "tie_word_embeddings": False,
}
"""Sizes that share no factor by chance, and no default of anybody's: what is ignored shows.

Five layers: every fourth may be of another kind. The special tokens are within the vocabulary.
"""

HARMLESS = frozenset(
    {
        "attention_dropout",
        "embd_pdrop",
        "embedding_dropout",
        "hidden_dropout",
        "initializer_range",
        "output_router_logits",
        "pretraining_tp",
        "resid_pdrop",
        "residual_dropout",
        "router_aux_loss_coef",
        "use_cache",
    }
)
"""Settings for training, or for how transformers computes the same: no model has to read them."""

ROPE_KINDS: Mapping[str, Settings] = {
    "default": {"rope_type": "default", "rope_theta": 300.0},
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 16,
    },
}

SETTINGS: Mapping[str, Settings] = {
    "tied embeddings": {"tie_word_embeddings": True},
    "attention biases": {"attention_bias": True},
    "MLP biases": {"mlp_bias": True},
    "heads of another size": {"head_dim": 24},
    "as many KV heads as heads": {"num_key_value_heads": 4},
    "one KV head": {"num_key_value_heads": 1},
    "a large epsilon": {"rms_norm_eps": 0.3},
    "another activation": {"hidden_act": "gelu"},
    "a third activation": {"hidden_act": "relu"},
    "a sliding window": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0},
    "capped logits": {"final_logit_softcapping": 2.0},
    "capped scores": {"attn_logit_softcapping": 2.0},
    "scaled logits": {"logits_scaling": 2.0},
    "scaled embeddings": {"embedding_multiplier": 2.0},
    "a scaled residual": {"residual_multiplier": 0.5},
    "scaled scores": {"attention_multiplier": 0.2},
}
"""What configurations of the Llama family may say; only what the reference knows is asked."""

UNSUPPORTED: Mapping[str, Settings] = {
    "a quantised checkpoint": {"quantization_config": {"quant_method": "fp8"}},
    "an unknown activation": {"hidden_act": "no_such_activation"},
    "an unknown rope": {"rope_parameters": {"rope_type": "no_such_rope", "rope_theta": 1e4}},
    "an unknown rope, in the old form": {
        "rope_parameters": None,
        "rope_scaling": {"type": "no_such_rope", "factor": 2.0},
    },
    "heads that KV heads do not divide": {"num_key_value_heads": 3},
}
"""What no model can serve: an ArchitectureError of `shape()`, before any weight is read."""

UNREADABLE: Mapping[str, Settings] = {
    "no layers": {"num_hidden_layers": 0},
    "a vocabulary in words": {"vocab_size": "large"},
    "a negative hidden size": {"hidden_size": -64},
    "no longest position": {"max_position_embeddings": None},
}
"""Values that no size has: an error of `shape()` that the core explains, of any of its types."""

REQUIRED: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
"""What every configuration says, and the field of `ModelShape`; each is left out in turn."""


class WatchedConfig(dict[str, Any]):
    """A config.json that knows which of its settings were asked for, `read`, and whether all of
    them were at once, for a copy: `copied`.

    `__iter__` is here because Python copies a dict without asking, unless its class has one.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.read: set[str] = set()
        self.copied = False

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self.copied = True
        return super().__iter__()

    def keys(self) -> Any:
        self.copied = True
        return super().keys()

    def items(self) -> Any:
        self.copied = True
        return super().items()


def save_served(folder: Path) -> bool:
    """Write a config.json of `LLAMA_LIKE` for a model plugin that serves it; False if none does.

    A model plugin that is broken is left out, and so is one of another architecture.
    """
    import transformers

    manager = enabled_plugins()
    for name in manager.names("model"):
        model_class: Any = getattr(transformers, name, None)
        if model_class is None:
            continue
        with suppress(PluginError, ArchitectureError):
            model = load_object(manager.spec("model", name).impl)
            settings = {**LLAMA_LIKE, "architectures": [name]}
            model_class.config_class(**settings).save_pretrained(folder)
            model.shape(json.loads((folder / "config.json").read_text()))
            return True
    return False
