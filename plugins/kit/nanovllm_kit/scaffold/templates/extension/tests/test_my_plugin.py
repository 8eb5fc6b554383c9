"""The extension keeps the contract of extensions, and its own promise."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from nanovllm_core.api import ConfigError, EngineConfig
from nanovllm_kit import PluginUnderTest
from nanovllm_kit.extension import ExtensionConformance, extension_under_test
from typer.testing import CliRunner

from nanovllm_extension_my_plugin import plugin


class TestMyPlugin(ExtensionConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return extension_under_test(plugin.__name__)


def config(**options: object) -> EngineConfig:
    plugins = {"enable": [plugin.NAME], "options": {plugin.NAME: options}}
    return EngineConfig.model_validate({"model": "demo", "plugins": plugins})


def test_an_engine_does_not_start_without_room(tmp_path: Path) -> None:
    """The error names what is free and what was asked."""
    plugin.nanovllm_configure(config(folder=str(tmp_path), min_free_gib=0))
    with pytest.raises(ConfigError, match="make room, or lower it"):
        plugin.nanovllm_configure(config(folder=str(tmp_path), min_free_gib=1e9))


def test_a_misspelt_option_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"plugins\.options\.my_plugin"):
        plugin.nanovllm_configure(config(foldr="/"))


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder; name one"):
        plugin.nanovllm_configure(config(folder=str(tmp_path / "none")))


def test_the_command_prints_what_is_free(tmp_path: Path) -> None:
    app = typer.Typer()
    plugin.nanovllm_cli(app)
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert float(result.output.split()[0]) == pytest.approx(plugin.free_gib(str(tmp_path)), abs=1)


def test_the_doctor_is_told_what_is_free() -> None:
    [check] = plugin.nanovllm_doctor()
    assert check.name.startswith(plugin.NAME)
    assert check.ok == (plugin.free_gib("~") >= 1.0)
