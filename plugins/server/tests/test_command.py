"""`nanovllm serve`: where its settings come from, and a server as an operator starts it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import httpx
import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

import nanovllm_core
from nanovllm_core.cli.main import make_app
from nanovllm_core.config import EngineConfig
from nanovllm_core.errors import ConfigError
from nanovllm_server import command
from nanovllm_server.guard import hosts
from nanovllm_server.server import held_address, listen
from nanovllm_server.settings import ServerSettings, parse_settings

SECRET = "nvk-in-plain-text"
DOCUMENT = Path(__file__).parents[3] / "docs" / "serving.md"
HELP = ["serve", "--help"]
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

    def run(_: Any, settings: Any, sockets: Any) -> bool:
        found.append(settings)
        return True

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "held_address", lambda host, port: nullcontext())
    monkeypatch.setattr(hosts, "check_address", lambda host, port: None)
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


@pytest.mark.parametrize(
    "section",
    [
        {"keys": [{"name": "a", "sha256": SECRET}]},
        {"keys": [{"name": "a", "key": SECRET}]},
        {"keys": [SECRET]},
        {"keys": {"a": SECRET}},
        {"tls": {"certfile": "a.pem", "keyfile_password": [SECRET]}},
    ],
)
def test_an_error_shows_no_key_that_stands_there_in_plain_text(section: Any) -> None:
    with pytest.raises(ConfigError, match=r"^serve\.(keys|tls\.keyfile_password)") as found:
        parse_settings(section)
    assert SECRET not in str(found.value)


def test_a_certificate_that_cannot_be_used_ends_the_start_before_the_model(
    served: list[Any], tmp_path: Path
) -> None:
    """With the file and the setting, and not with a traceback once the model is loaded."""
    other = tmp_path / "other.pem"
    other.write_text("no certificate")
    for words in (
        ["tls.certfile=/nowhere.pem"],
        [f"tls.certfile={other}"],
        [f"tls.certfile={other}", "tls.ca_certs=/nowhere.pem"],
    ):
        sets = [word for one in words for word in ("--set", f"serve.{one}")]
        with pytest.raises(ConfigError, match=r"^serve\.tls: .*(nowhere|other)\.pem"):
            serve(*sets)
    assert served == []


def test_an_address_that_cannot_be_had_ends_the_start_before_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nanovllm_core.AsyncLLM, "from_config", None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}: Address already in use; .*--port"):
            serve("--port", str(port))
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid"):
        serve("--host", "no.such.host.invalid", "--port", "0", "--allow-anonymous")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the address is already in use")
def test_a_second_server_of_one_address_ends_before_its_model(
    served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the first one still loads its own, and does not listen."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(command, "held_address", held_address)
    refused: list[str] = []

    def load_beside_another(_: Any) -> Any:
        with pytest.raises(ConfigError) as error:
            serve("--port", str(port))
        refused.append(str(error.value))
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(nanovllm_core.AsyncLLM, "from_config", staticmethod(load_beside_another))
    serve("--port", str(port))
    assert re.fullmatch(rf"another server of this user has .*port {port}.*--port", refused[0])
    assert len(refused) == len(served) == 1
    serve("--port", str(port))  # it is free again


def test_an_address_that_another_program_took_meanwhile_is_told_with_its_remedy() -> None:
    """One that listens on all addresses of this machine, say, since the server was bound."""
    with held_address("127.0.0.1", 0) as sockets:
        port = sockets[0].getsockname()[1]
        told = pytest.raises(ConfigError, match=rf"cannot listen on .*port {port}: .*--port")
        with socket.create_server(("0.0.0.0", port)), told:
            listen(sockets)


def fields(model: Any, path: str = "") -> Iterator[str]:
    """The dotted path of every field of a model and of the sections in it."""
    for name, field in model.model_fields.items():
        yield f"{path}{name}"
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from fields(inner, f"{path}{name}.")


def test_what_the_document_offers_users_of_vllm_is_there() -> None:
    """Each flag in the right column is one of the command, each key one of the configuration."""
    table = DOCUMENT.read_text(encoding="utf-8").partition("## Coming from vLLM")[2]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    offered = "\n".join(row[-1] for row in rows)
    keys = re.findall(r"--set ([a-z_.]+)=|`([a-z_]+(?:\.[a-z_]+)+)`", offered)
    flags = set(re.findall(r"--[a-z-]+", offered))
    settings = {*fields(EngineConfig), *fields(ServerSettings, "serve.")}
    assert len(rows) >= 25
    assert {first or second for first, second in keys} - settings == set()
    assert flags - {*re.findall(r"--[a-z-]+", CliRunner().invoke(make_app(), HELP).output)} == set()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_while_the_model_is_loaded_leaves_nothing_behind(
    tmp_path: Path, name: str
) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [*MAIN, "--port", "0"], env=environ, stdout=subprocess.DEVNULL,
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # as if not under nohup
    )  # fmt: skip
    try:
        end = time.monotonic() + 20
        while not [*tmp_path.glob("nanovllm-metrics-*")]:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.001)
        process.send_signal(getattr(signal, name))
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
    assert [*tmp_path.glob("nanovllm-*")] == []


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
