"""A new plugin package, complete: `nanovllm plugins new KIND NAME`.

    folder = new_plugin("scheduler", "fair", into=Path("."))      # ./scheduler_fair
    folder = new_plugin("model", "Phi3ForCausalLM", into=Path("."))  # ./model_phi3
    folder = new_plugin("model", "OlmoeForCausalLM", into=Path("."), variant="moe")

A template is a package that works, under the name `my_plugin`; what is written is the template with
the author's name in the place of that one. So the templates are code, linted and tested as code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from nanovllm_core import __version__
from nanovllm_core.errors import PluginError, did_you_mean, shown
from nanovllm_core.registry import (
    COMMAND_GROUP,
    EXTENSION,
    KIND,
    SUITE_GROUP,
    declared_group,
    declared_hook,
    get_plugin_manager,
    known_groups,
)

MAX_NAME = 20
"""Longer names would break the templates' lines."""

_ARCHITECTURE = re.compile(r"([A-Z][A-Za-z0-9]*?)(ForCausalLM|LMHeadModel)?")
"""A class of transformers; packages, modules and tests are named by its first part."""

_PAGES = {"route": "docs/write/route.md", "router": "plugins/engine_processes/README.md"}
"""Our documents of kinds that plugins declare."""

_FOLDER = Path(__file__).parent / "templates"
_SHARED = _FOLDER / "shared"


class ScaffoldError(PluginError):
    """A new plugin's package cannot be written: its name, its kind or its folder is wrong."""


@dataclass(frozen=True, slots=True)
class Template:
    """A kind's template: `folder` under templates/, and what a package of it is called.

    `entry_point` is the name in the configuration, with the place-holders of the templates; `more`
    are further entry points (group, name), all into the same module. `extras` are those of
    nanovllm-core that its tests need. `reference` is the class of transformers that a model's tests
    compare with, unless the model is named by an architecture that transformers has.
    """

    folder: str
    summary: str
    entry_point: str = "my_plugin"
    more: tuple[tuple[str, str], ...] = ()
    extras: str = "kit"
    reference: str = "LlamaForCausalLM"


TEMPLATES: Mapping[str, Template] = MappingProxyType(
    {
        "attention": Template("attention", "Paged attention in plain torch, for nanovllm"),
        "scheduler": Template("scheduler", "A scheduling policy for nanovllm: short answers first"),
        "model": Template("model", "A small decoder for nanovllm", "MyPluginForCausalLM"),
        "checkpoint": Template("checkpoint", "Checkpoints in zip archives, for nanovllm"),
        "executor": Template(
            "executor",
            "An executor for nanovllm that measures its steps",
            extras="kit,qwen3,sdpa,demo",
        ),
        "engine_client": Template(
            "engine_client",
            "Messages to an engine of nanovllm, in the log",
            extras="kit,qwen3,sdpa,demo",
        ),
        "sampler": Template("sampler", "A sampler for nanovllm: Gumbel noise from splitmix64"),
        "logits_processor": Template(
            "logits_processor", "A logits processor for nanovllm: repeat less"
        ),
        "constraint": Template(
            "constraint", "A constraint for nanovllm: an answer of few characters"
        ),
        "observer": Template(
            "observer", "Rates and waits of nanovllm, in the log", extras="kit,qwen3,sdpa,demo"
        ),
        "kernels": Template("kernels", "A kernel set for nanovllm, in plain torch"),
        EXTENSION: Template("extension", "A command and an environment check for nanovllm"),
        KIND: Template(
            "kind",
            "A new kind of nanovllm's plugins: where the numbers of steps go",
            more=(("nanovllm.my_plugins", "jsonl"), ("nanovllm.observers", "my_plugin")),
            extras="kit,qwen3,sdpa,demo",
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Variants:
    """A kind with several templates: the command's option that chooses, and its values.

    The first is the kind's own template, which is written where nothing was chosen.
    """

    option: str
    templates: Mapping[str, Template]


VARIANTS: Mapping[str, Variants] = MappingProxyType(
    {
        "scheduler": Variants(
            "--level",
            {
                "policy": TEMPLATES["scheduler"],
                "scheduler": Template(
                    "whole_scheduler", "A scheduler for nanovllm: prompts share each step"
                ),
            },
        ),
        "model": Variants(
            "--like",
            {
                "dense": TEMPLATES["model"],
                "moe": Template(
                    "mixture",
                    "A small decoder with a mixture of experts, for nanovllm",
                    "MyPluginForCausalLM",
                    reference="Qwen3MoeForCausalLM",
                ),
            },
        ),
    }
)


def new_plugin(kind: str, name: str, into: Path, variant: str | None = None) -> Path:
    """Write the package of a new plugin into `into`; the folder that was written.

    A model may be named by its architecture; its tests then compare with transformers' class of
    that name, if there is one. `variant` chooses a template of `VARIANTS`; None is the kind's own.
    Raises ScaffoldError for a kind without a template, a variant that it does not have, a name that
    cannot be one or is taken by what is installed, or a folder that exists.
    """
    template = _template(kind, variant)
    names = _names(kind, name, template)
    stem = names["my_plugin"]
    check_name(stem, kind)
    folder = into / f"{kind}_{stem}"
    if folder.exists():
        raise ScaffoldError(f"{folder} exists already; choose another name, or another --into")
    _refuse_taken(kind, stem, [(group, _rename(e, names)) for group, e in _entries(kind, template)])
    # Everything is read before anything is written.
    files = {folder / _rename(str(path), names): text for path, text in _files(template)}
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_rename(text, names), encoding="utf-8")
    except OSError as error:
        raise ScaffoldError(
            f"{folder} cannot be written: {error.strerror}; choose another --into"
        ) from error
    return folder


def known_to_transformers(architecture: str) -> bool:
    """Whether transformers has a class of that name; its module is not imported."""
    import transformers

    return architecture in dir(transformers)


def check_name(name: str, kind: str = "") -> None:
    """ScaffoldError, with a name that would do, unless packages and classes can be named so."""
    if name in ("auto", "none"):
        raise ScaffoldError(
            f"{shown(name)} means something else in a configuration; choose another"
        )
    if re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) and len(name) <= MAX_NAME:
        return
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    better = re.sub(r"[^a-z0-9]+", "_", words).lstrip("_0123456789")[:MAX_NAME].rstrip("_")
    hint = f"; try {better}" if better else ""
    or_class = ", or is a class, such as MistralForCausalLM" if kind == "model" else ""
    raise ScaffoldError(
        f"{shown(name)} cannot name a plugin: it takes lower-case letters, digits and single "
        f"underscores, begins with a letter, and has at most {MAX_NAME} characters{or_class}{hint}"
    )


def _refuse_taken(kind: str, name: str, entries: Iterable[tuple[str, str]]) -> None:
    """ScaffoldError for a name that would be a conflict as soon as the package is installed."""
    manager, groups = get_plugin_manager(), known_groups()
    taken = {*groups, COMMAND_GROUP, SUITE_GROUP}
    if kind == KIND and (name in manager.kinds() or declared_group(name) in taken):
        raise ScaffoldError(f"{shown(name)} is a kind already; choose another name")
    wanted = {(groups.get(group), entry) for group, entry in entries}
    for plugin in manager.installed():
        if (plugin.kind, plugin.name) in wanted:
            raise ScaffoldError(
                f"{plugin.distribution} has the {plugin.kind} {plugin.name!r} already; choose "
                "another name"
            )


def _entries(kind: str, template: Template) -> list[tuple[str, str]]:
    """The entry points of a package (group, name), with the place-holders of the templates."""
    [group] = [group for group, its_kind in known_groups().items() if its_kind == kind]
    return [(group, template.entry_point), *template.more]


def _template(kind: str, variant: str | None) -> Template:
    if kind not in TEMPLATES:
        _refuse_declared(kind)
        meant = [
            f"{one} {its.option} {kind}" for one, its in VARIANTS.items() if kind in its.templates
        ]
        hint = f"; did you mean {meant[0]}?" if meant else did_you_mean(kind, TEMPLATES)
        raise ScaffoldError(
            f"there is no template for {shown(kind)}{hint}; kinds: {', '.join(TEMPLATES)}"
        )
    if variant is None:
        return TEMPLATES[kind]
    if kind not in VARIANTS:
        raise ScaffoldError(f"{kind} has one template, and no variant {shown(variant)}")
    variants = VARIANTS[kind]
    if variant not in variants.templates:
        raise ScaffoldError(
            f"{variants.option} {shown(variant)} is no template of a {kind}; choose "
            f"{' or '.join(variants.templates)}"
        )
    return variants.templates[variant]


def _refuse_declared(kind: str) -> None:
    """ScaffoldError, with what to do instead, for a kind that an installed plugin declares."""
    manager = get_plugin_manager()
    if kind in manager.names(KIND):
        owner = manager.find(KIND, kind).distribution
        raise ScaffoldError(
            f"there is no template for {kind!r}. {owner} declares this kind. Copy the plugin of "
            f"{_PAGES.get(kind, f'the documents of {owner}')}: an entry point in the group "
            f"{declared_group(kind)!r}, and the hook {declared_hook(kind)} in its module"
        )


def _names(kind: str, name: str, template: Template) -> Mapping[str, str]:
    """What stands in the templates -> what is written."""
    camel = "".join(word.capitalize() for word in name.split("_"))
    architecture, reference = f"{camel}ForCausalLM", template.reference
    if kind == "model" and (match := _ARCHITECTURE.fullmatch(name)):
        architecture = name
        reference = name if known_to_transformers(name) else reference
        camel, name = match[1], match[1].lower()
    names = {
        "MyPluginForCausalLM": architecture,
        template.reference: reference,
        "my_plugin": name,
        "my-plugin": name.replace("_", "-"),
        "MyPlugin": camel,
        "my_kind": kind,
        "my-kind": kind.replace("_", "-"),
        "MY_CORE_VERSION": __version__,
        "MY_EXTRAS": template.extras,
        "MY_SUMMARY": template.summary,
    }
    lines = [
        f'[project.entry-points."{group}"]\n{entry} = "nanovllm_my_kind_my_plugin.plugin"\n'
        for group, entry in _entries(kind, template)
    ]
    return names | {"[project.entry-points.MY_ENTRY_POINTS]\n": _rename("\n".join(lines), names)}


def _rename(text: str, names: Mapping[str, str]) -> str:
    return re.sub("|".join(map(re.escape, names)), lambda match: names[match[0]], text)


def _files(template: Template) -> Iterator[tuple[Path, str]]:
    """The files of a template, what all kinds share first, by their path in the package."""
    for root in (_SHARED, _FOLDER / template.folder):
        for path in sorted(root.rglob("*")):
            inside = path.relative_to(root)
            # Python, ruff and others leave __pycache__, .ruff_cache and the like where they ran.
            cached = any(folder.rstrip("_").endswith("cache") for folder in inside.parts[:-1])
            if path.is_file() and not cached:
                yield inside, path.read_text(encoding="utf-8")
