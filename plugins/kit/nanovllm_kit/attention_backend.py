"""An attention backend on this machine, as the checks of `AttentionConformance` drive it.

It knows the device to test on, what the backend declares for it, and sizes that suit both: small
where kernels are interpreted, long where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from nanovllm_core.interfaces.attention import (
    AttentionBackend,
    AttentionConfig,
    AttentionRequirements,
    Phase,
)
from nanovllm_core.interfaces.specs import AttentionSpec
from nanovllm_core.selection import SMALLEST_BLOCK, unmet
from nanovllm_kit.attention_checks import run_decode, run_prefill
from nanovllm_kit.conformance import PluginUnderTest, SpecConformance
from nanovllm_kit.paged_attention import PagedCase, make_case

Run = Callable[..., Tensor]
PHASES: tuple[Phase, ...] = ("decode", "prefill")
DTYPES = ("float32", "float16", "bfloat16")
HEADS = ((4, 2), (8, 1), (8, 2), (4, 1), (2, 2))
"""Query and KV heads of checks about something else: the first that the backend accepts."""
HEAD_SIZES = (64, 80, 128, 256)
"""Head sizes that stand for all others, where a backend declares any, or more than `MANY`."""
MANY = 8

EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
"""Lengths at and around the tiles and blocks that kernels use."""
LONG = {"cpu": 300, "cuda": 4096}


class UnavailableError(Exception):
    """This machine cannot run the backend; the message says why."""


class BackendUnderTest:
    """One attention plugin on one device; raises UnavailableError where it cannot run.

    `device` None is CUDA where the backend declares it and the machine has it, else the CPU.
    """

    def __init__(self, plugin: PluginUnderTest, device: str | None = None) -> None:
        self.plugin = plugin
        self.spec = cast(AttentionSpec, plugin.spec)
        self.capabilities = self.spec.capabilities
        self.device = device or self._choose_device()
        reasons = self.reasons(self.requirements())
        if not self.dtypes:
            raise UnavailableError(f"does not run on {self.device} here: {'; '.join(reasons)}")

    def _choose_device(self) -> str:
        declared = self.capabilities.devices
        if "cuda" in declared and torch.cuda.is_available():
            return "cuda"
        if "cpu" in declared:
            return "cpu"
        raise UnavailableError(f"runs on {', '.join(sorted(declared))}, which is not here")

    # ------------------------------------------------------------------ what is declared

    @property
    def heads(self) -> tuple[int, int]:
        """Query and KV heads: grouped where the backend can, in groups that it accepts."""
        for num_heads, num_kv_heads in HEADS if self.capabilities.gqa else HEADS[-1:]:
            asked = self._asked(num_heads=num_heads, num_kv_heads=num_kv_heads)
            if any(not self.reasons(replace(asked, dtype=dtype)) for dtype in DTYPES):
                return num_heads, num_kv_heads
        return HEADS[0] if self.capabilities.gqa else HEADS[-1]

    @property
    def head_sizes(self) -> list[int]:
        """Every declared head size; of many, the ones that stand for all, and the largest."""
        declared = self.capabilities.head_sizes or frozenset(HEAD_SIZES)
        if len(declared) <= MANY:
            return sorted(declared)
        return sorted({*declared.intersection(HEAD_SIZES), max(declared)})

    @property
    def head_size(self) -> int:
        """The head size of checks that are about something else."""
        return min(self.head_sizes, key=lambda size: abs(size - 64))

    @property
    def dtypes(self) -> list[str]:
        """The declared dtypes that the backend accepts on this device."""
        return [d for d in DTYPES if not self.reasons(self.requirements(dtype=d))]

    @property
    def dtype(self) -> str:
        """The dtype of checks that are about something else: the most exact."""
        return self.dtypes[0]

    @property
    def half(self) -> str:
        """The accepted dtype of the fewest bytes, whose kernels are often others."""
        return min(self.dtypes, key=lambda name: getattr(torch, name).itemsize)

    @property
    def phases(self) -> list[Phase]:
        """The declared phases."""
        return [phase for phase in PHASES if phase in self.capabilities.phases]

    @property
    def block_multiples(self) -> list[int]:
        """What block sizes must be a multiple of, by layout, the preferred first."""
        layouts = self.spec.kv_layouts(self.requirements(), self.plugin.options)
        return list(dict.fromkeys(layout.block_multiple for layout in layouts))

    @property
    def block_size(self) -> int:
        """The smallest blocks that an engine uses, so that short sequences have many."""
        multiple = min(self.block_multiples)
        return -(-SMALLEST_BLOCK // multiple) * multiple

    @property
    def longest(self) -> int:
        """The longest sequence of a check on this device."""
        return LONG[self.device]

    def requirements(self, **changes: Any) -> AttentionRequirements:
        """What an ordinary model would ask on this device."""
        num_heads, num_kv_heads = self.heads
        return self._asked(**{"num_heads": num_heads, "num_kv_heads": num_kv_heads} | changes)

    def _asked(self, **changes: Any) -> AttentionRequirements:
        values: dict[str, Any] = {
            "phase": next(iter(self.phases), "decode"),
            "device": self.device,
            "dtype": next((d for d in DTYPES if d in self.capabilities.dtypes), DTYPES[0]),
            "head_size": self.head_size,
            "compute_capability": self._compute_capability(),
        }
        return AttentionRequirements(**values | changes)

    def reasons(self, requirements: AttentionRequirements) -> list[str]:
        """Why the backend cannot serve, by its capabilities or by its own check."""
        found = unmet(self.capabilities, requirements)
        return found or list(self.spec.check(requirements, self.plugin.options))

    def skip_unless_served(self, **asked: bool) -> None:
        """Skip, with the reasons, where these options refuse what the capabilities declare."""
        if reasons := self.reasons(self.requirements(**asked)):
            pytest.skip("; ".join(reasons))

    def _compute_capability(self) -> tuple[int, int] | None:
        return torch.cuda.get_device_capability() if self.device == "cuda" else None

    # ------------------------------------------------------------------ running it

    def case(
        self, seq_lens: Sequence[int], query_lens: Sequence[int] | None = None, **changes: Any
    ) -> PagedCase:
        """A batch of sequences: of decode rows, unless `query_lens` says how many queries each."""
        num_heads, num_kv_heads = self.heads
        dtype = changes.pop("dtype", self.dtype)
        values: dict[str, Any] = {
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_size": self.head_size,
            "block_size": self.block_size,
            "dtype": getattr(torch, dtype),
            "device": self.device,
            "finite_tail": self.capabilities.needs_finite_tail,
        }
        return make_case(query_lens or [1] * len(seq_lens), seq_lens, **values | changes)

    def backend(self, config: AttentionConfig) -> AttentionBackend:
        """A backend of its own, allocated."""
        made: AttentionBackend = self.plugin.load()(self.plugin.options, config)
        made.allocate()
        return made

    def decode(self, case: PagedCase, backend: AttentionBackend | None = None) -> Tensor:
        """Plan and run a decode step; the host's bound is the longest row that could be."""
        __tracebackhide__ = True
        backend = backend or self.backend(case.config())
        missing = backend.config.max_blocks_per_seq - case.block_table.shape[1]
        if missing > 0:  # a case of other sequences; the core's tables are as wide as was said
            table = torch.nn.functional.pad(case.block_table, (0, missing))
            case = replace(case, block_table=table)
        metadata = case.decode_metadata(max_seq_len=backend.config.max_model_len)
        return run_decode(backend, case, metadata)

    def prefill(self, case: PagedCase, backend: AttentionBackend | None = None) -> Tensor:
        """Plan and run a prefill step."""
        __tracebackhide__ = True
        return run_prefill(backend or self.backend(case.config()), case)

    def ways(self, case: PagedCase) -> list[tuple[Phase, Run]]:
        """The phases that may serve a batch, and how to run them.

        Rows of one query may be decoded or prefilled; of other counts, or of no keys, only one.
        """
        fits = {"decode": {*case.query_lens} == {1}, "prefill": 0 not in case.seq_lens}
        runs: dict[Phase, Run] = {"decode": self.decode, "prefill": self.prefill}
        return [(phase, runs[phase]) for phase in self.phases if fits[phase]]

    def check(
        self,
        case: PagedCase,
        what: str,
        *,
        phases: Sequence[Phase] = PHASES,
        rel_norm: float | None = None,
    ) -> None:
        """Fail, naming the batch, where a phase that may serve it is off the reference."""
        __tracebackhide__ = True
        expected = case.expected()
        for phase, run in self.ways(case):
            if phase in phases:
                assert_near(case, run(case), f"{phase}, {what}", expected, rel_norm)


class AttentionSubject(SpecConformance):
    """The fixtures of the attention suite: the backend on this machine, with the phase it needs."""

    @pytest.fixture
    def subject(self, plugin: PluginUnderTest) -> BackendUnderTest:
        """The backend on its best device here; skips where it cannot run."""
        try:
            return BackendUnderTest(plugin)
        except UnavailableError as error:
            pytest.skip(str(error))

    @pytest.fixture
    def decoder(self, subject: BackendUnderTest) -> BackendUnderTest:
        """The same, of a backend that decodes."""
        return _of_phase(subject, "decode")

    @pytest.fixture
    def prefiller(self, subject: BackendUnderTest) -> BackendUnderTest:
        """The same, of a backend that prefills."""
        return _of_phase(subject, "prefill")


def _of_phase(subject: BackendUnderTest, phase: Phase) -> BackendUnderTest:
    if phase not in subject.phases:
        pytest.skip(f"declares no {phase}")
    return subject


def assert_near(
    case: PagedCase,
    out: Tensor,
    what: str,
    expected: Tensor | None = None,
    rel_norm: float | None = None,
) -> None:
    """`case.assert_close`, with the batch in the message; a failure shows who asked, not this."""
    __tracebackhide__ = True
    try:
        case.assert_close(out, expected, rel_norm)
    except AssertionError as error:
        raise AssertionError(f"{what}: {describe(case)}: {error}") from None


def describe(case: PagedCase) -> str:
    """The batch in a line, to find it again."""
    _, block_size, num_kv_heads, head_size = case.k_cache.shape
    reach = "".join(
        f", {name} {value}"
        for name, value in (("window", case.sliding_window), ("soft cap", case.soft_cap))
        if value is not None
    )
    return (
        f"query_lens {_some(case.query_lens)}, seq_lens {_some(case.seq_lens)}, "
        f"{case.q_THD.shape[1]}/{num_kv_heads} heads of {head_size}, blocks of {block_size}, "
        f"{str(case.q_THD.dtype).removeprefix('torch.')}{reach}"
    )


def _some(lens: Sequence[int]) -> str:
    """All of them, or the first of very many and how many they are."""
    shown = ", ".join(map(str, lens[:20]))
    return f"[{shown}, ... {len(lens)} in all]" if len(lens) > 20 else f"[{shown}]"
