from .config.settings import EngineConfig as EngineConfig
from .config.sources import load_config as load_config
from .errors import NanoVLLMError as NanoVLLMError
from .frontend.async_llm import AsyncLLM as AsyncLLM
from .frontend.llm import LLM as LLM
from .frontend.outputs import RequestOutput as RequestOutput
from .interfaces.sampling_params import SamplingParams as SamplingParams
from .registry.hookspecs import hookimpl as hookimpl

__version__: str
