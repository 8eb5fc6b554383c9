"""How messages show values: cut, and without making a large text first."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest

from nanovllm_core.errors import (
    MAX_MESSAGE,
    MAX_SHOWN,
    ConfigError,
    UnsupportedError,
    clip,
    describe_error,
    in_ranges,
    shown,
)


def deep(levels: int) -> list[object]:
    value: list[object] = []
    for _ in range(levels):
        value = [value]
    return value


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "beginning"),
    [
        ("x" * 10**7, "'xxx"),
        (b"x" * 10**6, "b'xxx"),
        (10**5000, "<a whole number of 16610 bits>"),
        (-(10**5000), "<a whole number of 16610 bits>"),
        ([10**5000], "[<a whole number of 16610 bits>]"),
        (Fraction(10**5000, 3), "<Fraction instance"),
        ([*range(10**6)], "[0, 1, 2"),
        (["x" * 10**5] * 100, "['xxx"),
        ({i: i for i in range(10**5)}, "{0: 0, 1: 1"),
        (deep(100_000), "[[["),
        (Hostile(), "<Hostile instance"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_is_shown_in_a_short_text(value: object, beginning: str) -> None:
    text = shown(value)
    assert text.startswith(beginning)
    assert len(text) <= MAX_SHOWN


@pytest.mark.parametrize("value", [5, True, None, 0.5, "a'b", ["a", {"b": (1,)}], 2**64, -3])
def test_a_short_value_is_shown_whole(value: object) -> None:
    assert shown(value) == repr(value)


def test_a_cut_text_keeps_its_beginning_and_its_end() -> None:
    assert clip("abcdefghij", 9) == "abc...hij"
    assert clip("abcdefghi", 9) == "abcdefghi"


@pytest.mark.parametrize("kind", [ConfigError, UnsupportedError])
def test_no_message_is_longer_than_the_limit(kind: type[ConfigError]) -> None:
    """A plugin's own text may be."""
    assert len(str(kind("x" * 10**6))) <= MAX_MESSAGE
    assert str(kind("short")) == "short"


def test_an_error_of_a_plugin_is_told_with_its_file_and_line() -> None:
    """Outside the core, where it was raised; what has no such place is told without."""
    with pytest.raises(ZeroDivisionError) as caught:
        in_ranges(1 // int(one) for one in "120")
    text = describe_error(caught.value)
    assert text.startswith("ZeroDivisionError: ")
    assert re.search(r" \(test_errors\.py:\d+\)$", text)
    assert describe_error(KeyError("x")) == "KeyError: 'x'"


def test_numbers_in_a_row_are_shown_as_a_range() -> None:
    """Three or more; the order given does not matter, and texts stay as they are."""
    assert in_ranges({1, 2, 3, 5, 6, 9}) == ["1 to 3", 5, 6, 9]
    assert in_ranges(range(256, 0, -1)) == ["1 to 256"]
    assert in_ranges({"cuda", "cpu"}) == ["cpu", "cuda"]
    assert in_ranges(()) == []
