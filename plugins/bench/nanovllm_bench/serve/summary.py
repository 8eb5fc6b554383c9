"""What the clients saw -> the record of a result file; every figure follows from its raw values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanovllm_bench.latency import percentiles
from nanovllm_bench.serve.client import Answer
from nanovllm_bench.serve.load import Outcome

MAX_LAG_MS = 5.0
"""Of the client's own event loop at p99; beyond it the clients' times are not the endpoint's."""
MAX_CPU_SHARE = 0.9
"""Of one core, for a client process."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits in milliseconds that a good answer keeps; None: no such limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def are_met(self, answer: Answer) -> bool:
        """Whether a completed answer keeps every limit."""
        return all(
            limit is None or value <= limit
            for limit, value in (
                (self.ttft_ms, first_token_ms(answer)),
                (self.tpot_ms, per_token_ms(answer) or 0.0),
                (self.e2e_ms, end_to_end_ms(answer)),
            )
        )

    @property
    def limits(self) -> dict[str, float]:
        """The limits that there are, by name."""
        named = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "e2e_ms": self.e2e_ms}
        return {name: limit for name, limit in named.items() if limit is not None}


def first_token_ms(answer: Answer) -> float:
    """From arrival to the first chunk with text."""
    return 1e3 * (answer.times[0] - answer.arrived)


def end_to_end_ms(answer: Answer) -> float:
    """From arrival to the end of the stream."""
    return 1e3 * (answer.ended - answer.arrived)


def per_token_ms(answer: Answer) -> float | None:
    """The mean time of a token after the first chunk; None for an answer of one token."""
    later = sum(answer.tokens) - 1
    return 1e3 * (answer.times[-1] - answer.times[0]) / later if later > 0 else None


def inter_token_ms(answers: Iterable[Answer]) -> np.ndarray[Any, Any]:
    """Times between neighbouring tokens of each answer; tokens of one chunk come together."""
    return _gaps(np.repeat(answer.times, answer.tokens) for answer in answers)


def inter_chunk_ms(answers: Iterable[Answer]) -> np.ndarray[Any, Any]:
    """Times between neighbouring chunks with tokens of each answer."""
    return _gaps(np.asarray(answer.times) for answer in answers)


def _gaps(times: Iterable[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.zeros(0), *(1e3 * np.diff(seen) for seen in times)])


def summarise(
    outcomes: Sequence[Outcome], objectives: Objectives, *, exact_lengths: bool
) -> dict[str, Any]:
    """Figures of one load, and whether they can be trusted.

    `exact_lengths`: every answer must have as many tokens as it was asked for.
    """
    answers = sorted((a for o in outcomes for a in o.answers), key=lambda a: a.arrived)
    completed = [answer for answer in answers if answer.error is None]
    seconds = max((a.ended for a in answers), default=0.0) - min(a.arrived for a in answers)
    output_tokens = sum(sum(answer.tokens) for answer in completed)
    chunks = sum(len(answer.times) for answer in completed)
    client = _client(outcomes, answers)
    return {
        "seconds": round(seconds, 4),
        "num_seqs": len(answers),
        "completed": len(completed),
        "errors": errors_of(answers),
        "prompt_tokens": _total(answer.prompt_tokens for answer in completed),
        "cached_tokens": _total(answer.cached_tokens for answer in completed),
        "output_tokens": output_tokens,
        "asked_tokens": sum(answer.asked for answer in completed),
        "tokens_per_chunk": round(output_tokens / chunks, 3) if chunks else None,
        "tokens_per_second": round(output_tokens / seconds, 1),
        "requests_per_second": round(len(completed) / seconds, 3),
        **timings(completed),
        "goodput": _goodput(completed, len(answers), seconds, objectives),
        "client": client,
        "invalid": [*_reasons(client), *_short(completed, exact_lengths)],
        "long_prompts": _long([answer for o in outcomes for answer in o.long_answers]),
    }


def timings(completed: Sequence[Answer]) -> dict[str, Any]:
    """Percentiles in milliseconds, and the raw values that they follow from."""
    ttft = [round(first_token_ms(answer), 3) for answer in completed]
    e2e = [round(end_to_end_ms(answer), 3) for answer in completed]
    tpot = [round(ms, 4) for a in completed if (ms := per_token_ms(a)) is not None]
    between, chunked = counted(inter_token_ms(completed)), counted(inter_chunk_ms(completed))
    return {
        "ttft_ms": _percentiles(ttft),
        "inter_token_ms": _percentiles(values_of(between)),
        "inter_chunk_ms": _percentiles(values_of(chunked)),
        "tpot_ms": _percentiles(tpot),
        "e2e_ms": _percentiles(e2e),
        "raw_ttft_ms": ttft,
        "raw_tpot_ms": tpot,
        "raw_e2e_ms": e2e,
        "raw_inter_token_ms": between,
        "raw_inter_chunk_ms": chunked,
    }


def counted(values: np.ndarray[Any, Any]) -> dict[str, list[Any]]:
    """Many values as few: to a hundredth, each with its number."""
    distinct, counts = np.unique(np.round(values, 2), return_counts=True)
    return {"values": distinct.tolist(), "counts": counts.tolist()}


def values_of(raw: Mapping[str, Sequence[Any]]) -> np.ndarray[Any, Any]:
    """The values that `counted` counted."""
    return np.repeat(np.asarray(raw["values"], float), np.asarray(raw["counts"], int))


def errors_of(answers: Iterable[Answer]) -> dict[str, dict[str, Any]]:
    """By kind: how many, and what the first one said."""
    failed = [answer for answer in answers if answer.error is not None]
    kinds = Counter(str(answer.error) for answer in failed)
    first = {str(answer.error): answer.message for answer in reversed(failed)}
    return {kind: {"count": count, "first": first[kind]} for kind, count in sorted(kinds.items())}


def _percentiles(values: Any) -> dict[str, float] | None:
    return percentiles(values) if len(values) else None


def _total(counts: Iterable[int | None]) -> int | None:
    """The sum; None where an answer did not say."""
    known = list(counts)
    said = [count for count in known if count is not None]
    return sum(said) if said and len(said) == len(known) else None


def _goodput(
    completed: Sequence[Answer], asked: int, seconds: float, objectives: Objectives
) -> dict[str, Any] | None:
    if not objectives.limits:
        return None
    good = sum(map(objectives.are_met, completed))
    return {
        "limits": objectives.limits,
        "requests_per_second": round(good / seconds, 3),
        "share": round(good / asked, 4),
    }


def _client(outcomes: Sequence[Outcome], answers: Sequence[Answer]) -> dict[str, Any]:
    """How the clients themselves did: the worst process counts."""
    lags = [np.asarray(outcome.lag_ms) for outcome in outcomes if outcome.lag_ms]
    worst = max(lags, key=lambda lag: float(np.percentile(lag, 99)), default=np.zeros(1))
    late = [1e3 * (answer.sent - answer.arrived) for answer in answers]
    return {
        "processes": len(outcomes),
        "lag_ms": {**percentiles(worst.tolist()), "max": round(float(worst.max()), 3)},
        "sent_late_ms": percentiles(late),
        "cpu_share": round(max(outcome.cpu_share for outcome in outcomes), 3),
    }


def _reasons(client: Mapping[str, Any]) -> list[str]:
    """Why the clients, and not the endpoint, may have set the times."""
    reasons = []
    if (lag := client["lag_ms"]["p99"]) > MAX_LAG_MS:
        reasons.append(
            f"a client's event loop was {lag:.1f} ms late at p99, above {MAX_LAG_MS:g} ms; give "
            "more --processes, or a machine with free cores"
        )
    if (share := client["cpu_share"]) > MAX_CPU_SHARE:
        reasons.append(
            f"a client process took {share:.0%} of a core, above {MAX_CPU_SHARE:.0%}; give more "
            "--processes"
        )
    return reasons


def _short(completed: Sequence[Answer], exact_lengths: bool) -> list[str]:
    wrong = sum(sum(answer.tokens) != answer.asked for answer in completed)
    if not exact_lengths or not wrong:
        return []
    return [
        f"{wrong} of {len(completed)} answers do not have the number of tokens that they were "
        "asked for; an endpoint without ignore_eos needs --no-ignore-eos"
    ]


def _long(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """First tokens of the long prompts that ran beside; None without them."""
    if not answers:
        return None
    ttft = [round(first_token_ms(a), 3) for a in answers if a.error is None]
    return {
        "num_seqs": len(answers),
        "errors": errors_of(answers),
        "ttft_ms": _percentiles(ttft),
        "raw_ttft_ms": ttft,
    }
