"""What is encoded is what comes out: messages, deltas, errors, facts; and nothing else goes in."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from nanovllm_core import SamplingParams
from nanovllm_core.api import (
    DeviceError,
    EngineConfig,
    EngineError,
    InvalidPromptError,
    InvalidSamplingError,
    NanoVLLMError,
    TokenLogprobs,
    WorkerInfo,
)
from nanovllm_core.frontend import (
    Abort,
    AddRequests,
    Close,
    EndAt,
    EngineStats,
    GetStats,
    NewRequest,
    OutputDelta,
    Refused,
    ResetPrefixCache,
    WaitIdle,
)
from nanovllm_engine_processes import wire
from nanovllm_engine_processes.process import config_of_each, environment_of_each

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
ids = st.integers(0, 2**31 - 1)
whole = st.integers(0, 2**63 - 1)
arguments = st.dictionaries(
    names, st.dictionaries(names, st.none() | st.booleans() | whole | names | st.lists(whole))
)
params = st.builds(
    SamplingParams,
    temperature=st.none() | st.floats(0.1, 10),
    top_k=st.none() | st.integers(-1, 100),
    max_tokens=st.none() | st.integers(64, 2**62),
    min_tokens=st.integers(0, 64),
    stop=st.none() | names | st.lists(names, max_size=3),
    stop_token_ids=st.lists(ids, max_size=3),
    seed=st.none() | whole,
    logprobs=st.none() | st.integers(0, 20),
    n=st.integers(1, 8),
    logits_processors=st.none() | arguments,
    constraints=st.none() | arguments,
    logit_bias=st.none() | st.dictionaries(ids, st.floats(-100, 100), max_size=3),
)
requests = st.builds(
    NewRequest,
    request_id=names,
    prompt_token_ids=st.lists(ids),
    params=params,
    stream=st.booleans(),
    labels=st.none() | st.dictionaries(names, names),
    output_token_ids=st.lists(ids).map(tuple),
    cache_salt=st.binary(max_size=8),
)
messages = st.one_of(
    st.builds(AddRequests, whole, st.lists(requests, max_size=3).map(tuple)),
    st.builds(Abort, st.lists(names).map(tuple)),
    st.builds(EndAt, names, whole, whole, st.none() | names),
    *(st.builds(question, whole) for question in (GetStats, WaitIdle, ResetPrefixCache)),
    st.builds(Close, st.booleans()),
)


def same(params: SamplingParams) -> SamplingParams:
    """With lists as tuples: no message tells them apart, nor does the engine."""
    return replace(params, stop=params.stop_strings, stop_token_ids=params.stop_ids)


@settings(max_examples=80, deadline=None)
@given(messages)
def test_messages_come_out_as_they_went_in(message: Any) -> None:
    read = wire.read_message(*wire.decode(wire.encode_message(message)))
    if isinstance(message, AddRequests):
        assert isinstance(read, AddRequests)
        read = replace(
            read, requests=tuple(replace(one, params=same(one.params)) for one in read.requests)
        )
        message = replace(
            message,
            requests=tuple(replace(one, params=same(one.params)) for one in message.requests),
        )
    assert read == message


logprobs = st.builds(
    TokenLogprobs,
    st.floats(-100, 0),
    st.lists(st.tuples(ids, st.floats(-100, 0)), max_size=3).map(tuple),
)
deltas = st.builds(
    OutputDelta,
    request_id=names,
    index=ids,
    new_token_ids=st.lists(ids, max_size=4),
    new_logprobs=st.none() | st.lists(logprobs, max_size=2),
    finish_reason=st.sampled_from([None, "stop", "length", "abort"]),
    num_cached_tokens=ids,
    wait_steps=st.none() | ids,
)


@settings(max_examples=80, deadline=None)
@given(st.lists(deltas, max_size=4), st.none() | ids | names)
def test_deltas_come_out_as_they_went_in(given: list[OutputDelta], stop: Any) -> None:
    for one in given:
        one.stop_reason = stop if one.finish_reason else None
    engine, name, rows = wire.decode(wire.encode(3, wire.DELTAS, [*map(wire.delta_row, given)]))
    assert (engine, name) == (3, wire.DELTAS)
    assert [wire.read_delta(row, row[0], row[1]) for row in rows] == given


def test_packed_log_probabilities_stay_packed() -> None:
    """They are unpacked where they are read, as on a thread."""
    packed = TokenLogprobs.of_bytes(np.array([-0.5, -0.5], np.float32).tobytes())
    delta = OutputDelta(request_id="a", index=0, new_token_ids=[1], new_logprobs=[packed])
    [row] = wire.decode(wire.encode(wire.delta_row(delta)))
    read = wire.read_delta(row, "a", 0)
    assert read.new_logprobs is not None
    assert read.new_logprobs[0].__reduce__()[1] == packed.__reduce__()[1]


@pytest.mark.parametrize("kind", wire._error_types().values())
def test_every_error_of_the_core_keeps_its_type_and_text(kind: type[NanoVLLMError]) -> None:
    error = kind("7 is beyond 5\ud800; lower it")
    error.prompt_index = 0  # type: ignore[attr-defined]
    [row] = wire.decode(wire.encode(wire.error_row(error)))
    read = wire.read_error(row)
    assert type(read) is kind
    assert str(read) == "7 is beyond 5?; lower it"
    assert read.prompt_index == 0  # type: ignore[attr-defined]


def test_any_other_error_names_its_type_and_where_it_was_raised() -> None:
    class OwnError(NanoVLLMError):
        """Of a plugin that only the engine's process has."""

    for error in (OwnError("a"), ValueError("a"), KeyboardInterrupt("a")):
        [row] = wire.decode(wire.encode(wire.error_row(error, "engine 1 (process 5): ")))
        read = wire.read_error(row)
        assert type(read) is EngineError
        assert str(read) == f"engine 1 (process 5): {type(error).__name__}: a"
        assert type(error).__name__ in read.__notes__[0], "the traceback"


def test_a_plugin_s_error_is_of_the_type_that_it_was_made_from() -> None:
    """A request that it refuses stays the caller's fault."""

    class OwnError(InvalidSamplingError):
        """Of a plugin that only the engine's process has."""

    read = wire.read_error(wire.error_row(OwnError("constraints: no grammar")))
    assert (type(read), str(read)) == (InvalidSamplingError, "constraints: no grammar")


def test_what_no_message_holds_is_refused() -> None:
    good = NewRequest(request_id="a", prompt_token_ids=[1], params=SamplingParams())
    wire.pack_request(good)
    for beyond in (2**70, 2**63):
        with pytest.raises(InvalidPromptError, match="64 bits"):
            wire.pack_request(replace(good, prompt_token_ids=[beyond]))
    within_itself: dict[str, Any] = {}
    within_itself["y"] = within_itself
    for asked in (
        {"x": {"y": object()}}, {"x": {"y": 2**70}}, {"x": {"\ud800": 1}}, {"x": within_itself}
    ):  # fmt: skip
        with pytest.raises(InvalidSamplingError, match=r"^constraints cannot be sent"):
            wire.pack_request(replace(good, params=SamplingParams(constraints=asked)))
    with pytest.raises(InvalidSamplingError, match=r"^labels cannot be sent"):
        wire.pack_request(replace(good, labels={"a": "\ud800"}))
    numbers = {"x": {"y": np.int64(3), "z": np.float32(0.5)}}
    message = AddRequests(0, (replace(good, params=SamplingParams(constraints=numbers)),))
    read = wire.read_message(*wire.decode(wire.encode_message(message)))
    assert isinstance(read, AddRequests)
    assert read.requests[0].params.constraints == {"x": {"y": 3, "z": 0.5}}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_what_can_be_packed_can_be_sent_and_read_however_deep_it_nests() -> None:
    """No depth passes the check and fails afterwards, where nobody could be refused any more."""
    good = NewRequest(request_id="a", prompt_token_ids=[1], params=SamplingParams())
    refused = 0
    for depth in range(sys.getrecursionlimit() - 80, sys.getrecursionlimit() + 1):
        params = SamplingParams(constraints={"x": {"y": nested(depth)}})
        try:
            packed = wire.pack_request(replace(good, params=params))
        except InvalidSamplingError:
            refused += 1
        else:
            sent = wire.encode(wire.ADD, wire.PackedRequests(0, [packed]))
            # The other process may have less of its stack free.
            assert isinstance(wire.read_message(*wire.decode(sent)), AddRequests | Refused)
    assert refused


@pytest.mark.parametrize(
    "value", [msgspec.Raw(b"\xc1"), msgspec.Raw(b""), msgspec.msgpack.Ext(-1, b"x")]
)
def test_what_cannot_be_read_is_refused_before_it_is_sent(value: Any) -> None:
    """It encodes without an error."""
    params = SamplingParams(constraints={"x": {"y": value}})
    with pytest.raises(InvalidSamplingError, match=r"^constraints cannot be sent"):
        wire.pack_request(NewRequest(request_id="a", prompt_token_ids=[1], params=params))


def test_a_request_that_cannot_be_read_is_refused_with_those_of_its_message() -> None:
    good = NewRequest(request_id="a", prompt_token_ids=[1], params=SamplingParams())
    unreadable = "b", [1], b"\xc1"
    packed = wire.PackedRequests(7, [wire.pack_request(good), unreadable])
    read = wire.read_message(*wire.decode(wire.encode(wire.ADD, packed)))
    assert isinstance(read, Refused)
    assert (read.request_ids, read.index) == (("a", "b"), 1)
    assert isinstance(read.error, InvalidSamplingError)
    assert "cannot be read" in str(read.error)


def test_counters_and_facts_come_out_as_they_went_in() -> None:
    stats = EngineStats(steps=3, host_seconds=0.25, free_blocks=7)
    info = WorkerInfo(
        num_blocks=1, block_size=16, max_model_len=8, vocab_size=9, attention="a", device="cpu",
        cache_windows=(None, 4), choices=("x",), bucket_sizes=(1, 2), start_seconds={"plan": 0.5},
    )  # fmt: skip
    [first, second] = wire.decode(wire.encode(wire.stats_row(stats), wire.info_row(info)))
    assert wire.read_stats(first) == stats
    assert wire.read_info(second) == info


def test_each_engine_has_its_own_gpus_and_a_thread() -> None:
    """Of those that the program may see, from `device` on."""

    def gpus(device: str, given: str | None, **changes: int) -> list[str | None]:
        config = EngineConfig(model="x", device=device, **{"data_parallel_size": 2, **changes})
        variables = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
        return [one.get("CUDA_VISIBLE_DEVICES") for one in environment_of_each(config, variables)]

    assert gpus("auto", None, tensor_parallel_size=2) == ["0,1", "2,3"]
    assert gpus("cuda:1", None) == ["1", "2"]
    assert gpus("cuda", "4,a,6,b", tensor_parallel_size=2) == ["4,a", "6,b"]
    assert gpus("cpu", "0") == [None, None]
    assert gpus("auto", "") == [None, None]
    assert gpus("auto", "5", data_parallel_size=1) == [None]
    with pytest.raises(DeviceError, match="needs 4 GPUs, but CUDA_VISIBLE_DEVICES lists 3"):
        gpus("auto", "0,1,2", tensor_parallel_size=2)
    config = EngineConfig(model="x", device="cuda:1", data_parallel_size=2)
    one = config_of_each(config)
    assert (one.device, one.data_parallel_size, one.engine_client.name) == ("cuda", 1, "thread")
    assert EngineConfig.model_validate_json(one.model_dump_json()) == one
