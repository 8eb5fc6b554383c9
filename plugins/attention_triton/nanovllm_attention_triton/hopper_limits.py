"""What the kernel for Hopper that decodes latent rows needs, as data: without torch and triton."""

from __future__ import annotations

from nanovllm_attention_triton.decode_tuning import HOPPER_LATENT
from nanovllm_attention_triton.options import TritonOptions

HOPPER = 9
"""The compute capability (major) of the instructions that the kernels for Hopper use."""
GLUON_VERSIONS = ("3.6.", "3.7.")
"""Versions of Triton in whose Gluon, an experimental language, they are known to compile."""
LEAST_VALUES = 64
"""Columns of the values are rows of a product, of which an instruction takes as many."""
ROW_BYTES = 16
"""The copy engine reads rows that begin at multiples of so many bytes."""
REMEDY = "; or leave latent_kernel out, and the kernel that can serve is chosen"


def hopper_latent_limits(
    options: TritonOptions,
    *,
    device: str,
    capability: tuple[int, int] | None,
    triton_version: str,
    dtype: str,
    value_size: int,
    rest_size: int,
    block_size: int | None,
) -> list[str]:
    """Why `latent_kernel: hopper` cannot serve rows of `value_size` + `rest_size` numbers.

    Each reason has the value, the limit and the remedy. `device` is "cuda", or another kind.
    `capability` and `block_size` None: not known yet.
    """
    reasons = []
    if device != "cuda":
        reasons.append(f"needs a GPU of compute capability {HOPPER}.0, and the device is {device}")
    elif capability and capability[0] != HOPPER:
        has = ".".join(map(str, capability))
        reasons.append(f"needs compute capability {HOPPER}.0, and the GPU has {has}")
    if not triton_version.startswith(GLUON_VERSIONS):
        known = " or ".join(version + "x" for version in GLUON_VERSIONS)
        reasons.append(f"needs Triton {known}, and {triton_version} is installed")
    if dtype == "float32":
        reasons.append("needs float16 or bfloat16, and dtype is float32")
    if value_size <= LEAST_VALUES // 2:
        reasons.append(f"needs more than {LEAST_VALUES // 2} latent numbers, not {value_size}")
    if rest_size == 0:
        reasons.append("needs rows that have numbers behind their latent part, not 0")
    if (value_size + rest_size) * 2 % ROW_BYTES:
        reasons.append(
            f"needs rows of a multiple of {ROW_BYTES // 2} numbers, not {value_size + rest_size}"
        )
    tile = HOPPER_LATENT.tile
    if block_size is not None and block_size % tile:
        reasons.append(f"needs cache.block_size a multiple of {tile}, not {block_size}")
    set_too = {
        name: value
        for name in ("chunk_size", "decode_num_warps", "decode_num_stages")
        if (value := getattr(options, name)) is not None
    }
    if set_too:
        given = ", ".join(f"{name} {value}" for name, value in set_too.items())
        reasons.append(f"has its own division of work: leave out {given}")
    return [f"latent_kernel 'hopper' {reason}{REMEDY}" for reason in reasons]
