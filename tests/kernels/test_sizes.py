"""The arithmetic of launches."""

import triton

from nanovllm_core.kernels import cdiv, next_power_of_2


def test_they_are_what_tritons_own_functions_give() -> None:
    """Code may hold either: 0 has the power 0, by which kernels leave a part out."""
    for value in (*range(70), 1023, 1024, 1025, 151_936):
        assert next_power_of_2(value) == triton.next_power_of_2(value)
        assert all(cdiv(value, size) == triton.cdiv(value, size) for size in (1, 3, 64, 1000))
