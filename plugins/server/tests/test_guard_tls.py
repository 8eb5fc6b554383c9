"""A server with a certificate, and clients that leave TLS half done."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from nanovllm_server.guard.drain import DrainingServer
from nanovllm_server.guard.settings import LimitSettings, TlsSettings
from nanovllm_server.settings import ServerSettings

from .raw_client import GET, address_of, connect, exchange, serving, wait_until
from .toy import echo, long

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl makes the certificate"
)
LIMITS = LimitSettings(header_timeout_s=0.3, write_timeout_s=0.3)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsSettings:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*make.split(), *names, *files], check=True, capture_output=True)
    return TlsSettings(certfile=cert, keyfile=key)


@pytest.fixture(scope="module")
def server(tls: TlsSettings) -> Iterator[DrainingServer]:
    with serving(echo, ServerSettings(port=0, tls=tls, limits=LIMITS)) as server:
        yield server


def context_of(tls: TlsSettings) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=tls.certfile)


def secure(tls: TlsSettings, server: DrainingServer) -> ssl.SSLSocket:
    """A connection whose handshake is over."""
    client = connect(address_of(server))
    return context_of(tls).wrap_socket(client, server_hostname="localhost")


def test_a_certificate_makes_the_server_speak_tls(tls: TlsSettings, server: DrainingServer) -> None:
    url = f"https://localhost:{address_of(server)[1]}/v1/x"
    assert httpx.post(url, content=b"{}", verify=context_of(tls)).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "a part"])
def test_a_handshake_that_stays_out_ends_the_connection(
    server: DrainingServer, sent: bytes
) -> None:
    """It has the time of headers. No connection counts before its handshake, and asyncio waits for
    60 s, so that silent clients would take all files of the process."""
    assert exchange(address_of(server), sent) == b""


@pytest.mark.parametrize("end", [b"\r\n", b"connection: close\r\n\r\n"], ids=["open", "closed"])
def test_a_client_that_reads_nothing_is_cut_with_tls_as_without(
    tls: TlsSettings, end: bytes
) -> None:
    settings = ServerSettings(port=0, tls=tls, limits=LIMITS)
    with serving(long, settings) as server, secure(tls, server) as client:
        client.sendall(GET + end)
        wait_until(lambda: bool(server.server_state.connections))
        wait_until(lambda: not server.server_state.connections)


def test_a_client_that_does_not_end_tls_is_cut(tls: TlsSettings, server: DrainingServer) -> None:
    """The server has closed, and waits for the other side of it as long as for a reader."""
    with secure(tls, server) as client:
        client.sendall(GET + b"connection: close\r\n\r\n")
        wait_until(lambda: bool(server.server_state.connections))
        wait_until(lambda: not server.server_state.connections)
