"""Without a GPU, Triton kernels run in its interpreter, which is chosen when they are decorated."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
