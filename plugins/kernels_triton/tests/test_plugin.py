"""What the plugin says about itself, and that saying it costs no import of torch."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

from nanovllm_kernels_triton.plugin import nanovllm_kernels

SPEC = nanovllm_kernels()[0]


def test_the_entry_point_names_the_spec_module() -> None:
    """Group, name and module are the ones that YAML's `triton` resolves to."""
    (found,) = entry_points(group="nanovllm.kernels", name="triton")
    assert found.value == "nanovllm_kernels_triton.plugin"
    assert found.dist is not None
    assert found.dist.name == "nanovllm-kernels-triton"
    assert SPEC.name == "triton"


def test_the_spec_module_imports_neither_torch_nor_triton() -> None:
    """Listing plugins must stay fast."""
    code = (
        "import sys, nanovllm_kernels_triton.plugin as p; p.nanovllm_kernels(); "
        "sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
