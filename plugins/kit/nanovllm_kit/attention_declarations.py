"""Checks of what an attention backend says about itself, before and while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import cast, get_args

import torch

from nanovllm_core.interfaces.attention import (
    AttentionBackend,
    AttentionRequirements,
    GraphSupport,
    KVLayout,
    Phase,
)
from nanovllm_core.interfaces.specs import AttentionSpec
from nanovllm_kit.attention_backend import (
    HEAD_SIZES,
    AttentionSubject,
    BackendUnderTest,
)
from nanovllm_kit.conformance import PluginUnderTest


class AttentionDeclarations(AttentionSubject):
    """Capabilities are data, and true; questions are answered, not raised.

    What is not declared is refused by the core, before a plugin is asked (`unmet` in
    `nanovllm_core.selection.attention`): no answer of a plugin can undo that, so nothing here asks.
    """

    def test_the_spec_declares_an_attention_backend(self, plugin: PluginUnderTest) -> None:
        """The spec is an AttentionSpec, and `impl` a class that implements AttentionBackend."""
        if not isinstance(plugin.spec, AttentionSpec):
            raise AssertionError(f"the spec is a {type(plugin.spec).__name__}, not AttentionSpec")
        found = plugin.load()
        if not (isinstance(found, type) and issubclass(found, AttentionBackend)):
            raise AssertionError(f"{plugin.spec.impl} is {found!r}, no AttentionBackend class")
        if missing := sorted(found.__abstractmethods__):
            raise AssertionError(f"{found.__name__} does not implement {', '.join(missing)}")

    def test_capabilities_are_in_the_cores_terms(self, plugin: PluginUnderTest) -> None:
        """Sets of names that torch and the contract know: another spelling would match nothing."""
        stated = _spec(plugin).capabilities
        problems = [
            f"{name} is {values!r}, not a frozenset with something in it"
            for name, values in (
                ("devices", stated.devices),
                ("dtypes", stated.dtypes),
                ("phases", stated.phases),
                ("head_sizes", frozenset({1}) if stated.head_sizes is None else stated.head_sizes),
            )
            if not isinstance(values, frozenset) or not values
        ]
        problems += [f"device {name!r} is unknown" for name in stated.devices - {"cpu", "cuda"}]
        for name in stated.dtypes:
            if not isinstance(getattr(torch, name, None), torch.dtype):
                problems.append(f"dtype {name!r} is none of torch's names")
        problems += [f"phase {x!r} is unknown" for x in stated.phases - {*get_args(Phase)}]
        problems += [
            f"head size {size!r} is no positive integer"
            for size in stated.head_sizes or ()
            if type(size) is not int or size < 1
        ]
        if stated.latent_prefill and not stated.latent:
            problems.append("latent_prefill needs latent")
        if stated.cuda_graphs not in get_args(GraphSupport):
            problems.append(
                f"cuda_graphs {stated.cuda_graphs!r} is none of {get_args(GraphSupport)}"
            )
        for bound in (stated.min_compute_capability, stated.max_compute_capability):
            if bound is not None and [type(part) for part in bound] != [int, int]:
                problems.append(f"compute capability {bound!r} is no (major, minor)")
        if problems:
            raise AssertionError("; ".join(problems))

    def test_questions_about_what_is_declared_get_an_answer(self, plugin: PluginUnderTest) -> None:
        """check, kv_layouts and rank answer for every declared combination, the same each time."""
        spec, options = _spec(plugin), plugin.options
        for requirements in _declared(spec):
            reasons = spec.check(requirements, options)
            if not isinstance(reasons, list) or not all(type(text) is str for text in reasons):
                raise AssertionError(f"check gave {reasons!r}, not a list of reasons")
            if reasons != spec.check(requirements, options):
                raise AssertionError(f"check gives another answer the second time: {reasons}")
            if not all(text.strip() for text in reasons):
                raise AssertionError("check gave a reason without words")
            if type(spec.rank(requirements)) is not int:
                raise AssertionError(f"rank gave {spec.rank(requirements)!r}, not an integer")
        if spec.provider is not None and not str(spec.provider(options)).strip():
            raise AssertionError("provider names nothing")

    def test_layouts_name_blocks_that_both_phases_read(self, plugin: PluginUnderTest) -> None:
        """At least one layout, of a known name and a positive block multiple, for every phase."""
        spec = _spec(plugin)
        by_phase: dict[str, set[KVLayout]] = {}
        for requirements in _declared(spec):
            layouts = list(spec.kv_layouts(requirements, plugin.options))
            if not layouts:
                raise AssertionError(f"no layout for {requirements}")
            for layout in layouts:
                if not isinstance(layout, KVLayout) or layout.name != "NPKD":
                    raise AssertionError(f"{layout!r} is no layout that the core has (NPKD)")
                if type(layout.block_multiple) is not int or layout.block_multiple < 1:
                    raise AssertionError(
                        f"block multiple {layout.block_multiple!r} is not positive"
                    )
            if layouts != list(spec.kv_layouts(requirements, plugin.options)):
                raise AssertionError("kv_layouts gives another answer the second time")
            by_phase.setdefault(requirements.phase, set()).update(layouts)
        if not set.intersection(*by_phase.values()):
            raise AssertionError(f"its phases have no layout in common: {by_phase}")

    def test_what_runs_is_named(self, subject: BackendUnderTest) -> None:
        """`describe()` is what listings and benchmarks print."""
        text = subject.backend(subject.case([16]).config()).describe()
        if not isinstance(text, str) or not text.strip():
            raise AssertionError(f"describe() gave {text!r}")


def _spec(plugin: PluginUnderTest) -> AttentionSpec:
    return cast(AttentionSpec, plugin.spec)


def _declared(spec: AttentionSpec) -> Iterator[AttentionRequirements]:
    """Requirements within the stated capabilities, of every phase, device, dtype and head size."""
    stated = spec.capabilities
    for phase, device, dtype, head_size in product(
        sorted(stated.phases),
        sorted(stated.devices),
        sorted(stated.dtypes),
        sorted(stated.head_sizes or HEAD_SIZES),
    ):
        capability = stated.min_compute_capability or stated.max_compute_capability or (9, 0)
        yield AttentionRequirements(
            phase=phase,
            device=device,
            dtype=dtype,
            num_heads=4,
            num_kv_heads=2 if stated.gqa else 4,
            head_size=head_size,
            compute_capability=capability if device == "cuda" else None,
            cuda_graphs=device == "cuda"
            and stated.cuda_graphs in (("full",) if phase == "prefill" else ("decode", "full")),
            sliding_window=stated.sliding_window,
            soft_cap=stated.soft_cap,
        )
