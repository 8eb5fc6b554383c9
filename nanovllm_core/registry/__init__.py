"""Installed plugins and how they are loaded: kinds, hooks, discovery, checks, the manager."""

from nanovllm_core.registry.checks import (
    CORE as CORE,
    core_requirement as core_requirement,
    missing_hook as missing_hook,
)
from nanovllm_core.registry.discovery import (
    COMMAND_GROUP as COMMAND_GROUP,
    GROUP_PREFIX as GROUP_PREFIX,
    SUITE_GROUP as SUITE_GROUP,
    InstalledPlugin as InstalledPlugin,
    known_groups as known_groups,
)
from nanovllm_core.registry.hookspecs import PROJECT as PROJECT
from nanovllm_core.registry.kinds import (
    EXTENSION as EXTENSION,
    EXTENSION_GROUP as EXTENSION_GROUP,
    KIND as KIND,
    KIND_GROUP as KIND_GROUP,
    KINDS as KINDS,
    NO_SPEC as NO_SPEC,
    declared_group as declared_group,
    declared_hook as declared_hook,
)
from nanovllm_core.registry.manager import (
    PluginManager as PluginManager,
    get_plugin_manager as get_plugin_manager,
)
from nanovllm_core.registry.objects import (
    load_object as load_object,
    make_plugin as make_plugin,
)
from nanovllm_core.registry.options import read_options as read_options
