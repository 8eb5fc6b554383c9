"""The server over engines in processes of their own: what stops, ends and closes is told, and no
process is left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from nanovllm_core import AsyncLLM, load_config
from nanovllm_server.server import address, make_watched_server
from nanovllm_server.settings import parse_settings
from nanovllm_server.watch.watch import observed

MAIN = [sys.executable, "-m", "nanovllm_core", "serve", "--port", "0", "--device", "cpu"]
VALUES: dict[str, Any] = {
    "device": "cpu",
    "limits": {"max_num_seqs": 4},
    "cache": {"num_blocks": 256, "block_size": 16},
}
ERRORS = ("request_success_total", 'finished_reason="error"')
"""The metric of requests that ended with an error."""
HEALTH = {"ping_s": 0.05, "stuck_after_s": 1.0}
LONG = {"prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True, "temperature": 0}


PATIENCE = 120.0
"""Seconds that anything may take beside other work on the cores; alone it takes five at most."""


def wait_for(condition: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Wait until a condition holds; fail where it does not within the time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not come true in {seconds} s"
        time.sleep(0.01)


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def post(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
    """The open answer to a completion."""
    headers = {"content-type": "application/json", **(headers or {})}
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, headers)
    return urllib.request.urlopen(request, timeout=PATIENCE)


class Stream:
    """A stream that a thread reads: the text so far, and how it ended."""

    def __init__(
        self,
        url: str,
        body: dict[str, Any] = LONG,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.text = ""
        self.error: dict[str, Any] | None = None
        self.is_done = False
        self._answer = post(url, {**body, "stream": True}, headers)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError):  # a server that is killed
            self._read_events()

    def _read_events(self) -> None:
        for line in self._answer:
            if line == b"data: [DONE]\n":
                self.is_done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    self.error = event["error"]
                else:
                    self.text += event["choices"][0]["text"]

    def wait(self) -> Stream:
        """Until the server has ended it."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self


def pids(llm: AsyncLLM) -> list[int]:
    """The processes of the engines that run."""
    return [*llm._client.pids.values()]  # type: ignore[attr-defined]


def metric(url: str, name: str, labels: str = "") -> float:
    pattern = rf"^nanovllm:{name}{{{labels}[^}}]*}} (.*)$"
    return sum(map(float, re.findall(pattern, get(f"{url}/metrics")[1], re.MULTILINE)))


@contextmanager
def served(**values: Any) -> Iterator[tuple[str, AsyncLLM, Any]]:
    """A server of engines in processes, on a thread of this one; its address, door and watch."""
    client = {"name": "processes", "options": values.pop("options", {})}
    values = {**VALUES, "engine_client": client, **values}
    with observed(load_config("demo", overrides=values)) as config:
        llm = AsyncLLM.from_config(config)
        settings = {"port": 0, "health": HEALTH, "drain_s": 20.0}
        server, watch = make_watched_server(llm, parse_settings(settings))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        wait_for(lambda: server.started)
        url = address(server)
        try:
            wait_for(lambda: watch.monitor.not_ready is None)
            yield url, llm, watch
        finally:
            server.should_exit = True
            thread.join(30)
            llm.close()
        assert not thread.is_alive()


@pytest.mark.slow
def test_two_engines_behind_the_server_are_counted_watched_and_survived() -> None:
    """One server through all of it: counts, salts, health of an engine that stops, a stream that
    outlives its engine, and the end of the last one."""
    options = {"router": "prefix", "stall_seconds": 60}
    with served(data_parallel_size=2, options=options) as (url, llm, watch):
        assert watch._service.admission.places == 2 * 4 + 256, "the rows of both engines"
        assert metric(url, "num_engines") == 2

        # Both count, each into a file of its own; /metrics sums them.
        def counted() -> tuple[float, float]:
            return metric(url, "request_success_total"), metric(url, "generation_tokens_total")

        requests, tokens = counted()
        for prompt in range(4):
            body = {"prompt": [prompt + 5] * 40, "max_tokens": 5, "ignore_eos": True}
            assert json.loads(post(url, body).read())["usage"]["completion_tokens"] == 5
        # Beside them the monitor may have asked for a token or more, where a step took long.
        wait_for(lambda: counted()[0] >= requests + 4)
        wait_for(lambda: counted()[1] - counted()[0] == tokens - requests + 4 * 5 - 4)
        folder = Path(watch.monitor._llm.config.observers[-1].options["folder"])
        assert len([*folder.glob("*.values")]) == 2 + 1, "the server's has what no engine counts"

        # The engine's process says which plugins serve; the door's says where the engine is.
        used = {one["kind"]: one["name"] for one in json.loads(get(f"{url}/plugins")[1])["plugins"]}
        assert used["attention decode"] == "sdpa"
        assert (used["model"], used["engine_client"]) == ("Qwen3ForCausalLM", "processes")

        # Salts cross the wire: the same prompt is found under its own salt alone.
        def cached(salt: str) -> int:
            body = {"prompt": [9] * 50, "max_tokens": 1, "cache_salt": salt}
            usage = json.loads(post(url, body).read())["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert [cached(salt) for salt in ("a", "b", "a", "b")] == [0, 0, 48, 48]

        # What a service manager sends to every process is the door's to handle.
        first, second = pids(llm)
        os.kill(first, signal.SIGTERM)

        # A stopped engine: 503 within the bound, with the reason; 200 once it goes on.
        whole = Stream(url).wait()
        assert whole.is_done
        streams = [Stream(url, {**LONG, "prompt": prompt}) for prompt in ([5, 6, 7], [8] * 40)]
        os.kill(first, signal.SIGSTOP)
        stopped = time.monotonic()
        wait_for(lambda: get(f"{url}/health")[0] == 503)
        assert time.monotonic() - stopped < HEALTH["stuck_after_s"] + 2
        status, answer = get(f"{url}/ready")
        assert status == 503
        assert "has not answered for" in json.loads(answer)["reason"]
        assert "process is stopped" in json.loads(answer)["reason"]
        os.kill(first, signal.SIGCONT)
        wait_for(lambda: get(f"{url}/ready")[0] == 200)

        # One of two is killed: its streams go on with the other, and the server is well.
        again = [Stream(url) for _ in range(4)]
        wait_for(lambda: all(len(stream.text) > 20 for stream in again))
        os.kill(first, signal.SIGKILL)
        assert [stream.wait().text for stream in again] == [whole.text] * 4
        assert all(stream.wait().is_done for stream in streams)
        assert pids(llm) == [second]
        wait_for(lambda: get(f"{url}/ready")[0] == 200)
        assert metric(url, "generation_tokens_total") > tokens + 20, "it left its counts behind"
        wait_for(lambda: metric(url, "num_engines") == 1)

        # The last one: an error event, no hanging client, and the reason until the server ends.
        last = Stream(url)
        wait_for(lambda: last.text)
        os.kill(second, signal.SIGKILL)
        assert last.wait().error == {
            "message": "the request failed in the server: EngineError",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
        assert not last.is_done
        wait_for(lambda: watch.monitor.failure)
        assert "signal SIGKILL" in str(watch.monitor.failure)
    assert not folder.exists()


def test_an_error_of_the_start_is_told_with_its_process_and_ends_with_status_1() -> None:
    """It is the engine's own error, and nothing is left of its process."""
    process = subprocess.run(
        [*MAIN, "--model", "./nowhere"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert process.returncode == 1
    assert re.search(r"^error: engine 0 \(process \d+\): .*nowhere", process.stderr, re.MULTILINE)
    assert "Traceback" not in process.stderr
    assert is_gone(int(re.findall(r"process (\d+)", process.stderr)[0]))


def is_gone(pid: int) -> bool:
    """Gone, or a zombie that its new parent has not reaped yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


@contextmanager
def command(
    *words: str, log: str | Path = os.devnull, files: int | None = None
) -> Iterator[tuple[str, subprocess.Popen[str], int]]:
    """`nanovllm serve`: its address, its process, and the engine's. Nothing is left of them.

    Its log is a file: a pipe that nobody reads is full after some hundred requests, and the server
    would hang in writing the next line. `files` is its limit of open files.
    """
    limited = [] if files is None else ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh"]
    with open(log, "w") as errors:
        process = subprocess.Popen(
            [*limited, *MAIN, "--set", "limits.max_num_seqs=4", *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0,
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        wait_for(lambda: get(f"{url}/ready")[0] == 200)
        engine = engine_of(process.pid)
        yield url, process, engine
        assert is_gone(engine)
    finally:
        process.kill()
        process.communicate()


def children_of(pid: int) -> dict[int, str]:
    """The first words of the commands of the processes that this one started, by their ids.

    Whatever ends while it is looked at is left out, a thread of this process too.
    """
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, (task / "children").read_text().split()):
                with suppress(FileNotFoundError, ProcessLookupError):
                    words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
                    found[child] = " ".join(words[:4])
    return found


def engine_of(pid: int) -> int:
    """The only child of a server that is no front."""
    [engine] = [child for child, line in children_of(pid).items() if "nanovllm front" not in line]
    return engine


def end(process: subprocess.Popen[str]) -> int:
    """The status of a server."""
    process.communicate(timeout=PATIENCE)
    return process.returncode


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_to_every_process_of_a_service_drains_it(name: str) -> None:
    """As systemd and terminals send it: the stream finishes, the status is 0."""
    with command() as (url, process, engine):
        stream = Stream(url)
        wait_for(lambda: stream.text)
        for pid in (engine, process.pid):
            os.kill(pid, getattr(signal, name))
        assert stream.wait().is_done
        assert end(process) == 0


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_terminal_that_closes_drains_the_server(processes: str) -> None:
    with command("--processes", processes) as (url, process, _):
        stream = Stream(url)
        wait_for(lambda: stream.text)
        process.send_signal(signal.SIGHUP)
        assert stream.wait().is_done
        assert end(process) == 0


@pytest.mark.slow
def test_a_server_whose_engine_is_killed_ends_with_status_1(tmp_path: Path) -> None:
    """The stream ends with an error, and the log has the signal."""
    log = tmp_path / "log"
    with command(log=log) as (url, process, engine):
        stream = Stream(url)
        wait_for(lambda: stream.text)
        os.kill(engine, signal.SIGKILL)
        assert stream.wait().error is not None
        assert end(process) == 1
        assert f"engine 0 (process {engine}) ended with signal SIGKILL" in log.read_text()


@pytest.mark.slow
def test_a_server_whose_engine_is_killed_starts_another_where_that_is_set() -> None:
    """One that is stopped for longer than `stall_seconds` is killed, and replaced too."""
    restart = ["--set", "serve.health.on_engine_death=restart", "--set", "serve.health.ping_s=0.1"]
    stall = ["--set", "engine_client.options.stall_seconds=5"]
    with command(*restart, *stall) as (url, process, _):
        for end_it in (signal.SIGKILL, signal.SIGSTOP):
            counted, failed = metric(url, "generation_tokens_total"), metric(url, *ERRORS)
            stream = Stream(url)
            wait_for(lambda stream=stream: stream.text)  # type: ignore[misc]
            dying = engine_of(process.pid)
            os.kill(dying, end_it)
            assert stream.wait().error is not None
            wait_for(lambda: get(f"{url}/ready")[0] == 503)
            wait_for(lambda dying=dying: is_gone(dying))  # type: ignore[misc]
            wait_for(lambda: get(f"{url}/ready")[0] == 200)
            body = {"prompt": [5], "max_tokens": 4, "ignore_eos": True}
            assert json.loads(post(url, body).read())["usage"]["completion_tokens"] == 4
            assert metric(url, "generation_tokens_total") > counted + 4
            assert metric(url, *ERRORS) == failed + 1
        process.terminate()
        assert end(process) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 0), ("SIGINT", 130)])
def test_a_signal_during_the_start_leaves_no_process_and_no_folder(name: str, status: int) -> None:
    with tempfile.TemporaryDirectory() as place:  # its path is short, as a socket's must be
        environment = {**os.environ, "TMPDIR": place}
        process = subprocess.Popen(MAIN, env=environment, stdout=subprocess.PIPE, text=True)
        wait_for(lambda: [*Path(place).glob("nanovllm-engines-*/0")])  # its engine listens
        engine = engine_of(process.pid)
        process.send_signal(getattr(signal, name))
        assert process.communicate(timeout=PATIENCE)[0] == ""
        assert process.returncode == status
        assert is_gone(engine)
        assert [*Path(place).iterdir()] == []


@pytest.mark.slow
def test_more_idle_connections_than_files_harm_no_stream_and_not_the_engine(tmp_path: Path) -> None:
    """The server keeps files for itself, and says how many connections that leaves."""
    log = tmp_path / "log"
    with command("--set", "serve.health.ping_s=0.05", log=log, files=256) as (url, process, _):
        stream = Stream(url)
        wait_for(lambda: stream.text)
        place = urllib.parse.urlsplit(url)
        idle = [socket.create_connection((place.hostname, place.port)) for _ in range(300)]  # type: ignore[arg-type]
        assert stream.wait().is_done
        for one in idle:
            one.close()
        wait_for(lambda: get(f"{url}/health")[0] == 200)
        process.terminate()
        assert end(process) == 0
    assert "connections are limited to 128" in log.read_text()
    assert "the engine ended" not in log.read_text()


@pytest.mark.slow
def test_spans_of_the_engine_are_in_the_trace_of_the_client() -> None:
    """The request's label crosses the wire, and the engine's process sends its span itself."""
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra `tracing`")
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    trace = "0af7651916cd43dd8448eb211c80319c"
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    with command("--set", f"serve.tracing.endpoint={endpoint}") as (url, process, _):
        headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
        post(url, {"prompt": [5], "max_tokens": 2}, headers).read()
        process.terminate()
        assert end(process) == 0
    collector.shutdown()
    [engine] = [body for body in bodies if b"engine.request" in body]
    assert bytes.fromhex(trace) in engine


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_no_engine() -> None:
    with command() as (url, process, engine):
        stream = Stream(url)
        wait_for(lambda: stream.text)
        process.kill()
        wait_for(lambda: is_gone(engine))
