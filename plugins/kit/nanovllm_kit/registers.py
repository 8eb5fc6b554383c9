"""A committed list of what kernels take of a multiprocessor, by Triton's version; no GPU is needed.

A change that costs registers, shared memory or spills then shows as a failing test, and one that is
meant as a changed line. A test file names its kernels in a dictionary `JOBS` and compares:

    JOBS = {"copy-bf16": AotJob(...)}

    def test_no_kernel_takes_more_than_its_line():
        assert_within_list(__file__, compile_jobs(JOBS))

Its list lies beside it, `test_NAME.registers.json`, and is written for the Triton at hand by

    python -m nanovllm_kit.registers tests/test_NAME.py ...

The numbers are those of the ptxas that comes with Triton, the same on every machine. A version
without a list fails: its code has not been looked at yet.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib import util
from pathlib import Path

from nanovllm_kit.aot import AotJob, AotReport, compile_kernels

Usage = dict[str, int]
"""`registers`, `spills` and `shared`, as `AotReport` has them."""

KINDS = ("registers", "spills", "shared")


def compile_jobs(jobs: Mapping[str, AotJob]) -> dict[str, AotReport]:
    """What each named job compiles to, in one fresh process."""
    return dict(zip(jobs, compile_kernels(list(jobs.values())), strict=True))


def list_of(test_file: str | Path) -> Path:
    """The list that belongs to a test file."""
    return Path(test_file).with_suffix(".registers.json")


def assert_within_list(test_file: str | Path, reports: Mapping[str, AotReport]) -> None:
    """Fail where a kernel takes more than its line says, or where kernels and lines do not match.

    Raises AssertionError with every such kernel, what was found, what is listed, and the command
    that rewrites the list. Taking less is no failure.
    """
    import triton

    path = list_of(test_file)
    lists = _read(path)
    listed = lists.get(triton.__version__)
    if listed is None:
        faults = [f"no list for this version, only for {', '.join(lists) or 'none'}"]
    else:
        faults = [fault for name in reports for fault in _faults(name, reports[name], listed)]
        faults += [f"{name}: listed, but not compiled" for name in listed if name not in reports]
    if faults:
        raise AssertionError(
            "\n  ".join([f"{path.name}, Triton {triton.__version__}:", *faults])
            + "\nmend the kernel or, where the change is meant, rewrite the list: "
            + f"python -m nanovllm_kit.registers {test_file}"
        )


def write_list(test_file: str | Path, reports: Mapping[str, AotReport]) -> None:
    """Replace the list of the Triton version at hand; those of other versions stay."""
    import triton

    path = list_of(test_file)
    lists = _read(path) | {triton.__version__: {n: _usage(r) for n, r in reports.items()}}
    versions = [
        f' "{version}": {{\n'
        + ",\n".join(f'  "{name}": {json.dumps(usage)}' for name, usage in kernels.items())
        + "\n }"
        for version, kernels in sorted(lists.items())
    ]
    path.write_text("{\n" + ",\n".join(versions) + "\n}\n", encoding="utf-8")


def _faults(name: str, report: AotReport, listed: Mapping[str, Usage]) -> list[str]:
    if name not in listed:
        return [f"{name}: not listed, found {_usage(report)}"]
    found = _usage(report)
    return [
        f"{name}: {found[kind]} {kind}, listed {listed[name][kind]}"
        for kind in KINDS
        if found[kind] > listed[name][kind]
    ]


def _usage(report: AotReport) -> Usage:
    return {kind: getattr(report, kind) for kind in KINDS}


def _read(path: Path) -> dict[str, dict[str, Usage]]:
    if not path.exists():
        return {}
    lists: dict[str, dict[str, Usage]] = json.loads(path.read_text(encoding="utf-8"))
    return lists


def _jobs_of(test_file: str) -> dict[str, AotJob]:
    """The `JOBS` of a test file."""
    spec = util.spec_from_file_location(Path(test_file).stem, test_file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{test_file} is no Python file; name a test file that has JOBS")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    jobs: dict[str, AotJob] = module.JOBS
    return jobs


def _main() -> None:
    for test_file in sys.argv[1:]:
        write_list(test_file, compile_jobs(_jobs_of(test_file)))
        print(list_of(test_file))


if __name__ == "__main__":
    _main()
