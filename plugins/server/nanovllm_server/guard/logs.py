"""Log lines as text or JSON, one for each request. No prompt, output or key is in them."""

from __future__ import annotations

import json
import logging
import logging.config
import re
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from nanovllm_server.errors import failed
from nanovllm_server.guard.asgi import SentResponse
from nanovllm_server.guard.request_ids import request_id

access = logging.getLogger("nanovllm_server.access")
MAX_PATH = 200
"""Characters of a path in a log line."""
POLLED = frozenset({"/live", "/health", "/ready", "/metrics"})
"""Paths that are asked every few seconds, without end: their good answers are for `debug`."""


class AccessLog:
    """Middleware: a log line for each request, and an answer where the app raises.

    An exception's message may quote what a client sent. The log has its type and the lines of code
    where it was raised, and the client gets 500 with the request's id.
    """

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.perf_counter) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        response = SentResponse(scope, send)
        began = self._clock()
        try:
            await self._app(scope, receive, response)
        except Exception as error:
            access.error("%s\n%s", type(error).__name__, where(error))
            await response.end_with(failed(request_id.get()))
        finally:
            self._write(scope, response, self._clock() - began)

    def _write(self, scope: Scope, response: SentResponse, seconds: float) -> None:
        key = scope.get("state", {}).get("key")
        facts = {
            "method": scope["method"],
            # As it came, percent-encoded: no client can begin a new line. The query is left out.
            "path": scope.get("raw_path", b"").decode("ascii", "replace")[:MAX_PATH],
            "status": response.status,
            "is_complete": response.is_complete,
            "seconds": round(seconds, 6),
            "client": (scope.get("client") or ("",))[0],
            "key": None if key is None else key.name,
        }
        level = logging.ERROR if response.status == 500 else logging.INFO
        if scope["path"] in POLLED and response.status == 200:
            level = logging.DEBUG
        access.log(level, "request", extra={"facts": facts})


def where(error: BaseException) -> str:
    """The lines of code that an exception and its causes came through, without their messages."""
    text = "".join(traceback.format_tb(error.__traceback__))
    cause = error.__cause__ or error.__context__
    return text if cause is None else f"{text}after {type(cause).__name__}\n{where(cause)}"


class TextFormatter(logging.Formatter):
    """`time level message fact=value request_id=...`"""

    def format(self, record: logging.LogRecord) -> str:
        facts = {**getattr(record, "facts", {}), "request_id": request_id.get()}
        words = [f"{name}={_word(value)}" for name, value in facts.items() if value is not None]
        return " ".join([_time(record), record.levelname, message_of(record), *words])


def _word(value: object) -> str:
    """A value as one word: in quotes where it has spaces, so that no client adds facts."""
    text = str(value)
    return json.dumps(text) if re.search(r'[\s"]', text) else text


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, request_id, and a request's facts."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": message_of(record),
            "request_id": request_id.get(),
            **getattr(record, "facts", {}),
        }
        return json.dumps(line)


def message_of(record: logging.LogRecord) -> str:
    """The message; of an exception its type and its lines of code."""
    message = record.getMessage()
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        message = f"{message.rstrip()}: {type(error).__name__}\n{where(error)}"
    return message


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def configure_logging(form: Literal["text", "json"], level: str) -> None:
    """Send the lines of the server and of uvicorn to stderr."""
    formatter = JsonFormatter if form == "json" else TextFormatter
    logger = {"handlers": ["stderr"], "level": level.upper(), "propagate": False}
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"lines": {"()": formatter}},
            "handlers": {
                "stderr": {"class": "logging.StreamHandler", "formatter": "lines"},
            },
            "loggers": {"nanovllm_server": logger, "uvicorn": logger},
        }
    )
