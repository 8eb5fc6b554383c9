"""Variables for chat templates, such as `enable_thinking`: which names a caller may give."""

from __future__ import annotations

from collections.abc import Mapping

from nanovllm_core.errors import shown

RESERVED = frozenset(
    {
        "messages",
        "conversation",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Names that the engine sets when it applies a template; most are transformers' arguments."""


def check_chat_template_kwargs(kwargs: Mapping[str, object]) -> Mapping[str, object]:
    """The same variables; ValueError for what no template may be given."""
    if not isinstance(kwargs, Mapping):
        raise ValueError(
            f'{shown(kwargs)} must map names to values, as in {{"enable_thinking": false}}'
        )
    for name in kwargs:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{shown(name)} cannot name a variable; leave it out")
        if name in RESERVED:
            raise ValueError(f"{name!r} is set by the engine itself; leave it out")
    return kwargs
