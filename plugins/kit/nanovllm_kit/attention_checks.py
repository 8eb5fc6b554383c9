"""Checks of an attention backend on a GPU: the full matrix of shapes, and captured decode.

A plugin's tests call these with a function that makes its backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nanovllm_core.interfaces.attention import (
    AttentionBackend,
    AttentionConfig,
    DecodeMetadata,
)
from nanovllm_kit.paged_attention import PagedCase, make_case

BATCHES = (1, 4, 16, 32)
LENGTHS = (1, 2, 127, 128, 512, 2048, 4096)
QUERIES_PER_STEP = 16384
"""The most queries in one prefill step: longer prompts come as chunks over their context."""

MakeBackend = Callable[[AttentionConfig], AttentionBackend]


def run_decode(backend: AttentionBackend, case: PagedCase, metadata: DecodeMetadata) -> Tensor:
    """Plan and run one decode step of one layer."""
    __tracebackhide__ = True
    out = case.new_out()
    backend.plan_decode(metadata)
    call(backend.run_decode, case.q_THD, case.k_cache, case.v_cache, metadata, out)
    return out


def run_prefill(backend: AttentionBackend, case: PagedCase) -> Tensor:
    """Plan and run one prefill step of one layer."""
    __tracebackhide__ = True
    metadata = case.prefill_metadata()
    out = case.new_out()
    backend.plan_prefill(metadata)
    call(backend.run_prefill, case.q_THD, case.k_cache, case.v_cache, metadata, out)
    return out


def call(method: Callable[..., object], *arguments: object) -> None:
    """Call what writes its output; AssertionError where it returns one, which nobody reads."""
    __tracebackhide__ = True
    answer = method(*arguments)
    if answer is not None:
        name = method.__name__
        raise AssertionError(
            f"{name} returned a {type(answer).__name__}; it must write its output into the tensor "
            "that it is given last, and return None"
        )


def ragged(batch: int, longest: int) -> list[int]:
    """`batch` lengths from 1 to `longest`, the longest first."""
    return [max(1, longest - i * longest // batch - i % 3) for i in range(batch)]


def check_matrix(
    make_backend: MakeBackend,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    dtypes: Sequence[torch.dtype],
    batches: Sequence[int] = BATCHES,
    lengths: Sequence[int] = LENGTHS,
    device: str = "cuda",
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> int:
    """Decode and prefill, ragged and with padded rows, in every dtype; how many were compared.

    The numbers are bfloat16's, so that one float64 reference serves every dtype. In the first
    dtype each shape is run with a needle too.
    """
    compared = 0
    for batch in batches:
        for longest in lengths:
            for needle in (False, True):
                seq_lens = ragged(batch, longest)
                query_lens = [min(n, QUERIES_PER_STEP // batch) for n in seq_lens]
                decode_lens = [0 if i % 4 == 2 else n for i, n in enumerate(seq_lens)]
                for queries, lens in (([1] * batch, decode_lens), (query_lens, seq_lens)):
                    case = make_case(
                        queries, lens, num_heads=num_heads, num_kv_heads=num_kv_heads,
                        head_size=head_size, block_size=block_size, dtype=torch.bfloat16,
                        device=device, needle=needle, seed=compared,
                        sliding_window=sliding_window, soft_cap=soft_cap,
                    )  # fmt: skip
                    decode = lens is decode_lens
                    compared += _compare(
                        make_backend, case, dtypes[:1] if needle else dtypes, decode=decode
                    )
    return compared


def _compare(
    make_backend: MakeBackend, case: PagedCase, dtypes: Sequence[torch.dtype], *, decode: bool
) -> int:
    """Compare one batch in several dtypes; an error names the shape."""
    expected = case.expected()
    for dtype in dtypes:
        typed = case.astype(dtype)
        backend = make_backend(typed.config())
        backend.allocate()
        out = (
            run_decode(backend, typed, typed.decode_metadata())
            if decode
            else run_prefill(backend, typed)
        )
        try:
            typed.assert_close(out, expected)
        except AssertionError as error:
            phase = "decode" if decode else "prefill"
            raise AssertionError(
                f"{phase} in {dtype}, query_lens {case.query_lens}, seq_lens {case.seq_lens}, "
                f"q {tuple(case.q_THD.shape)}, cache {tuple(case.k_cache.shape)}: {error}"
            ) from error
    return len(dtypes)


def check_replay(
    make_backend: MakeBackend,
    *,
    block_size: int,
    dtype: torch.dtype,
    plan_is_captured: bool,
    batch: int = 8,
    longest: int = 1024,
    head_size: int = 128,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """A captured decode step follows its inputs: lengths, blocks and queries change in between.

    Each replay must be bitwise what the same step gives in eager mode, and near the reference.
    Between them memory is taken and freed, so that a graph which reads a freed tensor shows it.
    `plan_is_captured` false: the plan runs before each replay, outside the graph.
    """
    cases = [
        make_case(
            [1] * batch, lens, num_heads=16, num_kv_heads=8, head_size=head_size,
            block_size=block_size, dtype=dtype, device="cuda", seed=seed, needle=seed % 2 == 1,
            sliding_window=sliding_window, soft_cap=soft_cap,
        )
        for seed, lens in enumerate(
            (
                ragged(batch, longest),
                [1] * batch,
                [0 if i % 2 else longest - i for i in range(batch)],
                list(reversed(ragged(batch, longest // 2))),
                [longest] * batch,
            )
        )
    ]  # fmt: skip
    width = -(-longest // block_size)
    num_blocks = max(case.k_cache.shape[0] for case in cases)
    static = replace(
        cases[0],
        q_THD=torch.zeros_like(cases[0].q_THD),
        k_cache=cases[0].k_cache.new_zeros(num_blocks, *cases[0].k_cache.shape[1:]),
        v_cache=cases[0].v_cache.new_zeros(num_blocks, *cases[0].v_cache.shape[1:]),
        block_table=torch.zeros(batch, width, dtype=torch.int32, device="cuda"),
    )
    metadata = replace(static.decode_metadata(), max_seq_len=width * block_size)
    backend = make_backend(static.config())
    backend.allocate()
    out = torch.zeros_like(static.q_THD)

    def run() -> None:
        backend.run_decode(static.q_THD, static.k_cache, static.v_cache, metadata, out)

    graph = _capture(backend, metadata, run, plan_is_captured)
    held = {name: tensor.data_ptr() for name, tensor in backend.captured_tensors().items()}
    for case in cases:
        load_decode(static, metadata, case)
        junk = [torch.full((2**20,), float("nan"), device="cuda") for _ in range(8)]
        del junk
        out.fill_(float("nan"))
        if not plan_is_captured:
            backend.plan_decode(metadata)
        graph.replay()
        replayed = out.clone()
        case.assert_close(replayed)
        backend.plan_decode(metadata)
        run()
        live = metadata.seq_lens > 0
        assert torch.equal(replayed[live], out[live]), "replay differs from eager"
    assert held == {name: t.data_ptr() for name, t in backend.captured_tensors().items()}


def _capture(
    backend: AttentionBackend,
    metadata: DecodeMetadata,
    run: Callable[[], None],
    plan_is_captured: bool,
) -> torch.cuda.CUDAGraph:
    """Warm up on a side stream, then capture two layers of one step."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backend.plan_decode(metadata)
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if plan_is_captured:
            backend.plan_decode(metadata)
        run()
        run()
    return graph


def load_decode(static: PagedCase, metadata: DecodeMetadata, case: PagedCase) -> None:
    """Put a case's contents where the captured graph reads them."""
    num_blocks, width = case.k_cache.shape[0], case.block_table.shape[1]
    static.q_THD.copy_(case.q_THD)
    for target, source in ((static.k_cache, case.k_cache), (static.v_cache, case.v_cache)):
        target.fill_(float("nan"))[:num_blocks].copy_(source)
    static.block_table.zero_()[:, :width].copy_(case.block_table)
    metadata.seq_lens.copy_(case.decode_metadata().seq_lens)


def check_blocks_beyond_2_31_elements(
    make_backend: MakeBackend, *, block_size: int, dtype: torch.dtype = torch.bfloat16
) -> None:
    """The highest blocks of a cache of more than 2**31 elements are read where they are."""
    shape = {"num_heads": 16, "num_kv_heads": 8, "head_size": 128, "block_size": block_size}
    for queries in ([1, 1, 1], [200, 1, 64]):
        case = make_case(queries, [700, 1, 65], dtype=dtype, device="cuda", **shape)  # type: ignore[arg-type]
        used = case.k_cache.shape[0]
        total = 2**31 // case.k_cache[0].numel() + used
        caches = []
        for cache in (case.k_cache, case.v_cache):
            large = torch.full((total, *cache.shape[1:]), float("nan"), dtype=dtype, device="cuda")
            large[-used:] = cache
            caches.append(large)
        high = replace(
            case, k_cache=caches[0], v_cache=caches[1],
            block_table=case.block_table + (total - used),
        )  # fmt: skip
        backend = make_backend(high.config())
        backend.allocate()
        decode = len(queries) == sum(queries)
        out = (
            run_decode(backend, high, high.decode_metadata())
            if decode
            else run_prefill(backend, high)
        )
        high.assert_close(out)


def check_decode_never_synchronises(make_backend: MakeBackend, *, block_size: int) -> None:
    """Planning and running a decode step makes no call that waits for the device."""
    case = make_case(
        [1] * 4, [300, 0, 5, 128], num_heads=16, num_kv_heads=8, head_size=128,
        block_size=block_size, dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    backend = make_backend(case.config())
    backend.allocate()
    metadata = case.decode_metadata()
    case.assert_close(run_decode_without_waiting(backend, case, metadata))


def run_decode_without_waiting(
    backend: AttentionBackend, case: PagedCase, metadata: DecodeMetadata
) -> Tensor:
    """`run_decode`, once to compile and once where a call that waits for the GPU raises."""
    run_decode(backend, case, metadata)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return run_decode(backend, case, metadata)
    finally:
        torch.cuda.set_sync_debug_mode("default")
