"""The parts of the configuration that name plugins: a name, or a name with options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from nanovllm_core.errors import shown

AUTO = "auto"

Name = Annotated[str, Field(min_length=1)]


def expand_name(value: object, key: str) -> object:
    """`sjf` is short for `{name: sjf}`, and an empty section for the defaults."""
    if isinstance(value, str):
        return {key: value}
    return {} if value is None else value


def expand_attention(value: object) -> object:
    """Write one choice for both phases as `{prefill: {...}, decode: {...}}`; keep other keys."""
    value = expand_name(value, "backend")
    if not isinstance(value, Mapping) or value.keys() & {"prefill", "decode"}:
        return value
    both = {key: value[key] for key in ("backend", "options") if key in value}
    phases = {"prefill": both, "decode": both} if both else {}
    return phases | {key: value[key] for key in value if key not in both}


class Section(BaseModel):
    """A part of the configuration: frozen, no unknown keys, no silent conversions."""

    # The text below a field is its description.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_means_defaults(cls, value: object) -> object:
        return {} if value is None else value


class PluginChoice(Section):
    """A plugin and its options, or its name alone; `auto` where that is the default."""

    KEY: ClassVar[str] = "name"
    """The field that names the plugin."""
    if TYPE_CHECKING:  # each form declares it behind its own name of the plugin
        options: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: object) -> object:
        return expand_name(value, cls.KEY)

    @property
    def plugin(self) -> str:
        """The name of the plugin, or `auto`."""
        return str(getattr(self, self.KEY))

    @classmethod
    def takes_auto(cls) -> bool:
        """Whether `auto` stands for any plugin; if not, it is a name like any other."""
        return bool(cls.model_fields[cls.KEY].default == AUTO)

    @property
    def is_auto(self) -> bool:
        return self.takes_auto() and self.plugin == AUTO

    @model_validator(mode="after")
    def _options_need_a_name(self) -> Self:
        if self.is_auto and self.options:
            raise ValueError(
                f"options {shown(sorted(self.options))} need a named plugin, for `auto` may take "
                "any"
            )
        return self


class AttentionChoice(PluginChoice):
    """One attention backend and its options."""

    KEY = "backend"
    backend: Name = AUTO
    """The attention plugin to use, by name (see `nanovllm plugins list`). `auto` takes the fastest
    one that can serve this model on this machine and says why the others were passed over."""
    options: dict[str, Any] = {}
    """The settings of that plugin; each plugin has its own."""

    @model_validator(mode="after")
    def _is_no_pair(self) -> Self:
        if "+" in self.backend:
            prefill, _, decode = self.backend.partition("+")
            written = f"{{prefill: {prefill}, decode: {decode}}}"
            raise ValueError(f"{shown(self.backend)} is a pair; in YAML write {written}")
        return self


class AttentionSettings(Section):
    """The attention backends: a name, `{backend, options}`, or one of these for each phase.

    `prefill` computes prompts, `decode` generates answers token by token.
    """

    prefill: AttentionChoice = AttentionChoice()
    """The backend for prompts: many tokens of one sequence at once."""
    decode: AttentionChoice = AttentionChoice()
    """The backend for answers: one token of many sequences at once."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: object) -> object:
        value = expand_attention(value)
        if isinstance(value, Mapping) and value.keys() & {"backend", "options"}:
            raise ValueError("give either backend and options, or prefill and decode, not both")
        return value


class NamedPlugin(PluginChoice):
    """A plugin and its options, or its name alone."""

    name: Name
    """The plugin, by name."""
    options: dict[str, Any] = {}
    """The settings of that plugin; each plugin has its own."""


class SchedulerSettings(NamedPlugin):
    """The order in which waiting requests are admitted."""

    name: Name = "fcfs"
    """The scheduler plugin, by name. `fcfs` admits in order of arrival; `sjf` admits short prompts
    first; `lpt` admits long answers first."""


class ExecutorSettings(NamedPlugin):
    """How the model runs: in this process, or in several."""

    name: Name = AUTO
    """The executor plugin, by name. `single` runs the model in this process, `parallel` in
    `tensor_parallel_size` others. `auto` is `single` for a size of 1, and `parallel` above."""


class EngineClientSettings(NamedPlugin):
    """Where engines run: on a thread of this process, or in processes of their own."""

    name: Name = AUTO
    """The plugin, by name. `thread` is an engine on a thread of this process; `processes` are
    `data_parallel_size` engines, each in a process of its own. `auto` is `thread` for a size of 1,
    and `processes` above."""


class SamplerSettings(NamedPlugin):
    """How the device chooses a token from logits, after penalties, top-k and the like."""

    name: Name = "gumbel"
    """The sampler plugin, by name. `gumbel` takes the likeliest token, or samples one with noise
    that depends on the request's seed alone."""


class KernelSettings(NamedPlugin):
    """The fused operations that a model's layers are built on."""

    name: Name = AUTO
    """The kernel set, by name. `auto` takes the installed set of the highest rank that supports the
    device and the dtype, and says why not the others: `triton` on a GPU, and `torch`, the plain
    reference, on a CPU."""


def _named_once(value: tuple[NamedPlugin, ...]) -> tuple[NamedPlugin, ...]:
    names = [plugin.name for plugin in value]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{shown(name)} is listed {names.count(name)} times; once is enough")
    return value


PluginList = Annotated[tuple[NamedPlugin, ...], Field(strict=False, max_length=100)]
DistinctPlugins = Annotated[PluginList, AfterValidator(_named_once)]


def choice_models(
    section: type[Section], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], type[PluginChoice]]]:
    """The path and the model of each field, in a section and those in it, that takes one plugin.

    Fields are recognised by their type. Lists of plugins are left out.
    """
    for name, field in section.model_fields.items():
        model = field.annotation
        if not isinstance(model, type):
            continue
        if issubclass(model, PluginChoice):
            yield (*path, name), model
        elif issubclass(model, Section):
            yield from choice_models(model, (*path, name))


def plugins_named(
    value: Section | tuple[PluginChoice, ...], path: str
) -> list[tuple[str, PluginChoice]]:
    """Each plugin that a field of the configuration names, or `auto`, by its path.

    `scheduler`, `observers[1]`, `attention.decode`; `attention` where both phases take the same.
    """
    if isinstance(value, PluginChoice):
        return [(path, value)]
    if isinstance(value, tuple):
        return [(f"{path}[{index}]", one) for index, one in enumerate(value)]
    parts = {f"{path}.{name}": getattr(value, name) for name in type(value).model_fields}
    first, *others = parts.values()
    return [(path, first)] if all(one == first for one in others) else [*parts.items()]
