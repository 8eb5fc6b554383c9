"""`nanovllm eval`: answer a checkpoint's own held-out questions, and count exact matches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nanovllm_bench.commands.out import Out
from nanovllm_bench.environment import describe_environment
from nanovllm_core.cli import engine_options as options
from nanovllm_core.config import EngineConfig
from nanovllm_core.errors import CheckpointError, shown
from nanovllm_core.interfaces.sampling_params import NEUTRAL, SamplingParams


@dataclass(frozen=True, slots=True)
class Item:
    """A question and the one right answer."""

    task: str
    messages: list[dict[str, str]]
    answer: str


@dataclass(frozen=True, slots=True)
class Answered:
    """An item and what the model said."""

    item: Item
    text: str

    @property
    def task(self) -> str:
        return self.item.task

    @property
    def is_right(self) -> bool:
        return self.text.strip() == self.item.answer.strip()


@dataclass(frozen=True, slots=True)
class Score:
    """How many of a task's items were answered exactly."""

    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.total


def evaluate(
    ctx: typer.Context,
    model: options.Model = None,
    config: options.ConfigFile = None,
    data: Annotated[
        Path | None, typer.Option(help="Questions; default: the checkpoint's eval.jsonl.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum questions per task.", min=1)] = None,
    min_task: Annotated[
        float, typer.Option(help="Minimum accuracy of each task.", min=0, max=1)
    ] = 0.90,
    min_overall: Annotated[
        float, typer.Option(help="Minimum overall accuracy.", min=0, max=1)
    ] = 0.95,
    out: Out = None,
    attention: options.Attention = None,
    scheduler: options.Scheduler = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    settings: options.Settings = None,
) -> None:
    """Exact-match accuracy per task, decoded greedily; exit status 1 below a threshold."""
    engine_config = options.loaded_config(ctx).config
    items = read_items(data or _own_data(engine_config), limit)
    result, answered = _run(engine_config, items)
    scores = score(answered)
    overall = Score(sum(one.is_right for one in answered), len(answered))
    passed = overall.accuracy >= min_overall and all(
        task.accuracy >= min_task for task in scores.values()
    )
    _show(scores, overall, result)
    if out is not None:
        result |= {
            "passed": passed,
            "overall": _as_json(overall),
            "tasks": {name: _as_json(task) for name, task in scores.items()},
            "environment": describe_environment(),
            "wrong": [asdict(one) for one in answered if not one.is_right],
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if not passed:
        Console(stderr=True).print(
            f"below the threshold: every task needs {min_task:.0%}, all together {min_overall:.0%}",
            style="red",
        )
        raise typer.Exit(1)


def read_items(file: Path, limit: int | None) -> list[Item]:
    """The items of a file of JSON lines, `{"task", "messages", "answer"}`, by task."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{file} is not UTF-8 text (byte {error.start}); name a file of questions with --data"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error.strerror}); name a file of questions with --data"
        ) from error
    items = [_item(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise CheckpointError(f"{file} holds no questions; name another file with --data")
    items.sort(key=attrgetter("task"))
    return [item for _, task in groupby(items, attrgetter("task")) for item in list(task)[:limit]]


def score(answered: Sequence[Answered]) -> dict[str, Score]:
    """The score of each task, of answers that are sorted by task."""
    scores = {}
    for task, group in groupby(answered, attrgetter("task")):
        rights = [one.is_right for one in group]
        scores[task] = Score(sum(rights), len(rights))
    return scores


def _item(file: Path, number: int, line: str) -> Item:
    try:
        fields = json.loads(line)
        return Item(str(fields["task"]), list(fields["messages"]), str(fields["answer"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f'{file}, line {number}: {shown(error)}; expected {{"task", "messages", "answer"}}'
        ) from error


def _own_data(config: EngineConfig) -> Path:
    """The questions that the checkpoint brings along."""
    from nanovllm_core.registry import get_plugin_manager
    from nanovllm_core.selection import find_checkpoint

    plugins = get_plugin_manager(disable=config.plugins.disable)
    return find_checkpoint(plugins, config.model) / "eval.jsonl"


def _run(config: EngineConfig, items: Sequence[Item]) -> tuple[dict[str, Any], list[Answered]]:
    """Ask everything at once; returns what ran and the answers, in the order of the items."""
    with options.open_llm(config) as llm:
        # An answer that goes on past the longest right one is wrong already.
        longest = max(len(llm.tokenizer.encode(item.answer)) for item in items)
        params = SamplingParams(**{**NEUTRAL, "temperature": 0.0}, max_tokens=longest + 4)
        started = perf_counter()
        outputs = llm.chat([item.messages for item in items], params)
        seconds = perf_counter() - started
        ran = {
            "model": config.model,
            "attention": llm.info.attention,
            "scheduler": config.scheduler.name,
            "device": llm.info.device,
            "dtype": llm.info.dtype,
            "seconds": round(seconds, 3),
        }
    pairs = zip(items, outputs, strict=True)
    return ran, [Answered(item, output.text) for item, output in pairs]


def _as_json(one: Score) -> dict[str, float]:
    return {"correct": one.correct, "total": one.total, "accuracy": round(one.accuracy, 4)}


def _show(scores: dict[str, Score], overall: Score, ran: dict[str, Any]) -> None:
    what = f"{ran['model']} on {ran['device']}, {ran['attention']}, {ran['seconds']:.1f} s"
    table = Table("task", "right", "of", "accuracy")
    for name, task in scores.items():
        table.add_row(name, str(task.correct), str(task.total), f"{task.accuracy:.1%}")
    table.add_section()
    table.add_row("overall", str(overall.correct), str(overall.total), f"{overall.accuracy:.1%}")
    Console().print(what, style="bold", markup=False, highlight=False)
    Console().print(table)
