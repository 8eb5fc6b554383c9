"""Options of plugins and arguments of requests, read as strictly as the core's own fields."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticSerializationError, to_json

Model = TypeVar("Model", bound=BaseModel)
MAX_WRONG = 1000
"""At most so many errors are described. 300,000 take a second, in which an engine takes no step."""
_PLAIN = "must hold texts, numbers, true, false, null, lists and mappings alone ({})"


def read_options(model: type[Model], values: Mapping[str, Any]) -> Model:
    """The options of a configuration or the arguments of a request, as the plugin's own model.

    It is read as strict JSON: "1" is no number, 1 is no bool and 5 is no text, while a list may
    fill a tuple, and a text a path or a member of an enum. numpy's numbers are Python's.

    Raises pydantic's ValidationError, also for what JSON cannot say.
    """
    try:
        text = to_json(dict(values), inf_nan_mode="constants", fallback=_plain)
    except (PydanticSerializationError, ValueError) as error:
        reason = str(error).removeprefix("Error serializing to JSON: ")
        raise _refused(model, values, _PLAIN.format(reason)) from None
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        if error.error_count() > MAX_WRONG:
            problem = f"has more than {MAX_WRONG} wrong values, too many to describe; send fewer"
            raise _refused(model, values, problem) from None
        [first, *_] = error.errors(include_url=False, include_input=False)
        if first["type"] == "json_invalid":
            raise _refused(model, values, _PLAIN.format(first["ctx"]["error"])) from None
        raise


def _plain(value: object) -> object:
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise ValueError(f"{type(value).__name__} is none of these")


def _refused(model: type[BaseModel], values: object, problem: str) -> ValidationError:
    error = PydanticCustomError("refused", "{problem}", {"problem": problem})
    detail: InitErrorDetails = {"type": error, "loc": (), "input": values}
    return ValidationError.from_exception_data(model.__name__, [detail])
