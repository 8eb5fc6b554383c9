"""Several front processes of one server: one engine, one address, and limits that hold for all."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai import OpenAI

from nanovllm_core import EngineConfig
from nanovllm_core.errors import ConfigError
from nanovllm_server.fronts.child import Front
from nanovllm_server.fronts.fronts import MAX_ENDS, START_SECONDS, Fronts
from nanovllm_server.guard.hosts import check_address
from nanovllm_server.guard.keys import hash_key
from nanovllm_server.settings import ServerSettings
from nanovllm_server.watch.watch import folder_of, observed

from .test_engine_process import Stream, children_of, get, is_gone, post, wait_for

ROWS, QUEUE, FRONTS = 8, 4, 2
SETTINGS = {
    "device": "cpu",
    "limits": {"max_num_seqs": ROWS},
    "cache": {"num_blocks": 512, "block_size": 16},
    "serve": {
        "processes": FRONTS,
        "port": 0,
        "drain_s": 20,
        "health": {"ping_s": 0.1},
        "limits": {"max_queue": QUEUE},
    },
}
KEYS = [
    {"name": "acme", "max_concurrent": 2},
    {"name": "rated", "requests_per_minute": 0.01, "burst": 3},
    {"name": "big"},
]
LONG = {"prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}


class Server:
    """`nanovllm serve`, with everything that it makes in a folder of its own."""

    def __init__(self, place: str, serve: dict[str, Any], **values: Any) -> None:
        file, self.place = Path(place) / "server.yaml", Path(place)
        both = {**SETTINGS, **values, "serve": {**SETTINGS["serve"], **serve}}  # type: ignore[dict-item]
        file.write_text(json.dumps(both))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nanovllm_core", "serve", "--config", str(file)],
            stdout=subprocess.PIPE,
            stderr=(Path(place) / "log").open("w"),
            env={**os.environ, "TMPDIR": place},
            text=True,
            process_group=0,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]
        self.headers = {"authorization": "Bearer big"} if "keys" in serve else {}
        wait_for(lambda: all(get(f"{self.url}/ready")[0] == 200 for _ in range(8)))

    @property
    def children(self) -> dict[str, list[int]]:
        """The process ids of its fronts and its engines."""
        found: dict[str, list[int]] = {"front": [], "engine": []}
        for pid, line in children_of(self.process.pid).items():
            kind = next((one for one in found if f"nanovllm {one}" in line), "")
            if kind:
                found[kind].append(pid)
        return found

    def metric(self, pattern: str) -> float:
        request = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=10)
        request.request("GET", "/metrics", headers=self.headers)
        text = request.getresponse().read().decode()
        request.close()
        return sum(map(float, re.findall(rf"^nanovllm:{pattern} (.*)$", text, re.MULTILINE)))

    def stream(self) -> Stream:
        """A long one, which a thread reads."""
        return Stream(self.url, LONG, self.headers)

    def statuses(self, body: dict[str, Any], count: int, key: str = "big") -> list[int]:
        """Of requests one after the other, each on a connection of its own."""
        found = []
        for _ in range(count):
            try:
                with post(self.url, body, {"authorization": f"Bearer {key}"}) as answer:
                    answer.read()
                    found.append(answer.status)
            except urllib.error.HTTPError as error:
                found.append(error.code)
        return found

    def wait_idle(self) -> None:
        """Until nothing runs and every block is free."""
        for pattern in ("num_requests_running{.*}", "kv_cache_usage_perc{.*}"):
            wait_for(lambda pattern=pattern: self.metric(pattern) == 0)  # type: ignore[misc]
        wait_for(lambda: self.metric("http_requests_in_progress") == 1)  # the question itself

    def log(self) -> str:
        return (self.place / "log").read_text()

    def end(self) -> int:
        """Its status; nothing is left behind."""
        children = [pid for pids in self.children.values() for pid in pids]
        status = self.process.wait(60)
        assert all(map(is_gone, children))
        assert [one.name for one in self.place.iterdir() if one.name.startswith("nanovllm")] == []
        return status


@contextmanager
def running(**values: Any) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as place:  # its path is short, as a socket's must be
        server = None
        try:
            server = Server(place, values.pop("serve", {}), **values)
            yield server
        finally:
            if server is not None:
                with suppress(ProcessLookupError):
                    server.process.kill()
                server.process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """For tests in their order: the last one ends it. Its keys have limits."""
    keys = [{**one, "sha256": hash_key(str(one["name"]))} for one in KEYS]
    with running(serve={"keys": keys}) as server:
        yield server


def client_of(url: str, key: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def stream_text(client: OpenAI, number: int) -> str:
    """Greedy, sampled with a seed, and searched for a stop string, by the number."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "seed": number},
        {"temperature": 0, "stop": ["the"], "extra_body": {"min_tokens": number}},
    ]
    chunks = client.completions.create(
        model="demo", prompt="Once upon " * (1 + number), max_tokens=24, stream=True,
        **kinds[number % 3],
    )  # fmt: skip
    return "".join(chunk.choices[0].text for chunk in chunks)


def test_streams_of_two_fronts_are_those_of_one(server: Server, server_url: str) -> None:
    """Bit for bit, with OpenAI's client, twelve at once, each on a connection of its own."""
    one = [stream_text(client_of(server_url, "none"), number) for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        clients = [client_of(server.url, "big") for _ in range(12)]
        assert [*pool.map(stream_text, clients, range(12))] == one
    assert len(server.children["front"]) == FRONTS
    server.wait_idle()


def test_a_client_that_leaves_frees_its_blocks_whichever_front_it_had(server: Server) -> None:
    streams = [post(server.url, {**LONG, "stream": True}, server.headers) for _ in range(6)]
    for stream in streams:
        stream.readline()
        stream.close()
    server.wait_idle()


def test_limits_of_a_key_and_of_the_queue_hold_over_all_fronts(server: Server) -> None:
    """Requests at one time, the rate, and the places; all are given back."""
    acme = {"authorization": "Bearer acme"}
    streams = [post(server.url, {**LONG, "stream": True}, acme) for _ in range(2)]
    assert server.statuses(SHORT, 6, "acme") == [429] * 6
    for stream in streams:
        stream.close()
    server.wait_idle()
    assert server.statuses(SHORT, 2, "acme") == [200] * 2
    assert server.statuses(SHORT, 6, "rated") == [200] * 3 + [429] * 3
    whole = {**LONG, "n": ROWS + QUEUE, "stream": True}
    with post(server.url, whole, server.headers) as stream:
        stream.readline()
        assert server.statuses(SHORT, 6) == [429] * 6
    server.wait_idle()
    assert server.statuses({**SHORT, "n": ROWS + QUEUE}, 2) == [200] * 2


def test_metrics_plugins_and_prefixes_are_the_same_whichever_front_answers(server: Server) -> None:
    counted = 'http_requests_total{handler="/v1/models",method="GET",status="200"}'
    before = server.metric(counted)
    for _ in range(6):
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        connection.request("GET", "/v1/models", headers=server.headers)
        assert connection.getresponse().status == 200
        connection.close()
    wait_for(lambda: server.metric(counted) == before + 6)
    assert {server.metric(counted) for _ in range(6)} == {before + 6}

    def cached(key: str) -> int:
        body = {"prompt": [9] * 50, "max_tokens": 1}
        answer = json.loads(post(server.url, body, {"authorization": f"Bearer {key}"}).read())
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached("big"), *(cached("big") for _ in range(4)), cached("acme")] == [0, *[48] * 4, 0]


@pytest.mark.slow
def test_a_front_that_is_killed_takes_its_own_requests_along_and_is_started_again(
    server: Server,
) -> None:
    """Its clients see their connections end; the streams of the other one go on, bit for bit."""
    total = 'http_requests_total{handler="/v1/completions",method="POST",status="200"}'
    whole = server.stream().wait()
    server.wait_idle()  # a client sees the end of an answer before it is counted
    before = server.metric(total)
    first, second = server.children["front"]
    streams = [server.stream() for _ in range(ROWS)]
    wait_for(lambda: all(stream.text for stream in streams))
    os.kill(first, signal.SIGKILL)
    for stream in streams:
        stream.wait()
    left = [stream for stream in streams if stream.is_done]
    assert [stream.text for stream in left] == [whole.text] * len(left)
    assert all(whole.text.startswith(stream.text) for stream in streams)
    wait_for(lambda: len(server.children["front"]) == FRONTS)
    assert first not in server.children["front"]
    assert second in server.children["front"]
    assert f"front 0 (process {first}) ended with status -9" in server.log()
    server.wait_idle()
    assert server.statuses({**SHORT, "n": ROWS + QUEUE}, 4) == [200] * 4
    wait_for(lambda: server.metric(total) == before + len(left) + 4)  # counts outlive a front


@pytest.mark.slow
def test_sigterm_drains_all_fronts_together(server: Server) -> None:
    """Running streams finish, new requests are refused whichever front gets them, status 0."""
    stream = server.stream()
    wait_for(lambda: stream.text)
    for pid in (*server.children["front"], server.process.pid):  # as service managers send it
        os.kill(pid, signal.SIGTERM)
    wait_for(lambda: get(f"{server.url}/ready")[0] == 503)
    wait_for(lambda: server.statuses(SHORT, 6) == [503] * 6)
    assert not stream.is_done, "the front without a request listens for as long as the other"
    assert stream.wait().is_done
    assert server.end() == 0


@pytest.mark.slow
def test_a_second_signal_ends_running_requests_at_once() -> None:
    with running(engine_client="thread") as server:
        stream = Stream(server.url, LONG)
        wait_for(lambda: stream.text)
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: get(f"{server.url}/ready")[0] == 503)
        server.process.send_signal(signal.SIGINT)
        error = stream.wait().error
        assert error is not None
        assert error["code"] == "shutting_down"
        assert server.end() == 0


@pytest.mark.slow
def test_the_end_of_the_engine_ends_the_server_or_starts_another_engine() -> None:
    """Every stream ends with an error either way, and no front is left without an engine."""
    for policy in ("restart", "exit"):
        with running(serve={"health": {"ping_s": 0.1, "on_engine_death": policy}}) as server:
            streams = [Stream(server.url, LONG) for _ in range(4)]
            wait_for(lambda streams=streams: all(one.text for one in streams))  # type: ignore[misc]
            fronts, [engine] = server.children["front"], server.children["engine"]
            os.kill(engine, signal.SIGKILL)
            assert all(stream.wait().error for stream in streams)
            if policy == "exit":
                assert server.end() == 1
                continue
            wait_for(lambda: len(server.children["engine"]) == 1)
            wait_for(lambda: all(get(f"{server.url}/ready")[0] == 200 for _ in range(8)))
            assert server.children["front"] == fronts, "they go on with the new engine"
            assert server.statuses(SHORT, 6) == [200] * 6
            assert server.metric('request_success_total{finished_reason="error",.*}') == 4
            server.process.terminate()
            assert server.end() == 0


@pytest.mark.slow
def test_a_front_that_is_stopped_is_killed_and_replaced() -> None:
    with running(serve={"health": {"ping_s": 0.1, "stuck_after_s": 1.0}}) as server:
        first, _ = server.children["front"]
        os.kill(first, signal.SIGSTOP)
        wait_for(lambda: is_gone(first), 20)
        wait_for(lambda: len(server.children["front"]) == FRONTS)
        wait_for(lambda: server.statuses(SHORT, 6) == [200] * 6)


@pytest.mark.slow
def test_a_dead_front_ends_the_server_where_that_is_set_and_a_dead_server_its_fronts() -> None:
    with running(serve={"health": {"on_front_death": "exit"}}) as server:
        os.kill(server.children["front"][1], signal.SIGKILL)
        assert server.end() == 1
    with running() as server:
        children = [pid for pids in server.children.values() for pid in pids]
        server.process.kill()
        wait_for(lambda: all(map(is_gone, children)))


@pytest.mark.slow
def test_what_a_front_cannot_start_with_ends_the_server_with_its_reason() -> None:
    command = [sys.executable, "-m", "nanovllm_core", "serve", "--port", "0", "--device", "cpu"]
    words = ["--processes", "2", "--engine-client", "thread", "--set", "serve.routes=[nobody]"]
    ended = subprocess.run([*command, *words], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert re.search(r"^error: .*nobody", ended.stderr, re.MULTILINE)
    assert "Traceback" not in ended.stderr


@pytest.fixture
def unstarted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fronts]:
    """What starts fronts, with none."""
    config = EngineConfig.model_validate({"model": "demo", "device": "cpu"})
    with observed(config) as watched:
        fronts = Fronts(watched, ServerSettings(port=0, processes=FRONTS))
        monkeypatch.setattr(fronts, "_spawn", lambda column: None)
        try:
            yield fronts
        finally:
            fronts._fronts.clear()
            assert fronts._close()


@pytest.mark.parametrize("unread", [b"", b"."])
def test_a_front_ends_with_the_process_that_started_it(
    unread: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that one has not read the last beat: then the end of its socket is a reset."""
    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda *killed: ended.append(killed))
    theirs, ours = socket.socketpair()
    ours.sendall(unread)
    front = Front(ours)
    theirs.close()
    front._obey()
    assert ended == [(0, signal.SIGKILL)]


def stub(column: int, **values: Any) -> Any:
    """A front that has no process."""
    facts = {"column": column, "status": -9, "pid": 2**22 + column, "is_listening": True}
    return SimpleNamespace(**{**facts, "silence": 0.0, "release": lambda until: None, **values})


def test_a_front_that_ends_again_and_again_ends_the_server(
    unstarted: Fronts, caplog: pytest.LogCaptureFixture
) -> None:
    """Instead of a storm of starts; another front's ends are counted apart."""

    def goes_on(column: int) -> bool:
        unstarted._fronts[column] = stub(column)
        return unstarted._note_end(unstarted._fronts[column], is_draining=False)

    assert goes_on(1)
    assert [goes_on(0) for _ in range(MAX_ENDS)] == [True] * (MAX_ENDS - 1) + [False]
    assert f"front 0 has ended {MAX_ENDS} times in" in caplog.text
    assert goes_on(1)


def test_a_front_that_never_listens_is_killed_once_there_is_an_engine(unstarted: Fronts) -> None:
    killed: list[int] = []
    unstarted._fronts[0] = stub(0, is_listening=False, kill=lambda: killed.append(0))
    unstarted._starting = threading.Thread()
    unstarted._end_silent(START_SECONDS + 1)
    assert not killed, "it waits for the engine"
    unstarted._starting = None
    unstarted._end_silent(START_SECONDS - 1)
    assert not killed
    unstarted._end_silent(2.0)
    unstarted._end_silent(2.0)
    assert killed == [0]


def test_a_new_engine_starts_though_the_folder_of_counts_was_removed(unstarted: Fronts) -> None:
    """And fronts that start later have their folder in it."""
    folder = folder_of(unstarted._config)
    assert folder is not None
    shutil.rmtree(folder)
    unstarted._start_again()
    assert unstarted._start_error is None
    assert (folder / "http").is_dir()


def test_a_second_server_cannot_share_the_address_of_one_that_is_starting(
    unstarted: Fronts,
) -> None:
    """Linux would give it a part of the connections, once both listen."""
    check_address("127.0.0.1", unstarted._port)  # nobody listens yet
    with observed(EngineConfig.model_validate({"model": "demo", "device": "cpu"})) as watched:
        folders = {*Path(tempfile.gettempdir()).glob("nanovllm-share-*")}
        settings = ServerSettings(port=unstarted._port, processes=FRONTS)
        with pytest.raises(ConfigError, match="another server of this user"):
            Fronts(watched, settings)
        assert {*Path(tempfile.gettempdir()).glob("nanovllm-share-*")} <= folders
