"""What docs/coming_from_flash_attn.md says of each parameter is what the functions do."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm_core.errors import UnsupportedError

PAGE = Path(__file__).parents[1] / "docs/coming_from_flash_attn.md"
BACKENDS = ("sdpa", "triton")

ANSWER = "(yes|above 0|refused)"
ROWS = re.findall(rf"^\| (`.*`.*) \| {ANSWER} \| {ANSWER} \|$", PAGE.read_text(), re.M)
SAID = [
    (parameter, backend, answer)
    for names, *answers in ROWS
    for parameter in re.findall(r"`(\w+)`", names)
    for backend, answer in zip(BACKENDS, answers, strict=True)
]


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def with_kvcache(compat: ModuleType, **changes: Any) -> Tensor:
    """Two rows of three queries over a dense cache, with changes; the first result."""
    arguments: dict[str, Any] = {
        "q": tensor(2, 3, 4, 64),
        "k_cache": tensor(3, 32, 2, 64),
        "v_cache": tensor(3, 32, 2, 64) * 2,
        "cache_seqlens": torch.tensor([20, 9], dtype=torch.int32),
    }
    result = compat.flash_attn_with_kvcache(**arguments | changes)
    return result[0] if isinstance(result, tuple) else result


def varlen(compat: ModuleType, **changes: Any) -> Any:
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    qkv = (tensor(12, 4, 64), tensor(12, 2, 64), tensor(12, 2, 64) * 2)
    return compat.flash_attn_varlen_func(*qkv, starts, starts, 7, 7, **changes)


NEW = {"k": tensor(2, 2, 2, 64), "v": tensor(2, 2, 2, 64)}
ROTATION = {"rotary_cos": tensor(32, 16).cos(), "rotary_sin": tensor(32, 16).sin()}
KVCACHE: dict[str, dict[str, Any]] = {
    "softmax_scale": {"softmax_scale": 0.5},
    "causal": {"causal": True},
    "block_table": {"block_table": torch.tensor([[2], [0]], dtype=torch.int32)},
    "cache_batch_idx": {"cache_batch_idx": torch.tensor([2, 0], dtype=torch.int32)},
    "k": NEW,
    "v": NEW,
    "window_size": {"window_size": (2, 0)},
    "softcap": {"softcap": 0.5},
    "alibi_slopes": {"alibi_slopes": tensor(4).abs()},
    "rotary_cos": NEW | ROTATION,
    "rotary_sin": NEW | ROTATION,
    "cache_leftpad": {"cache_leftpad": torch.tensor([1, 2], dtype=torch.int32)},
}


def test_the_page_speaks_of_every_parameter_that_changes_a_result() -> None:
    told = {parameter for parameter, _, _ in SAID}
    assert told == {*KVCACHE, "return_softmax_lse", "return_attn_probs", "dropout_p"}


@pytest.mark.parametrize(("parameter", "backend", "answer"), SAID)
def test_a_parameter_is_honoured_or_refused_as_the_page_says(
    parameter: str, backend: str, answer: str
) -> None:
    """Honoured: the result is another one. Refused: the error names the parameter."""
    compat = importlib.import_module(f"nanovllm_flash_attn_compat.{backend}")
    if parameter == "return_attn_probs":
        assert (len(varlen(compat, return_attn_probs=True)) == 3) == (answer == "yes")
    elif parameter == "return_softmax_lse":
        kv = tensor(3, 32, 2, 64)
        result = compat.flash_attn_with_kvcache(
            tensor(2, 3, 4, 64), kv, kv, cache_seqlens=9, return_softmax_lse=True
        )
        assert (len(result) == 2) == (answer == "yes")
    elif answer != "refused":
        changed = with_kvcache(compat, **KVCACHE[parameter])
        assert not torch.allclose(changed, with_kvcache(compat), atol=1e-3)
        if answer == "above 0":
            with pytest.raises(UnsupportedError, match=f"{parameter}=0.0"):
                with_kvcache(compat, **{parameter: 0.0})
    else:
        refused = r"rotary_(cos|sin)" if parameter.startswith("rotary") else parameter
        call = varlen if parameter == "dropout_p" else with_kvcache
        with pytest.raises(UnsupportedError, match=refused):
            call(compat, **KVCACHE.get(parameter, {"dropout_p": 0.1}))
