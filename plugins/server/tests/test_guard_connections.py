"""Clients that no library would be, against uvicorn and a toy app: slow, endless, vanishing."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial

import pytest
from starlette.types import Receive, Scope, Send

from nanovllm_server.guard.connection import MAX_BEYOND, MAX_WAITING
from nanovllm_server.guard.drain import DrainingServer
from nanovllm_server.guard.settings import LimitSettings
from nanovllm_server.settings import ServerSettings

from .raw_client import (
    GET,
    HEAD,
    WAIT,
    Address,
    address_of,
    connect,
    exchange,
    read_all,
    serving,
    status_of,
    wait_until,
)
from .toy import LONG, echo, long

LIMITS = LimitSettings(
    max_body_bytes=100_000,
    max_header_bytes=4096,
    header_timeout_s=0.3,
    body_timeout_s=0.3,
    timeout_s=0.5,
)


@pytest.fixture(scope="module")
def server() -> Iterator[DrainingServer]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (flood if scope["path"] == "/flood" else echo)(scope, receive, send)

    with serving(app, ServerSettings(port=0, limits=LIMITS)) as server:
        yield server


@pytest.fixture(scope="module")
def address(server: DrainingServer) -> Address:
    return address_of(server)


async def flood(scope: Scope, receive: Receive, send: Send) -> None:
    """A stream that never ends."""
    head = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    events = b"data: x\n\n" * 1000
    while True:
        await send({"type": "http.response.body", "body": events, "more_body": True})
        await asyncio.sleep(0)


def test_a_request_is_answered(address: Address) -> None:
    answer = exchange(address, HEAD, b"connection: close\r\ncontent-length: 2\r\n\r\n{}")
    assert status_of(answer) == 200


@pytest.mark.parametrize(
    "sent",
    [b"", b"P", HEAD, HEAD + b"x: " + b"y" * 100],
    ids=["nothing", "one byte", "half of the headers", "half of a header"],
)
def test_headers_that_stay_out_end_the_connection(address: Address, sent: bytes) -> None:
    assert exchange(address, sent) == b""


@pytest.mark.parametrize(
    ("sent", "more", "status"),
    [
        (b"x-request-timeout: 0\r\ncontent-length: 50\r\n\r\n", b"{", 400),
        (b"content-length: 2\r\n\r\n{}", b"\r\n", 200),
    ],
    ids=["the rest of a refused body", "an empty line between requests"],
)
def test_a_connection_that_stays_after_its_answer_ends(
    address: Address, sent: bytes, more: bytes, status: int
) -> None:
    """uvicorn stops its timer at any byte, and a few thousand such connections fill a server."""
    with closing(connect(address)) as client:
        client.sendall(HEAD + sent)
        answer = client.recv(65_536)
        client.sendall(more)
        answer += read_all(client)
    assert status_of(answer) == status


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"x: " + b"y" * 5000 + b"\r\n\r\n",
        HEAD + b"x: " + b"y" * 5000,
        HEAD + b"x: y\r\n" * 2000 + b"\r\n",
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n",
    ],
    ids=["long", "endless", "many", "line"],
)
def test_too_many_headers_are_431(address: Address, sent: bytes) -> None:
    answer = exchange(address, sent)
    assert status_of(answer) == 431
    assert b"4096 bytes" in answer


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00\x01", b"HELLO\r\n\r\n", b"\x00" * 50])
def test_what_is_no_http_is_400(address: Address, sent: bytes) -> None:
    assert status_of(exchange(address, sent)) == 400


@pytest.mark.parametrize(
    "sent",
    [b"content-length: 50\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"],
    ids=["length", "chunked"],
)
def test_a_body_that_stays_out_is_408(address: Address, sent: bytes) -> None:
    answer = exchange(address, HEAD + sent)
    assert status_of(answer) == 408


def test_a_body_of_one_byte_at_a_time_is_408(address: Address) -> None:
    """Each byte renews no timer."""
    with closing(connect(address)) as client:
        client.sendall(HEAD + b"content-length: 1000\r\n\r\n")
        client.setblocking(False)
        end = time.monotonic() + WAIT
        answer = b""
        while not answer:
            assert time.monotonic() < end
            client.send(b"x")
            time.sleep(0.01)
            with suppress(BlockingIOError):
                answer = client.recv(65_536)
    assert status_of(answer) == 408


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_large_is_413_and_its_sender_sees_it(
    address: Address, is_chunked: bool
) -> None:
    """The connection is not reset under a client that still sends."""
    if is_chunked:
        parts = [
            b"transfer-encoding: chunked\r\n\r\n",
            *[b"10000\r\n" + b"x" * 65_536 + b"\r\n"] * 9,
        ]
        parts.append(b"0\r\n\r\n")
    else:
        parts = [b"content-length: 589824\r\n\r\n", *[b"x" * 65_536] * 9]
    answer = exchange(address, HEAD, *parts)
    assert status_of(answer) == 413
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "body_too_large"


def test_trailers_have_the_limit_of_headers(address: Address) -> None:
    trailers = b"x: " + b"y" * 2000 + b"\r\n"
    sent = b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + trailers * 4 + b"\r\n"
    answer = exchange(address, HEAD + sent)
    assert status_of(answer) in (400, 431)


def test_a_client_that_reads_nothing_is_cut_at_the_deadline(
    server: DrainingServer, address: Address
) -> None:
    """Closing would wait for it to read, and its connection would stay."""
    connections = server.server_state.connections
    wait_until(lambda: not connections)
    with closing(connect(address)) as client:
        client.sendall(HEAD.replace(b"/v1/x", b"/flood") + b"content-length: 2\r\n\r\n{}")
        wait_until(lambda: bool(connections))
        wait_until(lambda: not connections)


@pytest.mark.parametrize("end", [b"\r\n", b"connection: close\r\n\r\n"], ids=["open", "closed"])
@pytest.mark.parametrize("count", [1, 20])
def test_a_client_that_reads_nothing_of_its_answers_is_cut(end: bytes, count: int) -> None:
    """Of safe methods too, which have no deadline, and once the server has closed."""
    settings = ServerSettings(port=0, limits=LimitSettings(write_timeout_s=0.3))
    with serving(long, settings) as server, closing(connect(address_of(server))) as client:
        client.sendall((GET + end) * count)
        wait_until(lambda: bool(server.server_state.connections))
        wait_until(lambda: not server.server_state.connections)
        wait_until(lambda: not server.server_state.tasks)


def test_a_client_that_reads_slowly_gets_its_whole_answer() -> None:
    """However long it takes: each part that is taken gives it the time anew."""
    settings = ServerSettings(port=0, limits=LimitSettings(write_timeout_s=0.5))
    with serving(long, settings) as server, closing(connect(address_of(server))) as client:
        client.sendall(GET + b"connection: close\r\n\r\n")
        size, began = 0, time.monotonic()
        while part := client.recv(200_000):
            size += len(part)
            time.sleep(len(part) / 20_000_000)
        assert size > LONG
        assert time.monotonic() - began > 3 * settings.limits.write_timeout_s


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_answer_to_a_client_that_has_just_left_is_no_error(
    caplog: pytest.LogCaptureFixture, has_begun: bool
) -> None:
    """A stream may send once more before it hears that its connection has ended."""

    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        head = [(b"content-type", b"text/event-stream")]
        start = {"type": "http.response.start", "status": 200, "headers": head}
        if has_begun:
            await send(start)
        scope["state"]["abort_connection"]()  # As the end of the client's side does.
        if not has_begun:
            await send(start)
        await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})

    with serving(late, ServerSettings(port=0)) as server:
        exchange(address_of(server), HEAD, b"content-length: 2\r\n\r\n{}")
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


def test_a_client_that_leaves_ends_its_stream_also_where_another_request_waits_behind_it() -> None:
    async def until_gone(scope: Scope, receive: Receive, send: Send) -> None:
        async def events() -> None:
            head = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            while True:
                await send(
                    {"type": "http.response.body", "body": b"data: x\n\n", "more_body": True}
                )
                await asyncio.sleep(0.005)

        sending = asyncio.create_task(events())
        while (await receive())["type"] != "http.disconnect":
            pass
        sending.cancel()

    with serving(until_gone, ServerSettings(port=0)) as server:
        with closing(connect(address_of(server))) as client:
            client.sendall((HEAD + b"content-length: 2\r\n\r\n{}") * 2)
            assert client.recv(1000)
        wait_until(lambda: not server.server_state.tasks)


def test_one_connection_too_many_is_503_in_the_shape_of_all_errors() -> None:
    with serving(echo, ServerSettings(port=0, limits=LimitSettings(max_connections=2))) as server:
        address = address_of(server)
        request = HEAD + b"content-length: 2\r\n\r\n{}"
        with closing(connect(address)) as first, closing(connect(address)) as second:
            for client in (first, second):
                client.sendall(request)
                assert status_of(client.recv(65_536)) == 200
            answer = exchange(address, request)
        assert status_of(answer) == 503
        assert b"retry-after: 1\r\n" in answer
        assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "server_full"


def test_a_connection_within_the_limit_is_served_whoever_comes_after_it() -> None:
    with serving(echo, ServerSettings(port=0, limits=LimitSettings(max_connections=1))) as server:
        address = address_of(server)
        request = HEAD + b"content-length: 2\r\n\r\n{}"
        with closing(connect(address)) as first:
            first.sendall(request)
            assert status_of(first.recv(65_536)) == 200
            with closing(connect(address)) as second:
                wait_until(lambda: len(server.server_state.connections) == 2)
                first.sendall(request)
                assert status_of(first.recv(65_536)) == 200
                second.sendall(request)
                assert status_of(read_all(second)) == 503


def test_idle_connections_far_beyond_the_limit_are_refused_at_once() -> None:
    """Else they would hold files that the server needs until their headers are late."""
    with serving(echo, ServerSettings(port=0, limits=LimitSettings(max_connections=1))) as server:
        address = address_of(server)
        clients = [connect(address) for _ in range(1 + MAX_BEYOND)]
        wait_until(lambda: len(server.server_state.connections) == len(clients))
        answer = exchange(address)
        for client in clients:
            client.close()
    assert status_of(answer) == 503
    assert b"retry-after: 1\r\n" in answer
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "server_full"


def test_each_refusal_that_reaches_no_application_is_counted_by_its_status() -> None:
    counted: list[int] = []
    limits = LimitSettings(max_connections=1, max_header_bytes=1024)
    settings = ServerSettings(port=0, limits=limits)
    with serving(echo, settings, on_refusal=counted.append) as server:
        address = address_of(server)
        request = HEAD + b"content-length: 2\r\n\r\n{}"
        with closing(connect(address)) as first:
            first.sendall(request)
            assert status_of(first.recv(65_536)) == 200
            exchange(address, request * 3)  # The answer to the first one ends the connection.
            wait_until(lambda: len(server.server_state.connections) == 1)
        exchange(address, b"HELLO\r\n\r\n")
        exchange(address, HEAD + b"x: " + b"y" * 2000)
        clients = [connect(address) for _ in range(1 + MAX_BEYOND)]
        wait_until(lambda: len(server.server_state.connections) == len(clients))
        exchange(address)
        for client in clients:
            client.close()
    assert counted == [503, 400, 431, 503]


def test_collections_skip_what_a_start_has_made_as_long_as_the_server_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, partial(calls.append, name))
    with serving(echo, ServerSettings(port=0)):
        wait_until(lambda: calls == ["freeze"])
    assert calls[:2] == ["freeze", "unfreeze"]  # An engine of this process freezes again.


def test_pipelined_requests_are_answered_in_order(address: Address) -> None:
    bodies = [b'{"n": %d}' % index for index in range(5)]
    requests = [HEAD + b"content-length: 8\r\n\r\n" + body for body in bodies]
    last = requests.pop().replace(b"host:", b"connection: close\r\nhost:")
    answer = exchange(address, b"".join([*requests, last]))
    assert [int(n) for n in re.findall(rb'\\"n\\": (\d)', answer)] == [0, 1, 2, 3, 4]


def test_a_connection_has_a_bounded_number_of_requests_that_wait() -> None:
    """They are answered, and what follows is refused. Another connection is served meanwhile,
    however many come: a quarter of a MiB holds 14,500."""
    counted: list[int] = []
    with (
        serving(echo, ServerSettings(port=0), on_refusal=counted.append) as server,
        closing(connect(address_of(server))) as flooding,
    ):
        answer = exchange(address_of(server), (GET + b"\r\n") * (MAX_WAITING + 10))
        assert counted == [429]
        flooding.sendall(b"GET / HTTP/1.1\r\n\r\n" * 14_500)
        started = time.monotonic()
        closing_get = GET + b"connection: close\r\n\r\n"
        assert status_of(exchange(address_of(server), closing_get)) == 200
        assert time.monotonic() - started < 1
        assert read_all(flooding).count(b"HTTP/1.1 200") <= MAX_WAITING + 1
    statuses = [int(one) for one in re.findall(rb"HTTP/1.1 (\d+)", answer)]
    assert statuses == [200] * (MAX_WAITING + 1) + [429]
    assert b"wait for their answers" in answer


async def in_two_parts(scope: Scope, receive: Receive, send: Send) -> None:
    head = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
    await asyncio.sleep(0.1)
    await send({"type": "http.response.body", "body": b"data: 2\n\n"})


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        (b"HELLO\r\n\r\n", 400),
        (HEAD + b"x: " + b"y" * 5000 + b"\r\n\r\n", 431),
        (HEAD + b"x: " + b"y" * 5000, 431),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nno size\r\n", 400),
    ],
    ids=["no HTTP", "long headers", "headers without end", "a broken body"],
)
def test_a_request_that_is_refused_waits_for_the_answers_before_it(
    wrong: bytes, status: int, is_late: bool, count: int
) -> None:
    """The client would take the refusal for an earlier answer, or for a part of one.

    Nothing behind the refused request is served.
    """
    counted: list[int] = []
    settings = ServerSettings(port=0, limits=LimitSettings(max_header_bytes=4096))
    with (
        serving(in_two_parts, settings, on_refusal=counted.append) as server,
        closing(connect(address_of(server))) as client,
    ):
        client.sendall(GET + b"\r\n" + (GET + b"\r\n") * (count - 1))
        answer = b""
        while is_late and b"data: 1" not in answer:
            answer += client.recv(65_536)
        client.sendall(wrong)
        time.sleep(0.05)
        with suppress(OSError):
            client.sendall(GET + b"\r\n")
        answer += read_all(client)
    assert [int(one) for one in re.findall(rb"HTTP/1.1 (\d+)", answer)] == [200] * count + [status]
    refusal = answer.index(b"HTTP/1.1 %d" % status)
    assert re.findall(rb"data: \d", answer[:refusal]) == [b"data: 1", b"data: 2"] * count
    assert answer[:refusal].endswith(b"0\r\n\r\n")
    assert b"connection: close" in answer[refusal:]
    assert counted == [status]


def test_a_body_that_breaks_under_its_own_answer_gets_no_second_one() -> None:
    """It would be read as a part of the first."""
    counted: list[int] = []
    with (
        serving(in_two_parts, ServerSettings(port=0), on_refusal=counted.append) as server,
        closing(connect(address_of(server))) as client,
    ):
        client.sendall(GET + b"transfer-encoding: chunked\r\n\r\n")
        answer = b""
        while b"data: 1" not in answer:
            answer += client.recv(65_536)
        client.sendall(b"no size\r\n")
        answer += read_all(client)
    assert answer.count(b"HTTP/1.1") == 1
    assert counted == []


PROGRAM = """
import asyncio, sys, uvicorn
from nanovllm_server.guard.assemble import guarded, uvicorn_options
from nanovllm_server.guard.connection import MAX_BEYOND
from nanovllm_server.guard.drain import DrainingServer
from nanovllm_server.settings import ServerSettings

async def app(scope, receive, send):
    head = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": b"data: 1\\n\\n", "more_body": True})
    if scope["path"] == "/short":
        while not drain.is_draining:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
    else:
        await asyncio.Event().wait()
    await send({"type": "http.response.body", "body": b"data: [DONE]\\n\\n"})

settings = ServerSettings(port=0, drain_s=float(sys.argv[1]))
inner, drain = guarded(app, settings, [])

class Server(DrainingServer):
    async def startup(self, sockets=None):
        await super().startup(sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)

options = uvicorn_options(settings)
config = uvicorn.Config(inner, port=0, log_config=None, lifespan="off", **options)
Server(config, drain).run()
"""


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, str(request.param)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("process", [20], indirect=True)
def test_sigterm_lets_a_stream_finish_and_exits_with_status_0(
    process: subprocess.Popen[str],
) -> None:
    """New requests get 503 meanwhile, on new connections too."""
    assert process.stdout is not None
    address = ("127.0.0.1", int(process.stdout.readline()))
    with closing(connect(address)) as client:
        client.sendall(HEAD.replace(b"/v1/x", b"/short") + b"content-length: 2\r\n\r\n{}")
        read = client.recv(65_536)
        while b"data: 1" not in read:
            read += client.recv(65_536)
        process.send_signal(signal.SIGTERM)
        read += read_all(client)
    assert b"[DONE]" in read
    assert process.wait(WAIT) == 0


@pytest.mark.parametrize("process", [0.3], indirect=True)
def test_sigterm_ends_a_stream_that_does_not_finish(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    address = ("127.0.0.1", int(process.stdout.readline()))
    with closing(connect(address)) as client:
        client.sendall(HEAD + b"content-length: 2\r\n\r\n{}")
        read = client.recv(65_536)
        while b"data: 1" not in read:
            read += client.recv(65_536)
        process.send_signal(signal.SIGTERM)
        refused = b""
        while not refused.startswith(b"HTTP/1.1 503"):  # The signal is taken within 0.1 s.
            refused = exchange(
                address,
                HEAD,
                b"connection: close\r\ncontent-length: 2\r\nx-request-timeout: 0.01\r\n\r\n{}",
            )
        read += read_all(client)
    assert b"retry-after: 1\r\n" in refused
    assert b"shutting_down" in read
    assert process.wait(WAIT) == 0
