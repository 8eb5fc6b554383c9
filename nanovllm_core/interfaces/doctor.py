"""The result of a check of the environment, by `nanovllm plugins doctor` or an extension."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DoctorCheck:
    """One fact about this environment: `name` is what was looked at, `detail` what was found.

    `remedy` says what to do where it is not `ok`; without one there is nothing to do (a backend
    for GPUs on a machine that has none). `fatal`: nothing can be generated until it is mended.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    fatal: bool = False
