"""What `nanovllm plugins new` writes installs and passes its own tests, as written."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from nanovllm_kit.scaffold import TEMPLATES, new_plugin

from ..environments import freeze_what_is_imported, make_environment

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command of the shared environment; its output, which the test shows if it fails."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NANOVLLM_", "PYTHON", "COV_", "COVERAGE_", "PYTEST_"))
    }
    result = subprocess.run(
        list(map(str, command)),
        env=inherited | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-20000:]}\n{result.stderr[-5000:]}"
    return result.stdout


@pytest.mark.slow
@pytest.mark.long
def test_the_packages_of_all_kinds_install_and_pass_their_tests(
    tmp_path: Path, wheels: dict[str, Path]
) -> None:
    """In one environment, from wheels, type-checked as strictly as mypy can."""
    packages = [new_plugin(kind, f"new_{kind}", tmp_path) for kind in TEMPLATES]
    packages.append(new_plugin("scheduler", "new_whole", tmp_path, "scheduler"))
    packages.append(new_plugin("model", "new_mixture", tmp_path, "moe"))
    python = make_environment(tmp_path / "env")
    pip = (python, "-m", "pip", "--disable-pip-version-check", "-q")
    offline = ("--no-deps", "--no-index", "--no-build-isolation")
    ours = [wheel for name, wheel in wheels.items() if not name.startswith("nanovllm_example_")]
    run(*pip, "install", *offline, *ours, *packages, cwd=tmp_path)

    listed = json.loads(
        run(python, "-m", "nanovllm_core", "plugins", "list", "--json", cwd=tmp_path)
    )
    states = {entry["distribution"]: entry["state"] for entry in listed}
    for package in packages:
        name = f"nanovllm-{package.name.replace('_', '-')}"
        assert states[name] == "ready", states

    freeze_what_is_imported(tmp_path)
    passed = run(
        *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"),
        *(package / "tests" for package in packages),
        cwd=tmp_path,
    )
    assert "passed" in passed.splitlines()[-1]
    cache = ROOT / ".mypy_cache"
    modules = [next(package.glob("nanovllm_*")) for package in packages]
    run(python, "-m", "mypy", "--strict", "--cache-dir", cache, *modules, cwd=tmp_path)
