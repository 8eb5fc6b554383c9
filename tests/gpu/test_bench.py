"""The benchmarks on a GPU: rates, utilisation, launches and captured attention."""

from __future__ import annotations

import pytest
import torch

from nanovllm_bench.attention import able_backends, measure_attention
from nanovllm_bench.attention_cases import AttentionSetup
from nanovllm_bench.device import GpuUtilisation
from nanovllm_bench.launches import count_launches
from nanovllm_bench.rates import measure_rates
from nanovllm_core.interfaces.attention import Phase

pytestmark = [pytest.mark.gpu, pytest.mark.whole_gpu]


def test_a_gpu_copies_and_multiplies_at_a_plausible_rate() -> None:
    """Between a small laptop's and twice the fastest there is; what was taken is given back."""
    device = torch.device("cuda", 0)
    before = torch.cuda.memory_reserved(device)
    rates = measure_rates(device, torch.bfloat16)
    assert 5e10 < rates.copy_bytes_per_s < 2e13
    assert 5e12 < rates.matmul_flops_per_s < 5e15
    assert torch.cuda.memory_reserved(device) - before < 2**28


def test_a_busy_gpu_is_seen_as_busy() -> None:
    device = torch.device("cuda", 0)
    x = torch.randn(8192, 8192, device=device)
    with GpuUtilisation(device) as utilisation:
        for _ in range(200):
            x @ x
        torch.cuda.synchronize()
    if utilisation.mean is None:
        pytest.skip("NVML does not answer for this device")
    assert 0.3 < utilisation.mean <= 1


def test_launches_have_grids() -> None:
    x = torch.ones(1 << 20, device="cuda")
    launches = count_launches(lambda: x.add_(1), torch.device("cuda"))
    assert launches is not None
    assert len(launches) == 1
    assert launches[0].grid[0] > 1
    assert launches[0].microseconds > 0


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_every_backend_is_measured_as_it_runs(phase: Phase) -> None:
    """From a captured graph where it can be one; each near float64, with grid and memory."""
    setup = AttentionSetup(
        phase=phase,
        device=torch.device("cuda", 0),
        dtype=torch.bfloat16,
        batch=4,
        num_heads=16,
        num_kv_heads=8,
        head_size=128,
    )
    with torch.inference_mode():
        result = measure_attention(setup, able_backends(setup), [16, 1000], repeats=2)
    captured = {name for name in result["ran"] if name not in ("sdpa", "naive")}
    for row in result["rows"]:
        for name, cell in row["backends"].items():
            assert cell["relative_error"] < 2e-2, (name, row["length"])
            assert cell["cuda_graph"] is (phase == "decode" or name in captured)
            assert cell["launches"] >= 1
            assert cell["grid"]
            assert cell["peak_mib"] >= 0
