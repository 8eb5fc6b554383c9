"""`nanovllm serve`: where its settings come from, and a server as an operator starts it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import nanovllm_core
from nanovllm_core.cli.main import make_app
from nanovllm_core.errors import ConfigError
from nanovllm_server import command
from nanovllm_server.settings import parse_settings

MAIN = [sys.executable, "-m", "nanovllm_core", "serve"]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engine's configuration and the server's settings, instead of a server."""
    found: list[Any] = []
    closing = SimpleNamespace(close=lambda: None)

    def open_engine(config: Any) -> Any:
        found.append(config)
        return closing

    monkeypatch.setattr(nanovllm_core.AsyncLLM, "from_config", staticmethod(open_engine))

    def run(_: Any, settings: Any) -> bool:
        found.append(settings)
        return True

    monkeypatch.setattr(command, "run", run)
    return found


def serve(*words: str) -> None:
    result = CliRunner().invoke(make_app(), ["serve", *words])
    if result.exception:
        raise result.exception


def test_one_file_has_the_engine_and_the_server(served: list[Any], tmp_path: Path) -> None:
    """The section `serve:` is the server's; flags and `--set` win."""
    file = tmp_path / "engine.yaml"
    file.write_text("model: some/model\nserve: {port: 9000, host: 127.0.0.2}\n")
    serve("--config", str(file), "--port", "9001", "--set", "serve.served_model_name=mine")
    engine, settings = served
    assert engine.model == "some/model"
    assert (settings.host, settings.port) == ("127.0.0.2", 9001)
    assert settings.served_model_name == ("mine",)


def test_without_a_model_the_embedded_one_is_served(served: list[Any]) -> None:
    serve()
    assert served[0].model == "demo"
    assert (served[1].host, served[1].port) == ("127.0.0.1", 8000)


@pytest.mark.parametrize(
    ("words", "yaml", "name"),
    [
        ([], "", command.DEFAULT_ENGINE_CLIENT),
        (["--engine-client", "thread"], "", "thread"),
        ([], "engine_client: thread", "thread"),
        (["--engine-client", "processes"], "engine_client: thread", "processes"),
        ([], "engine_client: auto", "auto"),
        ([], "engine_client: {options: {stall_seconds: 5}}", command.DEFAULT_ENGINE_CLIENT),
        (["--set", "engine_client.options.stall_seconds=5"], "", command.DEFAULT_ENGINE_CLIENT),
    ],
)
def test_the_engine_has_a_process_of_its_own_unless_another_client_is_named(
    served: list[Any], tmp_path: Path, words: list[str], yaml: str, name: str
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(f"model: demo\n{yaml}\n")
    serve("--config", str(file), *words)
    assert served[0].engine_client.name == name
    assert served[0].engine_client.options in ({}, {"stall_seconds": 5})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"prot": 1}, "serve.prot: unknown option.*did you mean port"),
        ({"port": 70000}, "serve.port: 70000 must be at most 65535"),
        ({"port": "80"}, "serve.port: '80' must be a whole number; write 80"),
        (3, "serve: 3 must be a section"),
    ],
)
def test_a_wrong_setting_names_path_value_and_remedy(section: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_settings(section)


@pytest.mark.slow
def test_a_server_prints_its_address_answers_and_ends(tmp_path: Path) -> None:
    process = subprocess.Popen([*MAIN, "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Serving demo at http://127.0.0.1:"), line
        answer = httpx.get(f"{line.split()[-1]}/v1/models", timeout=10)
        assert answer.json()["data"][0]["id"] == "demo"
        process.send_signal(signal.SIGINT)
        process.wait(20)
    finally:
        process.kill()
        process.communicate()
