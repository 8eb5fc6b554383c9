"""Order of the tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest test, so that it does not run alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("wheels") is None)
