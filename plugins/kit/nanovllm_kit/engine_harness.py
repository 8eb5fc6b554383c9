"""The real engine on the fake worker, and the reference to compare it with. Imports no torch.

harness = Harness(Setting(num_blocks=6), TokenBudgetScheduler(MyPolicy(options)))
harness.add("a", [1, 2, 3])
harness.run()         # to the end; fails where a block leaked or nothing goes on
harness.check_all()   # every output is what its ids alone decide
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nanovllm_core.engine import (
    Engine,
    EngineLimits,
    FcfsPolicy,
    LoadedConstraint,
    Observation,
    OutputDelta,
    Request,
    TokenBudgetScheduler,
)
from nanovllm_core.errors import PluginFailedError
from nanovllm_core.frontend import Detokenizer, OutputStream, RequestOutput
from nanovllm_core.interfaces.sampling_params import SamplingParams
from nanovllm_core.interfaces.scheduler import Scheduler
from nanovllm_kit.fake_worker import FakeExecutor, reference_tokens

LOOK = 1000
"""Steps from one look at how far the requests are to the next."""
MAX_LOOKS = 5
"""In which no request was further than ever before, beside those that compute a prompt again."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The sizes of one engine under test; small, so that everything runs short."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    max_model_len: int = 64
    vocab_size: int = 50
    prefix_caching: bool = True
    steps_ahead: int = 1
    eos_token_ids: tuple[int, ...] = ()
    cache_windows: tuple[int | None, ...] = (None,)


@dataclass
class Letters:
    """A detokenizer: id 0 is "a", id 1 is "b" and so on, round the alphabet."""

    pushed: list[int] = field(default_factory=list)

    def push(self, token_ids: Sequence[int]) -> str:
        self.pushed += token_ids
        return letters(token_ids)

    def flush(self, token_ids: Sequence[int] = ()) -> str:
        return self.push(token_ids)


def letters(token_ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token_id % 26) for token_id in token_ids)


class NoEndError(AssertionError):
    """Requests are left, and for thousands of steps none of them got further than ever before."""


class Progress:
    """How far requests came; a request that is preempted and computed again gets no further."""

    def __init__(self, requests: Mapping[tuple[str, int], Request]) -> None:
        self._requests = requests
        self._furthest: dict[tuple[str, int], int] = {}
        self.since = 0
        """Steps since one was further than ever before."""

    def look(self) -> bool:
        """After LOOK steps more; False once that took longer than computing any request again."""
        further = [
            (key, request.num_scheduled)
            for key, request in self._requests.items()
            if request.num_scheduled > self._furthest.get(key, 0)
        ]
        self._furthest.update(further)
        self.since = 0 if further else self.since + LOOK
        again = max((request.max_length for request in self._requests.values()), default=0)
        return self.since < LOOK * MAX_LOOKS + again


class Harness:
    """An engine, in debug mode unless told otherwise, its fake worker, and what came out so far.

    `pickled`: plans and results are copied between the two, as between processes.
    """

    def __init__(
        self,
        setting: Setting | None = None,
        scheduler: Scheduler | None = None,
        *,
        engine_class: type[Engine] = Engine,
        observation: Observation | None = None,
        constraints: Mapping[str, LoadedConstraint] | None = None,
        constraint_seconds: float = 5.0,
        debug: bool = True,
        pickled: bool = True,
    ) -> None:
        self.setting = s = setting or Setting()
        self.executor = FakeExecutor(
            num_blocks=s.num_blocks,
            block_size=s.block_size,
            num_rows=s.max_num_seqs,
            max_model_len=s.max_model_len,
            max_num_batched_tokens=s.max_num_batched_tokens,
            vocab_size=s.vocab_size,
            cache_windows=s.cache_windows,
            pickled=pickled,
        )
        self.scheduler = scheduler or TokenBudgetScheduler(FcfsPolicy())
        self.engine = engine_class(
            self.executor,
            self.scheduler,
            EngineLimits(
                max_num_seqs=s.max_num_seqs,
                max_num_batched_tokens=s.max_num_batched_tokens,
                max_model_len=s.max_model_len,
                num_blocks=s.num_blocks,
                block_size=s.block_size,
                vocab_size=s.vocab_size,
                cache_windows=s.cache_windows,
            ),
            eos_token_ids=s.eos_token_ids,
            observation=observation,
            constraints=constraints,
            constraint_seconds=constraint_seconds,
            prefix_caching=s.prefix_caching,
            steps_ahead=s.steps_ahead,
            debug=debug,
        )
        self.outputs: list[RequestOutput] = []
        self.finished: dict[tuple[str, int], RequestOutput] = {}
        self.requests: dict[tuple[str, int], Request] = {}
        self._streams: dict[tuple[str, int], OutputStream] = {}

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        detokenizer: Callable[[], Detokenizer] | None = None,
        cache_salt: bytes = b"",
        labels: Mapping[str, str] | None = None,
    ) -> list[Request]:
        """Add a request; greedy and without a stop unless `params` say otherwise.

        `detokenizer` makes the one of each sample; stop strings need it.
        """
        params = params or SamplingParams(temperature=0, max_tokens=8)
        self.engine.add_request(
            request_id,
            prompt,
            params,
            stream=stream,
            searched=bool(params.stop) and detokenizer is not None,
            cache_salt=cache_salt,
            labels=labels,
        )
        samples = list(self.engine._samples[request_id])
        for sample in samples:
            key = (request_id, sample.index)
            self.requests[key] = sample
            text = detokenizer() if detokenizer else None
            self._streams[key] = OutputStream(
                sample.prompt_token_ids, params, text, self.engine.end_at
            )
        return samples

    def step(self) -> list[RequestOutput]:
        """One step of the engine; the outputs of its streams, and those that are finished."""
        __tracebackhide__ = True
        outputs = []
        for delta in self._step_engine():
            key = (delta.request_id, delta.index)
            output = self._streams[key].push(delta)
            if output is None or not (output.finished or self.requests[key].stream):
                continue
            outputs.append(output)
            if output.finished:
                assert key not in self.finished, f"{key} finished twice"
                self.finished[key] = output
        self.outputs += outputs
        return outputs

    def _step_engine(self) -> list[OutputDelta]:
        """The engine's step. What a watch beside the scheduler asserts is raised as it is."""
        __tracebackhide__ = True
        try:
            return self.engine.step()
        except PluginFailedError as error:
            if isinstance(error.__cause__, AssertionError):
                raise error.__cause__ from None
            raise

    def run(self) -> dict[tuple[str, int], RequestOutput]:
        """Step until nothing is left, then check that nothing leaked; NoEndError if it stays."""
        __tracebackhide__ = True
        for _ in self.steps():
            pass
        return self.finished

    def steps(self) -> Iterator[None]:
        """As `run`, a step at a time."""
        __tracebackhide__ = True
        progress = Progress(self.requests)
        for number in itertools.count(1):
            if not self.engine.has_unfinished():
                break
            if number % LOOK == 0 and not progress.look():
                stats = self.engine.stats
                raise NoEndError(
                    f"no end after {number} steps, and for {progress.since} steps no request got "
                    f"further than it had been: {stats.running} requests run, {stats.waiting} "
                    f"wait, and requests were preempted {stats.preemptions} times; the scheduler "
                    "goes in circles, or gives out nothing"
                )
            self.step()
            yield
        assert self.engine.stats.free_blocks == self.setting.num_blocks, "blocks leaked"
        assert not self.executor.results, "a result was never collected"
        assert self.engine.stats.running == self.engine.stats.waiting == 0

    def grow_old(self, steps: int, requests: int) -> None:
        """Count on from so many steps and requests, as an engine that has run for long."""
        self.engine._planner.step = steps
        self.engine._num_arrived = requests

    def take_free_blocks(self) -> list[int]:
        """Hold every free block, as if others did; debug mode takes that for a leak."""
        pool = self.engine._kv.pool
        return [pool.allocate() for _ in range(pool.num_free)]

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free what `take_free_blocks` held."""
        self.engine._kv.pool.release(blocks)

    def expected(self, request_id: str, index: int = 0) -> list[int]:
        """What a request's output must be, from its ids alone."""
        request = self.requests[request_id, index]
        return reference_tokens(
            request.prompt_token_ids,
            request.sampling,
            request.max_length,
            self.setting.vocab_size,
            self.setting.cache_windows,
        )

    def check_all(self) -> None:
        """Every request that was not aborted gave exactly the reference's tokens.

        Of those with stop strings, which must be single letters, up to the first that has one.
        """
        assert self.finished.keys() == self.requests.keys(), "a request got no reply"
        for (request_id, index), output in self.finished.items():
            expected = self.expected(request_id, index)
            request = self.requests[request_id, index]
            found = [i for i, x in enumerate(letters(expected)) if x in request.params.stop_strings]
            if found:  # the caller ends it there
                expected = expected[: found[0] + 1]
            if output.finish_reason == "abort":
                assert output.token_ids == expected[: len(output.token_ids)]
                continue
            assert output.token_ids == expected, f"{request_id}/{index}"
            stopped = expected[-1] in request.sampling.stop_token_ids
            assert output.finish_reason == ("stop" if stopped or found else "length")
            reason = letters(expected[-1:]) if found else expected[-1] if stopped else None
            assert output.stop_reason == reason
