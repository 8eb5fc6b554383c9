"""Makes the plugins of this kind that the options name, and hands every step to them."""

from __future__ import annotations

from nanovllm_core.api import ObserverContext, StepObserver, StepRecord

from nanovllm_kind_my_plugin.plugin import KIND, ObserverOptions
from nanovllm_kind_my_plugin.spec import StepSink


class MyPluginObserver(StepObserver):
    """Plugins of a declared kind are checked and made as the core's own are."""

    def __init__(self, options: ObserverOptions, context: ObserverContext) -> None:
        super().__init__(options, context)
        plugins = context.plugins
        chosen = [
            plugins.resolve(KIND.name, name, given, path=f"observers.{KIND.name}.use.{name}")
            for name, given in options.use.items()
        ]
        # All options are checked before the first is made.
        self._fed: list[StepSink] = [plugins.make(one) for one in chosen]

    def on_step(self, record: StepRecord) -> None:
        for one in self._fed:
            one.write(record)

    def close(self) -> None:
        for one in self._fed:
            one.close()
