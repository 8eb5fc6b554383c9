"""The routes keep their contract."""

from __future__ import annotations

import pytest

from nanovllm_example_routes_admin.plugin import ADMIN
from nanovllm_kit import PluginUnderTest, plugin_under_test
from nanovllm_server.watch.testing import RouteConformance


class TestAdminRoutes(RouteConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(ADMIN, key_sha256="0" * 64)
