"""What the plugin says about itself, and that saying it costs no import of torch."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from itertools import product

import pytest
import torch
from pydantic import ValidationError

from nanovllm_attention_triton import plugin
from nanovllm_attention_triton.backend import TritonAttention
from nanovllm_attention_triton.decode_tuning import decode_tunings
from nanovllm_attention_triton.options import TritonOptions
from nanovllm_attention_triton.prefill_tuning import prefill_tuning
from nanovllm_core.api import AttentionRequirements, UnsupportedError
from nanovllm_kit.latent_attention import LatentSizes, make_latent_case

SPEC = plugin.nanovllm_attention()[0]


def requirements(**changes):
    values = {
        "phase": "decode",
        "device": "cuda",
        "dtype": "bfloat16",
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_size": 128,
    }
    return AttentionRequirements(**(values | changes))


def test_the_entry_point_names_the_spec_module():
    """Group, name and module are the ones that YAML's `triton` resolves to."""
    (found,) = entry_points(group="nanovllm.attention", name="triton")
    assert found.value == "nanovllm_attention_triton.plugin"
    assert found.dist.name == "nanovllm-attention-triton"
    assert SPEC.name == "triton"


def test_the_spec_module_imports_neither_torch_nor_triton():
    """Listing plugins must stay fast."""
    code = (
        "import sys, nanovllm_attention_triton.plugin as p; p.nanovllm_attention(); "
        "sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("device", "multiples"), [("cuda", [256, 128, 16]), ("cpu", [16])])
def test_large_blocks_are_preferred_on_a_gpu(device, multiples):
    """Fewer blocks to hand out; any multiple of 16 serves."""
    layouts = SPEC.kv_layouts(requirements(device=device), TritonOptions())
    assert [layout.block_multiple for layout in layouts] == multiples


def test_a_gpu_of_any_dtype_passes_the_check():
    """No reason against it."""
    for dtype in ("float16", "bfloat16", "float32"):
        assert SPEC.check(requirements(dtype=dtype), TritonOptions()) == []


def test_a_cpu_is_refused_without_the_interpreter(monkeypatch):
    """The reason names the switch and the backend to take instead."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (reason,) = SPEC.check(requirements(device="cpu", dtype="float32"), TritonOptions())
    assert "TRITON_INTERPRET=1" in reason
    assert "sdpa" in reason
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert SPEC.check(requirements(device="cpu", dtype="float32"), TritonOptions()) == []


def test_bfloat16_on_a_cpu_is_refused(monkeypatch):
    """The interpreter computes it wrongly without a word."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (reason,) = SPEC.check(requirements(device="cpu"), TritonOptions())
    assert "bfloat16" in reason


def test_heads_that_do_not_divide_are_refused():
    """With both numbers."""
    (reason,) = SPEC.check(requirements(num_heads=10, num_kv_heads=4), TritonOptions())
    assert "10" in reason
    assert "4" in reason


def test_the_provider_names_triton_and_its_version():
    """What listings print."""
    assert SPEC.provider(TritonOptions()).startswith("triton 3.")


@pytest.mark.parametrize("wrong", [{"chunk_size": 100}, {"chunk_size": 0}, {"decode_num_warps": 3}])
def test_options_out_of_range_are_refused(wrong):
    """A chunk is whole tiles, warps are a power of two."""
    with pytest.raises(ValidationError):
        TritonOptions(**wrong)


def test_an_unknown_option_is_refused():
    """No option is swallowed."""
    with pytest.raises(ValidationError, match="chunk_sise"):
        TritonOptions(chunk_sise=64)


def test_every_option_reaches_the_kernels_constants():
    """An option that changes nothing would be worse than none."""
    options = TritonOptions(
        chunk_size=128,
        decode_num_warps=2,
        decode_num_stages=4,
        prefill_num_warps=8,
        prefill_num_stages=2,
    )
    for element_size, head_size, rows in product((2, 4), (64, 256), (1, 256)):
        [(most, decode)] = decode_tunings(
            element_size, head_size, 32, 8, rows, options,
            num_multiprocessors=132, shared_memory=228 * 1024,
        )  # fmt: skip
        assert most == rows
        assert (decode.fixed_chunk, decode.num_warps, decode.num_stages) == (128, 2, 4)
        assert options.chunk_size % decode.tile == 0
        prefill = prefill_tuning(element_size, head_size, rows > 1, options)
        assert (prefill.num_warps, prefill.num_stages) == (8, 2)


def latent_requirements(**changes):
    values = {"num_kv_heads": 1, "head_size": 576, "value_size": 512, "latent": True}
    return requirements(**({"compute_capability": (9, 0)} | values | changes))


def test_the_kernel_for_hopper_asks_for_its_blocks_if_the_user_chooses_it():
    """It needs Hopper, and blocks of at least 64 tokens."""
    chosen = TritonOptions(latent_kernel="hopper")
    assert SPEC.check(latent_requirements(block_size=64), chosen) == []
    layouts = SPEC.kv_layouts(latent_requirements(), chosen)
    assert [layout.block_multiple for layout in layouts] == [256, 128, 64]
    # It is not asked to serve prompts, or layers that cache keys and values.
    prompts = {"phase": "prefill", "num_kv_heads": 16, "head_size": 192, "value_size": 128}
    over_rows = {"phase": "prefill", "cuda_graphs": True}
    others = (
        latent_requirements(**prompts),
        latent_requirements(**over_rows),
        requirements(compute_capability=(8, 0)),
    )
    for other in others:
        assert SPEC.check(other, chosen) == []
        assert SPEC.kv_layouts(other, chosen) == SPEC.kv_layouts(other, TritonOptions())


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"compute_capability": (8, 0)}, {}, ["9.0", "8.0"]),
        ({"compute_capability": (10, 0)}, {}, ["9.0", "10.0"]),
        ({"dtype": "float32"}, {}, ["bfloat16", "float32"]),
        ({"block_size": 48}, {}, ["multiple of 64", "48"]),
        ({"head_size": 512}, {}, ["behind their latent part"]),
        ({"head_size": 517}, {}, ["multiple of 8", "517"]),
        ({"head_size": 48, "value_size": 32}, {}, ["more than 32", "not 32"]),
        ({}, {"chunk_size": 256}, ["leave out chunk_size 256"]),
        ({}, {"decode_num_warps": 4, "decode_num_stages": 2}, ["warps 4, decode_num_stages 2"]),
    ],
)
def test_the_kernel_for_hopper_is_refused_where_it_cannot_serve(changes, options, words):
    """By one reason, with the value, the limit and the remedy; the portable kernel serves."""
    asked = latent_requirements(**changes)
    (reason,) = SPEC.check(asked, TritonOptions(latent_kernel="hopper", **options))
    for word in ("latent_kernel 'hopper'", "leave latent_kernel out", *words):
        assert word in reason
    for kernel in ("auto", "portable"):
        assert SPEC.check(asked, TritonOptions(latent_kernel=kernel, **options)) == []


def test_the_kernel_for_hopper_is_refused_by_another_triton(monkeypatch):
    monkeypatch.setattr(plugin.metadata, "version", lambda _: "3.8.0")
    chosen = TritonOptions(latent_kernel="hopper")
    (reason,) = SPEC.check(latent_requirements(), chosen)
    assert "needs Triton 3.6.x or 3.7.x, and 3.8.0 is installed" in reason


def test_a_backend_without_the_kernel_for_hopper_is_not_built():
    """Where the user chose it, no other kernel takes its place."""
    case = make_latent_case(
        [1], LatentSizes(latent=64, rotated=16), num_heads=2, block_size=16, dtype=torch.float32
    )
    with pytest.raises(UnsupportedError, match=r"the device is cpu.*dtype is float32.*not 16"):
        TritonAttention(TritonOptions(latent_kernel="hopper"), case.config())
    for kernel in ("auto", "portable"):
        backend = TritonAttention(TritonOptions(latent_kernel=kernel), case.config())
        assert "persistent" not in backend.describe()


def test_the_kernel_for_hopper_is_built_where_it_can_serve_unless_the_user_chose_the_other(
    monkeypatch,
):
    """`auto`, the default, is that kernel where nothing stands against it."""
    limits = "nanovllm_attention_triton.backend.hopper_latent_limits"
    monkeypatch.setattr(limits, lambda *_, **__: [])
    case = make_latent_case(
        [1], LatentSizes(latent=64, rotated=16), num_heads=2, block_size=64, dtype=torch.float16
    )
    kernels = {
        options.latent_kernel: "persistent" in TritonAttention(options, case.config()).describe()
        for options in (
            TritonOptions(),
            TritonOptions(latent_kernel="hopper"),
            TritonOptions(latent_kernel="portable"),
        )
    }
    assert kernels == {"auto": True, "hopper": True, "portable": False}
