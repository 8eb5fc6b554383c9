"""What the front doors share: an engine on its thread, the tokenizer, and texts for its ids."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.config.sources import load_config
from nanovllm_core.engine import Engine, EngineStats
from nanovllm_core.errors import CheckpointError, InvalidPromptError, shown
from nanovllm_core.frontend.client import open_engine
from nanovllm_core.frontend.messages import NewRequest
from nanovllm_core.frontend.outputs import OutputStream
from nanovllm_core.frontend.prompts import Message, Prompt, check_params, check_token_ids
from nanovllm_core.frontend.tokenizer import Tokenizer
from nanovllm_core.interfaces.plan import WorkerInfo
from nanovllm_core.interfaces.request_labels import Labels
from nanovllm_core.interfaces.sampling_params import SamplingParams


class Door:
    """A started engine with its tokenizer; `close()` frees the device."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        config_file: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self._open(load_config(model, file=config_file, overrides=kwargs))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """An engine for a configuration that is already whole."""
        door = cls.__new__(cls)
        door._open(config)
        return door

    def _open(self, config: EngineConfig) -> None:
        self.config = config
        self._client = open_engine(config, type(self).__name__)
        self.sampling_defaults = self._client.sampling_defaults
        """The checkpoint's, for the fields that a request does not state."""

    @property
    def info(self) -> WorkerInfo:
        """The state of the engine once started: device, blocks, seconds of the start."""
        return self._client.info

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a request that sets none: the checkpoint's defaults. vLLM's name."""
        return SamplingParams(**self.sampling_defaults)  # type: ignore[arg-type]  # they were checked

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; CheckpointError where the checkpoint has none."""
        if self._client.tokenizer is None:
            raise CheckpointError(
                f"the checkpoint of {shown(self.config.model)} has no tokenizer.json, so text "
                "cannot be encoded; pass token ids, or set `tokenizer` to a folder that has one"
            )
        return self._client.tokenizer

    @property
    def engine(self) -> Engine:
        """The engine itself, for programs that add requests to it and take its steps themselves.

        Waits until no request of this door is unfinished, for its thread takes the steps of those;
        add none through the door meanwhile. UnsupportedError where it is in another process.
        """
        return self._client.engine

    @property
    def stats(self) -> EngineStats:
        """Counters of the engine: steps, preemptions, prefix hits."""
        return self._client.stats()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, as if no prompt had been seen."""
        self._client.reset_prefix_cache()

    def close(self) -> None:
        """Free the device, once a step that is under way has ended. Closing twice is fine."""
        self._client.close()

    exit = close  # nano-vllm's name

    # -- requests

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else check_token_ids(prompt)

    def _template(self, variables: Mapping[str, Any] | None) -> Callable[[Any], list[int]]:
        return partial(self.tokenizer.apply_chat_template, chat_template_kwargs=variables)

    def _encode_one(
        self, prompt: Prompt | Sequence[Message], variables: Mapping[str, Any] | None
    ) -> list[int]:
        """The ids of a prompt or of a conversation, which its first message shows."""
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            return self._template(variables)(prompt)
        if variables:
            raise InvalidPromptError(
                f"chat_template_kwargs is {shown(variables)}, but the prompt is no conversation, "
                "so no template is applied; leave it out, or pass messages"
            )
        return self._encode(prompt)  # type: ignore[arg-type]  # no message, so a prompt

    def _new_request(
        self, ids: list[int], params: SamplingParams, labels: Labels | None, **others: Any
    ) -> NewRequest:
        """A request with checked parameters; `others` are further fields of `NewRequest`."""
        check_params(params, self._client.tokenizer is not None)
        name = self._client.new_request_id()
        return NewRequest(
            request_id=name, prompt_token_ids=ids, params=params, labels=labels, **others
        )

    def _streams(self, request: NewRequest) -> list[OutputStream]:
        """Where the outputs of a request are made: one for each of its samples."""
        tokenizer = self._client.tokenizer
        return [
            OutputStream(
                request.prompt_token_ids,
                request.params,
                None if tokenizer is None else tokenizer.detokenizer(),
                self._client.end_at,
                request.stream,
            )
            for _ in range(request.params.n)
        ]
