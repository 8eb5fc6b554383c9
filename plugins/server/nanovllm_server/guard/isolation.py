"""Which requests may share cached prefixes."""

from __future__ import annotations

import json


def cache_salt(key_name: str | None, given: str | None) -> bytes:
    """The salt of a request: of its key, where prefixes are isolated, and of its own field.

    Requests of different keys never share a block, whatever salts they send.
    """
    if key_name is None and given is None:
        return b""
    return json.dumps([key_name, given]).encode()
