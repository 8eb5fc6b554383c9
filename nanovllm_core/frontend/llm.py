"""The offline front door: prompts in, texts out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from typing import Any

from nanovllm_core.errors import InvalidSamplingError, RequestError
from nanovllm_core.frontend.client import Mailbox
from nanovllm_core.frontend.door import Door
from nanovllm_core.frontend.gc_freeze import no_collections
from nanovllm_core.frontend.messages import NewRequest
from nanovllm_core.frontend.outputs import OutputStream, RequestOutput
from nanovllm_core.frontend.prompts import Message, Prompt, as_list, spread
from nanovllm_core.interfaces.request_labels import Labels, labels_of_each
from nanovllm_core.interfaces.sampling_params import SamplingParams


class LLM(Door):
    """An engine with its model loaded, for programs that have their prompts at hand.

    `model` is a folder, the name of a checkpoint plugin (`demo`), or a hub id. Keywords are the
    fields of `EngineConfig` (nested mappings, or nano-vllm's flat names); `config_file` is a YAML
    file beneath them. Use it as a context manager, or call `close()`; closing twice is fine. One
    that nobody holds any more is closed.

    The engine has a thread of its own, which takes the steps with the requests of all callers;
    threads may share one `LLM`. Ctrl-C in a call aborts the requests of that call, and the engine
    goes on.
    """

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
        before any is run. `use_tqdm` shows a progress bar on a terminal and in a notebook.
        `labels` are texts by name for schedulers and observers, the same for all prompts or one
        mapping each.
        """
        many = [prompts] if isinstance(prompts, str) else prompts
        many = as_list("prompts", "text, a list of token ids", many, Integral)
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
        many = as_list("conversations", expected, conversations, Mapping)
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
        The engine does not wait for the caller: outputs that are not taken yet are kept. Leaving
        the loop early, or `close()`, aborts the request.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        ids = self._encode_one(prompt, chat_template_kwargs)
        request = self._new_request(ids, params, labels, stream=True)
        streams = self._streams(request)
        with Mailbox(self._client) as mailbox:
            mailbox.add([request])
            while mailbox.unfinished:
                for delta in mailbox.deltas():
                    output = streams[delta.index].push(delta)
                    if output is not None:
                        yield output

    def _run(
        self,
        name: str,
        prompts: Sequence[Any],
        encode: Callable[[Any], list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        labels: Labels | Sequence[Labels | None] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = spread(sampling_params, len(prompts))
        all_labels = labels_of_each(labels, len(prompts))
        requests: list[NewRequest] = []
        with Mailbox(self._client) as mailbox:
            try:
                with no_collections():  # Each would look at every id of the prompts before.
                    for prompt, one, its_labels in zip(prompts, params, all_labels, strict=True):
                        mailbox.refused = len(requests)
                        requests.append(self._new_request(encode(prompt), one, its_labels))
                return self._complete(mailbox, requests, use_tqdm)
            except RequestError as error:
                # Parameters that all share are the fault of none of them.
                shared = params is not sampling_params and isinstance(error, InvalidSamplingError)
                if len(prompts) == 1 or shared:
                    raise
                named = type(error)(f"{name}[{mailbox.refused}]: {error}")
                named.prompt_index = mailbox.refused
                raise named from error

    def _complete(
        self, mailbox: Mailbox, requests: Sequence[NewRequest], use_tqdm: bool
    ) -> list[RequestOutput]:
        """Run requests to their ends; their outputs in the order of requests and samples."""
        self._client.check_open()
        if not requests:
            return []
        order = {request.request_id: index for index, request in enumerate(requests)}
        streams: dict[str, list[OutputStream]] = {}
        finished: list[RequestOutput] = []
        mailbox.add(requests)
        with progress_bar(sum(request.params.n for request in requests), use_tqdm) as advance:
            while mailbox.unfinished:
                for delta in mailbox.deltas():
                    name = delta.request_id
                    if name not in streams:  # made while the engine computes
                        streams[name] = self._streams(requests[order[name]])
                    output = streams[name][delta.index].push(delta)
                    if output is not None and output.finished:
                        finished.append(output)
                        advance()
        return sorted(finished, key=lambda output: (order[output.request_id], output.index))

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def progress_bar(total: int, is_wanted: bool) -> Iterator[Callable[[], None]]:
    """Gives a function to call for each output that is finished.

    It moves a bar on stderr where somebody watches: on a terminal, or in a notebook.
    """
    if not is_wanted or not (sys.stderr.isatty() or "IPython" in sys.modules):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    console = Console(stderr=True)
    columns = ("Generating", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    is_shown = sys.stderr.isatty() or console.is_jupyter
    with Progress(*columns, console=console, disable=not is_shown) as progress:
        task = progress.add_task("", total=total)
        yield partial(progress.advance, task)
