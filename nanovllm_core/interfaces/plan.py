"""The data that crosses from the engine to the workers and back: plain, small, serialisable.

The engine owns the truth (rows, blocks, lengths, known ids); a worker mirrors it in device tables
indexed by row. A plan carries deltas only. Plans are applied in the order they are submitted, on
one stream, so a block freed by one plan may be given to another row by the next.

All of it is data: a copy that went through pickle equals the original and means the same. Lists of
indices are int32 arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

PADDED = -1
"""The token id a result holds for a row that was finished already, or that was left no id."""

MAX_DEVICE_STOP_IDS = 8
"""Stop ids of a row that the device checks; where there are more, the engine checks every token."""


class ArrayEquality:
    """Equality by value for dataclasses (`eq=False`) whose fields may be arrays.

    Arrays are equal where their dtypes, shapes and elements are. Not hashable.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # as of any mutable value

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [one.name for one in fields(self)]  # type: ignore[arg-type]  # a dataclass
        return all(_equal(getattr(self, name), getattr(other, name)) for name in names)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """The parameters that the device needs to choose a row's tokens. Neutral values are off.

    `logits_processors` holds (name, arguments) pairs; the engine has checked the arguments.
    `logit_bias` holds (token id, bias) pairs, each id of the vocabulary at most once.
    `constrained`: the host says before each choice which ids are allowed (`TokenMasks`).
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logits_processors: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    constrained: bool = False

    @property
    def is_penalised(self) -> bool:
        """True where ids that came before become less likely."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def forbids_stop_ids(self) -> bool:
        """True where a stop id may not come before `min_tokens`."""
        return self.min_tokens > 0 and bool(self.stop_token_ids)

    @property
    def is_cut(self) -> bool:
        """True where unlikely ids are cut; never for a greedy choice, whose id always stays."""
        cut = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
        return cut and self.temperature > 0.0

    @property
    def needs_tail(self) -> bool:
        """True where the captured greedy/temperature sampler is not enough."""
        return (
            self.is_cut
            or self.is_penalised
            or self.forbids_stop_ids
            or self.logprobs is not None
            or bool(self.logits_processors)
            or bool(self.logit_bias)
            or self.constrained
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Admission(ArrayEquality):
    """A request takes a row. `token_ids` are all known ids: prompt, then outputs before preemption.

    `block_ids` int32 [G, n] are the row's block tables, one for each cache group; entry i covers
    tokens i * block_size to (i + 1) * block_size - 1. It is -1 where the group's window does not
    reach the tokens any more. `num_computed` tokens already have KV in these blocks (a prefix
    hit). `max_length` is the total number of ids, prompt and output, at which the row is
    finished for its length.
    """

    row: int
    token_ids: NDArray[np.int32]
    num_prompt_tokens: int
    num_computed: int
    block_ids: NDArray[np.int32]
    max_length: int
    sampling: RowSampling


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Positions `start` to `start + length - 1` of a row; `samples` on a prompt's last chunk."""

    row: int
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan(ArrayEquality):
    """One step: first the deltas, `admissions` and `appends`, then the work.

    The decoding rows each compute one position, the one after the row's last; a row that the device
    has finished is padding. `epoch` grows by one whenever these rows change. The first plan of an
    epoch lists them in `decode_rows`, int32 [num_decode]. Later ones leave them out (None): the
    worker holds them, so a plan that changes nothing has the same few bytes for any number of rows.
    A worker begins with epoch 0, which has no rows.

    `appends` are new blocks, int32 [n, 4], or None: (row, group, index, block id) each, for the
    block to become entry `index` of the row's block table in that cache group. Rows of `prefill`
    never decode in the same step.

    `samples_later` where a row that gets a token is constrained: the step is submitted in two
    parts. This plan launches the forward pass; `TokenMasks` follow and launch the sampling.
    """

    epoch: int = 0
    num_decode: int = 0
    samples_later: bool = False
    decode_rows: NDArray[np.int32] | None = None
    admissions: tuple[Admission, ...] = ()
    appends: NDArray[np.int32] | None = None
    prefill: tuple[PrefillChunk, ...] = ()

    @property
    def num_sampled(self) -> int:
        """The rows that get a token: those that decode, then the chunks that sample."""
        if not self.prefill:
            return self.num_decode
        return self.num_decode + sum(chunk.samples for chunk in self.prefill)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step, which the token budget bounds."""
        return self.num_decode + sum(chunk.length for chunk in self.prefill)

    def new_blocks(self, block_size: int) -> NDArray[np.int32]:
        """The ids of the blocks, int32 [n], that get a new owner: all but those of prefix hits."""
        parts = [np.zeros(0, np.int32) if self.appends is None else self.appends[:, 3]]
        for one in self.admissions:
            ids = one.block_ids[:, -(-one.num_computed // block_size) :]
            parts.append(ids[ids >= 0])
        return np.concatenate(parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenMasks(ArrayEquality):
    """The second part of a step: the ids that its constrained rows may choose.

    `rows` int32 [n], and `allowed` int32 [n, W], a row of W = ceil(V / 32) words each: bit i of
    word j stands for id 32 j + i, the layout of xgrammar and llguidance. Bits beyond the vocabulary
    mean nothing. A constrained row that is left out has ended on the host: its choice is dropped.
    """

    rows: NDArray[np.int32]
    allowed: NDArray[np.int32]


def mask_words(vocab_size: int) -> int:
    """The int32 words of one row of a mask."""
    return -(-vocab_size // 32)


_TOKEN, _PAIR = Struct("=f"), Struct("=if")


class _Packed:
    """Has the numbers of its fields as bytes until one is read: of most, nobody reads any.

    The bytes stay, and are what is pickled.
    """

    __slots__ = ("_packed",)
    _packed: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        packed = getattr(self, "_packed", None)
        if packed is None:
            return TokenLogprobs, tuple(getattr(self, name) for name in TokenLogprobs.__slots__)
        return TokenLogprobs.of_bytes, (packed,)

    if not TYPE_CHECKING:  # a checker would let every name pass

        def __getattr__(self, name: str) -> object:
            if name not in TokenLogprobs.__slots__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            TokenLogprobs.__init__(
                self,
                _TOKEN.unpack_from(self._packed)[0],
                tuple(_PAIR.iter_unpack(self._packed[_TOKEN.size :])),
            )
            return getattr(self, name)


@dataclass(frozen=True, slots=True)
class TokenLogprobs(_Packed):
    """The log-probability of a sampled token and of the most likely ones, in nats."""

    token_logprob: float
    top: tuple[tuple[int, float], ...]

    @classmethod
    def of_bytes(cls, packed: bytes) -> TokenLogprobs:
        """Those of a row of `CapturedTail.logprobs`, unpacked when they are read."""
        one = object.__new__(cls)
        object.__setattr__(one, "_packed", packed)
        return one


@dataclass(frozen=True, slots=True, eq=False)
class StepResult(ArrayEquality):
    """The result of a step: one entry for each decoding row, then for each chunk that samples.

    `token_ids` int32, `PADDED` where the row was finished before the step; `finished` bool: the
    device ended the row at this token (stop id or length). Both are set where processors, masks
    and `min_tokens` left the row no id. `logprobs` by entry, of rows that asked.
    """

    token_ids: NDArray[np.int32]
    finished: NDArray[np.bool_]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """The state of the workers once started.

    `attention` and `kernels` name what runs; `choices`, to which the engine's front adds, says why
    these and not others, a line for each. `start_seconds` says where the time of the start went, by
    part, in the order of the parts. The front adds `plan` before them: the choice of plugins, and
    the imports. What it does after them (the engine's own tables, a garbage collection) is in none.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    attention: str
    device: str
    cache_windows: tuple[int | None, ...] = (None,)
    """The sliding window of each cache group in tokens, the token itself among them; None: all."""
    kernels: str = ""
    choices: Sequence[str] = ()
    dtype: str = ""
    cuda_graphs: bool = False
    load_seconds: float = 0.0
    capture_seconds: float = 0.0
    bucket_sizes: Sequence[int] = ()
    prompt_graph_sizes: Sequence[int] = ()
    """Prompt tokens that steps are captured for; empty where none with prompts is."""
    row_padding: int = 1
    """Steps that fill the token budget pad their decoding rows to a multiple of this, or to all
    rows: the padding takes its part of the budget. 1: they are not padded."""
    start_seconds: Mapping[str, float] = field(default_factory=dict)
