"""`POST /tokenize` and `/detokenize`: the tokenizer alone, as vLLM's server offers it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field, model_validator

from nanovllm_server.bodies import Body, TokenId
from nanovllm_server.chat_body import Messages
from nanovllm_server.errors import refused, refused_field
from nanovllm_server.guard.body import BodyRoute
from nanovllm_server.service import Service


class TokenizeBody(Body):
    """The body of `/tokenize`: a prompt, or a conversation."""

    model: str | None = None
    """A served name of the model; left out, the only one."""
    prompt: str | None = None
    """Text."""
    messages: Messages | None = None
    """A conversation, which the chat template turns into a prompt."""
    add_special_tokens: bool | None = None
    """Add the special tokens that the checkpoint puts around a text; true where it is left out.
    Not for a conversation: the template writes them."""
    add_generation_prompt: bool | None = None
    """Open the assistant's turn after a conversation; true where it is left out."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""

    @model_validator(mode="after")
    def _one_kind_of_prompt(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise refused_field("give prompt or messages, and not both", "prompt")
        others = (
            ("add_generation_prompt", "chat_template_kwargs")
            if self.messages is None
            else ("add_special_tokens",)
        )
        for name in others:
            if getattr(self, name) is not None:
                kind = "a text" if self.messages is None else "a conversation"
                raise refused_field(f"{name} does not apply to {kind}; leave it out", name)
        return self


class DetokenizeBody(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    """A served name of the model; left out, the only one."""
    tokens: Annotated[list[TokenId], Field(max_length=2**20, fail_fast=True)]
    """Token ids."""


def make_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["tokens"], route_class=BodyRoute)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """The token ids of a text or of a conversation."""
        service.check_model(body.model)
        if body.messages is not None:
            ids = await service.encode_chat(
                body.messages, body.chat_template_kwargs, body.add_generation_prompt is not False
            )
        else:
            ids = await service.encode(body.prompt or "", body.add_special_tokens is not False)
        return {
            "count": len(ids),
            "max_model_len": service.llm.info.max_model_len,
            "tokens": ids,
        }

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        """The text of token ids, without special tokens."""
        service.check_model(body.model)
        size = service.llm.info.vocab_size
        if beyond := [token_id for token_id in body.tokens if token_id >= size]:
            raise refused(
                f"tokens has {beyond[0]}; the vocabulary has the ids 0 to {size - 1}", "tokens"
            )
        return {"prompt": await service.decode(body.tokens)}

    return router
