"""The sdpa spec is light and says truly what the backend can do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from nanovllm_attention_sdpa.plugin import SdpaOptions, nanovllm_attention
from nanovllm_core.api import AttentionRequirements, Phase

(SPEC,) = nanovllm_attention()


def requirements(
    device: str = "cuda", dtype: str = "bfloat16", phase: Phase = "decode"
) -> AttentionRequirements:
    return AttentionRequirements(
        phase=phase, device=device, dtype=dtype, num_heads=16, num_kv_heads=8, head_size=128
    )


def test_the_entry_point_names_the_spec_module() -> None:
    """`sdpa` in the group `nanovllm.attention` is this plugin."""
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="nanovllm.attention", name="sdpa")
    assert entry.value == "nanovllm_attention_sdpa.plugin"
    assert entry.dist is not None
    assert entry.dist.name == "nanovllm-attention-sdpa"


def test_auto_and_math_serve_everywhere() -> None:
    """These two leave no device, dtype or phase out."""
    for kernel in ("auto", "math"):
        options = SdpaOptions(kernel=kernel)
        for device in ("cpu", "cuda"):
            for dtype in ("float32", "float16", "bfloat16"):
                assert SPEC.check(requirements(device, dtype), options) == []


@pytest.mark.parametrize(
    ("kernel", "needs", "reason"),
    [
        ("efficient", requirements("cpu"), "kernel 'efficient' exists only on cuda, device is cpu"),
        ("cudnn", requirements("cpu"), "kernel 'cudnn' exists only on cuda, device is cpu"),
        ("flash", requirements(dtype="float32", phase="prefill"), "dtype is float32"),
        ("cudnn", requirements(dtype="float32"), "dtype is float32"),
        ("flash", requirements(), "takes no mask on cuda"),
        ("efficient", replace(requirements(), soft_cap=True), "'efficient' has no soft cap"),
        (
            "flash",
            replace(requirements(phase="prefill"), sliding_window=True),
            "no sliding window, and the model needs one",
        ),
    ],
)
def test_a_kernel_that_cannot_serve_gives_its_reason(
    kernel: str, needs: AttentionRequirements, reason: str
) -> None:
    """The reason names the kernel, and what to use instead."""
    (found,) = SPEC.check(needs, SdpaOptions.model_validate({"kernel": kernel}))
    assert reason in found
    assert "use kernel: auto" in found


def test_flash_serves_prefill_on_cuda_and_everything_on_cpu() -> None:
    """Only decode on cuda needs a mask that it has not."""
    flash = SdpaOptions(kernel="flash")
    assert SPEC.check(requirements(phase="prefill"), flash) == []
    assert SPEC.check(requirements("cpu"), flash) == []


def test_unknown_kernels_and_options_are_refused() -> None:
    """The options model forbids what it does not know."""
    with pytest.raises(ValidationError):
        SdpaOptions.model_validate({"kernel": "triton"})
    with pytest.raises(ValidationError):
        SdpaOptions.model_validate({"kernal": "math"})


def test_blocks_are_any_multiple_of_16() -> None:
    """The layout and what `provider` prints."""
    (layout,) = SPEC.kv_layouts(requirements(), SdpaOptions())
    assert (layout.name, layout.block_multiple) == ("NPKD", 16)
    assert SPEC.provider is not None
    assert SPEC.provider(SdpaOptions(kernel="math")) == "torch sdpa, kernel math"
