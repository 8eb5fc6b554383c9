"""`python -m tests.mutants`: change a seeded sample of lines and see whether the tests notice."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import tempfile
from pathlib import Path

import pytest

from .recording import Project
from .sample import examine

ROOT = Path(__file__).parents[2]
PROJECT = Project(
    root=ROOT,
    rooms=("nanovllm_core/engine", "nanovllm_core/worker", "plugins/kit/nanovllm_kit"),
    tests=("tests/**/test_*.py", "plugins/*/tests/**/test_*.py"),
    others=(
        "tests/api/*",
        "tests/examples/*",
        "tests/gpu/*",
        "tests/mutants/*",
        "tests/scaffold/*",
        "tests/test_docs*.py",
        "tests/test_examples.py",
        "tests/test_packaging.py",
        "tests/test_site.py",
        "tests/test_tutorials.py",
        "plugins/checkpoint_demo/tests/*",
    ),
    imports=(
        ".",
        *(
            path.parent.relative_to(ROOT).as_posix()
            for glob in ("plugins/*/pyproject.toml", "examples/plugins/*/pyproject.toml")
            for path in sorted(ROOT.glob(glob))
        ),
    ),
)
SLOW_IMPORTS = (
    "numpy",
    "pydantic",
    "rich",
    "safetensors.torch",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "typer",
    "xxhash",
    "yaml",
)


def main() -> int:
    """Examine a sample; exit status 1 where a mutant survives that is not listed as equivalent."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200, help="lines, a third from each room")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    # Before Triton is imported. A process that has met CUDA cannot be forked.
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as empty:
        # It imports its plugins itself, or it would warn in every session that it did not.
        pytest.main(["-q", "-c", os.devnull, empty])
    for module in SLOW_IMPORTS:
        importlib.import_module(module)
    gc.freeze()
    loaded = [name for name in sys.modules if name.startswith("nanovllm")]
    assert not loaded, f"a fork must import these itself: {loaded}"
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        return examine(
            PROJECT,
            Path(folder),
            state=ROOT / ".mutants",
            equivalents=Path(__file__).with_name("equivalent.toml"),
            seed=arguments.seed,
            count=arguments.count,
            jobs=arguments.jobs,
        )


if __name__ == "__main__":
    sys.exit(main())
