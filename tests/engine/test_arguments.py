"""What a request says to a processor or a constraint is checked before it is queued."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, field_validator

from nanovllm_core.engine.request_factory import plain_arguments, read_arguments
from nanovllm_core.errors import InvalidSamplingError, PluginFailedError
from nanovllm_core.interfaces.specs import LogitsProcessorSpec

VOCAB = 50


class Ids(BaseModel):
    model_config = ConfigDict(extra="forbid")
    ids: list[int] = []


class Word(BaseModel):
    """Its validator refuses what it returned."""

    model_config = ConfigDict(extra="forbid")
    word: str

    @field_validator("word")
    @classmethod
    def spell(cls, word: str) -> str:
        if not word.islower():
            raise ValueError("lower case")
        return word.upper()


def check(arguments: Ids, vocab_size: int) -> list[str]:
    if 13 in arguments.ids:
        raise KeyError("unlucky")
    return [f"id {one} is not below {vocab_size}" for one in arguments.ids if one >= vocab_size]


KINDS: dict[str, dict[str, Any]] = {
    "ban": {"arguments": Ids, "check": check},
    "say": {"arguments": Word},
}
SPECS = {
    name: LogitsProcessorSpec(name=name, impl="code:Ban", contract=1, summary="Made up.", **kind)
    for name, kind in KINDS.items()
}


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("bann", {}, r"has no logits processor 'bann'; did you mean ban\?; it has ban, say; list"),
        ("ban", {"id": [1]}, r"logits_processors\.ban\.id: unknown option .* did you mean ids\?"),
        ("ban", {"ids": ["x"]}, r"logits_processors\.ban\.ids\[0\]: 'x' must be a whole number"),
        ("ban", {"ids": [50, 3, 51]}, r"ban: id 50 is not below 50; id 51 is not below 50"),
        ("say", {}, r"logits_processors\.say\.word: missing"),
    ],
)
def test_a_wrong_argument_is_told_with_its_place(
    name: str, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidSamplingError, match=said):
        plain_arguments(name, arguments, SPECS, VOCAB)


def test_a_check_that_raises_is_the_plugins_fault() -> None:
    with pytest.raises(PluginFailedError, match=r"the check of 'ban' failed: KeyError: 'unlucky'"):
        read_arguments("logits processor", "ban", {"ids": [13]}, SPECS, VOCAB)


def test_valid_arguments_travel_as_plain_data_that_is_valid_again() -> None:
    """The worker, maybe another process, reads them once more."""
    assert plain_arguments("ban", {"ids": [1, 2]}, SPECS, VOCAB) == {"ids": [1, 2]}
    with pytest.raises(PluginFailedError, match=r"logits_processors\.say.*plain data.*lower case"):
        plain_arguments("say", {"word": "yes"}, SPECS, VOCAB)
