"""The labels of a request: texts by name, for schedulers and observers and not for the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from nanovllm_core.errors import InvalidLabelsError, shown

Labels = Mapping[str, str]

MAX_LABELS = 16
"""Of one request."""
MAX_NAME_LENGTH = 64
MAX_TEXT_LENGTH = 256
"""In characters, both."""
EXAMPLE = 'as in {"tenant": "acme"}'


class ReadOnlyDict(dict[str, str]):
    """A read-only dict: json, pickle and `dataclasses.asdict` accept it like any dict.

    (They do not take a `MappingProxyType`, and records are made to be written somewhere.)
    """

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise TypeError("labels are read-only; make a dict(labels) and change that")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadOnlyDict, (dict(self),)


NO_LABELS: Labels = ReadOnlyDict()


def check_labels(labels: object) -> Labels:
    """A read-only copy; None is no labels.

    Raises `InvalidLabelsError` for what is not a small mapping of texts; the message names the
    value, the limit and the remedy.
    """
    if labels is None:
        return NO_LABELS
    if not isinstance(labels, Mapping):
        raise InvalidLabelsError(
            f"labels is {type(labels).__name__} {shown(labels)}; it must be a mapping of names to "
            f"texts, {EXAMPLE} (None for no labels)"
        )
    if len(labels) > MAX_LABELS:
        raise InvalidLabelsError(
            f"labels has {len(labels)} entries; a request carries at most {MAX_LABELS}, so leave "
            "some out"
        )
    checked: dict[str, str] = {}
    for key, text in labels.items():
        name = _text("a name in labels", key, 1, MAX_NAME_LENGTH)
        checked[name] = _text(f"labels[{name!r}]", text, 0, MAX_TEXT_LENGTH)
    return ReadOnlyDict(checked)


def labels_of_each(
    labels: Labels | Sequence[Labels | None] | None, count: int
) -> Sequence[Labels | None]:
    """One entry for each of `count` prompts, from one mapping for all or a list of one for each.

    Raises `InvalidLabelsError` for a list of another length, and for a wrong mapping that all
    share; those of a list are checked with their prompts.
    """
    if not isinstance(labels, Sequence) or isinstance(labels, str | bytes):
        return [check_labels(labels)] * count
    if len(labels) != count:
        raise InvalidLabelsError(
            f"{len(labels)} labels for {count} prompts; give one mapping for all, or one for each"
        )
    return labels


def _text(what: str, value: object, least: int, most: int) -> str:
    """The value as a plain `str` of `least` to `most` characters that every observer can write."""
    if not isinstance(value, str):
        raise InvalidLabelsError(
            f"{what} is {type(value).__name__} {shown(value)}; it must be text, {EXAMPLE}"
        )
    if not least <= len(value) <= most:
        raise InvalidLabelsError(
            f"{what} has {len(value)} characters ({shown(value)}); give it {least} to {most}"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidLabelsError(
            f"{what} is {shown(value)}, which is no Unicode text (character {error.start} is half "
            "of a pair); decode it with the right encoding"
        ) from None
    return str.__str__(value)  # A subclass may answer anything.
