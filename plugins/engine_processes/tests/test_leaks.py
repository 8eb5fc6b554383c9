"""Opened and closed again and again, a client leaves nothing in its own process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest

from nanovllm_core.api import EngineConfig, EngineError, WorkerInfo
from nanovllm_core.frontend import EngineStats, open_engine
from nanovllm_engine_processes import process, wire

Folders = Callable[[], list[Path]]
TIMES = 50
PATIENCE = 5.0
"""Seconds within which nothing is left."""
INFO = WorkerInfo(
    num_blocks=1, block_size=16, max_model_len=64, vocab_size=9, attention="a", device="cpu"
)
PROGRAM = f"""
import sys
sys.path[:] = sys.argv[5:]
import msgspec, zmq
folder, number = sys.argv[2], int(sys.argv[3])
inbox, out = zmq.Context.instance().socket(zmq.PULL), zmq.Context.instance().socket(zmq.PUSH)
inbox.bind(f"ipc://{{folder}}/{{number}}")
out.connect(f"ipc://{{folder}}/answers")
def say(*parts):
    out.send(msgspec.msgpack.encode((number, *parts)))
while True:
    name, content = msgspec.msgpack.decode(inbox.recv())
    if name == "start":
        if "unstartable" in content["config"]:
            sys.exit(3)
        say("started", [{wire.info_row(INFO)!r}, None, {{}}])
    elif name == "GetStats":
        say("stats", [content["subscriber"], {wire.stats_row(EngineStats())!r}])
    elif name == "Close":
        say("closed", [{wire.stats_row(EngineStats())!r}, None])
        break
"""
"""An engine's process that answers and loads nothing: a start takes no time."""


def held() -> tuple[int, int, int]:
    """Open files and sockets, threads, and processes that were started and not reaped."""
    gc.collect()
    tasks = [*Path("/proc/self/task").iterdir()]
    children = [pid for task in tasks for pid in (task / "children").read_text().split()]
    return len([*Path("/proc/self/fd").iterdir()]), len(tasks), len(children)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_nothing_is_left_after_many_starts_and_ends(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of clients that were closed, that nobody held any more, and whose start failed."""
    monkeypatch.setattr(process, "PROGRAM", PROGRAM)
    before = (0, 0, 0)
    for time in range(TIMES + 3):
        if time == 3:
            before = held()
        model = "unstartable" if time % 3 == 2 else "x"
        config = EngineConfig(
            model=model, device="cpu", data_parallel_size=2, engine_client={"name": "processes"}
        )
        if model == "unstartable":
            with pytest.raises(EngineError, match="ended with exit code 3"):
                open_engine(config)
            continue
        client = open_engine(config)
        assert len(client.stats().engines) == 2
        assert len(folders()) == 1
        if time % 3:
            client.close()
        del client
    # The thread of a client that nobody holds ends by itself, a moment later.
    until = monotonic() + PATIENCE
    while held() != before and monotonic() < until:
        sleep(0.05)
    assert held() == before
    assert folders() == []
