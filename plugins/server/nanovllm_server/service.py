"""What the routes share: the engine, the settings, the names of the model."""

from __future__ import annotations

import time

from nanovllm_core import AsyncLLM
from nanovllm_core.errors import shown
from nanovllm_server.errors import ApiError
from nanovllm_server.settings import ServerSettings


class Service:
    """The engine behind the routes. `llm` is read anew for each request: it may be replaced."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.names = settings.served_model_name or (llm.config.model,)
        self.started = int(time.time())

    def check_model(self, name: str | None) -> str:
        """The name that the answer carries; 404 for a model that is not served."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"model {shown(name)} is not served here; this server has {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return self.names[0] if name is None else name
