"""Compile Triton and Gluon kernels for a GPU on a machine without one, and read what they use.

For an H100 or H200 (sm_90), unless a job says another `capability`.

A kernel that spills registers is slow in a way no CPU test shows; one that takes more shared memory
than a GPU has does not start there. The compilation runs in a fresh process without
TRITON_INTERPRET, because Triton decides at decoration time whether a function is interpreted: tests
that interpret kernels in their own process can still compile them here.

    report = compile_kernel(
        "nanovllm_attention_triton.decode:decode_kernel",
        signature={"q_ptr": "*bf16:16", "num_rows": "i32"},
        constexprs={"BLOCK": 64},
        num_warps=4,
        num_stages=3,
    )
    assert report.spills == 0

Types are written as Triton's ahead-of-time tool writes them: `*bf16`, `i32`, `i64`, `fp32`, and
`:16` behind a pointer or integer that is divisible by 16 at run time, as torch's allocations are.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Constant = int | float | bool | str | None

SHARED_MEMORY = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}
"""The most bytes that a GPU grants a program, by compute capability: an A100; RTX 30, A10; RTX 40,
L4, L40S; H100, H200; B200; RTX 50. A kernel that takes more does not start there. Source: the CUDA
C++ Programming Guide, "Technical Specifications per Compute Capability"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AotJob:
    """One kernel, `"package.module:name"`, with the types and constants to compile it for.

    `signature` names every argument that is not in `constexprs`, in any order. A constant that is a
    Triton dtype is written as the string `"tl.float32"`. `maxnreg` bounds the registers per thread.
    Without `enable_fp_fusion` no product and sum become one instruction.
    `capability` is the GPU's compute capability without its point. `disassemble` asks for the
    report's `sass`.
    """

    kernel: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Constant]
    num_warps: int = 4
    num_stages: int = 3
    maxnreg: int | None = None
    enable_fp_fusion: bool = True
    capability: int = 90
    disassemble: bool = False


@dataclass(frozen=True, slots=True)
class AotReport:
    """`registers` per thread, `spills` in bytes of local memory per thread, `shared` in bytes.

    `ptx` is the assembly, in which a test may look for vectorised accesses (`ld.global.v4`). `sass`
    is the machine code, whose order ptxas decides; empty unless the job asks for it.
    """

    registers: int
    spills: int
    shared: int
    ptx: str
    sass: str = ""


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Constant],
    num_warps: int = 4,
    num_stages: int = 3,
) -> AotReport:
    """Compile one kernel: `"package.module:name"`, or the decorated function itself.

    Raises RuntimeError with the compiler's own message if it does not compile. Starting the process
    takes seconds: for several kernels or configurations use `compile_kernels`.
    """
    if not isinstance(kernel, str):
        kernel = f"{kernel.fn.__module__}:{kernel.fn.__name__}"
    job = AotJob(
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return compile_kernels([job])[0]


def compile_kernels(jobs: Sequence[AotJob]) -> list[AotReport]:
    """Compile several kernels in one fresh process; the reports are in the order of the jobs."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", "nanovllm_kit.aot"],
        input=json.dumps([asdict(job) for job in jobs]),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if process.returncode != 0:
        names = ", ".join(job.kernel for job in jobs)
        raise RuntimeError(f"compiling {names} failed:\n{process.stderr[-4000:]}")
    return [AotReport(**report) for report in json.loads(process.stdout.splitlines()[-1])]


def _compile(job: AotJob) -> AotReport:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    module, name = job.kernel.split(":")
    function = getattr(importlib.import_module(module), name)
    types, attributes = {}, {}
    for index, argument in enumerate(function.arg_names):
        if argument in job.constexprs:
            types[argument] = "constexpr"
            continue
        if argument not in job.signature:
            raise ValueError(f"{job.kernel}: no type for argument {argument!r} in the signature")
        types[argument], _, divisible = job.signature[argument].partition(":")
        if divisible:
            attributes[(index,)] = [["tt.divisibility", int(divisible)]]
    unknown = (set(job.signature) | set(job.constexprs)) - set(function.arg_names)
    if unknown:
        raise ValueError(f"{job.kernel} has no argument {sorted(unknown)}")
    constants = {k: _constant(v) for k, v in job.constexprs.items()}
    source = GluonASTSource if function.is_gluon() else ASTSource
    compiled = triton.compile(
        source(function, types, constants, attributes),
        target=GPUTarget("cuda", job.capability, 32),
        options={
            "num_warps": job.num_warps,
            "num_stages": job.num_stages,
            "maxnreg": job.maxnreg,
            "enable_fp_fusion": job.enable_fp_fusion,
        },
    )
    registers, spills = _resource_usage(compiled.asm["cubin"])
    # Triton disassembles when asked for "sass", and takes seconds.
    sass = compiled.asm["sass"] if job.disassemble else ""
    return AotReport(registers, spills, compiled.metadata.shared, compiled.asm["ptx"], sass)


def _constant(value: Constant) -> Any:
    if isinstance(value, str) and value.startswith("tl."):
        import triton.language as tl

        return getattr(tl, value.removeprefix("tl."))
    return value


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack per thread, as the cuobjdump that Triton packages reads them.

    A Triton kernel puts nothing on the stack but spilled registers.
    """
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage:\n{text}")
    return int(found[1]), int(found[2])


def _main() -> None:
    jobs = [AotJob(**job) for job in json.load(sys.stdin)]
    reports = [asdict(_compile(job)) for job in jobs]
    sys.stdout.write("\n" + json.dumps(reports) + "\n")


if __name__ == "__main__":
    _main()
