"""Clients that offer another protocol: they are served as HTTP/1.1, with their bodies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from nanovllm_server.guard.connection import MAX_WAITING
from nanovllm_server.guard.settings import LimitSettings
from nanovllm_server.settings import ServerSettings

from .raw_client import Address, address_of, exchange, serving, status_of
from .toy import echo

BODY = b'{"n": 1}'
REQUEST = b"POST /smuggled HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}"
LAST = (
    b"POST /v1/x HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 6\r\n\r\n"
    b'"last"'
)
PAUSE = 0.05
"""Seconds between two parts, so that the server reads each alone."""


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    limits = LimitSettings(header_timeout_s=1.0, body_timeout_s=1.0, max_header_bytes=4096)
    with serving(echo, ServerSettings(port=0, limits=limits)) as server:
        yield address_of(server)


def offer(*headers: bytes, protocol: bytes = b"h2c", version: bytes = b"1.1") -> bytes:
    """The head of a request as the JDK's client sends it: it offers HTTP/2 by default."""
    lines = [
        b"POST /v1/x HTTP/" + version,
        b"Connection: Upgrade, HTTP2-Settings",
        b"Host: 127.0.0.1",
        b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
        b"Upgrade: " + protocol,
        *headers,
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def sized(body: bytes) -> bytes:
    return offer(b"Content-Length: %d" % len(body))


def bodies_of(answers: bytes) -> list[str]:
    """What the toy app read, in the order of its answers."""
    found = re.findall(rb'\{"body": .*?"key": null\}', answers)
    return [json.loads(one)["body"] for one in found]


CHUNKED = offer(b"Transfer-Encoding: chunked")
IN_CHUNKS = b"3\r\n" + BODY[:3] + b"\r\n%x\r\n" % len(BODY[3:]) + BODY[3:] + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "parts",
    [
        [sized(BODY) + BODY],
        [sized(BODY), BODY],
        [sized(BODY)[:90], sized(BODY)[90:] + BODY[:2], BODY[2:]],
        [CHUNKED + IN_CHUNKS],
        [CHUNKED, IN_CHUNKS[:9], IN_CHUNKS[9:]],
        [offer(b"Content-Length: 8", protocol=b"websocket") + BODY],
    ],
    ids=["one part", "two parts", "cut anywhere", "chunks", "chunks in parts", "websocket"],
)
def test_a_request_that_offers_another_protocol_is_served_with_its_body(
    address: Address, parts: list[bytes]
) -> None:
    """And so is the request that follows on the connection, in the same part or in one after it."""
    for sent in ([*parts, LAST], [*parts[:-1], parts[-1] + LAST]):
        answers = exchange(address, *sent, pause=PAUSE)
        assert bodies_of(answers) == [BODY.decode(), '"last"']
        assert answers.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("is_one_part", [False, True])
def test_a_body_that_looks_like_a_request_is_never_answered_as_one(
    address: Address, is_chunked: bool, is_one_part: bool
) -> None:
    """Behind a proxy that passes offers on, it would be the request of another client."""
    head, body = sized(REQUEST), REQUEST
    if is_chunked:
        head, body = CHUNKED, b"%x\r\n" % len(REQUEST) + REQUEST + b"\r\n0\r\n\r\n"
    parts = [head + body + LAST] if is_one_part else [head, body, LAST]
    answers = exchange(address, *parts, pause=PAUSE)
    assert bodies_of(answers) == [REQUEST.decode(), '"last"']


def test_a_request_without_a_body_may_offer_too(address: Address) -> None:
    asked = offer().replace(b"POST", b"GET")
    assert bodies_of(exchange(address, asked, asked + LAST, pause=PAUSE)) == ["", "", '"last"']


def test_as_many_offers_in_one_part_as_may_wait_are_all_answered(address: Address) -> None:
    asked = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"
    assert len(bodies_of(exchange(address, asked * MAX_WAITING + LAST))) == MAX_WAITING + 1


@pytest.mark.parametrize(
    "sent",
    [
        offer(b"Transfer-Encoding: gzip") + REQUEST,
        offer(b"Content-Length: 2", b"Transfer-Encoding: chunked") + REQUEST,
        offer(b"Transfer-Encoding: chunked") + b"no size\r\n" + REQUEST,
        b"CONNECT /v1/x HTTP/1.1\r\nhost: localhost\r\n\r\n" + REQUEST,
    ],
    ids=["coding", "length and chunks", "no chunks", "a tunnel"],
)
def test_a_body_without_one_certain_length_ends_the_connection_with_400(
    address: Address, sent: bytes
) -> None:
    answers = exchange(address, sent)
    assert status_of(answers) == 400
    assert answers.count(b"HTTP/1.1 ") == 1
    assert bodies_of(answers) == []


def test_trailers_after_an_offer_have_the_limit_of_headers(address: Address) -> None:
    trailers = b"x: " + b"y" * 2000 + b"\r\n"
    answer = exchange(address, CHUNKED + b"2\r\n{}\r\n0\r\n" + trailers * 4 + b"\r\n")
    assert status_of(answer) in (400, 431)


def test_an_offer_of_http_1_0_ends_its_connection(address: Address) -> None:
    answers = exchange(address, offer(b"Content-Length: 8", version=b"1.0") + BODY + LAST)
    assert bodies_of(answers) == [BODY.decode()]
