"""`POST /v1/completions`: prompts as text or token ids, continued."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from nanovllm_core import RequestOutput
from nanovllm_server import logprobs
from nanovllm_server.bodies import typed_for
from nanovllm_server.completion_body import CompletionBody
from nanovllm_server.guard.body import BodyRoute
from nanovllm_server.guard.prompts import check_echo
from nanovllm_server.service import Service
from nanovllm_server.stream import Shape, Usage, Work, answer, encode


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["completions"], route_class=BodyRoute)

    async def create_completion(body: CompletionBody) -> Response:
        """Continue each prompt; with `stream`, as server-sent events."""
        model = service.check_model(body.model)
        params = body.sampling_params()
        service.admission.check_size(len(body.prompt) * params.n)
        prompts = await service.encode_prompts(body.prompt)
        work = Work(
            llm=service.llm,
            prompts=prompts,
            params=params,
            labels=body.labels,
            cache_salt=service.cache_salt(body.cache_salt),
            admission=service.admission,
            stream=bool(body.stream),
            prompt_field="prompt",
            count_lost=service.count_lost,
        )
        echoed = await service.texts_of(body.prompt) if body.echo else []
        check_echo(echoed, params.n)
        shape = CompletionShape(service, model, body, echoed)
        return answer(work, shape, body.stream_options)

    # The class is made for this engine, so no annotation in the source can name it.
    create_completion.__annotations__["body"] = typed_for(CompletionBody, service.llm.config)
    router.post("/v1/completions")(create_completion)
    return router


class CompletionShape(Shape):
    """Answers of the object `text_completion`."""

    def __init__(
        self, service: Service, model: str, body: CompletionBody, echoed: Sequence[str]
    ) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._texts = service.token_texts
        self._has_logprobs = body.logprobs is not None
        self._n = body.n or 1
        self._echoed = echoed
        """The text of each prompt; empty where none is echoed."""
        self._offsets: dict[int, logprobs.TextOffsets] = {}
        """Of the streamed tokens, by choice."""
        self._before = b'data: %b,"choices":[{"index":' % encode(self._head)[:-1]

    def _prompt(self, index: int) -> str:
        return self._echoed[index // self._n] if self._echoed else ""

    def opening(self, index: int, after: bytes) -> bytes:
        prompt = self._prompt(index)
        return self._event(index, prompt, b"null", None, after) if prompt else b""

    def event(self, index: int, output: RequestOutput, after: bytes) -> bytes:
        logprobs = self._new_logprobs(index, output) if self._has_logprobs else b"null"
        if not output.new_text and output.finish_reason is None and logprobs == b"null":
            return b""
        return self._event(index, output.new_text, logprobs, output.finish_reason, after)

    def _event(
        self, index: int, text: str, logprobs: bytes, reason: str | None, after: bytes
    ) -> bytes:
        return b'%b%d,"text":%b,"logprobs":%b,"finish_reason":%b%b' % (
            *(self._before, index, encode(text), logprobs),
            *(b"null" if reason is None else b'"%b"' % reason.encode(), after),
        )

    def _new_logprobs(self, index: int, output: RequestOutput) -> bytes:
        ids = output.new_token_ids
        if not ids:
            return b"null"
        entries = (output.logprobs or [])[-len(ids) :]
        if index not in self._offsets:
            self._offsets[index] = self._texts.offsets()
        return encode(logprobs.for_completion(self._texts, ids, entries, self._offsets[index]))

    def _whole_logprobs(self, output: RequestOutput) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        offsets = self._texts.offsets()
        return logprobs.for_completion(self._texts, output.token_ids, output.logprobs, offsets)

    def usage_event(self, usage: Usage) -> bytes:
        return b"data: %b\n\n" % encode({**self._head, "choices": [], "usage": usage.body})

    def whole(self, outputs: Mapping[int, RequestOutput], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": self._prompt(index) + output.text,
                "logprobs": self._whole_logprobs(output),
                "finish_reason": output.finish_reason,
            }
            for index, output in outputs.items()
        ]
        return {**self._head, "choices": choices, "usage": usage.body}
