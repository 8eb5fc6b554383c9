"""What every result file says: what really ran, where, and the raw numbers on one line each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm_bench.environment import describe_environment

if TYPE_CHECKING:
    from nanovllm_core.config import EngineConfig
    from nanovllm_core.frontend import Door

_NUMBERS = re.compile(r"\[\s*(-?\d[-+.\deE,\s]*)\]")


def describe_engine(llm: Door) -> dict[str, Any]:
    """What really ran: backends asked for and taken, device, graphs, blocks, versions, commit."""
    info = llm.info
    return {
        "backend": configured_attention(llm.config),
        "attention": info.attention,
        "kernels": info.kernels,
        "scheduler": llm.config.scheduler.name,
        "device": info.device,
        "dtype": info.dtype,
        "cuda_graphs": info.cuda_graphs,
        "prompt_graph_sizes": list(info.prompt_graph_sizes),
        "block_size": info.block_size,
        "num_blocks": info.num_blocks,
        "max_num_seqs": llm.config.limits.max_num_seqs,
        "load_seconds": round(info.load_seconds, 3),
        "capture_seconds": round(info.capture_seconds, 3),
        "config": llm.config.model_dump(mode="json"),
        "environment": describe_environment(),
    }


def configured_attention(config: EngineConfig) -> str:
    """The backend as it is named in the configuration, or PREFILL+DECODE for a pair."""
    prefill, decode = config.attention.prefill, config.attention.decode
    return prefill.backend if prefill == decode else f"{prefill.backend}+{decode.backend}"


def write_record(file: Path, record: Mapping[str, Any]) -> None:
    """Write a result as JSON; a list of numbers stays on one line."""
    text = json.dumps(record, indent=2)
    text = _NUMBERS.sub(lambda match: f"[{' '.join(match[1].split())}]", text)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n", encoding="utf-8")
