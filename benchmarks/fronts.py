"""What a server streams in a second, by its front processes, without a GPU.

    python benchmarks/fronts.py [--processes 1 2 4] [--engine-client processes thread]
        [--streams 256] [--tokens 400] [--step-ms 0.0] [--clients 4] [--turns 3] [--out FILE]

`nanovllm serve` streams over HTTP from an engine whose device is a clock: a step's result is there
after a given time, 0 for at once. So the work of the host is the bound. Client processes only look
for the end of each stream. CPU
time is given for each token and part: `main` is the process that starts the fronts, and the whole
server where there is one process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from door import MODEL
from processes import write_clock
from rich.console import Console
from rich.table import Table
from words import write_words

TICKS = os.sysconf("SC_CLK_TCK")
PARTS = ("main", "front", "engine")


@contextmanager
def server(processes: int, client: str, step_ms: float) -> Iterator[tuple[str, int]]:
    """The address and the process of a started server."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_clock(folder)
        write_words(folder, MODEL["vocab_size"])  # type: ignore[arg-type]
        config = {
            "model": place,
            "load_format": "dummy",
            "device": "cpu",
            "dtype": "float32",
            "engine_client": client,
            "executor": {"name": "clock", "options": {"step_ms": step_ms}},
            "limits": {"max_num_seqs": 256, "max_model_len": 1024},
            "serve": {"port": 0, "processes": processes, "limits": {"max_queue": 4096}},
        }
        (folder / "server.yaml").write_text(json.dumps(config))
        paths = [place, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "nanovllm_core",
                "serve",
                "--config",
                str(folder / "server.yaml"),
            ],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1], process.pid
        finally:
            process.terminate()
            process.communicate()


def seconds_of(pid: int) -> float:
    """The CPU time of a process, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def parts_of(pid: int) -> dict[str, list[int]]:
    """The processes of a server by what they are."""
    found: dict[str, list[int]] = {"main": [pid], "front": [], "engine": []}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            for name in ("front", "engine"):
                if any(word.startswith(f"nanovllm {name} ") for word in words):
                    found[name].append(child)
    return found


async def stream_all(url: str, streams: int, tokens: int) -> None:
    """Read so many streams to their ends, once a line comes on stdin."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = {"prompt": [1, 2, 3], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {url[7:]}\r\ncontent-type: application/json\r\n"
    request = head.encode() + b"content-length: %d\r\n\r\n%b" % (len(content), content)

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request)
        last = b""
        while not last.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = await reader.read(2**16)
            if not part:
                raise SystemExit(f"a stream ended early: {last!r}")
            last = (last + part)[-64:]
        writer.close()

    pairs = [await asyncio.open_connection(host, int(port)) for _ in range(streams)]
    print("ready", flush=True)
    sys.stdin.readline()
    await asyncio.gather(*(one(*pair) for pair in pairs))


def turn(url: str, pid: int, asked: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of one run, and the µs of CPU time of each part for a token."""
    share = asked.streams // asked.clients
    command = [sys.executable, __file__, "--client", url, str(share), str(asked.tokens)]
    pipe = subprocess.PIPE
    clients = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(asked.clients)
    ]
    for one in clients:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    parts = parts_of(pid)
    before = {name: sum(map(seconds_of, pids)) for name, pids in parts.items()}
    began = time.perf_counter()
    for one in clients:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    if any([one.wait() for one in clients]):
        raise SystemExit("a client failed")
    elapsed = time.perf_counter() - began
    after = {name: sum(map(seconds_of, pids)) for name, pids in parts.items()}
    tokens = share * asked.clients * asked.tokens
    spent = {name: 1e6 * (after[name] - before[name]) / tokens for name in parts}
    return {"tokens_per_s": tokens / elapsed, **spent}


def measure(processes: int, client: str, asked: argparse.Namespace) -> dict[str, Any]:
    """The medians over the turns, behind one that is not counted."""
    with server(processes, client, asked.step_ms) as (url, pid):
        turns = [turn(url, pid, asked) for _ in range(asked.turns + 1)][1:]
    medians = {name: median(one[name] for one in turns) for name in turns[0]}
    return {"processes": processes, "engine_client": client, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--engine-client", nargs="+", default=["processes", "thread"])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--client", nargs=3, metavar=("URL", "STREAMS", "TOKENS"))
    asked = parser.parse_args()
    if asked.client is not None:
        url, streams, tokens = asked.client
        asyncio.run(stream_all(url, int(streams), int(tokens)))
        return
    pairs = [(n, client) for client in asked.engine_client for n in asked.processes]
    rows = [measure(*pair, asked) for pair in pairs]
    table = Table(title=f"{asked.streams} streams of {asked.tokens}, steps of {asked.step_ms:g} ms")
    for column in ("engine client", "fronts", "tokens/s", *(f"µs: {one}" for one in PARTS)):
        table.add_column(column, justify="right")
    for row in rows:
        spent = (f"{row[part]:.1f}" for part in PARTS)
        rate = f"{row['tokens_per_s']:,.0f}"
        table.add_row(row["engine_client"], str(row["processes"]), rate, *spent)
    Console(width=100).print(table)
    if asked.out is not None:
        asked.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
