"""The guards alone, in front of a toy app."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm_core.errors import ConfigError
from nanovllm_server.errors import ApiError
from nanovllm_server.fronts.fronts import ENDS_SECONDS, MAX_ENDS, counted_signals, is_storm
from nanovllm_server.guard.admission import Admission
from nanovllm_server.guard.assemble import guarded
from nanovllm_server.guard.body import BodyLimit, check_nesting, nesting
from nanovllm_server.guard.command import serve_key
from nanovllm_server.guard.deadlines import Deadlines
from nanovllm_server.guard.drain import Drain, signals_as_exit
from nanovllm_server.guard.files import RESERVE, raise_file_limit, within_file_limit
from nanovllm_server.guard.hosts import (
    LocalOnly,
    bound_sockets,
    check_exposure,
    claimed,
    is_loopback,
)
from nanovllm_server.guard.isolation import cache_salt
from nanovllm_server.guard.keys import ApiKey, Keys, api_key, hash_key, make_key, read_keys
from nanovllm_server.guard.ledger import MAX_CLIENTS, NUM_OWN, Ledger
from nanovllm_server.guard.logs import AccessLog, JsonFormatter, TextFormatter
from nanovllm_server.guard.prompts import (
    PromptLimits,
    check_arguments,
    check_echo,
    check_logprobs,
    check_stops,
    check_template_kwargs,
)
from nanovllm_server.guard.rates import Allowance, Rates
from nanovllm_server.guard.request_ids import RequestIds
from nanovllm_server.guard.settings import CorsSettings
from nanovllm_server.settings import ServerSettings, parse_settings

from .toy import Answer, Stream, call, echo, scope_of

KEY = "nvk-0123456789abcdefghijklmnopqrstuvwxyzABCDEFG"
SECRET = "the secret prompt"
ACME = ApiKey(name="acme", sha256=hash_key(KEY))


def ask(app: object, parts: tuple[bytes | float, ...] = (b"{}",), **headers: str) -> Answer:
    return asyncio.run(call(app, scope_of(**headers), parts))  # type: ignore[arg-type]


# -- keys


def test_a_request_without_a_key_has_not_that_of_an_earlier_one() -> None:
    """uvicorn may run a request in the context of an earlier one of its connection."""
    found: list[ApiKey | None] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(api_key.get())

    async def one_context() -> None:
        keys = Keys(app, [ACME], ["/v1/"])
        await keys(scope_of(method="GET", authorization=f"Bearer {KEY}"), receive, send)
        await keys(scope_of(method="GET"), receive, send)

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    asyncio.run(one_context())
    assert found == [ACME, None]


def test_a_key_opens_and_its_name_reaches_the_app() -> None:
    answer = ask(Keys(echo, [ACME]), authorization=f"Bearer {KEY}")
    assert answer.status == 200
    assert json.loads(answer.body)["key"] == "acme"


@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer x", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer é"]
)
def test_what_is_no_key_is_401_and_is_not_repeated(value: str | None) -> None:
    headers = {} if value is None else {"authorization": value}
    answer = ask(Keys(echo, [ACME]), **headers)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.error["code"] == "invalid_api_key"
    assert KEY.encode() not in answer.body


@pytest.mark.parametrize(
    ("path", "status"),
    [("/", 200), ("/health", 200), ("/page/a.js", 200), ("/healthy", 401), ("/v1/models", 401)],
)
def test_only_public_paths_need_no_key(path: str, status: int) -> None:
    app = Keys(echo, [ACME], public=["/", "/health", "/page/"])
    assert ask(app, path=path, method="GET").status == status


@pytest.mark.parametrize("method", ["POST", "PUT", "TRACE"])
def test_a_public_path_is_public_to_be_read(method: str) -> None:
    """The body of a client without a key would count in the memory that all bodies share."""
    assert ask(Keys(echo, [ACME], public=["/health"]), path="/health", method=method).status == 401


def test_keys_come_from_the_section_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"- {{name: other, sha256: {'a' * 64}}}\n")
    keys = read_keys([ACME], file, {"SERVE_API_KEY": "a-key-of-some-length"})
    assert [key.name for key in keys] == ["acme", "other", "environment"]
    assert keys[2].sha256 == hash_key("a-key-of-some-length")


@pytest.mark.parametrize(
    "text",
    [
        *("[", "- {name: x}", "- {name: acme, sha256: secret-secret-secret}", "just text"),
        f'- {{name: acme, sha256: "{"a" * 64}\\n"}}',
    ],
)
def test_a_wrong_key_file_is_refused_without_its_content(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="keys_file") as caught:
        read_keys([], file, {})
    assert "secret-secret" not in str(caught.value)


def test_a_name_used_twice_and_a_short_key_are_refused() -> None:
    with pytest.raises(ConfigError, match="two API keys have the name 'acme'"):
        read_keys([ACME, ACME], None, {})
    with pytest.raises(ConfigError, match="SERVE_API_KEY has 5 characters"):
        read_keys([], None, {"SERVE_API_KEY": "short"})


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        (KEY + "\n", "begins or ends with white space"),
        (" " + KEY, "begins or ends with white space"),
        ("clé" + KEY, "has other characters than printable ASCII"),
        ("tab\t" + KEY, "has other characters than printable ASCII"),
        ("\udcff" + KEY, "has other characters than printable ASCII"),
    ],
)
def test_a_key_that_no_request_can_send_is_refused_at_start(plain: str, said: str) -> None:
    """With a remedy, and without the key itself."""
    with pytest.raises(ConfigError, match=f"SERVE_API_KEY {said}.*serve-key") as caught:
        read_keys([], None, {"SERVE_API_KEY": plain})
    assert KEY not in str(caught.value)


def test_a_key_of_the_environment_may_have_any_printable_character_of_ascii() -> None:
    """A space too, but for its ends."""
    plain = "".join(map(chr, range(ord("!"), ord("~") + 1))) + " a"
    keys = read_keys([], None, {"SERVE_API_KEY": plain})
    assert ask(Keys(echo, keys), authorization=f"Bearer {plain}").status == 200


def test_made_keys_differ_and_have_256_bits() -> None:
    keys = {make_key() for _ in range(100)}
    assert len(keys) == 100
    assert {len(key) for key in keys} == {len("nvk-") + 43}


# -- rates


@given(st.lists(st.floats(0, 30), max_size=60), st.floats(0.1, 5), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_a_bucket_never_gives_more_than_rate_and_burst(
    times: list[float], rate: float, burst: int
) -> None:
    allowance, full_at, taken = Allowance(rate, burst, None), 0.0, []
    for now in sorted(times):
        full_at, wait = allowance.take(full_at, now)
        if wait == 0:
            taken.append(now)
        else:
            assert wait <= 1 / rate + 1e-6
    for index, first in enumerate(taken):
        for count, last in enumerate(taken[index:], 1):
            assert count <= burst + (last - first) * rate + 1e-6


def test_beyond_a_rate_a_client_gets_429_and_when_to_come_back() -> None:
    now = 0.0
    app = Rates(echo, requests_per_minute=6, burst=2, clock=lambda: now)
    assert [ask(app).status for _ in range(3)] == [200, 200, 429]
    answer = ask(app)
    assert answer.headers["retry-after"] == "10"
    assert answer.error["type"] == "rate_limit_error"
    assert ask(app, method="GET").status == 200
    now = 10.0
    assert [ask(app).status for _ in range(2)] == [200, 429]


def test_each_key_has_its_own_rate() -> None:
    other = ApiKey(name="big", sha256=hash_key("b"), requests_per_minute=60, burst=5)
    app = Keys(Rates(echo, 1, 1, clock=lambda: 0.0), [ACME, other])
    statuses = [ask(app, authorization=f"Bearer {key}").status for key in (KEY, KEY, *["b"] * 6)]
    assert statuses == [200, 429, *[200] * 5, 429]


def test_concurrent_requests_of_a_client_are_bounded_and_given_back() -> None:
    async def main() -> list[int]:
        stream = Stream()
        app = Rates(stream, max_concurrent=2)
        first = [asyncio.create_task(call(app, scope_of())) for _ in range(2)]
        await stream.started.wait()
        await asyncio.sleep(0)
        statuses = [(await call(app, scope_of())).status]
        first[0].cancel()
        await asyncio.sleep(0)
        stream.go.set()
        statuses.append((await call(app, scope_of())).status)
        return statuses

    assert asyncio.run(main()) == [429, 200]


def test_a_client_that_has_read_all_of_an_answer_may_send_the_next_request() -> None:
    """Even to another front, which sees the count of this one."""
    ledger = Ledger.create(columns=2)
    other = Rates(echo, max_concurrent=1, ledger=second_front(ledger))
    statuses: list[int] = []

    async def send(message: Message) -> None:
        statuses.append((await call(other, scope_of())).status)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}"}

    asyncio.run(Rates(echo, max_concurrent=1, ledger=ledger)(scope_of(), receive, send))
    assert statuses == [429, 200]  # before the answer's first bytes, and before its last


# -- the queue


def test_the_queue_holds_rows_and_waiting_samples_and_no_more() -> None:
    now = 0.0
    admission = Admission(rows=2, max_queue=1, clock=lambda: now)
    with admission.enter(), admission.enter(2):
        with pytest.raises(ApiError) as caught, admission.enter():
            pass
        assert caught.value.status == 429
        assert int((caught.value.headers or {})["retry-after"]) >= 1
        now = 1000.0
    assert admission.taken == 0
    with admission.enter(3), pytest.raises(ApiError) as caught, admission.enter():
        pass
    assert (caught.value.headers or {})["retry-after"] == "60"


def test_a_request_of_more_samples_than_places_is_400() -> None:
    with pytest.raises(ApiError) as caught, Admission(2, 2).enter(5):
        pass
    assert (caught.value.status, caught.value.param) == (400, "n")


def test_places_are_given_back_where_a_request_fails() -> None:
    admission = Admission(1, 0)
    with pytest.raises(ValueError, match="x"), admission.enter():
        raise ValueError("x")
    assert admission.taken == 0


# -- several fronts


def second_front(ledger: Ledger) -> Ledger:
    """As another process maps it."""
    return Ledger(os.dup(ledger.fd), ledger.columns, 1)


def test_fronts_share_places_and_rates_and_a_dead_one_gives_its_places_back() -> None:
    first = Ledger.create(columns=2)
    second = second_front(first)
    one, other = Admission(2, 1, ledger=first), Admission(2, 1, ledger=second)
    with one.enter(2), other.enter():
        assert one.taken == other.taken == 3
        with pytest.raises(ApiError), one.enter():
            pass
        first.clear(1)  # the other has ended
        assert one.taken == 2
    fronts = [Rates(echo, 6, 3, clock=lambda: 0.0, ledger=ledger) for ledger in (first, second)]
    assert [ask(app).status for app in (*fronts, *fronts)] == [200, 200, 200, 429]


def test_no_two_fronts_look_and_add_at_one_time() -> None:
    """Each of two processes takes what is free, as often as it can: never more than there is."""
    ledger = Ledger.create(columns=2)
    program = """
import sys
from nanovllm_server.guard.ledger import QUEUE, Ledger
ledger, most = Ledger(int(sys.argv[1]), 2, int(sys.argv[2])), 0
for _ in range(20_000):
    with ledger.lock():
        if ledger.total(QUEUE) < 1:
            ledger.add(QUEUE, 1)
    most = max(most, ledger.total(QUEUE))
    ledger.put(QUEUE, 0)
print(most)
"""
    commands = [[sys.executable, "-c", program, str(ledger.fd), str(n)] for n in range(2)]
    running = [
        subprocess.Popen(one, stdout=subprocess.PIPE, pass_fds=[ledger.fd]) for one in commands
    ]
    assert [one.communicate()[0] for one in running] == [b"1\n"] * 2


def test_a_client_that_comes_beyond_the_table_takes_the_row_of_one_that_is_idle() -> None:
    """The one whose burst is whole the soonest; rows of requests under way stay."""
    ledger = Ledger.create()
    for number in range(MAX_CLIENTS):
        row = ledger.client(str(number), 0.0)
        ledger.set_full_at(row, 1000.0 + number)
    ledger.add(ledger.client("0", 0.0), 1)
    assert ledger.client("new", 5.0) == ledger.client("new", 6.0) == NUM_OWN + 1
    assert ledger.full_at(NUM_OWN + 1) == 5.0
    assert ledger.client("0", 0.0) == NUM_OWN


# -- bodies


def limited(timeout_s: float = 5.0, app: ASGIApp = echo) -> BodyLimit:
    return BodyLimit(app, max_bytes=100, max_total_bytes=250, max_depth=8, timeout_s=timeout_s)


def test_a_body_in_parts_reaches_the_app_whole() -> None:
    assert json.loads(ask(limited(), (b'{"a"', b": 1}")).body)["body"] == '{"a": 1}'


@pytest.mark.parametrize(
    ("parts", "length"),
    [((b"x" * 101,), None), ((b"x" * 60, b"x" * 60), "5"), ((b"{}",), "101"), ((b"",), "9" * 30)],
)
def test_a_body_beyond_the_limit_is_413_however_it_comes(
    parts: tuple[bytes, ...], length: str | None
) -> None:
    answer = ask(limited(), parts, **({} if length is None else {"content_length": length}))
    assert answer.status == 413
    assert "100 bytes" in answer.error["message"]
    assert answer.headers["connection"] == "close"


def test_a_body_that_stays_out_is_408() -> None:
    answer = ask(limited(timeout_s=0.05), (b"{", 60.0, b"}"))
    assert answer.status == 408


def test_bodies_beyond_the_limit_of_all_are_503_until_a_request_is_over() -> None:
    """Each counts with what has come: one that is only announced takes no memory."""

    async def main() -> None:
        stream = Stream()
        app = limited(app=stream)
        coming, announced = [b" " * 100, 60.0, b"{}"], [60.0, b" " * 100]
        held = [asyncio.create_task(call(app, scope_of(), coming)) for _ in range(2)]
        silent = asyncio.create_task(call(app, scope_of(content_length="100"), announced))
        await asyncio.sleep(0.01)
        refused = await call(app, scope_of(), (b" " * 30, b" " * 30))
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert refused.headers["connection"] == "close"
        assert refused.error["code"] == "bodies_full"
        for word in ("limit of 250", "serve.limits.max_total_body_bytes"):
            assert word in refused.error["message"]
        running = asyncio.create_task(call(app, scope_of(), (b" " * 50,)))
        await stream.started.wait()
        assert (await call(app, scope_of(), (b" ",))).status == 503
        held[0].cancel()
        stream.go.set()
        assert (await running).status == 200
        answers = [await call(app, scope_of(), (b" " * 100,)) for _ in range(3)]
        assert [one.status for one in answers] == [200] * 3
        held[1].cancel()
        silent.cancel()

    asyncio.run(main())


def test_a_limit_of_all_bodies_that_holds_not_one_is_refused() -> None:
    limits = {"max_body_bytes": 2000, "max_total_body_bytes": 1999}
    with pytest.raises(ConfigError, match=r"max_total_body_bytes.*at least max_body_bytes"):
        parse_settings({"limits": limits})


def deep(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(deep, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(deep, value), default=0)
    return 0


TEXTS = st.text(st.sampled_from('[]{}"\\é a'), max_size=6)
JSON = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


@given(JSON, st.booleans())
@settings(max_examples=200, deadline=None)
def test_nesting_is_that_of_the_json(value: object, is_ascii: bool) -> None:
    """Brackets, quotes and backslashes inside of strings do not count."""
    assert nesting(json.dumps(value, ensure_ascii=is_ascii).encode()) == deep(value)


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"a":' * 9 + b"1" + b"}" * 9, b'["' + b"\\\\" * 9 + b'",' + b"[" * 9],
)
def test_a_deep_body_is_400_before_anything_parses_it(body: bytes) -> None:
    with pytest.raises(ApiError, match="deeper than 8"):
        check_nesting(body, 8)


def test_utf_16_is_refused() -> None:
    with pytest.raises(ApiError, match="UTF-8"):
        check_nesting(json.dumps(["a"]).encode("utf-16"), 8)


@pytest.mark.parametrize("unit", [b"[],", b'"",', b'"\\\\",', b'{"":[]},', b'\\"'])
def test_four_megabytes_of_the_worst_take_a_bounded_time(unit: bytes) -> None:
    body = b"[" * 65 + unit * (4_000_000 // len(unit))
    began = time.process_time()
    with pytest.raises(ApiError):
        check_nesting(body, 64)
    assert time.process_time() - began < 1.0


# -- deadlines and the end


def test_a_request_beyond_its_deadline_is_504() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    answer = ask(Deadlines(slow, 0.02, 10))
    assert answer.status == 504
    assert answer.error["type"] == "timeout_error"
    assert ask(Deadlines(slow, 9, 10), x_request_timeout="0.02").status == 504


def test_a_stream_beyond_its_deadline_ends_with_an_error_event() -> None:
    async def main() -> tuple[Answer, bool]:
        stream = Stream()
        answer = await call(Deadlines(stream, 0.02, 10), scope_of())
        return answer, stream.was_cancelled

    answer, was_cancelled = asyncio.run(main())
    assert was_cancelled
    events = [event for event in answer.body.decode().split("\n\n") if event]
    assert events[0] == "data: 1"
    assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert not answer.messages[-1].get("more_body")


@pytest.mark.parametrize("asked", ["0", "-1", "nan", "inf", "11", "soon", "", "1e999"])
def test_a_deadline_that_is_none_is_400(asked: str) -> None:
    assert ask(Deadlines(echo, 5, 10), x_request_timeout=asked).status == 400


def test_a_timeout_of_the_app_itself_is_not_a_deadline() -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        ask(Deadlines(fails, 5, 10))


def test_a_drain_refuses_new_requests_and_lets_running_ones_finish() -> None:
    async def main() -> tuple[Answer, Answer, Answer]:
        stream = Stream()
        deadlines = Deadlines(stream, 60, 60)
        drain = Drain(deadlines, deadlines, drain_s=30)
        running = asyncio.create_task(call(drain, scope_of()))
        await stream.started.wait()
        drain.begin()
        refused = await call(drain, scope_of())
        assert drain.running == 1
        stream.go.set()
        looked = await call(drain, scope_of(method="GET"))
        return await running, refused, looked

    finished, refused, looked = asyncio.run(main())
    assert finished.body.endswith(b"[DONE]\n\n")
    assert (refused.status, refused.headers["retry-after"]) == (503, "30")
    assert refused.headers["connection"] == "close"
    assert looked.status == 200


def test_a_closed_terminal_ends_a_server_unless_it_was_started_to_outlive_it() -> None:
    """As `nohup` starts it: SIGHUP is ignored, and stays so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended, signals_as_exit():
            signal.raise_signal(signal.SIGHUP)
        assert ended.value.code == 0
        with counted_signals() as came:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGHUP, signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with signals_as_exit(), counted_signals() as came:
            signal.raise_signal(signal.SIGHUP)
        assert came == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_drain_ends_what_does_not_finish_in_its_time() -> None:
    async def main() -> Answer:
        stream = Stream()
        deadlines = Deadlines(stream, 60, 60)
        drain = Drain(deadlines, deadlines, drain_s=0.02)
        running = asyncio.create_task(call(drain, scope_of()))
        await stream.started.wait()
        drain.begin()
        answer = await running
        assert stream.was_cancelled
        assert drain.running == 0
        return answer

    assert b"shutting_down" in asyncio.run(main()).body


def test_a_client_that_reads_nothing_is_cut_at_its_deadline() -> None:
    was_cut = False

    def abort() -> None:
        nonlocal was_cut
        was_cut = True

    async def main() -> None:
        scope = scope_of()
        scope["state"]["abort_connection"] = abort

        async def stalled(message: object) -> None:
            await asyncio.Event().wait()

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": b"{}"}

        await Deadlines(Stream(), 0.02, 10)(scope, receive, stalled)

    asyncio.run(main())
    assert was_cut


# -- ids and logs


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("nanovllm_server")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(level)
    logger.propagate = propagate


@pytest.mark.parametrize(
    ("given_id", "is_kept"),
    [("abc-123", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("a\nb", False)],
)
def test_a_sane_id_is_kept_and_another_is_replaced(
    given_id: str, is_kept: bool, lines: io.StringIO
) -> None:
    answer = ask(RequestIds(AccessLog(echo)), x_request_id=given_id)
    name = answer.headers["x-request-id"]
    assert (name == given_id) == is_kept
    assert re.fullmatch(r"[\w-]+", name)
    assert json.loads(lines.getvalue())["request_id"] == name


def test_a_log_line_has_the_facts_and_no_secret(lines: io.StringIO) -> None:
    app = RequestIds(AccessLog(Keys(echo, [ACME])))
    secret = b'{"prompt": "the secret"}'
    asyncio.run(
        call(app, {**scope_of(authorization=f"Bearer {KEY}"), "query_string": b"q=1"}, [secret])
    )
    line = json.loads(lines.getvalue())
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/x", 200)
    assert line["key"] == "acme"
    assert "the secret" not in lines.getvalue()
    assert KEY not in lines.getvalue()


def test_no_client_adds_facts_to_its_line() -> None:
    """uvicorn takes the address from X-Forwarded-For, which a proxy may pass on as it came."""
    record = logging.LogRecord("x", logging.INFO, "f", 1, "request", (), None)
    record.facts = {"status": 200, "client": "1.2.3.4 status=500 key=admin"}
    words = shlex.split(TextFormatter().format(record))
    assert "status=200" in words
    assert not {"status=500", "key=admin"} & {*words}


@pytest.mark.parametrize(
    ("path", "status", "level"),
    [
        ("/live", 200, "DEBUG"),
        ("/health", 200, "DEBUG"),
        ("/health", 503, "INFO"),
        ("/ready", 503, "INFO"),
        ("/metrics", 200, "DEBUG"),
        ("/metrics", 401, "INFO"),
        ("/metrics", 500, "ERROR"),
        ("/v1/models", 200, "INFO"),
    ],
)
def test_what_is_asked_every_second_fills_no_log(path: str, status: int, level: str) -> None:
    """A page, Prometheus and a load balancer ask without end. What they are refused is seen."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body"})

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("nanovllm_server.access")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel("DEBUG")
    try:
        ask(RequestIds(AccessLog(app)), method="GET", path=path)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert [record.levelname for record in records] == [level]


def test_an_app_that_raises_gives_500_and_a_log_without_the_message(lines: io.StringIO) -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError(SECRET)

    answer = ask(RequestIds(AccessLog(fails)))
    assert answer.status == 500
    assert answer.headers["x-request-id"] in answer.error["message"]
    assert "ValueError" in lines.getvalue()
    assert "in fails" in lines.getvalue()
    assert SECRET not in lines.getvalue() + answer.body.decode()


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_exceptions_are_logged_without_what_they_quote(formatter: logging.Formatter) -> None:
    try:
        raise KeyError(SECRET)
    except KeyError as error:
        record = logging.LogRecord(
            "x", logging.ERROR, "f", 1, "failed", (), (KeyError, error, error.__traceback__)
        )
    text = formatter.format(record)
    assert "KeyError" in text
    assert SECRET not in text


# -- who may come


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1", "a.example"]
)
def test_a_server_beyond_loopback_needs_keys_or_consent(host: str) -> None:
    expected = host.startswith("127.") or host in ("::1", "localhost")
    assert is_loopback(host) == expected
    check_exposure(host, has_keys=True, allow_anonymous=False)
    check_exposure(host, has_keys=False, allow_anonymous=True)
    if not expected:
        with pytest.raises(ConfigError, match="--allow-anonymous"):
            check_exposure(host, has_keys=False, allow_anonymous=False)


@pytest.mark.parametrize(
    ("method", "host", "origin", "status"),
    [
        ("POST", "127.0.0.1:8000", None, 200),
        ("POST", "127.0.0.2:8000", None, 200),
        ("GET", "127.0.0.1.evil.example", None, 403),
        ("GET", "", None, 403),
        ("POST", "localhost:8000", "http://localhost:8000", 200),
        ("POST", "[::1]:8000", "http://[::1]:8000", 200),
        ("POST", "localhost:8000", "https://ok.example", 200),
        ("POST", "localhost:8000", "https://evil.example", 403),
        ("POST", "localhost:8000", "null", 403),
        ("POST", "localhost:8000", "http://[x", 403),
        ("POST", "localhost:8000", "", 403),
        ("POST", "LocalHost:8000", "HTTP://localhost:8000", 200),
        ("GET", "localhost:8000", "https://evil.example", 200),
        ("GET", "evil.example:8000", None, 403),
        ("GET", "localhost.evil.example", None, 403),
    ],
)
def test_pages_of_others_cannot_use_a_server_without_keys(
    method: str, host: str, origin: str | None, status: int
) -> None:
    headers = {"host": host} if origin is None else {"host": host, "origin": origin}
    app = LocalOnly(echo, ["https://ok.example"])
    assert ask(app, method=method, **headers).status == status


# -- what is asked


@given(st.none() | st.text(max_size=8), st.none() | st.text(max_size=8))
def test_two_keys_never_have_a_salt_in_common(first: str | None, second: str | None) -> None:
    salts = {cache_salt(key, given) for key in ("a", "b", None) for given in (first, second)}
    assert len(salts) == 3 * len({first, second})


def test_requests_without_key_and_salt_share() -> None:
    assert cache_salt(None, None) == b""


@pytest.mark.parametrize(
    "check",
    [
        lambda limits: limits.check_text("x" * 161, "prompt"),
        lambda limits: limits.check_messages(["x" * 81, "x" * 80]),
        lambda limits: limits.check_messages([""] * 5000),
        lambda _: check_template_kwargs({"a": "x" * 20_000}),
        lambda _: check_stops(["x" * 1500] * 2),
        lambda _: check_stops(["whole", "half \ud800"]),
        lambda _: check_arguments({"constraints": {"a": {"b": "x" * 2**20}}}, 1),
        lambda _: check_arguments({"logits_processors": {str(i): {} for i in range(9000)}}, 16),
        lambda _: check_echo(["x" * 2**20, "y" * 2**20], 9),
        lambda _: check_logprobs(20, 199_729),
    ],
)
def test_what_is_too_large_is_400_before_it_is_encoded(check: object) -> None:
    with pytest.raises(ApiError) as caught:
        check(PromptLimits.of(10))  # type: ignore[operator]
    assert caught.value.status == 400
    assert caught.value.param


@pytest.mark.parametrize("check", [check_template_kwargs, partial(check_arguments, num_prompts=1)])
def test_four_megabytes_of_small_values_are_measured_in_a_moment(check: Any) -> None:
    """All streams of the server wait meanwhile. A search for cycles would take a quarter second."""
    values = {"a": {f"k{place}": [[]] for place in range(280_000)}}
    began = time.process_time()
    with pytest.raises(ApiError):
        check(values)
    assert time.process_time() - began < 0.3


def test_a_public_path_that_no_request_has_is_refused() -> None:
    """Or a probe of it would get 401, and restart the server for ever."""
    assert ServerSettings(public_paths=("/", "/health")).public_paths == ("/", "/health")
    with pytest.raises(ValidationError, match="'health' begins without a slash"):
        ServerSettings(public_paths=("/", "health"))


# -- all of them


def test_a_page_of_an_allowed_origin_asks_without_a_key_and_reads_every_answer() -> None:
    """A browser sends no key with its question, and must be able to read a 401."""
    origin = "https://ok.example"
    settings = ServerSettings(cors=CorsSettings(allow_origins=(origin,)))
    app, _ = guarded(echo, settings, [ACME])
    wanted = {"access_control_request_method": "POST", "origin": origin}
    question = ask(app, method="OPTIONS", access_control_request_headers="authorization", **wanted)
    assert question.status == 200
    assert "authorization" in question.headers["access-control-allow-headers"].lower()
    answer = ask(app, origin=origin)
    assert answer.status == 401
    assert answer.headers["access-control-allow-origin"] == origin
    assert "x-request-id" in answer.headers


@pytest.mark.parametrize(
    ("cors", "status"), [({}, 200), ({"allow_headers": ("authorization",)}, 400)]
)
def test_a_page_may_send_any_header_unless_some_are_configured(
    cors: dict[str, tuple[str, ...]], status: int
) -> None:
    """OpenAI's client for JavaScript has headers of its own on each request."""
    origin = "https://ok.example"
    settings = ServerSettings(cors=CorsSettings(allow_origins=(origin,), **cors))
    app, _ = guarded(echo, settings, [ACME])
    wanted = {"access_control_request_method": "POST", "origin": origin}
    headers = "authorization,content-type,x-stainless-os,x-stainless-retry-count"
    question = ask(app, method="OPTIONS", access_control_request_headers=headers, **wanted)
    assert question.status == status
    if status == 200:
        assert question.headers["access-control-allow-headers"] == headers


def test_a_page_can_read_that_a_server_drains() -> None:
    origin = "https://ok.example"
    settings = ServerSettings(cors=CorsSettings(allow_origins=(origin,)))
    app, drain = guarded(echo, settings, [ACME])
    drain.is_draining = True
    answer = ask(app, origin=origin)
    assert answer.error["code"] == "shutting_down"
    assert answer.headers["access-control-allow-origin"] == origin


def test_other_origins_get_no_leave() -> None:
    app, _ = guarded(echo, ServerSettings(), [ACME])
    answer = ask(app, origin="https://evil.example", authorization=f"Bearer {KEY}")
    assert "access-control-allow-origin" not in answer.headers


def test_a_server_for_everybody_does_not_start_unasked() -> None:
    with pytest.raises(ConfigError, match="allow_anonymous"):
        guarded(echo, ServerSettings(host="0.0.0.0"), [])


def test_the_command_prints_a_key_and_the_entry_that_admits_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("acme", "123", "null"):
        serve_key(name)
        out, err = capsys.readouterr()
        [entry] = yaml.safe_load(out)
        assert entry == {"name": name, "sha256": hash_key(err.split()[-1])}


@pytest.mark.parametrize("name", ["", "a b", "a: b", "x" * 65, "é"])
def test_a_name_that_the_server_would_refuse_gets_no_key(name: str) -> None:
    with pytest.raises(ConfigError, match=r"1 to 64"):
        serve_key(name)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is a file")
def test_a_ledger_needs_no_space_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to the map of a file ends the process where the disk is full."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    ledger = Ledger.create(columns=2, max_connections=10)
    ledger.add(ledger.client("last", 0.0), 1)
    assert not os.get_inheritable(ledger.fd)


@pytest.mark.skipif(sys.platform != "linux", reason="several fronts need Linux")
def test_connections_are_as_many_as_files_allow_with_a_warning_that_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allowed = 1000
    monkeypatch.setattr(resource, "getrlimit", lambda _: (allowed, allowed))
    settings = within_file_limit(ServerSettings())
    assert settings.limits.max_connections == allowed - RESERVE
    for word in ("4096", "1000", "744", "LimitNOFILE"):
        assert word in caplog.text
    caplog.clear()
    assert within_file_limit(settings) is settings
    allowed = resource.RLIM_INFINITY
    assert within_file_limit(ServerSettings()) == ServerSettings()
    assert caplog.text == ""


def test_the_limit_of_open_files_is_raised_as_far_as_the_system_lets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def set_limit(which: int, limits: tuple[int, int]) -> None:
        asked.append((which, limits))
        raise ValueError("the system refuses")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 9000))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    raise_file_limit()
    assert asked == [(resource.RLIMIT_NOFILE, (9000, 9000))]


def test_a_shared_address_has_one_server_also_before_it_listens() -> None:
    """Linux would let the second one in while the first loads its model."""
    first = bound_sockets("127.0.0.1", 0, is_shared=True)
    port = first[0].getsockname()[1]
    claims = claimed(first)
    second = bound_sockets("127.0.0.1", port, is_shared=True)
    with pytest.raises(ConfigError, match=f"another server of this user has .*, port {port}"):
        claimed(second)
    for one in claims:
        one.close()
    for one in (*claimed(second), *first, *second):
        one.close()


def test_a_front_that_ends_again_and_again_is_a_storm_and_one_that_ends_now_and_then_is_not() -> (
    None
):
    ends: deque[float] = deque(maxlen=MAX_ENDS)
    apart = ENDS_SECONDS / (MAX_ENDS - 1) + 0.1
    assert not any(is_storm(ends, number * apart) for number in range(3 * MAX_ENDS))
    ends.clear()
    assert not any(is_storm(ends, second) for second in range(MAX_ENDS - 1))
    assert is_storm(ends, MAX_ENDS)
