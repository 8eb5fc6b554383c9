"""nanovllm: a small LLM inference engine whose parts are plugins.

from nanovllm_core import LLM, SamplingParams

with LLM("demo") as llm:
    print(llm.generate("Once upon a time", SamplingParams(temperature=0))[0].text)
"""

import lazy_loader

__version__ = "0.1.0"

# The public names are in __init__.pyi. Each is imported on first use: the command watches for
# Ctrl-C before torch is imported.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
