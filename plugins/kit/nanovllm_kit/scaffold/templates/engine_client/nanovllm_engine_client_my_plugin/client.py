"""An engine on a thread of this process, and the log of its messages."""

from __future__ import annotations

import logging
from itertools import count
from typing import Any

from nanovllm_core.frontend import Message, ThreadClient

from nanovllm_engine_client_my_plugin.plugin import MyPluginOptions

logger = logging.getLogger(__name__)


class MyPluginClient(ThreadClient):
    """Counts messages, and logs one of so many."""

    def __init__(self, options: MyPluginOptions, *arguments: Any) -> None:
        super().__init__(options, *arguments)
        self._every = options.every
        self._numbers = count(1)

    def post(self, message: Message) -> None:
        """Any thread calls it, also a finaliser: it must not wait."""
        number = next(self._numbers)
        if number % self._every == 0:
            logger.info("message %d: %s", number, type(message).__name__)
        super().post(message)
