"""Captured steps on a machine without a GPU: what debug mode compares, and how graphs are freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from nanovllm_core.config.sources import load_config
from nanovllm_core.errors import GraphSafetyError
from nanovllm_core.selection.startup import start
from nanovllm_core.worker.graphs import StepGraphs, StepKey, _addresses, compile_launches
from nanovllm_core.worker.progress import Laps

from ..e2e.tiny import write_config


class FakeGraph:
    """Counts what a captured graph is asked for."""

    def __init__(self) -> None:
        self.replays = 0
        self.resets = 0

    def replay(self) -> None:
        self.replays += 1

    def reset(self) -> None:
        self.resets += 1


def captured(tensors: dict[str, Tensor], debug: bool) -> tuple[StepGraphs, FakeGraph]:
    """Graphs as they are after a capture at bucket 4 with these tensors in use."""
    graphs = StepGraphs(torch.device("cpu"), lambda: tensors, debug=debug)
    fake: Any = FakeGraph()
    graphs._graphs[StepKey.decode(4)] = fake
    graphs._addresses[StepKey.decode(4)] = _addresses(tensors)
    return graphs, fake


def test_a_tensor_made_anew_after_capture_is_named() -> None:
    """Bug 22 of peers: right in eager mode, silently wrong in replay. The error says which."""
    tensors = {"kv_cache": torch.zeros(8), "attention.decode.splits": torch.zeros(4)}
    graphs, fake = captured(tensors, debug=True)
    graphs.replay(StepKey.decode(4))
    assert fake.replays == 1
    kept = tensors["attention.decode.splits"]
    tensors["attention.decode.splits"] = torch.zeros(4)
    with pytest.raises(
        GraphSafetyError,
        match=r"graph of 4 rows was captured with attention\.decode\.splits at 0x\w+, which is now "
        r"at 0x\w+.*allocate it once, in allocate\(\), and write into it",
    ):
        graphs.replay(StepKey.decode(4))
    assert fake.replays == 1, "nothing was launched"
    tensors["attention.decode.splits"] = kept
    graphs.replay(StepKey.decode(4))
    assert fake.replays == 2


def test_a_tensor_that_is_gone_is_named_too() -> None:
    tensors = {"row_tables": torch.zeros(8)}
    graphs, _ = captured(tensors, debug=True)
    tensors.clear()
    with pytest.raises(GraphSafetyError, match=r"row_tables at 0x\w+, which is now at 0x0"):
        graphs.replay(StepKey.decode(4))


def test_contents_may_change_between_replays() -> None:
    """Addresses are compared, not values: new inputs are what replays are for."""
    tensors = {"row_tables": torch.zeros(8)}
    graphs, fake = captured(tensors, debug=True)
    tensors["row_tables"].fill_(7)
    graphs.replay(StepKey.decode(4))
    assert fake.replays == 1


def test_without_debug_nothing_is_looked_at() -> None:
    """A steady step makes exactly one replay and no host work for it."""
    looks = []

    def watched() -> dict[str, Tensor]:
        looks.append(1)
        return {}

    graphs = StepGraphs(torch.device("cpu"), watched)
    fake: Any = FakeGraph()
    graphs._graphs[StepKey.decode(1)] = fake
    graphs.replay(StepKey.decode(1))
    assert (fake.replays, looks) == (1, [])


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What captures need of torch.cuda, to no effect."""
    for name in ("Stream", "current_stream", "stream", "CUDAGraph", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    for name in ("synchronize", "empty_cache", "current_blas_handle", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("is_needed", [True, False])
def test_a_start_whose_first_kernels_are_compiled_traces_no_other_step(is_needed: bool) -> None:
    """A warm start would trace all steps twice, for nothing; it has the products loaded instead."""
    asked: list[list[str]] = []
    launched: list[str] = []

    class Kernels:
        @contextmanager
        def compile_ahead(self) -> Iterator[Callable[[], bool]]:
            def ask() -> bool:
                asked.append(launched[:])
                return is_needed

            yield ask

        def load_products(self, products: Iterable[str]) -> None:
            launched.extend(products)

    first, others = ([partial(launched.append, name) for name in names] for names in ("ab", "cd"))
    products: Any = ["a product"]
    compile_launches(Kernels(), torch.device("cpu"), first, others, products)
    assert asked == [["a", "b"]]
    assert launched == (list("abcd") if is_needed else ["a", "b", "a product"])


@pytest.mark.usefixtures("no_gpu")
def test_the_steps_of_the_most_tokens_are_captured_first() -> None:
    """They lay out the pool, in which all others then find room."""
    keys = [
        *map(StepKey.decode, (1, 8, 300)),
        *(StepKey("mixed", tokens, rows) for rows in (8, 256) for tokens in (128, 512)),
    ]
    ran: list[StepKey] = []
    StepGraphs(torch.device("cpu"), dict).capture(keys, ran.append, Laps())
    assert [key.total_tokens for key in ran[::2]] == [768, 520, 384, 300, 136, 8, 1]
    assert ran[::2] == ran[1::2], "each once to warm up and once for its graph"
    traced: list[StepKey] = []
    StepGraphs(torch.device("cpu"), dict).capture(keys, traced.append, Laps(), warm_up=False)
    assert traced == ran[::2], "where kernels are compiled already, none runs before"


def test_graphs_are_freed_once_however_often_it_is_asked() -> None:
    """Bug 17 of peers: graphs that outlive what they read hang the exit."""
    graphs, fake = captured({}, debug=False)
    graphs.clear()
    graphs.clear()
    assert fake.resets == 1
    with pytest.raises(KeyError):
        graphs.replay(StepKey.decode(4))


def test_closing_frees_the_graphs_before_blocks_and_weights(tmp_path: Path) -> None:
    """Bug 17 of peers, end to end: at the moment of the reset the runner is still alive."""
    for plugin in ("model_qwen3", "attention_sdpa"):
        pytest.importorskip(f"nanovllm_{plugin}", reason=f"needs the plugin {plugin}")
    changes = {"device": "cpu", "attention": "sdpa", "load_format": "dummy", "max_num_seqs": 2}
    startup = start(load_config(str(write_config(tmp_path)), overrides=changes))
    executor: Any = startup.executor
    executor.start(startup.setup)
    runner = weakref.ref(executor._worker._runner)
    alive = []

    class Watching(FakeGraph):
        def reset(self) -> None:
            alive.append(runner() is not None)
            super().reset()

    graphs, _ = captured({}, debug=False)
    graphs._graphs[StepKey.decode(4)] = Watching()  # type: ignore[assignment]
    executor._worker._runner._graphs = graphs
    del graphs
    executor.close()
    executor.close()
    assert alive == [True]
    gc.collect()
    assert runner() is None, "blocks and weights go with the runner"
