"""Requests that schemathesis draws from the server's own description."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis")

CALM = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
SECONDS = {"x-request-timeout": "1"}
"""A request may ask for more tokens than that; its answer is 504."""


def operations(url: str) -> Iterator[Any]:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for operation in schema.get_all_operations():
        yield operation.ok()


def run_cases(url: str, max_examples: int) -> int:
    """Send cases of every operation; how many operations there are."""
    count = 0
    for operation in operations(url):
        count += 1

        @settings(max_examples=max_examples, **CALM)  # type: ignore[arg-type]
        @given(case=operation.as_strategy())
        def run(case: Any) -> None:
            answer = case.call(headers=SECONDS, timeout=30)
            assert answer.status_code < 500 or answer.status_code == 504, answer.text

        run()
    return count


def test_no_request_that_the_description_allows_makes_the_server_fail(server_url: str) -> None:
    described = httpx.get(f"{server_url}/openapi.json").json()["paths"]
    assert run_cases(server_url, 4) == sum(len(methods) for methods in described.values())


@pytest.mark.slow
def test_a_hundred_requests_of_each_operation_do_not_either(server_url: str) -> None:
    assert run_cases(server_url, 100)
