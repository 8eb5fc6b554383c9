"""The worker: the model runner, its device-resident batch state, CUDA graphs and the sampler.

Knows rows, blocks and token ids; knows nothing of requests or text. The public door for executors.
"""

from nanovllm_core.registry.objects import make_plugin as make_plugin
from nanovllm_core.worker.executor import SingleProcessExecutor as SingleProcessExecutor
from nanovllm_core.worker.weights import (
    INDEX_NAME as INDEX_NAME,
    init_dummy_weights as init_dummy_weights,
    load_weights as load_weights,
)
from nanovllm_core.worker.worker import Worker as Worker
