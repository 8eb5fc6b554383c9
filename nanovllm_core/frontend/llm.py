"""The offline front door: prompts in, texts out."""

from __future__ import annotations

import operator
import os
import sys
import weakref
from collections.abc import Callable, Container, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from threading import RLock
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.config.sources import load_config
from nanovllm_core.engine import Engine, EngineLimits, EngineStats, RequestOutput
from nanovllm_core.engine.observation import Observation
from nanovllm_core.errors import (
    CheckpointError,
    EngineClosedError,
    InvalidPromptError,
    InvalidSamplingError,
    RequestError,
    shown,
)
from nanovllm_core.frontend.closing import EngineParts, close_parts
from nanovllm_core.frontend.gc_freeze import freeze_objects
from nanovllm_core.frontend.tokenizer import Tokenizer, checkpoint_eos_token_ids
from nanovllm_core.interfaces.plan import WorkerInfo
from nanovllm_core.interfaces.request_labels import Labels, labels_of_each
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.selection.startup import Startup, start

Prompt = str | Sequence[int]
Message = Mapping[str, str]


class LLM:
    """An engine with its model loaded, for programs that have their prompts at hand.

    `model` is a folder, the name of a checkpoint plugin (`demo`), or a hub id. Keywords are the
    fields of `EngineConfig` (nested mappings, or nano-vllm's flat names); `config_file` is a YAML
    file beneath them. Use it as a context manager, or call `close()`; closing twice is fine. One
    that nobody holds any more is closed.

    Threads may share one: a step runs on one of them at a time, with the requests of all.
    """

    def __init__(self, model: str | None = None, *, config_file: str | None = None, **kwargs: Any):
        self._open(load_config(model, file=config_file, overrides=kwargs))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """An engine for a configuration that is already whole."""
        llm = cls.__new__(cls)
        llm._open(config)
        return llm

    def _open(self, config: EngineConfig) -> None:
        self.config = config
        self._lock = RLock()
        self._next_id = 0
        self._awaited: set[str] = set()
        """Requests whose caller wants their outputs."""
        self._kept: dict[tuple[str, int], RequestOutput] = {}
        """By request and sample: the news that came while another caller ran the steps, as one."""
        began = perf_counter()
        startup = start(config)
        self._executor = startup.executor
        self.sampling_defaults = startup.sampling_defaults
        """The checkpoint's, for the fields that a request does not state."""
        self._observation = Observation(startup.observers) if startup.observers else None
        parts = EngineParts(startup.plugins, startup.executor, self._observation)
        self._pid = parts.pid
        self._closing = weakref.finalize(self, close_parts, parts)
        self._closing.atexit = False  # A program that ends frees the device in any case.
        try:
            self._tokenizer = Tokenizer.find(startup.setup.tokenizer, config.chat_template_kwargs)
            # The tokenizer may lie in another folder; the ids that end a text are the checkpoint's.
            own_ids = () if self._tokenizer is None else self._tokenizer.eos_token_ids
            eos = checkpoint_eos_token_ids(startup.setup.checkpoint, own_ids)
            planned = perf_counter() - began
            info = self._executor.start(startup.setup)
            self.info: WorkerInfo = replace(
                info,
                choices=startup.choices,
                start_seconds={"plan": planned, **info.start_seconds},
            )
            self._engine = self._make_engine(startup, eos)
            freeze_objects()
            parts.is_ready = True
            startup.plugins.hook.nanovllm_engine_started(info=self.info)
        except BaseException:
            self._closing()
            raise

    def _make_engine(self, startup: Startup, eos_token_ids: Iterable[int]) -> Engine:
        config, info = self.config, self.info
        return Engine(
            self._executor,
            startup.scheduler,
            EngineLimits(
                max_num_seqs=config.limits.max_num_seqs,
                max_num_batched_tokens=config.limits.max_num_batched_tokens,
                max_model_len=info.max_model_len,
                num_blocks=info.num_blocks,
                block_size=info.block_size,
                vocab_size=info.vocab_size,
            ),
            eos_token_ids=eos_token_ids,
            sampling_defaults=self.sampling_defaults,
            logits_processors=startup.logits_processors,
            observation=self._observation,
            prefix_caching=config.cache.prefix_caching,
            steps_ahead=config.steps_ahead,
            seed=config.seed,
            debug=config.debug,
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a request that sets none: the checkpoint's defaults. vLLM's name."""
        return SamplingParams(**self.sampling_defaults)  # type: ignore[arg-type]  # they were checked

    # -- generating -------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        labels: Labels | Sequence[Labels | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt (text or token ids); outputs come in the order of the prompts.

        With `n` samples per prompt, a prompt's samples follow one another. Every prompt is checked
        before any is run. `use_tqdm` shows a progress bar where stderr is a terminal. `labels` are
        texts by name for schedulers and observers, the same for all prompts or one mapping each.
        """
        many = [prompts] if isinstance(prompts, str) else prompts
        many = _as_list("prompts", "text, a list of token ids", many, Integral)
        return self._run("prompts", many, self._encode, sampling_params, labels, use_tqdm)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        labels: Labels | Sequence[Labels | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, lists of `{"role", "content"}`, by the checkpoint's template.

        `chat_template_kwargs` are variables for the template, on top of the configuration's.
        """
        expected = "a list of messages {'role', 'content'}"
        many = _as_list("conversations", expected, conversations, Mapping)
        encode = self._template(chat_template_kwargs)
        return self._run("conversations", many, encode, sampling_params, labels, use_tqdm)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        labels: Labels | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Yield one prompt's (or conversation's) outputs as they grow; `new_text` is what is new.

        `chat_template_kwargs` are variables for a conversation's template, as in `chat`.
        Leaving the loop early, or `close()`, aborts the request.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        encode: Callable[[Any], list[int]] = self._encode
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            encode = self._template(chat_template_kwargs)
        elif chat_template_kwargs:
            raise InvalidPromptError(
                f"chat_template_kwargs is {shown(chat_template_kwargs)}, but the prompt is no "
                "conversation, so no template is applied; leave it out, or pass messages"
            )
        request_id = self._add(encode(prompt), params, labels, stream=True)
        left = params.n
        try:
            while left:
                for output in self._step([request_id]):
                    left -= output.finish_reason is not None
                    yield output
        finally:
            self._forget([request_id])

    def _run(
        self,
        name: str,
        prompts: Sequence[Any],
        encode: Callable[[Any], list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        labels: Labels | Sequence[Labels | None] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _spread(sampling_params, len(prompts))
        all_labels = labels_of_each(labels, len(prompts))
        order: dict[str, int] = {}
        try:
            requests = zip(prompts, params, all_labels, strict=True)
            for index, (prompt, one, its_labels) in enumerate(requests):
                try:
                    order[self._add(encode(prompt), one, its_labels)] = index
                except RequestError as error:
                    # Parameters that all share are the fault of none of them.
                    shared = params is not sampling_params and isinstance(
                        error, InvalidSamplingError
                    )
                    if len(prompts) == 1 or shared:
                        raise
                    named = type(error)(f"{name}[{index}]: {error}")
                    named.prompt_index = index
                    raise named from error
            total = sum(one.n for one in params)
            outputs = self._drain(order, total, show=use_tqdm and sys.stderr.isatty())
        finally:
            self._forget(order)
        return sorted(outputs, key=lambda output: (order[output.request_id], output.index))

    def _drain(self, order: Mapping[str, int], total: int, show: bool) -> list[RequestOutput]:
        finished: list[RequestOutput] = []
        columns = ("Generating", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
            task = progress.add_task("", total=total)
            while len(finished) < total:
                for output in self._step(order):
                    if output.finish_reason is not None:
                        finished.append(output)
                        progress.advance(task)
        return finished

    def _step(self, mine: Container[str]) -> list[RequestOutput]:
        """The news of the requests in `mine`, by a step if none is there; others' is kept."""
        with self._lock:
            self._check_open()
            kept = [self._kept.pop(key) for key in tuple(self._kept) if key[0] in mine]
            if kept:
                return kept
            news = self._engine.step()
            for output in news:
                if output.request_id in self._awaited and output.request_id not in mine:
                    self._keep(output)
            return [output for output in news if output.request_id in mine]

    def _keep(self, output: RequestOutput) -> None:
        """Add to what is kept of the same sample: an output holds all so far, and what is new."""
        key = output.request_id, output.index
        if earlier := self._kept.get(key):
            output = replace(
                output,
                new_token_ids=earlier.new_token_ids + output.new_token_ids,
                new_text=earlier.new_text + output.new_text,
            )
        self._kept[key] = output

    def _forget(self, request_ids: Iterable[str]) -> None:
        """Abort the unfinished requests among these; their caller no longer waits."""
        with self._lock:
            for request_id in request_ids:
                self._engine.abort(request_id)
                self._awaited.discard(request_id)
            for key in tuple(self._kept):
                if key[0] not in self._awaited:
                    self._kept.pop(key, None)

    def _add(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        labels: Labels | None,
        stream: bool = False,
    ) -> str:
        self._check_open()
        if not isinstance(params, SamplingParams):
            raise InvalidSamplingError(
                f"expected SamplingParams, got {type(params).__name__} {shown(params)}; make one, "
                "as in SamplingParams(temperature=0.6)"
            )
        detokenizer = self._tokenizer.detokenizer if self._tokenizer is not None else None
        with self._lock:
            request_id = str(self._next_id)
            self._next_id += 1
            self._engine.add_request(
                request_id, ids, params, stream=stream, detokenizer=detokenizer, labels=labels
            )
            self._awaited.add(request_id)
        return request_id

    def _template(self, variables: Mapping[str, Any] | None) -> Callable[[Any], list[int]]:
        return partial(self.tokenizer.apply_chat_template, chat_template_kwargs=variables)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            # Lists of integers, but not of ids; and of words that would be taken for ids.
            if isinstance(prompt, bytes | bytearray | Mapping):
                raise TypeError
            ids = list(prompt)
        except TypeError:
            raise InvalidPromptError(
                f"a prompt is text or a list of token ids; got {type(prompt).__name__} "
                f"{shown(prompt)}"
            ) from None
        if set(map(type, ids)) <= {int}:  # nearly always, and in no Python loop
            return ids
        for index, token_id in enumerate(ids):
            try:
                if isinstance(token_id, bool):
                    raise TypeError
                ids[index] = operator.index(token_id)  # the integers of numpy and torch too
            except TypeError:
                raise InvalidPromptError(
                    f"a prompt is a flat list of whole token ids; got {type(token_id).__name__} "
                    f"{shown(token_id)} at index {index}"
                ) from None
        return ids

    # -- what it is made of -----------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; CheckpointError where the checkpoint has none."""
        if self._tokenizer is None:
            raise CheckpointError(
                f"the checkpoint of {shown(self.config.model)} has no tokenizer.json, so text "
                "cannot be encoded; pass token ids, or set `tokenizer` to a folder that has one"
            )
        return self._tokenizer

    @property
    def engine(self) -> Engine:
        """The loop itself, for programs that add requests while others run."""
        return self._engine

    @property
    def stats(self) -> EngineStats:
        """Counters of the engine: steps, preemptions, prefix hits."""
        return self._engine.stats

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, as if no prompt had been seen."""
        with self._lock:
            self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Free the device, once a step of another thread has ended. Closing twice is fine."""
        with self._lock:
            self._closing()

    exit = close  # nano-vllm's name

    def _check_open(self) -> None:
        if not self._closing.alive:
            raise EngineClosedError("this LLM is closed; create a new one")
        if os.getpid() != self._pid:
            raise EngineClosedError(
                f"this LLM was created in process {self._pid}, and this is {os.getpid()}: neither "
                "threads nor a GPU outlive a fork; create a new one here"
            )

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_list(name: str, expected: str, given: Any, item: type) -> Sequence[Any]:
    """`given` in a list where it is a single one, which its first `item` shows."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes | bytearray):
        raise InvalidPromptError(
            f"{name}: expected {expected} or a list of these, got {type(given).__name__} "
            f"{shown(given)}"
        )
    return [given] if given and isinstance(given[0], item) else given


def _spread(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if not isinstance(params, Sequence):
        return [params] * count
    if len(params) != count:
        raise InvalidPromptError(
            f"{len(params)} sampling_params for {count} prompts; give one for all, or one for each"
        )
    return params
