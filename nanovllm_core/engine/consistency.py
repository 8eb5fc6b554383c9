"""The invariants of the engine's state, checked by tests and in debug mode."""

from __future__ import annotations

from collections.abc import Collection

from nanovllm_core.engine.planner import Planner
from nanovllm_core.engine.request import Request, RequestState
from nanovllm_core.errors import InconsistentStateError

WITH_ROW = (RequestState.PREFILLING, RequestState.DECODING, RequestState.DRAINING)


def assert_consistent(planner: Planner, requests: Collection[Request], max_in_flight: int) -> None:
    """Raises `InconsistentStateError` naming the first invariant that is broken."""
    planner.kv.pool.assert_consistent(request.block_ids for request in requests)
    rows, taken = planner.rows, planner.running
    _require(
        taken.keys().isdisjoint(rows.free) and len(taken) + len(rows.free) == rows.num_rows,
        f"rows {sorted(taken)} are taken and {sorted(rows.free)} are free, of {rows.num_rows}",
    )
    owners = {request.row: request for request in requests if request.row >= 0}
    for row, request in taken.items():
        _require(owners.get(row) is request, f"row {row} is not its request's row")
    _require(len(owners) == len(taken), f"requests hold rows {sorted(owners)}, not {sorted(taken)}")
    for request in requests:
        _check_state(planner, request)
        if request.row >= 0:
            _check_lengths(planner, request, max_in_flight)


def _check_state(planner: Planner, request: Request) -> None:
    name, state, row = request.request_id, request.state, request.row
    _require(state is not RequestState.FINISHED, f"{name} is finished and still listed")
    _require((row >= 0) == (state in WITH_ROW), f"{name} is {state.value} in row {row}")
    decodes = row >= 0 and bool(planner.rows.decoding[row])
    for expected, found, where in (
        (RequestState.WAITING, planner.waiting.get(name) is request, "the queue"),
        (RequestState.PREFILLING, planner.prefilling.get(name) is request, "the list of prompts"),
        (RequestState.DECODING, decodes, "its row"),
    ):
        _require((state is expected) == found, f"{name} is {state.value}, {where} says otherwise")


def _check_lengths(planner: Planner, request: Request, max_in_flight: int) -> None:
    name, known, scheduled = request.request_id, request.num_tokens, request.num_scheduled
    _require(known <= request.max_length, f"{name} has {known} ids of {request.max_length} at most")
    _require(
        scheduled <= request.max_length - 1,
        f"{name} is planned to {scheduled}, past {request.max_length - 1}",
    )
    _require(
        0 <= request.num_in_flight <= max_in_flight,
        f"{name} has {request.num_in_flight} tokens in flight, of {max_in_flight} at most",
    )
    if request in planner.draining:
        _require(not request.block_ids, f"{name} was preempted and still holds blocks")
        return
    kv, held = planner.kv, len(request.block_ids)
    early = kv.early_steps if request.state is not RequestState.PREFILLING else 0
    _require(
        kv.num_blocks_for(scheduled) <= held <= kv.num_blocks_for(scheduled + early),
        f"{name} holds {held} blocks for {scheduled} positions",
    )
    _require(request.num_published <= held, f"{name} shares blocks it does not hold")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InconsistentStateError(message)
