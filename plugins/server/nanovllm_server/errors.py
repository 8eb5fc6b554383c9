"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic_core import ErrorDetails, PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from nanovllm_core.config import SECTION, explain
from nanovllm_core.errors import (
    EngineClosedError,
    InvalidLabelsError,
    InvalidSamplingError,
    NanoVLLMError,
    RequestError,
    RequestTooLongError,
    clip,
)

log = logging.getLogger(__name__)

TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
"""The `type` of a status; of others it is `invalid_request_error`, or `server_error` from 500."""


def as_unicode(text: str) -> str:
    """A text that may quote half of a surrogate pair, which is no UTF-8, with that escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


class ApiError(Exception):
    """An answer that is an error. `param` is the request's field that is at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = as_unicode(message)
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else TYPES[500])
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The whole answer, for routes and middleware."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def refused(message: str, param: str | None, code: str | None = None) -> ApiError:
    """A request that can be mended by its sender."""
    return ApiError(400, message, param=param, code=code)


REFUSED = "refused"


def refused_field(message: str, field: str, code: str | None = None) -> PydanticCustomError:
    """For validators of a body's models: `field` of the model is at fault, wherever it stands."""
    context = {"message": as_unicode(message), "field": as_unicode(field), "code": code}
    return PydanticCustomError(REFUSED, "{message}", context)


def failed(request_id: str | None) -> ApiError:
    """The answer where a bug raised. The log has the exception."""
    return ApiError(
        500,
        "the server failed on this request; its log has the reason under the request's id "
        f"{request_id}",
        code="internal_error",
    )


def of_engine(error: BaseException, prompt: str | None = None) -> ApiError:
    """The answer for an error of the engine; `prompt` is the field that holds the prompt."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestTooLongError):
        field = "min_tokens" if " and min_tokens=" in str(error) else prompt
        return refused(str(error), field, "context_length_exceeded")
    if isinstance(error, InvalidSamplingError):
        return refused(str(error), _named_field(str(error)))
    if isinstance(error, InvalidLabelsError):
        return refused(str(error), "user")
    if isinstance(error, RequestError):
        field = _named_field(str(error))
        return refused(str(error), field if field == "chat_template_kwargs" else prompt)
    if isinstance(error, EngineClosedError):
        return ApiError(
            503,
            "the engine has ended; send the request again: a server replaces its engine, or ends",
            code="engine_ended",
            headers={"retry-after": "1"},
        )
    if isinstance(error, NanoVLLMError):
        # The message is the operator's: it may name paths of this machine.
        log.error("a request failed: %s: %s", type(error).__name__, clip(str(error), 500))
        message = f"the request failed in the server: {type(error).__name__}"
    else:
        # A bug. Its message may hold a part of the prompt, so the log has the places alone.
        places = "".join(traceback.format_tb(error.__traceback__))
        log.error("a request failed: %s\n%s", type(error).__name__, places)
        message = "the request failed in the server: internal error"
    return ApiError(500, message, code="internal_error")


def _named_field(message: str) -> str | None:
    """The sampling parameter that a message of `SamplingParams` begins with."""
    found = re.match(r"(?:an id in )?([a-z_]+)", message)
    return found and found[1]


UNPARSED = "There was an error parsing the body"
"""The framework's message, which names no cause."""


def add_handlers(app: FastAPI) -> None:
    """Give every error of the routes OpenAI's shape."""

    async def api(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return of_validation(error).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if message == HTTPStatus(error.status_code).phrase:
            message += _remedy(request, error)
        if message == UNPARSED:
            message = _unparsed(error.__cause__) or message
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def engine(_: Request, error: Exception) -> Response:
        return of_engine(error).response()

    async def other(request: Request, _: Exception) -> Response:
        return failed(request.scope.get("state", {}).get("request_id")).response()

    app.add_exception_handler(ApiError, api)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(NanoVLLMError, engine)
    app.add_exception_handler(Exception, other)  # It is raised on, for the log.


def _remedy(request: Request, error: HTTPException) -> str:
    """What the router's own 404 and 405, which are a phrase alone, leave out."""
    asked = f": {request.method} {clip(request.url.path, 200)}"
    if error.status_code == 404:
        return f"{asked}; GET /openapi.json lists the API's routes"
    if error.status_code == 405 and error.headers and "Allow" in error.headers:
        return f"{asked}; use {error.headers['Allow']}"
    return asked


def _unparsed(wrong: BaseException | None) -> str | None:
    """Why a body was not parsed; None for a reason of the server's."""
    if isinstance(wrong, UnicodeDecodeError):
        byte = f"byte {wrong.object[wrong.start]:#04x} at position {wrong.start}"
        return f"the body is not UTF-8: {byte}; send JSON, encoded as UTF-8"
    if isinstance(wrong, ValueError):  # Python's limit, and the only other one of its parser
        digits = sys.get_int_max_str_digits()
        return f"the body is not valid JSON: a number has more than {digits} digits; send fewer"
    return None


def of_validation(error: RequestValidationError) -> ApiError:
    """The first thing wrong in a body, with its path as `param`."""
    first = error.errors()[0]
    context = first.get("ctx", {})
    if first["type"] == "json_invalid":
        [*_, position] = first["loc"]
        fault = f"{context.get('error', '')} (at character {position})"
        return refused(f"the body is not valid JSON: {fault}", None)
    location = [*first["loc"][1:]]  # the first part is "body"
    if first["type"] == REFUSED:
        location.append(context["field"])
    param = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in location)
    param = clip(param.removeprefix("."))
    if first["type"] == REFUSED:
        return refused(context["message"], param, context["code"])
    if first["type"] == "extra_forbidden":
        return refused(f"{param}: this server has no such parameter", param, "unknown_parameter")
    if first["type"] == "value_error":
        return refused(str(context["error"]), param or None)
    if not location:
        return refused("the body must be a JSON object, sent as application/json", None)
    where = param or "the body"
    message = explain(cast(ErrorDetails, {**first, "loc": ()}), where, lambda _: "")
    return refused(message.replace(SECTION, "a JSON object"), param or None)
