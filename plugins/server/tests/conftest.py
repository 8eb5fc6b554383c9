"""One engine and one server of the demo model for all tests of a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from nanovllm_core import AsyncLLM, load_config
from nanovllm_server.server import address, make_watched_server
from nanovllm_server.settings import ServerSettings
from nanovllm_server.watch.watch import observed

START_SECONDS = 30.0


@pytest.fixture(scope="session")
def llm() -> Iterator[AsyncLLM]:
    """The demo model, small: 16 rows, 512 blocks of 16 tokens."""
    with_limits = {"max_num_seqs": 16}
    cache = {"num_blocks": 512, "block_size": 16}
    values = {"device": "cpu", "limits": with_limits, "cache": cache}
    with observed(load_config("demo", overrides=values)) as config:
        engine = AsyncLLM.from_config(config)
        yield engine
        engine.close()


@pytest.fixture(scope="session")
def server_url(llm: AsyncLLM) -> Iterator[str]:
    """The address of a server of `llm` on a free port, on a thread of this process."""
    server, watch = make_watched_server(llm, ServerSettings(port=0))
    thread = threading.Thread(target=server.run, name="server", daemon=True)
    thread.start()
    end = time.monotonic() + START_SECONDS
    while not server.started:
        assert thread.is_alive(), "the server ended at its start"
        assert time.monotonic() < end, f"the server did not start in {START_SECONDS} s"
        time.sleep(0.01)
    while watch.monitor.not_ready:
        assert time.monotonic() < end, watch.monitor.not_ready
        time.sleep(0.01)
    yield address(server)
    server.should_exit = True
    thread.join(START_SECONDS)
    assert not thread.is_alive()
