"""The invariants of the engine's state, checked by tests and in debug mode."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from nanovllm_core.engine.block_pool import NO_BLOCK
from nanovllm_core.engine.planner import Planner
from nanovllm_core.engine.prefix_cache import PagedKV
from nanovllm_core.engine.request import Request, RequestState
from nanovllm_core.errors import InconsistentStateError, ModelOutputError, shown
from nanovllm_core.interfaces.executor import Executor
from nanovllm_core.interfaces.plan import StepPlan


def assert_consistent(planner: Planner, requests: Collection[Request], max_in_flight: int) -> None:
    """Raises `InconsistentStateError` naming the first invariant that is broken."""
    for fault in _faults(planner, requests, max_in_flight):
        raise InconsistentStateError(fault)


def wrong_result(plan: StepPlan, result: object, executor: Executor) -> InconsistentStateError:
    """The error of a result that is not that of the plan."""
    return InconsistentStateError(
        f"{type(executor).__name__} returned {shown(result)} for a step of {plan.num_sampled} "
        "tokens; collect() must return a StepResult with one for each decoding row and each chunk "
        "that samples"
    )


def named(error: ModelOutputError, running: Mapping[int, Request]) -> ModelOutputError:
    """The same error with the requests of its rows; those that have ended meanwhile have none."""
    ids = [running[row].request_id for row in error.rows if row in running]
    requests = f"request {', '.join(ids)}, " if ids else ""
    return ModelOutputError(f"{requests}{error}", error.rows)


def _faults(planner: Planner, requests: Collection[Request], max_in_flight: int) -> Iterator[str]:
    yield from planner.kv.pool.faults(
        [block for table in request.block_tables for block in table if block != NO_BLOCK]
        for request in requests
    )
    rows, taken = planner.rows, planner.running
    if sorted([*taken, *rows.free]) != list(range(rows.num_rows)):
        yield f"rows {sorted(taken)} are taken and {sorted(rows.free)} are free, of {rows.num_rows}"
    owners = {request.row: request for request in requests if request.row >= 0}
    for row, request in taken.items():
        if owners.get(row) is not request:
            yield f"row {row} is not its request's row"
    if len(owners) != len(taken):
        yield f"requests hold rows {sorted(owners)}, not {sorted(taken)}"
    for request in requests:
        yield from _state_faults(planner, request)
        if request.row >= 0:
            yield from _length_faults(planner, request, max_in_flight)


def _state_faults(planner: Planner, request: Request) -> Iterator[str]:
    name, state, row = request.request_id, request.state, request.row
    if state is RequestState.FINISHED:
        yield f"{name} is finished and still listed"
    if (row < 0) != (state in (RequestState.HELD, RequestState.WAITING)):
        yield f"{name} is {state.value} in row {row}"
    decodes = row >= 0 and bool(planner.rows.decoding[row])
    for expected, found, place in (
        (RequestState.WAITING, planner.waiting.get(name) is request, "the queue"),
        (RequestState.PREFILLING, planner.prefilling.get(name) is request, "the list of prompts"),
        (RequestState.DECODING, decodes, "its row"),
    ):
        if (state is expected) != found:
            yield f"{name} is {state.value}, {place} says otherwise"


def _length_faults(planner: Planner, request: Request, max_in_flight: int) -> Iterator[str]:
    name, known, scheduled = request.request_id, request.num_tokens, request.num_scheduled
    if known > request.max_length:
        yield f"{name} has {known} ids of {request.max_length} at most"
    if scheduled > request.max_length - 1:
        yield f"{name} is planned to {scheduled}, past {request.max_length - 1}"
    if not 0 <= request.num_in_flight <= max_in_flight:
        yield f"{name} has {request.num_in_flight} tokens in flight, of {max_in_flight} at most"
    kv, held = planner.kv, request.num_blocks
    if request in planner.draining:
        if held:
            yield f"{name} was preempted and still holds blocks"
        return
    early = kv.early_steps if request.state is not RequestState.PREFILLING else 0
    if not kv.num_blocks_for(scheduled) <= held <= kv.num_blocks_for(scheduled + early):
        yield f"{name} holds {held} blocks for {scheduled} positions"
    if request.num_published > held:
        yield f"{name} shares blocks it does not hold"
    if request.num_published * kv.block_size > known:
        yield f"{name} shares {request.num_published} blocks and has {known} ids for them"
    yield from _window_faults(kv, request)


def _window_faults(kv: PagedKV, request: Request) -> Iterator[str]:
    """Every block in a window is there, and few behind it are."""
    name, scheduled = request.request_id, request.num_scheduled
    # A decoding row drops blocks when it gets one, so at most so many positions ago.
    since = 0 if request.state is RequestState.PREFILLING else kv.block_size + kv.early_steps
    for group, (window, table) in enumerate(zip(kv.windows, request.block_tables, strict=True)):
        if len(table) != request.num_blocks:
            yield f"{name} has block tables of {request.num_blocks} and {len(table)} entries"
        least = most = 0
        if window is not None:
            most = kv.first_block(window, scheduled)
            least = kv.first_block(window, max(0, scheduled - since))
        dropped = table.count(NO_BLOCK)
        if not least <= dropped <= most or NO_BLOCK in table[dropped:]:
            yield (
                f"{name} dropped {dropped} blocks of group {group} at {scheduled} positions; its "
                f"window of {window} asks for the first {least} to {most}"
            )
