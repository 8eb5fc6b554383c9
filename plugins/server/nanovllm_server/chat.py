"""`POST /v1/chat/completions`: the next message of a conversation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from nanovllm_core import RequestOutput
from nanovllm_server import logprobs
from nanovllm_server.bodies import typed_for
from nanovllm_server.chat_body import ChatBody
from nanovllm_server.guard.body import BodyRoute
from nanovllm_server.service import Service
from nanovllm_server.stream import Shape, Usage, Work, answer, encode


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["chat"], route_class=BodyRoute)

    async def create_chat_completion(body: ChatBody) -> Response:
        """Answer a conversation; with `stream`, as server-sent events."""
        model = service.check_model(body.model)
        params = body.sampling_params()
        service.admission.check_size(params.n)
        ids = await service.encode_chat(body.messages, body.chat_template_kwargs)
        work = Work(
            llm=service.llm,
            prompts=[ids],
            params=params,
            labels=body.labels,
            cache_salt=service.cache_salt(body.cache_salt),
            admission=service.admission,
            stream=bool(body.stream),
            prompt_field="messages",
            count_lost=service.count_lost,
        )
        return answer(work, ChatShape(service, model, body), body.stream_options)

    # The class is made for this engine, so no annotation in the source can name it.
    create_chat_completion.__annotations__["body"] = typed_for(ChatBody, service.llm.config)
    router.post("/v1/chat/completions")(create_chat_completion)
    return router


class ChatShape(Shape):
    """Answers of the objects `chat.completion` and `chat.completion.chunk`."""

    def __init__(self, service: Service, model: str, body: ChatBody) -> None:
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
        }
        self._texts = service.token_texts
        self._has_logprobs = bool(body.logprobs)
        self._before = b'data: %b,"choices":[{"index":' % encode(self._head)[:-1]

    def opening(self, index: int, after: bytes) -> bytes:
        return self._event(index, b'{"role":"assistant","content":""}', b"null", None, after)

    def event(self, index: int, output: RequestOutput, after: bytes) -> bytes:
        ids = output.new_token_ids
        listed = b"null"
        if self._has_logprobs and ids:
            entries = (output.logprobs or [])[-len(ids) :]
            listed = encode(logprobs.for_chat(self._texts, ids, entries))
        if output.new_text or listed != b"null":
            delta = b'{"content":%b}' % encode(output.new_text)
        elif output.finish_reason is not None:
            delta = b"{}"
        else:
            return b""
        return self._event(index, delta, listed, output.finish_reason, after)

    def _event(
        self, index: int, delta: bytes, logprobs: bytes, reason: str | None, after: bytes
    ) -> bytes:
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            *(self._before, index, delta, logprobs),
            *(b"null" if reason is None else b'"%b"' % reason.encode(), after),
        )

    def usage_event(self, usage: Usage) -> bytes:
        return b"data: %b\n\n" % encode({**self._head, "choices": [], "usage": usage.body})

    def whole(self, outputs: Mapping[int, RequestOutput], usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                "logprobs": None
                if output.logprobs is None
                else logprobs.for_chat(self._texts, output.token_ids, output.logprobs),
                "finish_reason": output.finish_reason,
            }
            for index, output in outputs.items()
        ]
        return {**self._head, "choices": choices, "usage": usage.body}
