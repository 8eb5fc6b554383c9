"""The kinds of plugins, as data that commands, schema, doctor and `explain` read.

A built-in kind is added in five files of the core: a module of `interfaces/` with its interface and
its spec (those of the kinds so far are in `specs.py`), its hook (`hookspecs.py`), its `Kind` here,
the field of the configuration that names its plugins (`config/settings.py`), and its public names
(`api.py`). Other files name it only to use it.

Each kind has its own contract version. A change in the meaning of a contract raises the version. If
older plugins no longer work, `oldest_contract` rises too, and they are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from nanovllm_core.interfaces import constraint, specs


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of plugin.

    Its entry points are in the group `nanovllm.PLURAL`; the hook `nanovllm_PLURAL` returns its
    specs, of the type `spec`. `plural` is left out where it is the name with an s. `interface`
    ("package.module:Type") is the type of the objects that its plugins make; empty: any type.

    `contract` is the current version of its contract, `oldest_contract` the oldest that is taken;
    `changed` says what a plugin written for an older one must change.

    `choice` is the field of `EngineConfig` that names its plugins, with options; empty for kinds
    that are chosen otherwise. `is_needed`: an engine needs one, and none comes with the core.
    `extras` are this project's plugins outside the core, each with the extra that installs it, the
    one to advise first.

    `conformance` is the suite that plugins of a declared kind must pass, `"package.module:Class"`;
    those of the core's kinds are registered in the group `nanovllm.suites`.
    """

    name: str
    spec: type[specs.PluginSpec | specs.KindSpec]
    interface: str
    plural: str = ""
    contract: int = 1
    oldest_contract: int = 1
    changed: str = ""
    choice: str = ""
    is_needed: bool = False
    extras: Mapping[str, str] = field(default_factory=dict, hash=False)
    conformance: str = ""

    @property
    def group(self) -> str:
        """The entry-point group of its plugins."""
        return f"nanovllm.{self.plural or self.name + 's'}"

    @property
    def hook(self) -> str:
        """The hook that returns its plugins' specs."""
        return f"nanovllm_{self.plural or self.name + 's'}"


OPTIONS_FIRST = "state contract=2, and take the options as the first argument: "
INTERFACES = "nanovllm_core.interfaces"

_OURS = (
    Kind(
        "checkpoint",
        specs.CheckpointSpec,
        "pathlib:Path",
        contract=2,
        oldest_contract=2,
        changed=f"{OPTIONS_FIRST}find(options, reference), which returns a pathlib.Path",
        extras={"demo": "demo"},
    ),
    Kind(
        "model",
        specs.ModelSpec,
        f"{INTERFACES}.model:CausalLM",
        contract=2,
        oldest_contract=2,
        changed=f"{OPTIONS_FIRST}Model(options, config, context)",
        is_needed=True,
        extras={
            "Qwen3ForCausalLM": "qwen3",
            "Qwen3MoeForCausalLM": "qwen3-moe",
            "DeepseekV2ForCausalLM": "deepseek",
            "DeepseekV3ForCausalLM": "deepseek",
        },
    ),
    Kind(
        "attention",
        specs.AttentionSpec,
        f"{INTERFACES}.attention:AttentionBackend",
        plural="attention",
        contract=2,
        oldest_contract=2,
        changed=f"{OPTIONS_FIRST}Backend(options, config)",
        choice="attention",
        is_needed=True,
        extras={"sdpa": "sdpa", "triton": "triton", "flash": "flash"},
    ),
    Kind(
        "kernels",
        specs.KernelSetSpec,
        f"{INTERFACES}.kernels:KernelSet",
        plural="kernels",
        contract=4,
        oldest_contract=4,
        changed="state contract=4, and add route(logits, routing, bias), experts(x, weights, ids, "
        "gate_up, down, num_shared, residual), prepare_latent(q, rows, prep, positions, "
        "slot_mapping, cache) and linear_per_head(x, weight), or derive from "
        "nanovllm_core.kernels.TorchKernels, which has them; "
        "products have a bias (None for none): linear(x, weight, bias, out), and the last argument "
        "of norm_linear, norm_gate_up and linear_add; out may be float32, and is not rounded then; "
        "the weight of a norm may be float32, and multiplies before the one rounding then",
        choice="kernels",
        extras={"triton": "triton"},
    ),
    Kind("sampler", specs.SamplerSpec, f"{INTERFACES}.sampler:Sampler", choice="sampler"),
    Kind(
        "logits_processor",
        specs.LogitsProcessorSpec,
        f"{INTERFACES}.logits_processor:LogitsProcessor",
        choice="logits_processors",
    ),
    Kind(
        "constraint",
        constraint.ConstraintSpec,
        f"{INTERFACES}.constraint:Constraint",
        choice="constraints",
    ),
    Kind(
        "scheduler",
        specs.SchedulerSpec,
        f"{INTERFACES}.scheduler:PolicyOrScheduler",
        choice="scheduler",
        extras={"sjf": "sjf", "lpt": "lpt"},
    ),
    Kind(
        "executor",
        specs.ExecutorSpec,
        f"{INTERFACES}.executor:Executor",
        contract=4,
        oldest_contract=4,
        changed="state contract=4, and add sample(masks): a step whose plan samples_later is "
        "submitted in two parts; a plan has a block table for each cache group, so block_ids are "
        "[G, n] and appends (row, group, index, block id). Pass every plan and all masks to "
        "nanovllm_core.worker.Worker, in order; derive a group of ranks from TensorParallel",
        choice="executor",
        extras={"parallel": "parallel"},
    ),
    Kind(
        "engine_client",
        specs.EngineClientSpec,
        "nanovllm_core.frontend.client:EngineClient",
        choice="engine_client",
        extras={"processes": "data-parallel", "shared": "data-parallel"},
    ),
    Kind(
        "observer",
        specs.ObserverSpec,
        f"{INTERFACES}.observer:StepObserver",
        choice="observers",
        extras={"prometheus": "server", "opentelemetry": "server"},
    ),
)

KINDS: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in _OURS})
"""The core's own kinds, in the order in which a start decides; plugins may declare more."""

EXTENSION = "extension"
EXTENSION_GROUP = "nanovllm.extensions"
"""Plugins of lifecycle and command-line hooks; loaded only when `plugins.enable` names them."""

KIND = "kind"
KIND_GROUP = "nanovllm.kinds"
DECLARATION = Kind(
    KIND,
    specs.KindSpec,
    "",
    contract=2,
    oldest_contract=2,
    changed="state contract=2, the type of its plugins' objects as interface= in its KindSpec, and "
    "call plugins.make(resolved, *arguments) without a type",
)
"""Plugins that declare a kind; loaded when a plugin of that kind is."""

NO_SPEC = (EXTENSION, KIND)
"""Kinds whose plugins are not selected by a name and options, and so have no `PluginSpec`."""


def declared_group(name: str) -> str:
    """The entry-point group of a kind that a plugin declares."""
    return f"nanovllm.{name}s"


def declared_hook(name: str) -> str:
    """The hook of a kind that a plugin declares."""
    return f"nanovllm_{name}s"


def contract_problem(kind: Kind, stated: object, owner: str) -> str | None:
    """The reason to refuse the contract version that a plugin states; None for those taken.

    `owner` is the distribution that defines the kind, which is to be upgraded for a newer plugin.
    """
    oldest, current = kind.oldest_contract, kind.contract
    if not isinstance(stated, int) or isinstance(stated, bool) or stated < 1:
        return (
            f"contract {stated!r} is not a version; state the number that it was written for, "
            f"contract={current} today"
        )
    if oldest <= stated <= current:
        return None
    age, late, early = (
        ("old", "the plugin", owner) if stated < oldest else ("new", owner, "the plugin")
    )
    return (
        f"it is too {age}: it was written for contract {stated} of {kind.name}, and {owner} takes "
        + (f"{oldest} to {current}" if oldest < current else f"{current}")
        + f"; upgrade {late}, or install an older version of {early}"
        + (f"; if it is yours: {kind.changed}" if stated < oldest and kind.changed else "")
    )
