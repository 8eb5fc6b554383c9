"""The conformance suites are a distribution of their own; this module names it."""

raise ImportError(
    'nanovllm_core.testing is now nanovllm_kit: pip install "nanovllm-core[kit]", and import the '
    "same names from nanovllm_kit"
)
