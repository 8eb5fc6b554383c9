"""The page at `/`: a chat and the engine's live figures, in plain files of this package.

The files need no build step, and load nothing from elsewhere: the Content-Security-Policy that they
are sent with allows this server only, and neither inline scripts nor inline styles.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from nanovllm_server.service import Service

FOLDER = "/page/"
"""Where the page's files are. They and `/` need no API key: the page asks its reader for one."""

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file in memory, and the headers of its responses."""

    content: bytes
    headers: dict[str, str]

    async def respond(self, request: Request) -> Response:
        """The file, or 304 without it where the browser's copy is the same."""
        known = request.headers.get("if-none-match", "")
        if self.headers["etag"] in [tag.strip().removeprefix("W/") for tag in known.split(",")]:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def read_page() -> dict[str, PageFile]:
    """The page's files by name. A browser keeps them, and asks each time whether they changed."""
    page = {}
    for resource in files(__name__).joinpath("static").iterdir():
        content = resource.read_bytes()
        page[resource.name] = PageFile(
            content,
            {
                "content-type": CONTENT_TYPES[PurePath(resource.name).suffix],
                "etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
                "cache-control": "no-cache",
                **SECURITY_HEADERS,
            },
        )
    return page


def page_routes() -> list[BaseRoute]:
    """The routes of the page: `/`, and one for each of its files."""
    page = read_page()
    return [
        Route("/", page["index.html"].respond),
        *(Route(FOLDER + name, file.respond) for name, file in page.items()),
    ]


def make_router(service: Service) -> APIRouter:
    """The page's routes for `make_app`. The page asks the other routes for all that it shows."""
    return APIRouter(routes=page_routes())
