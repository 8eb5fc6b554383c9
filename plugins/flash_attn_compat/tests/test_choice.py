"""Which backend serves a device, and what happens where it is missing."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from importlib import import_module

import pytest
import torch

from nanovllm_core.api import PluginLoadError, UnsupportedError
from nanovllm_flash_attn_compat import backend, choice, chosen_backend, flash_attn_varlen_func


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(choice, "is_installed", lambda name: name in names)


@pytest.mark.parametrize(
    ("device", "capability", "name", "reason"),
    [
        ("cuda", (9, 0), "triton", "faster"),
        ("cuda", (8, 0), "triton", "faster"),
        ("cuda:1", (7, 5), "sdpa", r"\(7, 5\) is below triton's \(8, 0\)"),
        ("cpu", None, "sdpa", "cpu"),
        ("mps", None, "sdpa", "mps"),
    ],
)
def test_the_device_chooses_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    capability: tuple[int, int],
    name: str,
    reason: str,
) -> None:
    """Triton on the GPUs that its kernels run on, sdpa everywhere else."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found, why = chosen_backend(device)
    assert found == name
    assert re.search(reason, why)


@pytest.mark.parametrize(("device", "missing"), [("cuda", "triton"), ("cpu", "sdpa")])
def test_a_missing_backend_is_refused_with_its_pip_line(
    monkeypatch: pytest.MonkeyPatch, device: str, missing: str
) -> None:
    """Not replaced by the one that is there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    install(monkeypatch, *({"triton", "sdpa"} - {missing}))
    line = (
        rf"{missing} .*not installed: pip install nanovllm-attention-{missing} \(from a checkout: "
    )
    line += f"pip install -e plugins/attention_{missing}"
    with pytest.raises(PluginLoadError, match=line):
        chosen_backend(device)


def test_a_backend_named_in_an_import_is_refused_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the same line."""
    monkeypatch.setattr(backend, "is_installed", lambda name: False)
    with pytest.raises(PluginLoadError, match=r"pip install nanovllm-attention-sdpa \(from a"):
        backend.load_operators("sdpa")


def test_triton_by_name_is_refused_on_devices_that_its_kernels_do_not_run_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CPU without the interpreter, and a GPU of compute capability below 8.0."""
    triton = import_module("nanovllm_flash_attn_compat.triton")
    monkeypatch.setattr(triton, "INTERPRETED", False)
    monkeypatch.setattr(triton, "_reasons", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))

    class OnOldGPU(torch.Tensor):
        device = torch.device("cuda:0")

    x, starts = torch.randn(2, 2, 8), torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=r"q=a tensor on cpu .*TRITON_INTERPRET=1.*sdpa"):
        triton.flash_attn_varlen_func(x, x, x, starts, starts, 2, 2)
    old = [y.as_subclass(OnOldGPU) for y in (x, x, x, starts, starts)]
    with pytest.raises(UnsupportedError, match=r"q=a tensor on cuda:0 .*\(7, 5\).*\(8, 0\).*sdpa"):
        triton.flash_attn_varlen_func(*old, 2, 2)


def test_the_log_says_who_serves_a_device_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "_names", {})
    starts = torch.tensor([0, 2], dtype=torch.int32)
    x = torch.randn(2, 2, 8)
    with caplog.at_level(logging.INFO, "nanovllm.flash_attn_compat"):
        for _ in range(2):
            flash_attn_varlen_func(x, x, x, starts, starts, 2, 2)
    (record,) = caplog.records
    assert "cpu are served by sdpa: torch's attention" in record.getMessage()


@pytest.mark.slow
def test_importing_the_package_imports_no_backend() -> None:
    """One of them may be missing. Nor torch's compiler, which takes seconds."""
    code = (
        "import sys, nanovllm_flash_attn_compat; "
        "sys.exit(any(name.startswith(('nanovllm_attention', 'torch._dynamo.')) "
        "for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
