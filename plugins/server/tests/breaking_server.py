"""`nanovllm serve` whose engine ends once the file of the first argument exists."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from nanovllm_core.cli.main import main
from nanovllm_core.worker.executor import SingleProcessExecutor

broken = Path(sys.argv[1])
collect = SingleProcessExecutor.collect


def fail(self: SingleProcessExecutor) -> Any:
    if broken.exists():
        raise RuntimeError("the device is gone")
    return collect(self)


SingleProcessExecutor.collect = fail  # type: ignore[method-assign]
sys.argv = ["nanovllm", "serve", "--port", "0", "--device", "cpu", "--engine-client", "thread"]
main()
