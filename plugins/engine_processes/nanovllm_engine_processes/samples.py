"""What a door has been given of every sample, and so what is left for another engine to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from nanovllm_core.frontend import EndAt, NewRequest, OutputDelta, derive_seed
from nanovllm_engine_processes.routing import EngineLoad


@dataclass(slots=True, eq=False)
class Batch:
    """The requests of one `AddRequests`: all of them are added, or none."""

    subscriber: int
    request_ids: tuple[str, ...]


@dataclass(slots=True, eq=False)
class Sample:
    """One output of a request: where it runs, and what its door has of it.

    An engine knows it by `part` and `part_index`: the request's own id and index, or others once it
    has been run again.
    """

    request: NewRequest
    index: int
    batch: Batch
    engine: int
    part: str
    part_index: int
    tokens_left: int
    """As the engine's load counts them."""
    token_ids: list[int] = field(default_factory=list)
    """Outputs that the door has."""
    is_finished: bool = False
    """Its last delta has come."""
    is_aborted: bool = False
    end: EndAt | None = None
    """Its door has searched its text, and says where it ends."""
    num_reruns: int = 0

    @property
    def is_over(self) -> bool:
        """True once neither the engine nor the door has more to say."""
        has_ended = not self.request.params.stop or self.is_aborted or self.end is not None
        return self.is_finished and has_ended

    def rest(self, part: str) -> NewRequest:
        """What is left, as a request of one sample: the engine goes on behind the outputs.

        Sample i of a request has the seed that is derived from the request's, so its noise is the
        same here: it follows from the seed and the number of the output.
        """
        params = self.request.params
        seed = params.seed or 0  # it has one
        seed = derive_seed(seed, self.index) if self.index else seed
        return replace(
            self.request,
            request_id=part,
            params=replace(params, n=1, seed=seed),
            output_token_ids=tuple(self.token_ids),
        )

    def last_delta(self, **fields: object) -> OutputDelta:
        """A last delta that no engine gives any more."""
        return OutputDelta(
            request_id=self.request.request_id,
            index=self.index,
            new_token_ids=[],
            new_logprobs=None if self.request.params.logprobs is None else [],
            **fields,  # type: ignore[arg-type]
        )


class Samples:
    """All samples that are not over, with the load of each engine."""

    def __init__(self, num_engines: int, max_model_len: int) -> None:
        self.loads = {engine: EngineLoad() for engine in range(num_engines)}
        """Of the engines that run."""
        self._max_model_len = max_model_len
        self._by_part: dict[tuple[str, int], Sample] = {}
        self._by_request: dict[str, list[Sample]] = {}

    def __iter__(self) -> Iterator[Sample]:
        for samples in tuple(self._by_request.values()):
            yield from tuple(samples)

    def add(self, request: NewRequest, batch: Batch, engine: int) -> None:
        """A request goes to an engine, with all its samples."""
        params, prompt = request.params, len(request.prompt_token_ids)
        most = self._max_model_len - prompt if params.max_tokens is None else params.max_tokens
        samples = [
            Sample(request, index, batch, engine, request.request_id, index, most)
            for index in range(params.n)
        ]
        samples[0].tokens_left += prompt
        self._by_request[request.request_id] = samples
        for sample in samples:
            self._by_part[sample.part, sample.part_index] = sample
            self._count(sample, 1)

    def move(self, sample: Sample, engine: int, part: str) -> None:
        """A sample runs again, on another engine, as the only one of `part`."""
        self._count(sample, -1)
        del self._by_part[sample.part, sample.part_index]
        sample.engine, sample.part, sample.part_index = engine, part, 0
        sample.num_reruns += 1
        self._by_part[part, 0] = sample
        self._count(sample, 1)

    def of_part(self, part: str, index: int, engine: int) -> Sample | None:
        """The sample that an engine knows so."""
        sample = self._by_part.get((part, index))
        return sample if sample is not None and sample.engine == engine else None

    def of_request(self, request_id: str) -> list[Sample]:
        """Those of a request that are not over."""
        return self._by_request.get(request_id, [])

    def take(self, sample: Sample, delta: OutputDelta) -> None:
        """A delta goes to the door: never twice, and nothing behind the last."""
        sample.token_ids += delta.new_token_ids
        given = min(len(delta.new_token_ids), sample.tokens_left)
        sample.tokens_left -= given
        if sample.engine in self.loads:
            self.loads[sample.engine].tokens -= given
        if delta.finish_reason is not None:
            self._count(sample, -1)
            sample.is_finished = True
            self.drop_if_over(sample)

    def drop_if_over(self, sample: Sample) -> None:
        """Forget a sample of which nothing more is to come."""
        if sample.is_over:
            self._forget(sample)

    def drop(self, samples: Iterable[Sample]) -> None:
        """Forget samples that were refused."""
        for sample in tuple(samples):
            if not sample.is_finished:
                self._count(sample, -1)
            self._forget(sample)

    def _forget(self, sample: Sample) -> None:
        if self._by_part.pop((sample.part, sample.part_index), None) is None:
            return
        others = self._by_request[sample.request.request_id]
        others.remove(sample)
        if not others:
            del self._by_request[sample.request.request_id]

    def _count(self, sample: Sample, sign: int) -> None:
        load = self.loads.get(sample.engine)
        if load is not None:
            load.requests += sign
            load.tokens += sign * sample.tokens_left
