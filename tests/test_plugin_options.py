"""Plugin options and requests' arguments are as strict as the core's own fields."""

from __future__ import annotations

import math
import time
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nanovllm_core.config.errors import explain_options
from nanovllm_core.registry.options import read_options


class Colour(Enum):
    RED = "red"


class Inner(BaseModel):
    """As lax as pydantic's models are by themselves."""

    size: int = 1


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    whole: int = 1
    number: float = 1.0
    switch: bool = False
    text: str = ""
    several: tuple[int, ...] = ()
    names: frozenset[str] = frozenset()
    by_id: dict[int, float] = {}
    path: Path | None = None
    colour: Colour = Colour.RED
    inner: Inner = Inner()
    either: int | str = 0
    pair: tuple[int, ...] = Field(default=(1, 2), min_length=2)
    colours: frozenset[str] = Field(default=frozenset({"red", "blue"}), min_length=2)


def problem(values: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        read_options(Options, values)
    return explain_options(caught.value, Options, "s.options", "p 1.0")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"whole": "1"}, "s.options.whole: '1' must be a whole number; write 1 ("),
        ({"whole": True}, "whole: True must be a whole number"),
        ({"whole": 1.0}, "whole: 1.0 must be a whole number"),
        ({"number": "1.5"}, "number: '1.5' must be a number; write 1.5 ("),
        ({"number": True}, "number: True must be a number"),
        ({"switch": 1}, "switch: 1 must be true or false; write true"),
        ({"switch": "no"}, "switch: 'no' must be true or false; write false"),
        ({"switch": "maybe"}, "switch: 'maybe' must be true or false (p 1.0)"),
        ({"text": 5}, "text: 5 must be text; put it in quotes"),
        ({"several": ["1"]}, "several[0]: '1' must be a whole number"),
        ({"several": 1}, "several: 1 must be a list"),
        ({"inner": {"size": "1"}}, "inner.size: '1' must be a whole number"),
        ({"by_id": {"x": 1}}, "by_id: the key 'x' must be a whole number"),
        ({"text": object()}, "must hold texts, numbers, true, false, null, lists and mappings"),
        ({"text": b"\xff"}, "must hold texts, numbers"),
        ({"text": "\ud800"}, "must hold texts, numbers"),
        ({"whole": 10**5000}, "must hold texts, numbers"),
    ],
)
def test_no_value_is_converted_in_silence(values: dict[str, Any], said: str) -> None:
    assert said in problem(values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"pair": [1, "x"]}, ["pair[1]: 'x' must be a whole number"]),
        ({"pair": ["x"]}, ["pair[0]: 'x' must be", "pair: ['x'] must be a list of 2 or"]),
        ({"pair": [1]}, ["pair: [1] must be a list of 2 or more items"]),
        ({"colours": ["red"] * 2}, ["colours: ['red', 'red'] must be a list of 2 or more items"]),
    ],
)
def test_a_list_is_called_too_short_only_where_it_is(
    values: dict[str, Any], said: list[str]
) -> None:
    """A wrong item is an item, though pydantic does not count it; equal ones are one of a set."""
    lines = problem(values).splitlines()
    assert len(lines) == len(said)
    for line, part in zip(lines, said, strict=True):
        assert part in line


def test_what_a_file_can_write_fills_pythons_types() -> None:
    """Lists fill tuples and sets; texts fill paths and members of enums."""
    read = read_options(
        Options,
        {
            "several": [1, 2],
            "names": ["a"],
            "by_id": {5: 1, "6": 2},
            "path": "x/y",
            "colour": "red",
            "number": 3,
            "inner": {"size": 2},
            "either": "7",
        },
    )
    assert (read.several, read.names, read.by_id) == ((1, 2), frozenset({"a"}), {5: 1.0, 6: 2.0})
    assert (read.path, read.colour, read.inner.size) == (Path("x/y"), Colour.RED, 2)
    assert read.either == "7"


def test_python_may_give_its_own_types_and_numpys_numbers() -> None:
    values = {"whole": np.int64(3), "several": (1, np.uint8(2)), "path": Path("x"), "number": 1}
    read = read_options(Options, values)
    assert (read.whole, read.several, read.path) == (3, (1, 2), Path("x"))
    assert read_options(Options, {"number": np.float32(0.5)}).number == 0.5
    assert read_options(Options, {"number": math.inf}).number == math.inf


def test_very_many_wrong_values_are_not_described() -> None:
    """That of a third of a million takes a second, in which an engine takes no step."""
    began = time.process_time()
    said = problem({"several": ["x"] * 340_000})
    assert time.process_time() - began < 0.5
    assert said.startswith("s.options: {'several': ['x', 'x', ")
    assert said.endswith(
        " has more than 1000 wrong values, too many to describe; send fewer (p 1.0)"
    )


def test_many_wrong_options_are_counted_after_the_first() -> None:
    lines = problem({f"x{i}": "y" * 10**4 for i in range(300)}).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "... and 280 more"
    assert max(map(len, lines)) < 800
