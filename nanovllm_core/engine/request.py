"""A request as the engine sees it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.engine.constraints import SampleConstraints
from nanovllm_core.engine.deltas import OutputDelta
from nanovllm_core.engine.rows import RowTable
from nanovllm_core.errors import InvalidSamplingError, NanoVLLMError
from nanovllm_core.interfaces.observer import FinishReason
from nanovllm_core.interfaces.plan import MAX_DEVICE_STOP_IDS, PADDED, RowSampling, TokenLogprobs
from nanovllm_core.interfaces.sampling_params import SamplingParams

NO_ROW = -1


class RequestState(enum.Enum):
    """HELD -> WAITING -> PREFILLING -> DECODING -> DRAINING -> FINISHED.

    A preempted request goes from PREFILLING or DECODING back to WAITING, through DRAINING while
    tokens of it are in flight. An abort goes from anywhere to FINISHED.
    """

    HELD = "held"
    """A further sample, waiting until the first one's prompt blocks can be shared."""
    WAITING = "waiting"
    """In the scheduler's queue; it has no row."""
    PREFILLING = "prefilling"
    """It has a row, and prompt tokens that are not planned yet."""
    DECODING = "decoding"
    """It has a row, and every step computes one more position."""
    DRAINING = "draining"
    """Nothing more is planned, but tokens are in flight."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One output to be made. Satisfies `RequestView`.

    `request_id` is unique and is what schedulers see; `group_id` and `index` are what the caller
    sees: the id that was given, and the number of the sample.

    While the request has a row, its known ids and its lengths are in the `RowTable`; `token_ids`
    holds the ids known when it last had none.
    """

    request_id: str
    group_id: str
    index: int
    params: SamplingParams
    sampling: RowSampling
    num_prompt_tokens: int
    token_ids: NDArray[np.int32]
    max_length: int
    arrival_step: int
    arrival_index: int
    arrival_time: float
    """All times are in seconds of `time.perf_counter()`."""
    table: RowTable
    labels: Mapping[str, str]
    stream: bool = False
    searched: bool = False
    """The caller searches the text for stop strings, and has the last word on the end."""
    cache_salt: bytes = b""
    constraints: SampleConstraints | None = None

    state: RequestState = RequestState.HELD
    row: int = NO_ROW
    block_tables: list[list[int]] = field(default_factory=list)
    """One for each cache group, of equal lengths; empty where the request holds no blocks."""
    digests: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks of known ids, computed as they are needed."""
    num_published: int = 0
    """Leading entries of `block_tables` that the prefix cache was told about."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache held at the first admission."""
    wait_steps: int | None = None
    """Steps from the arrival to the first admission; None before it."""
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    num_preemptions: int = 0
    num_handed_out: int = field(init=False)
    """Leading ids, the prompt's among them, that the caller has."""
    new_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Those of output ids that were not handed out."""
    finish_reason: FinishReason | None = None
    finished_time: float = 0.0
    num_output_tokens: int = 0
    """Set when the request finishes: output ids that count."""
    held_samples: list[Request] = field(default_factory=list)
    """Samples that wait for this request's prompt blocks."""

    def __post_init__(self) -> None:
        self.num_handed_out = len(self.token_ids)

    @property
    def priority(self) -> int:
        return self.params.priority

    @property
    def prompt_token_ids(self) -> list[int]:
        ids: list[int] = self.known_ids()[: self.num_prompt_tokens].tolist()
        return ids

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) if self.row < 0 else int(self.table.known[self.row])

    @property
    def num_blocks(self) -> int:
        """Entries of each block table."""
        return len(self.block_tables[0]) if self.block_tables else 0

    @property
    def num_output_ids(self) -> int:
        """Output ids known on the host."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_scheduled(self) -> int:
        return 0 if self.row < 0 else int(self.table.scheduled[self.row])

    @property
    def is_streamed(self) -> bool:
        """True where every token is handed out at once."""
        return self.stream or self.searched

    @property
    def is_watched(self) -> bool:
        """True where every single token needs Python."""
        params = self.params
        return (
            self.is_streamed
            or params.logprobs is not None
            or self.constraints is not None
            or len(self.sampling.stop_token_ids) > MAX_DEVICE_STOP_IDS
        )

    @property
    def num_in_flight(self) -> int:
        """Tokens that planned steps will give and the host does not have yet."""
        if self.state is RequestState.PREFILLING or self.row < 0:
            return 0
        return self.num_scheduled + 1 - self.num_tokens

    def known_ids(self) -> NDArray[np.int32]:
        """All ids known on the host: prompt, then outputs. A view where the request has a row."""
        return self.token_ids if self.row < 0 else self.table.token_ids[self.row, : self.num_tokens]

    def refused(self, token_id: int) -> InvalidSamplingError | None:
        """The error of a newest id that the request may not have, or of -1: none was left."""
        if self.constraints is not None:
            return self.constraints.refused(token_id)
        if token_id != PADDED:
            return None
        names = [*(self.params.logits_processors or {})]
        names += ["min_tokens"] * self.sampling.forbids_stop_ids
        return InvalidSamplingError(
            f"logits_processors: {' and '.join(names)} left no id to choose after "
            f"{self.num_output_ids - 1} of the output; change one of them"
        )

    def take_delta(
        self,
        reason: FinishReason | None = None,
        stop: int | str | None = None,
        error: NanoVLLMError | None = None,
    ) -> OutputDelta:
        """The ids that are known and were not handed out."""
        new_ids: list[int] = self.known_ids()[self.num_handed_out :].tolist()
        self.num_handed_out += len(new_ids)
        logprobs, self.new_logprobs = self.new_logprobs, []
        return OutputDelta(
            request_id=self.group_id,
            index=self.index,
            new_token_ids=new_ids,
            new_logprobs=None if self.params.logprobs is None else logprobs,
            finish_reason=reason,
            stop_reason=stop,
            error=error,
            num_cached_tokens=self.num_cached_tokens,
            wait_steps=self.wait_steps,
        )
