"""Every exception nanovllm raises on purpose.

NanoVLLMError
├── ConfigError                  a key, type or value of the configuration is wrong
├── PluginError
│   ├── PluginNotFoundError      no installed plugin has that name
│   ├── PluginConflictError      two distributions register the same name
│   ├── PluginLoadError          a selected plugin cannot be imported, or breaks the contract
│   ├── PluginFailedError        a plugin raised when it was called
│   ├── ModelOutputError         logits that are NaN or infinite; debug mode looks for them
│   └── UnsupportedError         the plugin exists but cannot serve here; carries the reasons
├── CheckpointError
│   ├── CheckpointNotFoundError  the model names no folder, plugin or hub repository
│   ├── CheckpointConflictError  the model names a folder and a plugin, each with a checkpoint
│   ├── ArchitectureError        the checkpoint's architecture or one of its settings is unknown
│   └── WeightsError             missing, unexpected, truncated or mismatched weights
├── RequestError
│   ├── InvalidPromptError       empty prompt, or ids outside the vocabulary
│   ├── InvalidSamplingError     a sampling parameter out of its range, or no id left to choose
│   ├── InvalidLabelsError       labels that are not a small mapping of texts
│   └── RequestTooLongError      a request that can never fit
├── DeviceError                  the device that was asked for is not there
├── OutOfMemoryError             too little memory for what was asked
└── EngineError
    ├── EngineClosedError        the engine was closed, or died
    ├── SchedulerError           a scheduler plugin decided something impossible
    ├── ExecutorError            a worker failed, or no executor can run the config
    ├── GraphSafetyError         a captured graph reads memory it must not
    └── InconsistentStateError   an invariant is broken: a bug in nanovllm or in a plugin

Every message carries the value, the limit and the remedy. A value that came from outside is written
by `shown`, which cuts it.
"""

from __future__ import annotations

import difflib
import importlib
import reprlib
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MAX_MESSAGE = 20_000
"""Characters of one error's message; a plugin's own text may be longer and is cut."""
MAX_SHOWN = 200
"""Characters of one value in a message."""
_NOT_THEIRS = frozenset({Path(__file__).parent, Path(importlib.__file__).parent})
"""Folders of code that stands between a plugin and its error."""


def clip(text: str, limit: int = MAX_SHOWN) -> str:
    """The text, or its beginning and its end where it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    half = (limit - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def shown(value: object) -> str:
    """`repr` of a value for a message: at most `MAX_SHOWN` characters, whatever it holds.

    Large strings and containers are cut before their text is made.
    """
    return clip(_SHORT.repr(value))


def describe_error(error: BaseException) -> str:
    """Type and text of a plugin's error and, where its traceback says it, the file and line."""
    return f"{type(error).__name__}: {error}{place_of(error)}"


def place_of(error: BaseException) -> str:
    """File and line of a plugin's error, in brackets; empty where its traceback has none."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and _NOT_THEIRS.isdisjoint(Path(frame.filename).parents)
    ]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def in_ranges(values: Iterable[Any]) -> list[Any]:
    """The values in order; three or more whole numbers in a row become one text: "1 to 256"."""
    rows: list[list[Any]] = []
    for value in sorted(values):
        if rows and isinstance(value, int) and value == rows[-1][-1] + 1:
            rows[-1].append(value)
        else:
            rows.append([value])
    return [one for row in rows for one in (row if len(row) < 3 else [f"{row[0]} to {row[-1]}"])]


class _ShortRepr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 16
        self.maxstring = self.maxother = MAX_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write the digits of a huge number."""
        if x.bit_length() <= 512:
            return repr(x)
        return f"<a whole number of {x.bit_length()} bits>"


_SHORT = _ShortRepr()


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, if any is like it; no long name is like another."""
    if len(name) > 100:
        return None
    matches = difflib.get_close_matches(name, [*known], n=1)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean block_size?`, or nothing. A `prefix` that all have makes no two alike."""
    match = nearest(name.removeprefix(prefix), (each.removeprefix(prefix) for each in known))
    return f"; did you mean {prefix}{match}?" if match else ""


class NanoVLLMError(Exception):
    """Base of every error raised on purpose."""

    def __init__(self, message: object = "") -> None:
        super().__init__(clip(str(message), MAX_MESSAGE))


class ConfigError(NanoVLLMError):
    """A key, type or value of the configuration is wrong; the message names its path."""


class PluginError(NanoVLLMError):
    """Something about an installed (or missing) plugin."""


class PluginNotFoundError(PluginError):
    """No installed plugin has that name."""


class PluginConflictError(PluginError):
    """Two distributions register the same name in one group."""


class PluginLoadError(PluginError):
    """A selected plugin cannot be imported, or does not keep its contract."""


class PluginFailedError(PluginError):
    """A plugin raised when it was called; its own error is the cause."""


class ModelOutputError(PluginError):
    """Debug mode found logits that no model may give, in `rows` of the engine's tables."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class UnsupportedError(PluginError):
    """A plugin cannot serve what is asked of it here; `reasons` lists why."""

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)


class CheckpointError(NanoVLLMError):
    """Something about the checkpoint on disk."""


class CheckpointNotFoundError(CheckpointError):
    """The model names no folder, no checkpoint plugin and no hub repository."""


class CheckpointConflictError(CheckpointError):
    """The model names both a folder with a checkpoint and an installed checkpoint source."""


class ArchitectureError(CheckpointError):
    """The checkpoint's architecture, or one of its settings, is not supported."""


class WeightsError(CheckpointError):
    """Weights are missing, unexpected, truncated, or of the wrong shape or type."""


class RequestError(NanoVLLMError):
    """One request is wrong; the others go on.

    `prompt_index` is the place of its prompt among those of one call; None where there is no other.
    """

    prompt_index: int | None = None


class InvalidPromptError(RequestError):
    """The prompt is empty or holds ids outside the vocabulary."""


class InvalidSamplingError(RequestError):
    """A sampling parameter is out of its range, or the parameters leave no id to choose."""


class InvalidLabelsError(RequestError):
    """The labels of a request are not a small mapping of texts."""


class RequestTooLongError(RequestError):
    """The request can never fit the model length or the KV cache."""


class DeviceError(NanoVLLMError):
    """The device that was asked for is not available."""


class OutOfMemoryError(NanoVLLMError):
    """Too little memory for what was asked."""


class EngineError(NanoVLLMError):
    """The engine as a whole cannot go on."""


class EngineClosedError(EngineError):
    """The engine was closed, or died of an earlier error."""


class SchedulerError(EngineError):
    """A scheduler plugin decided something impossible."""


class ExecutorError(EngineError):
    """A worker failed, or no executor can run the configuration."""


class GraphSafetyError(EngineError):
    """A captured graph would read memory that is not the memory it was captured with."""


class InconsistentStateError(EngineError):
    """An invariant is broken: a bug in nanovllm or in a plugin."""
