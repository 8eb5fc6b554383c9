"""The configuration: its settings, the sources they come from, and errors that name the setting."""

from nanovllm_core.config.choices import (
    AttentionChoice as AttentionChoice,
    KernelSettings as KernelSettings,
)
from nanovllm_core.config.errors import (
    SECTION as SECTION,
    explain as explain,
    explain_options as explain_options,
)
from nanovllm_core.config.settings import (
    EngineConfig as EngineConfig,
    bucket_sizes as bucket_sizes,
)
from nanovllm_core.config.sources import load_config as load_config
from nanovllm_core.config.yaml_reader import parse_yaml as parse_yaml
