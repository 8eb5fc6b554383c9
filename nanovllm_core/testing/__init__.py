"""The conformance suites are a distribution of their own; this module names it."""

from nanovllm_core.registry.discovery import extra_command

raise ImportError(
    f"nanovllm_core.testing is now nanovllm_kit: {extra_command('kit')}, and import the same names "
    "from nanovllm_kit"
)
