"""The caller says where a request ends, however far the engine is by then."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from nanovllm_core.engine import Observation
from nanovllm_core.interfaces.observer import RequestRecord, StepObserver, StepRecord
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_kit.engine_harness import Harness, Setting
from nanovllm_kit.fake_worker import reference_tokens


class Records(StepObserver):
    """Keeps what came of each request: reason, output tokens."""

    def __init__(self) -> None:
        self.ends: dict[str, tuple[str, int]] = {}

    def on_step(self, record: StepRecord) -> None: ...

    def on_request_finished(self, record: RequestRecord) -> None:
        assert record.request_id not in self.ends
        self.ends[record.request_id] = record.finish_reason, record.num_output_tokens


@given(
    end=st.integers(1, 8),
    late=st.integers(0, 9),
    steps_ahead=st.integers(0, 3),
    others=st.integers(0, 3),
    windows=st.sampled_from([(None,), (5, None)]),
)
@settings(max_examples=60, deadline=None)
def test_a_request_ends_at_the_length_that_its_caller_says(
    end: int, late: int, steps_ahead: int, others: int, windows: tuple[int | None, ...]
) -> None:
    """`late` steps after the caller has the id that it ends at; others go on to their lengths."""
    records = Records()
    sizes = Setting(steps_ahead=steps_ahead, num_blocks=40, cache_windows=windows)
    harness = Harness(sizes, observation=Observation({"records": records}))
    engine, params = harness.engine, SamplingParams(temperature=0, max_tokens=8, stop="!")
    for index in range(others):
        engine.add_request(str(index), range(index + 3), SamplingParams(max_tokens=12))
    engine.add_request("a", range(5), params, searched=True)
    (request,) = engine._samples["a"]
    outputs: list[int] = []
    while len(outputs) < end:
        for delta in engine.step():
            outputs += delta.new_token_ids if delta.request_id == "a" else []
    for _ in range(late):
        engine.step()
    assert "a" not in records.ends
    engine.end_at("a", 0, end, "!")
    engine.assert_consistent()
    assert request.row < 0
    assert request.block_tables == []
    while engine.has_unfinished():
        engine.step()
    assert records.ends == {"a": ("stop", end), **{str(i): ("length", 12) for i in range(others)}}
    assert engine.stats.free_blocks == 40
    expected = reference_tokens(
        range(5), request.sampling, request.max_length, sizes.vocab_size, windows
    )
    assert outputs[:end] == expected[:end]
