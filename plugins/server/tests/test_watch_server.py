"""A whole server whose engine hangs or ends: what its clients, its probes and its parent see."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nanovllm_core import AsyncLLM, load_config
from nanovllm_server.server import address, make_watched_server
from nanovllm_server.settings import parse_settings
from nanovllm_server.watch.watch import folder_of, observed

SERVER = Path(__file__).with_name("breaking_server.py")


def wait_for(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Wait until a condition holds; fail where it does not within the time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not come true in {seconds} s"
        time.sleep(0.01)


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@contextmanager
def served(llm: AsyncLLM, **settings: Any) -> Iterator[str]:
    """A server of its own for `llm`, on a thread; its address."""
    server, watch = make_watched_server(llm, parse_settings({"port": 0, **settings}))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    url = address(server)
    wait_for(lambda: watch.monitor.not_ready is None)
    yield url
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def complete(url: str) -> int:
    """The status of a request for a few tokens."""
    body = json.dumps({"model": "demo", "prompt": "Once", "max_tokens": 4}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_probes_say_503_while_a_step_hangs_and_no_client_hangs() -> None:
    """/health and /ready with the reason, /metrics with a 0; the running request ends at its
    deadline, while the step still hangs; all is well once the step has ended."""
    llm = AsyncLLM("demo", device="cpu", limits={"max_num_seqs": 2}, cache={"num_blocks": 256})
    go_on = threading.Event()
    executor: Any = llm.engine._executor
    collect = executor.collect

    def hang() -> Any:
        assert go_on.wait(30)
        return collect()

    health = {"ping_s": 0.05, "stuck_after_s": 0.3}
    with served(llm, health=health, limits={"timeout_s": 1.0}) as url:
        executor.collect = hang
        statuses: list[int] = []
        client = threading.Thread(target=lambda: statuses.append(complete(url)))
        client.start()
        wait_for(lambda: get(f"{url}/health")[0] == 503)
        status, body = get(f"{url}/ready")
        assert status == 503
        assert "the engine has not answered for" in json.loads(body)["reason"]
        assert 'nanovllm:engine_healthy{model_name="demo"} 0.0' in get(f"{url}/metrics")[1]
        assert "the engine has not answered for" in json.loads(get(f"{url}/live")[1])["problem"]
        client.join(20)
        assert statuses == [504]
        go_on.set()
        wait_for(lambda: get(f"{url}/health")[0] == 200)
        assert complete(url) == 200
    llm.close()


@contextmanager
def breaking() -> Iterator[tuple[str, Path, Callable[[], None]]]:
    """A server that replaces its engine: its address, its folder of counts, and what breaks the
    engine; that returns once another one serves."""
    values = {"device": "cpu", "limits": {"max_num_seqs": 2}, "cache": {"num_blocks": 256}}
    with observed(load_config("demo", overrides=values)) as config:
        llm = AsyncLLM.from_config(config)
        executor, patch = type(llm.engine._executor), pytest.MonkeyPatch()
        folder = folder_of(config)
        assert folder is not None

        def fail_once(_: object) -> Any:
            patch.undo()
            raise RuntimeError("the device is gone")

        def break_engine() -> None:
            patch.setattr(executor, "collect", fail_once)
            assert complete(url) >= 500
            wait_for(lambda: get(f"{url}/ready")[0] == 503)
            wait_for(lambda: get(f"{url}/ready")[0] == 200)

        with served(llm, health={"ping_s": 0.05, "on_engine_death": "restart"}) as url:
            yield url, folder, break_engine
        llm.close()


def test_a_server_with_a_new_engine_serves_on() -> None:
    """With `on_engine_death: restart`: the client of the old one gets an error, the next one text;
    what was counted stays counted, and the request that ended with its engine is."""
    with breaking() as (url, _, break_engine):
        assert complete(url) == 200
        before = counted(url)
        assert counted(url, ERRORS) == 0
        break_engine()
        assert complete(url) == 200
        assert counted(url) >= before + 5
        assert counted(url, ERRORS) == 1


def test_a_new_engine_starts_though_the_folder_of_counts_was_removed() -> None:
    """By hand, or by a cleaner of temporary files. The new one has it again, for this user alone,
    and the server removes it; requests that end with that engine count too."""
    with breaking() as (url, folder, break_engine):
        assert complete(url) == 200
        shutil.rmtree(folder)
        break_engine()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert complete(url) == 200
        assert counted(url) >= 5
        break_engine()
        assert counted(url, ERRORS) == 1
    assert not folder.exists()


TOKENS = 'generation_tokens_total{model_name="demo"}'
ERRORS = 'request_success_total{finished_reason="error",model_name="demo"}'


def counted(url: str, name: str = TOKENS) -> float:
    """A counter of this server; by default the tokens that its engines have generated."""
    pattern = rf"^nanovllm:{re.escape(name)} (.*)$"
    [number] = re.findall(pattern, get(f"{url}/metrics")[1], re.MULTILINE)
    return float(number)


@pytest.mark.slow
def test_a_server_whose_engine_ends_ends_with_status_1(tmp_path: Path) -> None:
    """Its client gets an error, and whatever supervises the server starts another."""
    broken, log = tmp_path / "broken", tmp_path / "log"
    with log.open("w") as errors:  # a pipe that nobody reads would fill
        process = subprocess.Popen(
            [sys.executable, SERVER, broken], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        url = line.split()[-1]
        wait_for(lambda: get(f"{url}/ready")[0] == 200)
        broken.touch()
        assert complete(url) >= 500
        assert process.wait(30) == 1
        assert "the device is gone" in log.read_text()
    finally:
        process.kill()
        process.wait(10)
