"""API keys: made here, kept as hashes, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from pathlib import Path

import yaml
from pydantic import Field, TypeAdapter, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from nanovllm_core.api import ConfigError
from nanovllm_server.errors import ApiError
from nanovllm_server.guard.asgi import SAFE_METHODS, header, send_error
from nanovllm_server.section import ServerSection

KEY_VARIABLE = "SERVE_API_KEY"
"""The environment variable of one key in plain text. Those that begin with `NANOVLLM_` are fields
of the engine, and errors show their values."""
MIN_KEY_LENGTH = 16
"""In characters: a hash without salt hides only what nobody can guess."""


class ApiKey(ServerSection):
    """Who may use the server. The key itself stands nowhere, only its SHA-256."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    """Stands in logs and labels, and separates cached prefixes."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of the key, as `nanovllm serve-key` prints it."""
    requests_per_minute: float | None = Field(default=None, gt=0, strict=False)
    """Instead of the limit for all keys."""
    burst: int | None = Field(default=None, ge=1)
    """Requests that may come at once, instead of the limit for all keys."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Requests under way at one time, instead of the limit for all keys."""


api_key: ContextVar[ApiKey | None] = ContextVar("api_key", default=None)
"""Of the request that this task serves."""


def make_key() -> str:
    """A new key of 256 random bits."""
    return f"nvk-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """The SHA-256 of a key, in hexadecimal digits.

    A slow hash with salt protects passwords, because people choose guessable ones. A key of 256
    random bits cannot be guessed, and this hash is computed for every request.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def read_keys(
    listed: Iterable[ApiKey], file: Path | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[ApiKey, ...]:
    """All keys: of the configuration, of a YAML file of the same list, and of the environment.

    Raises ConfigError for a file that is no such list, for a name that is used twice, and for a key
    in the environment that is too short or that no request can send.
    """
    keys = [*listed, *(_read_file(file) if file is not None else ())]
    plain = environ.get(KEY_VARIABLE)
    if plain is not None:
        _check_plain(plain)
        keys.append(ApiKey(name="environment", sha256=hash_key(plain)))
    names = [key.name for key in keys]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two API keys have the name {name!r}; give each a name of its own")
    return tuple(keys)


def _check_plain(key: str) -> None:
    """Refuse a key that is guessable, or that a header cannot carry. No message shows it."""
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(
            f"{KEY_VARIABLE} has {len(key)} characters; a key needs at least "
            f"{MIN_KEY_LENGTH}, so make one with `nanovllm serve-key`"
        )
    if key != key.strip():
        raise ConfigError(
            f"{KEY_VARIABLE} begins or ends with white space, such as the newline of a file, which "
            "no request can send; remove it, or make a key with `nanovllm serve-key`"
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{KEY_VARIABLE} has other characters than printable ASCII, which the header of a "
            "request may not carry; make a key with `nanovllm serve-key`"
        )


def _read_file(file: Path) -> list[ApiKey]:
    example = 'a YAML list of entries such as {name: acme, sha256: "..."}'
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
        return TypeAdapter(list[ApiKey]).validate_python(entries)
    except OSError as error:
        raise ConfigError(f"keys_file {str(file)!r} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"keys_file {str(file)!r}: {place or 'the file'}: {first['msg']}; expected {example}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        # Their messages quote the file.
        raise ConfigError(f"keys_file {str(file)!r} is no YAML; expected {example}") from None


class Keys:
    """Middleware: a request needs one of these keys as `Authorization: Bearer <key>`.

    The `ApiKey` is put into `scope["state"]["key"]` and `api_key`. Paths in `public` need no key
    where they are read; one that ends in `/` stands for all beneath it. Without keys everybody may
    come.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[ApiKey], public: Iterable[str] = ()) -> None:
        self._app = app
        self._keys = [(key.sha256.encode(), key) for key in keys]
        paths = tuple(public)
        self._paths = frozenset(paths)
        self._folders = tuple(path for path in paths if path.endswith("/") and path != "/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys:
            key = self._find(header(scope, b"authorization"))
            # None too: uvicorn may run a request in the context of an earlier one.
            api_key.set(key)
            if key is not None:
                scope.setdefault("state", {})["key"] = key
            elif scope["method"] not in SAFE_METHODS or not self._is_public(scope["path"]):
                await send_error(
                    send,
                    ApiError(
                        401,
                        "the request has no valid API key; send one as the header "
                        "`Authorization: Bearer <key>`",
                        code="invalid_api_key",
                        headers={"www-authenticate": "Bearer"},
                    ),
                )
                return
        await self._app(scope, receive, send)

    def _find(self, value: str | None) -> ApiKey | None:
        """The key of a header. It is compared with every key, so the time tells nothing."""
        scheme, _, token = (value or "").partition(" ")
        given = hash_key(token.strip()).encode()
        found = None
        for digest, key in self._keys:
            if hmac.compare_digest(digest, given):
                found = key
        return found if scheme.lower() == "bearer" else None

    def _is_public(self, path: str) -> bool:
        return path in self._paths or path.startswith(self._folders)
