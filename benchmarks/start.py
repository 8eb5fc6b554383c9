"""From a fresh process to an engine that is ready, and where the time goes.

    python benchmarks/start.py [--model benchmarks/configs/qwen3-0.6b] [--out FILE] [--profile FILE]

Three starts, each in a process of its own: the first with an empty Triton cache, which compiles
every kernel, the others with the cache that it left. `import` is until nanovllm_core's classes are
there, `plan` to `capture` are the parts of `llm.info.start_seconds`, `ready` is all of it since the
process was asked for, and `token` the first token after that. A model folder without weights gets
random ones. Where Python may not write what it compiles (`PYTHONDONTWRITEBYTECODE`) and torch came
uncompiled, each start compiles it: the results say so.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib.util
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parent / "configs" / "qwen3-0.6b"
TOP = 60
"""Functions in a profile, of each order."""


def start(arguments: argparse.Namespace) -> dict[str, float]:
    """In the new process: start an engine, take one token; returns seconds by part."""
    from nanovllm_core import LLM, SamplingParams

    imported = time.time()
    from nanovllm_bench.workloads import load_format

    with LLM(
        arguments.model,
        load_format=load_format(arguments.model),
        device=arguments.device,
        attention=arguments.attention,
        limits={"max_model_len": arguments.max_model_len},
        tensor_parallel_size=arguments.tensor_parallel_size,
    ) as llm:
        ready = time.time()
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
        token = time.time()
        return {
            "import": imported - arguments.began,
            **llm.info.start_seconds,
            "ready": ready - arguments.began,
            "token": token - ready,
        }


def in_new_process(triton_cache: str, further: list[str]) -> dict[str, float]:
    """`start` in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--began", repr(time.time()), *further]
    environment = {**os.environ, "TRITON_CACHE_DIR": triton_cache}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def is_compiled(package: str) -> bool:
    """Whether its Python files were compiled; else each import compiles them, or the first one."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.cached is not None and Path(spec.cached).is_file()


def write_profile(profile: cProfile.Profile, file: Path) -> None:
    with file.open("w", encoding="utf-8") as stream:
        for order in ("cumtime", "tottime"):
            pstats.Stats(profile, stream=stream).sort_stats(order).print_stats(TOP)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(CONFIG))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--profile", type=Path, help="profile one more warm start into this file")
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.began is not None:
        profile = cProfile.Profile()
        if arguments.profiled:
            profile.enable()
        seconds = start(arguments)
        profile.disable()
        if arguments.profiled:
            write_profile(profile, arguments.profile)
        print(json.dumps(seconds))
        return
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as triton_cache:
        for name in ("empty", "warm", "warm"):
            seconds = in_new_process(triton_cache, [])
            results.append({"triton_cache": name, **{k: round(s, 3) for k, s in seconds.items()}})
            print(" ".join(f"{key} {value}" for key, value in results[-1].items()), flush=True)
        if arguments.profile:
            in_new_process(triton_cache, ["--profiled"])
    compiled = is_compiled("torch")
    if not compiled:
        print("torch's Python files are not compiled, so each of these starts compiled them again")
    if arguments.out:
        from nanovllm_bench.environment import describe_environment

        document = {
            "model": Path(arguments.model).name,
            "tensor_parallel_size": arguments.tensor_parallel_size,
            "torch_is_compiled": compiled,
            "starts": results,
            "environment": describe_environment(),
        }
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
