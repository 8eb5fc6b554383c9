"""The worker: the model runner, its device-resident batch state, CUDA graphs and the sampler.

Knows rows, pages and token ids; knows nothing of requests or text. The public door for executors.
"""

from nanovllm_core.worker.executor import (
    SingleProcessExecutor as SingleProcessExecutor,
)
