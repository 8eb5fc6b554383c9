"""The outputs of the engine: for each sample, only that which is new. Ids, and no text."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm_core.errors import NanoVLLMError
from nanovllm_core.interfaces.observer import FinishReason
from nanovllm_core.interfaces.plan import TokenLogprobs


@dataclass(slots=True, kw_only=True)
class OutputDelta:
    """The ids that one sample of a request got since its last delta. Plain data; can be pickled.

    `new_token_ids` hold the end-of-sequence id if that ended the sample. `new_logprobs` has an
    entry for each of them, or is None where log-probabilities were not asked for. `finish_reason`
    is None until the last delta; `stop_reason` is the id or the string that stopped the sample,
    `error` what ended it where the reason is "error".
    `num_cached_tokens` counts prompt tokens that the prefix cache held, `wait_steps` the engine's
    steps from the arrival to the admission (None before it).
    """

    request_id: str
    index: int
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: NanoVLLMError | None = None
    num_cached_tokens: int = 0
    wait_steps: int | None = None

    def extend(self, later: OutputDelta) -> None:
        """Join the next delta of the same sample to this one."""
        self.new_token_ids += later.new_token_ids
        if self.new_logprobs is not None:
            self.new_logprobs += later.new_logprobs or []
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.error, self.wait_steps = later.error, later.wait_steps
