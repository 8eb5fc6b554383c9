"""Who may reach a server without API keys: this machine, and no web page that it shows."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from nanovllm_core.api import ConfigError
from nanovllm_server.errors import ApiError
from nanovllm_server.guard.asgi import SAFE_METHODS, header, send_error


def is_loopback(host: str) -> bool:
    """Whether a name or an address is of this machine's loopback, so that only it gets there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(host: str, has_keys: bool, allow_anonymous: bool) -> None:
    """Raises ConfigError for a server that everybody on the network could use unasked."""
    if not (is_loopback(host) or has_keys or allow_anonymous):
        raise ConfigError(
            f"host is {host!r}, which other machines can reach, and there is no API key: everybody "
            "on the network could use this server. Make a key with `nanovllm serve-key`, listen on "
            "127.0.0.1, or state serve.allow_anonymous: true (--allow-anonymous)"
        )


def check_address(host: str, port: int) -> None:
    """Raises ConfigError where a server cannot listen: early, for a model takes long to load."""
    for one in bound_sockets(host, port):
        one.close()


def bound_sockets(host: str, port: int, *, is_shared: bool = False) -> list[socket.socket]:
    """Sockets on each address of a host, which do not listen yet; with port 0 all on one free port.

    The options are asyncio's: an address may be used at once after another server has left it. A
    shared one may have several sockets of this user, among which Linux spreads the connections:
    `claimed` keeps other servers away. Raises ConfigError where an address cannot be had.
    """
    bound: list[socket.socket] = []
    try:
        for family, kind, _, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            if family == socket.AF_INET6 and not socket.has_ipv6:
                continue
            one = socket.socket(family, kind)
            bound.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address[0], port, *address[2:]))
            port = one.getsockname()[1]
    except OSError as error:
        for one in bound:
            one.close()
        raise ConfigError(
            f"the server cannot listen on {host!r}, port {port}: {error.strerror}; choose others "
            "with --host and --port (0 takes a free one)"
        ) from None
    return bound


def claimed(sockets: Iterable[socket.socket]) -> list[socket.socket]:
    """Sockets that keep other servers from the addresses of shared ones, until they are closed.

    Linux would let a second server of this user share an address, and give it a part of the
    connections. A name of Linux's abstract sockets has one owner, and ends with its process. Raises
    ConfigError where another server has an address.
    """
    claims: list[socket.socket] = []
    for one in sockets:
        host, port = one.getsockname()[:2]
        claim = socket.socket(socket.AF_UNIX)
        claims.append(claim)
        try:
            claim.bind(f"\0nanovllm-serve/{os.getuid()}/{host}/{port}")
        except OSError as error:
            for each in claims:
                each.close()
            raise ConfigError(
                f"another server of this user has {host!r}, port {port}, or starts there "
                f"({error.strerror}); end it, or choose another --host or --port"
            ) from None
    return claims


class LocalOnly:
    """Middleware for a server on loopback without keys: web pages of others cannot use it.

    A page can send a POST to this machine without asking (its Origin says so), and one whose name
    its owner points to 127.0.0.1 can read the answer too (its Host says so). 403 for both.
    `origins` are those that CORS allows.
    """

    def __init__(self, app: ASGIApp, origins: Iterable[str] = ()) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is not None:
            await send_error(send, refusal)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        host = header(scope, b"host") or ""
        if not is_loopback(_name(host)):
            return ApiError(
                403,
                f"the host {host[:80]!r} is no name of this machine's loopback; use 127.0.0.1, or "
                "configure an API key to be reached by other names",
                code="host_not_allowed",
            )
        origin = header(scope, b"origin")
        if origin is None or scope["method"] in SAFE_METHODS or "*" in self._origins:
            return None
        # Compared as text, so that a malformed origin equals no host.
        if origin in self._origins or origin.partition("://")[2].lower() == host.lower():
            return None
        return ApiError(
            403,
            f"pages of {origin[:80]!r} may not use this server; list the origin in "
            "cors.allow_origins",
            code="origin_not_allowed",
        )


def _name(host: str) -> str:
    """A Host header without its port."""
    name, separator, port = host.lower().rpartition(":")
    return name if separator and port.isdecimal() else host.lower()
