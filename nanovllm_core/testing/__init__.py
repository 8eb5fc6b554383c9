"""Helpers for tests of the core and of plugins; they ship in the wheel.

Modules here are imported one by one (`nanovllm_core.testing.numerics`, `.aot`, …), so that a test
pays only for what it uses.
"""
