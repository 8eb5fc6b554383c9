"""The contract of an attention backend.

Who calls what, and when:

    spec.check, spec.kv_layouts     once, at start, before torch touches the device
    Backend(options, config)        once, after the weights are loaded
    allocate()                      once, before the KV cache is sized and before any capture
    plan_decode / plan_prefill      once per step, before the layers
    run_decode / run_prefill        once per layer and step
    prepares_decode                 once per layer and step without prompts, before its run; and for
                                    kernel sets that ask, before the first step
    run_decode_from_qkv             in the place of run_decode, where it says so
    plan_packed                     latent groups: once per step and packed call, before the layers
    run_packed                      latent groups: per layer, once for each plan_packed

In steps without prompts a backend may take over the preparation (norm, rotation, the store of k and
v), and save each layer a kernel. Where it does not, and beside prompts, `KernelSet.prepare_qkv`
does it, and is the reference of what the backend must compute.

In a captured decode step plan_decode and the runs are captured; a test may also plan outside the
graph and replay the runs alone. Where `cuda_graphs` is "full", small steps with prompt chunks are
captured too, plan_prefill and run_prefill with them; all others run eagerly. A start captures the
largest prompts as well, and throws the graph away, where the backend needs no warm-up.

A plan holds for the runs that follow it, until the next plan of its phase. An engine writes the
next step into the same tensors and metadata objects, or into new ones at old addresses. So equal
lengths, an equal address or the same object do not mean an equal step. The other phase may be
planned and run between plan and run of one phase. A backend keeps no tensor of a step beyond the
next plan of its phase.

Instances share no memory that they write to: two engines of one process may run at once.

Only the configuration limits heads, rows, queries and keys. A backend with a limit of its own
refuses larger values: in `spec.check` if the requirements show them, or by UnsupportedError in its
constructor. It never computes only a part.
A block of the KV cache is a page in FlashAttention's words.

A **latent** group (`LatentHeads`) caches one row of R numbers per token, the key of all heads;
values are its first `latent_size` numbers. `run_decode` then gets queries of R numbers, k_cache
[N, P, 1, R], v_cache [N, P, 1, latent_size] (a view of k_cache: each row needs to be read only
once) and out [B, H, latent_size]. Only a backend that declares `latent` is chosen for such groups.
Where one declares `latent_prefill` too, steps of a few sizes with prompts are captured, and their
prompts come to `plan_prefill` and `run_prefill`, with queries, caches and outputs as in decode. For
the prompts of all other steps the core computes keys and values and calls `run_packed` instead, for
the step's own tokens and for each part of the context.

Shape suffixes: T tokens, B decode rows, S prefill sequences, H query heads, K KV heads,
D head size, N KV blocks, P tokens per block, M blocks per sequence at most; L packed keys,
V value size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nanovllm_core.errors import shown

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel
    from torch import Tensor

    from nanovllm_core.interfaces.kernels import QKPrep
    from nanovllm_core.interfaces.model import LatentHeads

Phase = Literal["prefill", "decode"]
GraphSupport = Literal["none", "decode", "full"]
LAYOUTS = ("NPKD",)
BLOCK_MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""What block sizes, 16 to 256, can be multiples of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCapabilities:
    """The capabilities of a backend, as data. One that is not declared is not supported.

    `head_sizes`: None means any. `latent`: it serves groups that cache one row per token, whose
    sizes `head_sizes` does not limit, but `spec.check` may. `latent_prefill`: its `run_prefill`
    serves such groups, for steps with prompts that are captured.
    `needs_finite_tail`: the backend reads (and discards) keys that a sequence does not see, in the
    unused tail of its last block or in blocks wholly before its window, so blocks must hold finite
    numbers.
    `cuda_graphs`: whether nothing, the calls of the decode phase, or those of both can be captured.
    """

    devices: frozenset[str]
    dtypes: frozenset[str]
    phases: frozenset[Phase] = frozenset({"prefill", "decode"})
    head_sizes: frozenset[int] | None = None
    min_compute_capability: tuple[int, int] | None = None
    max_compute_capability: tuple[int, int] | None = None
    gqa: bool = False
    sliding_window: bool = False
    soft_cap: bool = False
    latent: bool = False
    latent_prefill: bool = False
    needs_finite_tail: bool = False
    cuda_graphs: GraphSupport = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequirements:
    """The requirements of the model, the device and the configuration, for one phase.

    `cuda_graphs`: its calls will be captured. Prefill is chosen without it and then checked with
    it; if the backend refuses, steps with prompts run eagerly.
    `num_kv_heads`, `head_size` and `value_size` (None: as `head_size`) are those that the phase
    attends with. Of a `latent` group these are one head and the cached row in decode steps and in
    prompts that are captured, and in other prompts as many heads as q has: 1, 576, 512 and H, 192,
    128.
    """

    phase: Phase
    device: str
    dtype: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    compute_capability: tuple[int, int] | None = None
    cuda_graphs: bool = False
    block_size: int | None = None
    sliding_window: bool = False
    soft_cap: bool = False
    latent: bool = False
    value_size: int | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One way to lay out KV blocks that a backend can read.

    `name` "NPKD": K and V are tensors `[N, P, K, D]`, D contiguous; those of a latent group share
    memory. The block size must be a multiple of `block_multiple` tokens, a power of 2 up to 256.
    Raises ValueError for any other name or multiple.
    """

    name: Literal["NPKD"]
    block_multiple: int

    def __post_init__(self) -> None:
        for field, allowed in (("name", LAYOUTS), ("block_multiple", BLOCK_MULTIPLES)):
            value = getattr(self, field)
            if type(value) is not type(allowed[0]) or value not in allowed:
                choices = ", ".join(map(str, allowed))
                raise ValueError(f"{field} {shown(value)} of a KVLayout is none of {choices}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Everything a backend needs to allocate its buffers; constant for the engine's life.

    No step has more than `max_num_seqs` decode rows, as many chunks, or `max_num_batched_tokens`
    prompt tokens, padding included.

    `sliding_window` w: a query at position p sees the keys at p - w + 1 to p, w with its own.
    `soft_cap` c: scores s, scaled, become c * tanh(s / c) before the softmax. None: neither.
    `latent`: `num_kv_heads` is 1 and `head_size` that of the cached row; see above.

    With a window, blocks that lie wholly before the window of a sequence's first query of the step
    may belong to another sequence by now: their table entries are the numbers of any blocks. What
    is in these must not matter. Only a backend with `needs_finite_tail` may read them at all.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    sliding_window: int | None = None
    soft_cap: float | None = None
    latent: LatentHeads | None = None

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks that the longest sequence needs: M, the width of every block table."""
        return -(-self.max_model_len // self.block_size)


@dataclass(slots=True)
class DecodeMetadata:
    """A batch of rows with `query_len` query tokens each, always one so far, in device tensors."""

    block_table: Tensor
    """int32 [B, M]: each row's blocks. It is stale behind those of the row. B may be 0."""
    seq_lens: Tensor
    """int32 [B]: the keys to attend to, the query's own included. 0 marks a padded row, which must
    read nothing and whose output is ignored."""
    max_seq_len: int
    """A host bound on `seq_lens`: the configured maximum inside a captured graph."""
    query_len: int = 1
    """1 in every step of the engine. No capability declares other numbers: `plan_decode` raises
    UnsupportedError, with the number, if the backend does not support it. A backend that does gets
    B * query_len queries in q_BHD, row after row: each row's last positions; causal."""

    @property
    def num_rows(self) -> int:
        """B, padded rows included."""
        return self.block_table.shape[0]


@dataclass(slots=True)
class PrefillMetadata:
    """A batch of prompt chunks of different lengths, packed, in device tensors.

    The queries of a sequence are its last `query_len` positions; the mask is causal. The chunk's
    own keys and values are already in their blocks. A chunk may have no query and no key, and S may
    be 0. In a captured step q_THD may go on beyond `query_start_loc[-1]`: that is padding, whose
    output is ignored.
    """

    block_table: Tensor
    """int32 [S, M]: the blocks of each chunk's sequence."""
    seq_lens: Tensor
    """int32 [S]: keys of each sequence, this chunk's included."""
    query_start_loc: Tensor
    """int32 [S + 1]: where each chunk's queries start in q_THD, the first at 0."""
    max_query_len: int
    """The most queries of a chunk: exact, on the host; a bound in a captured step."""
    max_seq_len: int
    """The most keys of a sequence: exact, on the host; a bound in a captured step."""
    num_context: int | None = None
    """The sum of the keys before the chunks; None in a captured step."""


@dataclass(slots=True)
class PackedMetadata:
    """Sequences of packed queries, and the packed keys and values that these attend to.

    `query_start_loc`, `key_start_loc` [S + 1] int32 in device tensors: where each sequence's
    queries and keys start, the first at 0. A sequence may have none of either. `causal`: the last
    query sees the last key of its sequence, the one before it one key less; else each query sees
    all keys of its sequence. `max_query_len` and `max_key_len` are bounds on the host.
    `plan` is the backend's own: what `plan_packed` leaves there for `run_packed`.
    """

    query_start_loc: Tensor
    key_start_loc: Tensor
    max_query_len: int
    max_key_len: int
    causal: bool
    plan: Any = None


class AttentionBackend(ABC):
    """Paged attention over one KV layout. One instance serves all layers of a cache group.

    They have the same heads, window, soft cap and scale, and read the same block tables.
    """

    def __init__(self, options: BaseModel, config: AttentionConfig) -> None:
        self.options = options
        self.config = config

    def allocate(self) -> None:  # noqa: B027 - a backend without workspace has nothing to allocate
        """Allocate every buffer that a captured graph will read. Called once, before capture."""

    def plan_decode(self, metadata: DecodeMetadata) -> None:  # noqa: B027 - optional
        """Prepare one decode step on the current stream; called once per step, not per layer.

        Inside a captured graph the call is captured too: host values may come from
        `metadata.max_seq_len` and shapes only, and no tensor may be created that a kernel keeps.

        Raises UnsupportedError, which names `metadata.query_len`, if `run_decode` does not support
        it: most backends support only 1. The engine uses only 1 so far; a later engine with other
        numbers gets this error instead of wrong results.
        """

    def plan_prefill(self, metadata: PrefillMetadata) -> None:  # noqa: B027 - optional
        """Prepare one prefill step; called once per step, captured where the spec says "full"."""

    @abstractmethod
    def run_decode(
        self,
        q_BHD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: DecodeMetadata,
        out_BHD: Tensor,
    ) -> None:
        """Attend each row's query to its blocks (caches [N, P, K, D]), into `out_BHD`.

        All in the configuration's dtype, q and out contiguous; the caches have D contiguous. Called
        once per layer and step, after the step's own k and v are in their blocks; captured where
        the spec says so.
        """

    def prepares_decode(self, prep: QKPrep, num_rows: int) -> bool:
        """Whether `run_decode_from_qkv` shall serve a layer in a step of so many decode rows.

        It depends on nothing else.
        """
        return False

    def run_decode_from_qkv(
        self,
        qkv_BX: Tensor,
        prep: QKPrep,
        positions_B: Tensor,
        slot_mapping_B: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: DecodeMetadata,
        out_BHD: Tensor,
    ) -> None:
        """`KernelSet.prepare_qkv` and `run_decode` in one, where `prepares_decode` says so.

        Each row's last key and value are those of `qkv_BX` [B, X]: they are stored in the slot of
        the row, which is where its block table has its last token, and -1 for a padded row. All
        earlier keys, `positions_B`, `slot_mapping_B` and the metadata were written before
        `plan_decode`. Roundings are those of `prepare_qkv`; nothing else is written.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.prepares_decode says yes, so run_decode_from_qkv must be there"
        )

    @abstractmethod
    def run_prefill(
        self,
        q_THD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: PrefillMetadata,
        out_THD: Tensor,
    ) -> None:
        """Attend each chunk's queries causally to its sequence's blocks into `out_THD`.

        Types and strides as in `run_decode`. Called once per layer and step; captured where the
        spec says "full", and must then read lengths on the device alone.
        """

    def plan_packed(self, metadata: PackedMetadata) -> None:  # noqa: B027 - optional
        """Prepare one packed call of the step, for all layers; a step may have several."""

    def run_packed(
        self,
        q_THD: Tensor,
        k_LHD: Tensor,
        v_LHV: Tensor,
        metadata: PackedMetadata,
        out_THV: Tensor,
        lse_HT: Tensor | None = None,
    ) -> None:
        """Attend the queries to the packed keys and values of their sequences, into `out_THV`.

        Only where the spec declares `latent`, and never captured. All have H heads and the
        configuration's dtype; q and out are contiguous, k and v have a contiguous last dimension.
        `lse_HT` float32, contiguous: where it is given, the natural logarithm of each softmax's
        denominator (of scaled scores) is written to it. A query that sees no key gets zeros and
        -inf. Keys and values that are not finite harm their own sequence alone.
        """
        raise NotImplementedError(
            f"{type(self).__name__} is chosen for latent attention, so run_packed must be there"
        )

    def captured_tensors(self) -> Mapping[str, Tensor]:
        """The backend's own tensors that captured kernels read, by name.

        In debug mode the runner compares their addresses at capture and at replay.
        """
        return {}

    def describe(self) -> str:
        """The implementation that runs, for listings and benchmarks: provider, version, kernel."""
        return type(self).__name__
