"""The thread between door and engines, over engines that are simulated: none is a process.

Random programs of arrivals, steps, ends of texts, aborts and deaths: no token is lost, none comes
twice, every request ends, and nothing of it is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from nanovllm_core import SamplingParams
from nanovllm_core.api import EngineConfig, EngineError, InvalidPromptError, WorkerInfo
from nanovllm_core.frontend import (
    Abort,
    AddRequests,
    Answer,
    Close,
    EndAt,
    EngineStats,
    GetStats,
    NewRequest,
    OutputDelta,
    OutputStream,
    Refused,
    RequestOutput,
    derive_seed,
)
from nanovllm_engine_processes import EngineLoad, Router, hub as hub_module, wire
from nanovllm_engine_processes.hub import Hub
from nanovllm_engine_processes.plugin import ProcessesOptions
from nanovllm_engine_processes.samples import Samples

NUM_ENGINES = 4
INFO = WorkerInfo(
    num_blocks=1, block_size=16, max_model_len=64, vocab_size=9, attention="a", device="cpu"
)


def token(seed: int, place: int) -> int:
    """The id at this place of the outputs of a sample: its letter is `chr(97 + id)`."""
    return derive_seed(seed, place) % 26


@dataclass(eq=False)
class Running:
    """A sample in a simulated engine."""

    request: NewRequest
    index: int
    seed: int
    known: int
    handed_out: int
    is_finished: bool = False

    def delta(self, **how: Any) -> OutputDelta:
        """The ids that were not handed out."""
        ids = [token(self.seed, place) for place in range(self.handed_out, self.known)]
        self.handed_out = self.known
        self.is_finished = "finish_reason" in how
        return OutputDelta(
            request_id=self.request.request_id, index=self.index, new_token_ids=ids, **how
        )


class SimulatedEngine:
    """An engine loop with its sockets: what is sent lies in `inbox`, what it says in `outbox`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.inbox: deque[bytes] = deque()
        self.outbox: deque[bytes] = deque()
        self.samples: list[Running] = []

    def say(self, name: str, content: object) -> None:
        self.outbox.append(wire.encode(self.number, name, content))

    def step(self) -> None:
        """Take the messages, then a token of each sample."""
        deltas: list[OutputDelta] = []
        while self.inbox:
            deltas += self.handle(wire.read_message(*wire.decode(self.inbox.popleft())))
        for one in self.samples:
            if not one.is_finished:
                one.known += 1
                if one.known == one.request.params.max_tokens:
                    deltas.append(one.delta(finish_reason="length"))
                elif one.request.stream or one.request.params.stop:
                    deltas.append(one.delta())
        self.samples = [
            one for one in self.samples if one.request.params.stop or not one.is_finished
        ]
        if deltas:
            self.say(wire.DELTAS, [*map(wire.delta_row, deltas)])

    def handle(self, message: Any) -> Iterator[OutputDelta]:
        match message:
            case AddRequests(_, requests):
                bad = [at for at, one in enumerate(requests) if not one.prompt_token_ids]
                if bad:
                    error = wire.error_row(InvalidPromptError("the prompt is empty"))
                    self.say(wire.REFUSED, [error, [one.request_id for one in requests], bad[0]])
                    return
                self.samples += [one for request in requests for one in running(request)]
            case Abort(names):
                for one in [*self.samples]:
                    if one.request.request_id in names:
                        self.samples.remove(one)
                        if not one.is_finished:
                            yield one.delta(finish_reason="abort")
            case EndAt(name, index, _, stop):
                for one in [*self.samples]:
                    if (one.request.request_id, one.index) == (name, index):
                        self.samples.remove(one)
                        if not one.is_finished:
                            yield one.delta(finish_reason="stop", stop_reason=stop)
            case GetStats(number):
                self.say(wire.STATS, [number, wire.stats_row(EngineStats(steps=1))])


def running(request: NewRequest) -> list[Running]:
    """The samples of a request, as an engine makes them."""
    seed, have = request.params.seed, len(request.output_token_ids)
    assert seed is not None
    assert not have or request.params.n == 1
    made = [
        Running(request, index, derive_seed(seed, index) if index else seed, have, have)
        for index in range(request.params.n)
    ]
    assert [token(made[0].seed, place) for place in range(have)] == [*request.output_token_ids]
    return made


class Letters:
    """A detokenizer of one letter for each id."""

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(97 + one) for one in token_ids)

    flush = push


@dataclass(eq=False)
class Call:
    """A request as its caller sees it."""

    request: NewRequest
    streams: list[OutputStream]
    expected: list[RequestOutput]
    """Those of an engine that lives."""
    last: dict[int, RequestOutput] = field(default_factory=dict)
    is_over: bool = False
    error: BaseException | None = None
    was_left: bool = False


class RandomRouter(Router):
    """Any engine; the loads that it is shown are those of unfinished work. It forgets badly."""

    def __init__(self, draws: Random) -> None:
        self.draws = draws

    def choose(self, request: NewRequest, loads: Mapping[int, EngineLoad]) -> int:
        assert all(load.requests >= 0 and load.tokens >= 0 for load in loads.values())
        return self.draws.choice(sorted(loads))

    def forget(self, engine: int) -> None:
        raise ValueError("a router's own fault ends nothing")


class Simulation:
    """Engines, and the callers of one door: `receive` plays the next part of a program."""

    def __init__(self, program: Sequence[tuple[str, int]], draws: Random) -> None:
        self.program, self.draws = deque(program), draws
        self.engines = {number: SimulatedEngine(number) for number in range(NUM_ENGINES)}
        self.dying: dict[int, EngineError] = {}
        self.calls: list[Call] = []
        self.answers: SimpleQueue[Answer] = SimpleQueue()
        self.num_arrived = self.num_asked = self.num_answered = 0
        self.idle_rounds = 0
        config = EngineConfig(model="x", data_parallel_size=NUM_ENGINES)
        options = ProcessesOptions(max_reruns=2)
        self.hub = Hub(config, "LLM", options, RandomRouter(draws))
        self.hub.engines = self  # type: ignore[assignment]
        self.hub.info = INFO
        self.hub._infos = dict.fromkeys(self.engines, INFO)
        self.hub._samples = Samples(NUM_ENGINES, INFO.max_model_len)
        self.hub.subscribers[7] = self.answers.put

    # -- what the hub calls

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self.engines))

    def __len__(self) -> int:
        return len(self.engines)

    def ring(self) -> None:
        pass

    def send(self, number: int, message: bytes) -> None:
        self.engines[number].inbox.append(message)

    def end(self, number: int) -> None:
        del self.engines[number]
        self.dying.pop(number, None)

    def receive(self) -> list[Any]:
        self.check_whole_requests()
        if self.program:
            return self.play(*self.program.popleft())
        self.idle_rounds += 1
        assert self.idle_rounds < 500, "requests do not end"
        self.read()
        for engine in self.engines.values():
            engine.step()
        heard = [one for number in self for one in self.hear(number, 99)]
        if not heard and all(call.is_over for call in self.calls) and self.answers.empty():
            self.hub.post(Close())
        return heard

    def find_ended(self) -> tuple[list[Any], dict[int, EngineError]]:
        """Of one that died, a part of what it had said still comes."""
        heard = [one for number in self.dying for one in self.hear(number, self.draws.randrange(3))]
        return heard, dict(self.dying)

    def hear(self, number: int, most: int) -> list[Any]:
        outbox = self.engines[number].outbox
        return [wire.decode(outbox.popleft()) for _ in range(min(most, len(outbox)))]

    # -- what happens

    def play(self, act: str, value: int) -> list[Any]:
        engine = self.engines.get(value % NUM_ENGINES)
        if act == "add":
            self.add()
        elif act == "read":
            self.read()
        elif act == "ask":
            self.num_asked += 1
            self.hub.post(GetStats(7))
        elif act == "leave" and self.calls:
            call = self.calls[value % len(self.calls)]
            if not call.is_over:
                call.was_left = True
                self.hub.post(Abort((call.request.request_id,)))
        elif engine is not None:
            if act == "step":
                engine.step()
            elif act == "hear":
                return self.hear(engine.number, 1 + value // NUM_ENGINES)
            elif act in ("die", "die together"):
                for number in [one for one in self if one == engine.number or act != "die"][:2]:
                    self.dying[number] = EngineError(f"engine {number} ended")
            elif act == "fail":
                engine.step()
                engine.say(wire.ENDED, wire.error_row(EngineError("a step raised")))
        return []

    def add(self) -> None:
        """One to three requests at once; now and then one that its engine refuses."""
        draws, calls = self.draws, []
        for _ in range(draws.randrange(1, 4)):
            params = SamplingParams(
                max_tokens=draws.randrange(1, 12),
                n=draws.choice([1, 1, 2, 3]),
                stop=draws.choice([None, None, ["a", "be", "c"]]),
                seed=draws.choice([None, draws.randrange(99)]),
            )
            request = NewRequest(
                request_id=str(len(self.calls) + len(calls)),
                prompt_token_ids=[] if draws.random() < 0.05 else [1, 2, 3],
                params=params,
                stream=draws.random() < 0.7,
            )
            streams = [OutputStream([1], params, Letters(), self.end_at) for _ in range(params.n)]
            calls.append(Call(request, streams, alone(request, self.num_arrived)))
            self.num_arrived += params.n
        self.calls += calls
        self.hub.post(AddRequests(7, tuple(call.request for call in calls)))

    def end_at(self, *values: Any) -> None:
        self.hub.post(EndAt(*values))

    def read(self) -> None:
        """The callers take what has come."""
        while not self.answers.empty():
            answer = self.answers.get()
            if isinstance(answer, list):
                for delta in answer:
                    self.take(self.calls[int(delta.request_id)], delta)
            elif isinstance(answer, EngineStats):
                self.num_answered += 1
            else:
                names = answer.request_ids if isinstance(answer, Refused) else None
                self.num_answered = self.num_asked if names is None else self.num_answered
                for call in self.calls:
                    if not call.is_over and (names is None or call.request.request_id in names):
                        call.is_over, call.error = True, answer.error

    def take(self, call: Call, delta: OutputDelta) -> None:
        assert not call.is_over, "a delta behind the end"
        assert delta.index not in call.last, "a delta behind a sample's last"
        output = call.streams[delta.index].push(delta)
        if output is not None and output.finished:
            call.last[delta.index] = output
            call.is_over = len(call.last) == len(call.streams)

    def check_whole_requests(self) -> None:
        for call in self.calls:
            samples = self.hub._samples.of_request(call.request.request_id)
            assert len({one.engine for one in samples}) < 2, "samples of a request were parted"


def alone(request: NewRequest, arrived: int) -> list[RequestOutput]:
    """The outputs of a request that one engine runs to its end."""
    engine, last = SimulatedEngine(0), {}
    messages: deque[Any] = deque()
    if not request.prompt_token_ids:
        return []
    seed = request.params.seed
    seed = derive_seed(0, arrived) if seed is None else seed
    sent = replace(request, params=replace(request.params, seed=seed))
    streams = [
        OutputStream(
            [1], request.params, Letters(), lambda *values: messages.append(EndAt(*values))
        )
        for _ in range(request.params.n)
    ]
    engine.inbox.append(wire.encode_message(AddRequests(0, (sent,))))
    while len(last) < len(streams):
        engine.step()
        while engine.outbox:
            for row in wire.decode(engine.outbox.popleft())[2]:
                output = streams[row[1]].push(wire.read_delta(row, row[0], row[1]))
                if output is not None and output.finished:
                    last[output.index] = output
        while messages:
            engine.inbox.append(wire.encode_message(messages.popleft()))
    return [last[index] for index in range(len(streams))]


def facts(output: RequestOutput) -> tuple[Any, ...]:
    return output.token_ids, output.text, output.finish_reason, output.stop_reason


acts = ["add"] * 3 + ["step"] * 6 + ["hear"] * 6 + ["read"] * 3
acts += ["leave", "ask", "die", "die together", "fail"]
programs = st.lists(st.tuples(st.sampled_from(acts), st.integers(0, 15)), max_size=80)


@settings(max_examples=150, deadline=None)
@example([("add", 0), ("add", 0), ("die", 1)], 115)  # a request is refused when it runs again
@given(programs, st.integers(0, 2**32))
def test_no_token_is_lost_or_comes_twice_whatever_happens(
    program: list[tuple[str, int]], seed: int
) -> None:
    """Every request ends as on one engine alone, unless it was left, or ran out of engines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_module, "LOOK_SECONDS", -1.0)
        simulation = Simulation(program, Random(seed))
        simulation.hub._serve(simulation)  # type: ignore[arg-type]
    for engine in simulation.engines.values():
        engine.step()  # for what was sent last
    has_engines = bool(simulation.engines)
    for call in simulation.calls:
        if call.error is not None:
            assert isinstance(call.error, InvalidPromptError) or not has_engines
            continue
        assert len(call.last) == call.request.params.n
        if not call.request.prompt_token_ids:
            # Refused only when it ran again: the others of its batch went on meanwhile.
            for output in call.last.values():
                assert call.was_left or isinstance(output.error, InvalidPromptError)
            continue
        for index, output in call.last.items():
            wanted = call.expected[index]
            if output.finish_reason in ("abort", "error"):
                assert call.was_left or output.finish_reason == "error"
                assert wanted.token_ids[: len(output.token_ids)] == output.token_ids
            else:
                assert facts(output) == facts(wanted)
    assert simulation.num_answered == simulation.num_asked
    samples = simulation.hub._samples
    assert [*samples] == []
    assert samples._by_part == {}
    assert samples._by_request == {}
    assert simulation.hub._questions == {}
    assert {(load.requests, load.tokens) for load in samples.loads.values()} <= {(0, 0)}
    assert [one.samples for one in simulation.engines.values()] == [[]] * len(simulation)
