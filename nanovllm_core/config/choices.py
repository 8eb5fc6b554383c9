"""The parts of the configuration that name plugins: a name, or a name with options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from nanovllm_core.errors import shown


def expand_name(value: object, key: str) -> object:
    """`sjf` is short for `{name: sjf}`, and an empty section for the defaults."""
    if isinstance(value, str):
        return {key: value}
    return {} if value is None else value


def expand_attention(value: object) -> object:
    """Write any form of `attention` as `{prefill: {...}, decode: {...}}`; keep other keys."""
    value = expand_name(value, "backend")
    if not isinstance(value, Mapping):
        return value
    both = {key: value[key] for key in ("backend", "options") if key in value}
    phases = {key: value[key] for key in ("prefill", "decode") if key in value}
    if both and phases:
        raise ValueError("give either backend and options, or prefill and decode, not both")
    if both:
        phases = {"prefill": both, "decode": both}
    rest = {key: value[key] for key in value if key not in both and key not in phases}
    return {key: expand_name(phases[key], "backend") for key in phases} | rest


class Section(BaseModel):
    """A part of the configuration: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _empty_means_defaults(cls, value: object) -> object:
        return {} if value is None else value


class AttentionChoice(Section):
    """One attention backend and its options."""

    backend: str = Field(
        default="auto",
        min_length=1,
        description="The attention plugin to use, by name (see `nanovllm plugins list`). `auto` "
        "takes the fastest one that can serve this model on this machine and says why the others "
        "were passed over.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="The settings of that plugin; each plugin has its own."
    )

    @model_validator(mode="after")
    def _options_need_a_name(self) -> AttentionChoice:
        if self.backend == "auto" and self.options:
            raise ValueError(
                f"options {shown(sorted(self.options))} need a named backend, for `auto` may take "
                "any"
            )
        return self


class AttentionSettings(Section):
    """Attention lets each token look back at the earlier ones; it is where most time goes.

    A name, `{backend, options}`, or one of these for each of the two phases: `prefill` reads the
    prompt, `decode` writes the answer token by token.
    """

    prefill: AttentionChoice = Field(
        default_factory=AttentionChoice,
        description="The backend that reads prompts: many tokens of one sequence at once.",
    )
    decode: AttentionChoice = Field(
        default_factory=AttentionChoice,
        description="The backend that writes answers: one token of many sequences at once.",
    )

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: object) -> object:
        return expand_attention(value)


class NamedPlugin(Section):
    """A plugin and its options; the name alone will do."""

    name: str = Field(min_length=1, description="The plugin, by name.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="The settings of that plugin; each plugin has its own."
    )

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: object) -> object:
        return expand_name(value, "name")


class SchedulerSettings(NamedPlugin):
    """Who is served first when more requests wait than can run."""

    name: str = Field(
        default="fcfs",
        min_length=1,
        description="The scheduler plugin, by name. `fcfs` serves in order of arrival; `sjf` "
        "serves short prompts first.",
    )


class ExecutorSettings(NamedPlugin):
    """How the model runs: in this process, or in several."""

    name: str = Field(
        default="single",
        min_length=1,
        description="The executor plugin, by name. `single` runs the model in this process.",
    )


class SamplerSettings(NamedPlugin):
    """How the device chooses a token where no more than temperature is asked for."""

    name: str = Field(
        default="gumbel",
        min_length=1,
        description="The sampler plugin, by name. `gumbel` takes the likeliest token, or draws one "
        "with noise that depends on the request's seed alone.",
    )


class KernelSettings(NamedPlugin):
    """The fused operations that a model's layers are built on."""

    name: str = Field(
        default="auto",
        min_length=1,
        description="The kernel set, by name. `auto` is `triton` on a GPU and `torch`, the plain "
        "reference, on a CPU; a set of another distribution is used only where it is named.",
    )

    @model_validator(mode="after")
    def _options_need_a_name(self) -> KernelSettings:
        if self.name == "auto" and self.options:
            raise ValueError(
                f"options {shown(sorted(self.options))} need a named kernel set, for `auto` may "
                "take any"
            )
        return self


def _named_once(value: tuple[NamedPlugin, ...]) -> tuple[NamedPlugin, ...]:
    names = [plugin.name for plugin in value]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{shown(name)} is listed {names.count(name)} times; once is enough")
    return value


PluginList = Annotated[tuple[NamedPlugin, ...], Field(strict=False, max_length=100)]
DistinctPlugins = Annotated[PluginList, AfterValidator(_named_once)]
