"""The public door for kernels that sample: functions of the core's Triton kernels, to be called.

A token must not depend on the kernel that chose it, so there is one noise and one cut. Importing
this needs Triton.
"""

from nanovllm_core.kernels.sampling_triton import (
    SamplingWorkspace as SamplingWorkspace,
    launch_partial as launch_partial,
    noise_keys as noise_keys,
    score_of as score_of,
    take_turn as take_turn,
)
from nanovllm_core.kernels.truncation_triton import (
    find_cut as find_cut,
    keep_of_tile as keep_of_tile,
    to_float as to_float,
    to_key as to_key,
    weigh as weigh,
)
