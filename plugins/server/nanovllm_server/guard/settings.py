"""The settings of the guards: parts of the section `serve:`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from nanovllm_core.api import ConfigError
from nanovllm_server.section import ServerSection

Seconds = Annotated[float, Field(gt=0, le=86_400, strict=False)]
File = Annotated[Path, Field(strict=False)]
Texts = Annotated[tuple[str, ...], Field(strict=False)]


class LimitSettings(ServerSection):
    """What one request and one client may take. Beyond it a request gets 4xx with the limit."""

    max_queue: int = Field(default=256, ge=0)
    """Samples that wait for a row of the batch, beyond those that run; further requests get 429."""
    timeout_s: Seconds = 600.0
    """A request that has not ended after so many seconds is aborted with 504."""
    max_timeout_s: Seconds = 3600.0
    """The most that a request may ask for with the header X-Request-Timeout."""
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """Of a request."""
    max_total_body_bytes: int = Field(default=256 * 2**20, validate_default=True)
    """Of all requests under way in one process together, at least `max_body_bytes`. Further bodies
    get 503."""
    body_timeout_s: Seconds = 30.0
    """A body must be complete after so many seconds."""
    max_json_depth: int = Field(default=64, ge=8, le=500)
    """Levels of objects and arrays in a body."""
    max_prompt_characters: int | None = Field(default=None, ge=1)
    """Text beyond it is refused before it is encoded. Left out: 16 for each token of the model's
    length."""
    max_header_bytes: int = Field(default=32_768, ge=1024)
    """Of a request's line and headers."""
    header_timeout_s: Seconds = 10.0
    """The headers of a request must be complete after so many seconds, and so must the handshake of
    TLS."""
    write_timeout_s: Seconds = 30.0
    """A client that takes nothing of a waiting answer for so many seconds is cut off, within twice
    that time."""
    max_connections: int = Field(default=4096, ge=1)
    """Connections at one time; requests on further ones get 503. Fewer where a process may
    open fewer files."""
    requests_per_minute: float | None = Field(default=None, gt=0, strict=False)
    """Of each key, or of each address where there are no keys. Left out: no limit."""
    burst: int = Field(default=10, ge=1)
    """Requests that may come at once within that rate."""
    max_concurrent: int | None = Field(default=None, ge=1)
    """Requests under way of each key or address. Left out: no limit."""

    @field_validator("max_total_body_bytes")
    @classmethod
    def _holds_one_body(cls, total: int, others: ValidationInfo) -> int:
        if total < (one := others.data.get("max_body_bytes", 0)):
            raise ValueError(
                f"must be at least max_body_bytes ({one}), or a body of that size is never taken; "
                "raise it"
            )
        return total


class TlsSettings(ServerSection):
    """The server's certificate, for HTTPS without a proxy."""

    certfile: File
    """The certificate and its chain, in PEM."""
    keyfile: File | None = None
    """Its key, if the certificate's file does not hold it."""
    keyfile_password: str | None = Field(default=None, repr=False)
    """Of an encrypted key."""
    ca_certs: File | None = None
    """Clients must show a certificate that these have signed."""

    def check(self) -> None:
        """Raises ConfigError for files that a server cannot use."""
        import ssl

        for file in filter(None, (self.certfile, self.keyfile, self.ca_certs)):
            try:
                file.read_bytes()
            except OSError as error:
                message = f"serve.tls: {str(file)!r} cannot be read: {error.strerror}"
                raise ConfigError(message) from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password OpenSSL would ask for it at the terminal.
            password = self.keyfile_password or ""
            context.load_cert_chain(self.certfile, self.keyfile, lambda: password)
            if self.ca_certs is not None:
                context.load_verify_locations(self.ca_certs)
        except ssl.SSLError as error:
            raise ConfigError(
                f"serve.tls: {str(self.certfile)!r} gives no certificate with its key "
                f"({error.reason or error}); check keyfile, keyfile_password and ca_certs"
            ) from None

    def uvicorn_options(self) -> dict[str, Any]:
        """The arguments of `uvicorn.Config`."""
        import ssl

        options: dict[str, Any] = {
            "ssl_certfile": self.certfile,
            "ssl_keyfile": self.keyfile,
            "ssl_keyfile_password": self.keyfile_password,
        }
        if self.ca_certs is not None:
            options.update(ssl_ca_certs=self.ca_certs, ssl_cert_reqs=ssl.CERT_REQUIRED)
        return options


class CorsSettings(ServerSection):
    """Which pages of other origins may use the server from a browser."""

    allow_origins: Texts = ()
    """Such as `https://chat.example.org`; `*` is every page."""
    allow_headers: Texts = ("*",)
    """That these pages may send; `*` is every header, such as those that OpenAI's client adds."""


class LogSettings(ServerSection):
    """Lines on stderr. No prompt, output or key is in them."""

    format: Literal["text", "json"] = "text"
    """`json` writes one object a line."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """`warning` leaves out the line of each request. `debug` adds those of `/live`, `/health`,
    `/ready` and `/metrics` that were answered with 200."""
