"""The front door for programs with an event loop: servers, and notebooks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.engine import EngineStats, OutputDelta
from nanovllm_core.frontend.client import EngineClient
from nanovllm_core.frontend.door import Door
from nanovllm_core.frontend.messages import AddRequests, Answer, Ended, NewRequest, Refused
from nanovllm_core.frontend.outputs import RequestOutput
from nanovllm_core.frontend.prompts import Message, Prompt
from nanovllm_core.interfaces.request_labels import Labels
from nanovllm_core.interfaces.sampling_params import SamplingParams


class AsyncLLM(Door):
    """An engine with its model loaded, for programs with an event loop.

    The arguments are those of `LLM`. Loading the model blocks the loop, so make it before the loop
    serves anybody, or in a thread (`await asyncio.to_thread(AsyncLLM, "demo")`). Tasks of several
    loops may share one. Use it as an asynchronous context manager, or call `close()`.
    """

    def _open(self, config: EngineConfig) -> None:
        super()._open(config)
        # Not on a thread beside the start: transformers replaces itself while it is imported.
        if self._client.tokenizer is not None:
            self._client.tokenizer.load_chat_template()
        self._mailboxes: dict[asyncio.AbstractEventLoop, LoopMailbox] = {}

    async def generate(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        labels: Labels | None = None,
        cache_salt: bytes = b"",
        stream: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield one prompt's (or conversation's) outputs as they grow; `new_text` is what is new.

        The arguments are those of `LLM.stream`. Without `stream`, a sample has one output, its
        last. A request shares cached prefixes only with those of the same `cache_salt`. Cancelling
        the task aborts the request: its blocks are free before the engine's next step. So does
        `aclose()`; a loop that is left by `break` without it aborts when Python collects the
        generator.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        ids = self._encode_one(prompt, chat_template_kwargs)
        request = self._new_request(ids, params, labels, stream=stream, cache_salt=cache_salt)
        streams, left = self._streams(request), params.n
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            for closed in [one for one in self._mailboxes if one.is_closed()]:
                self._mailboxes.pop(closed).close()  # Its streams can no longer end.
            mailbox = self._mailboxes[loop] = LoopMailbox(self._client, loop)
        try:
            answers = mailbox.add(request)
            while left:
                if not answers.pending:
                    await answers.wait()
                answer = answers.take()
                if not isinstance(answer, OutputDelta):
                    raise answer.error
                output = streams[answer.index].push(answer)
                left -= answer.finish_reason is not None
                if output is not None:
                    yield output
        finally:
            mailbox.remove(request.request_id, is_over=not left)
            if mailbox.is_empty and self._mailboxes.get(loop) is mailbox:
                del self._mailboxes[loop]
                mailbox.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


class Answers:
    """What has come for one request and its task has not taken. Only that task waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.pending: deque[OutputDelta | Refused | Ended] = deque()
        self._newest: dict[int, OutputDelta] = {}
        """By sample, the delta among them."""
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None

    def put(self, answer: OutputDelta | Refused | Ended) -> None:
        """Keep an answer; a delta joins the untaken one of its sample, if there is one.

        So a slow task takes fewer and larger deltas.
        """
        if not isinstance(answer, OutputDelta):
            self.pending.append(answer)
        elif (newest := self._newest.get(answer.index)) is not None:
            newest.extend(answer)
        else:
            self.pending.append(answer)
            self._newest[answer.index] = answer
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> OutputDelta | Refused | Ended:
        """The oldest answer that was not taken yet; there must be one."""
        answer = self.pending.popleft()
        if isinstance(answer, OutputDelta):
            del self._newest[answer.index]
        return answer

    def wait(self) -> asyncio.Future[None]:
        """Done when the next answer has come."""
        self._waiter = self._loop.create_future()
        return self._waiter


class LoopMailbox:
    """The answers for all requests of one event loop, which is woken once for each step."""

    def __init__(self, client: EngineClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._answers: dict[str, Answers] = {}
        """By request."""
        self._number = client.subscribe(self._wake)

    @property
    def is_empty(self) -> bool:
        return not self._answers

    def add(self, request: NewRequest) -> Answers:
        """Send a request; where its answers come."""
        answers = self._answers[request.request_id] = Answers(self._loop)
        self._client.send(AddRequests(self._number, (request,)))
        return answers

    def remove(self, request_id: str, is_over: bool) -> None:
        """Forget a request, and abort it unless it is over."""
        del self._answers[request_id]
        if not is_over:
            self._client.abort([request_id])

    def close(self) -> None:
        self._client.unsubscribe(self._number)

    def _wake(self, answer: Answer) -> None:
        """On the engine's thread; RuntimeError where the loop is closed."""
        self._loop.call_soon_threadsafe(self._sort, answer)

    def _sort(self, answer: Answer) -> None:
        """Give every request its own; those that were removed want none."""
        if isinstance(answer, list):
            for delta in answer:
                if (answers := self._answers.get(delta.request_id)) is not None:
                    answers.put(delta)
            return
        names = answer.request_ids if isinstance(answer, Refused) else tuple(self._answers)
        for name in names:
            if name in self._answers and not isinstance(answer, EngineStats):
                self._answers[name].put(answer)
