"""From a configuration to everything an engine needs, chosen and checked before work begins."""

from __future__ import annotations

import ctypes
import logging
import os
import pkgutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import cast

from nanovllm_core.config.choices import AUTO
from nanovllm_core.config.settings import EngineConfig
from nanovllm_core.engine.constraints import LoadedConstraint
from nanovllm_core.engine.observation import close_observers
from nanovllm_core.errors import NanoVLLMError, PluginLoadError
from nanovllm_core.interfaces.constraint import ConstraintContext, ConstraintSpec
from nanovllm_core.interfaces.executor import Executor, WorkerSetup
from nanovllm_core.interfaces.observer import ObserverContext, StepObserver
from nanovllm_core.interfaces.scheduler import Scheduler, SchedulingPolicy
from nanovllm_core.interfaces.specs import (
    KernelSetSpec,
    LogitsProcessorSpec,
    ResolvedPlugin,
    SchedulerSpec,
)
from nanovllm_core.registry.manager import PluginManager
from nanovllm_core.registry.objects import make_plugin
from nanovllm_core.selection.decisions import SEQUENCE, Decisions
from nanovllm_core.selection.generation_config import describe_defaults

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Startup:
    """What a configuration resolved to, and the objects that an engine is made of."""

    decisions: Decisions
    setup: WorkerSetup
    scheduler: Scheduler
    scheduler_name: str
    """For errors: its kind, name and distribution."""
    executor: Executor
    logits_processors: Mapping[str, LogitsProcessorSpec]
    """The logits processors that requests may use, in the order in which they run."""
    observers: Mapping[str, StepObserver]
    """By a label that names the plugin and its distribution."""
    choices: tuple[str, ...]
    """Why these attention backends and this kernel set: the lines of the log."""


def wake_gpu(wakers: Sequence[str]) -> None:
    """What takes time and neither torch nor Python's lock, for a thread beside torch's import.

    CUDA is initialised, kernel sets are woken by their `wakers`, and Triton reads all of itself,
    for the names of its compiled kernels.
    """
    with suppress(OSError, ImportError):
        if ctypes.CDLL("libcuda.so.1").cuInit(0):  # OSError: there is no driver
            return
        for waker in wakers:
            try:
                pkgutil.resolve_name(waker)()
            except Exception as error:
                logger.warning("the waker %s of a kernel set failed: %s", waker, error)
        from triton.runtime.cache import triton_key

        triton_key()


def find_wakers(decisions: Decisions) -> list[str]:
    """`KernelSetSpec.wake` of the sets that a start may take.

    None for workers in other processes, nor where no step is captured.
    """
    config, plugins = decisions.config, decisions.plugins
    is_here = config.tensor_parallel_size == 1 and config.executor.plugin in (AUTO, "single")
    if config.cuda_graphs.enforce_eager or not is_here:
        return []
    is_auto = config.kernels.is_auto
    wakers = []
    for name in plugins.names("kernels") if is_auto else [config.kernels.plugin]:
        with suppress(NanoVLLMError):  # the choice raises it
            spec = cast(KernelSetSpec, plugins.spec("kernels", name))
            if spec.wake and (spec.rank > 0 or not is_auto):
                wakers.append(spec.wake)
    return wakers


def start(config: EngineConfig) -> Startup:
    """Resolve every choice of `config`; loads no weights and allocates nothing on the device."""
    decisions = Decisions(config)
    if config.device != "cpu":
        Thread(target=wake_gpu, args=[find_wakers(decisions)], daemon=True).start()
    for decide in SEQUENCE.values():
        decide(decisions)
    attention, kernels = decisions.attention, decisions.kernels
    choices = (*attention.report, *kernels.report)
    for line in choices:
        logger.info(line)
    if kernels.warning:
        logger.warning("%s; %s", kernels.warning, kernels.remedy)
    if decisions.sampling_defaults:
        defaults = describe_defaults(decisions.sampling_defaults)
        logger.info("sampling defaults of the checkpoint: %s", defaults)
    plugins = decisions.plugins
    setup = make_setup(decisions)
    [scheduler], [executor] = decisions.named("scheduler"), decisions.named("executor")
    made_scheduler = make_scheduler(plugins, scheduler)
    made_executor = cast(Executor, make_plugin(executor))
    # By now every selected plugin is known, so each hears of it, as extensions do.
    plugins.hook.nanovllm_configure(config=config, plugins=plugins)
    processors = {
        one.name: cast(LogitsProcessorSpec, plugins.spec(one.kind, one.name))
        for one in setup.logits_processors
    }
    return Startup(
        decisions,
        setup,
        made_scheduler,
        str(scheduler),
        made_executor,
        processors,
        make_observers(decisions),
        choices,
    )


def make_setup(decisions: Decisions) -> WorkerSetup:
    """The choices as plain data, for the workers."""
    [kernels], [sampler] = decisions.named("kernels"), decisions.named("sampler")
    attention = decisions.attention.prefill.resolved, decisions.attention.decode.resolved
    in_steps = decisions.model, *attention, kernels, sampler, *decisions.named("executor")
    return WorkerSetup(
        config=decisions.config,
        checkpoint=str(decisions.checkpoint),
        model_config=decisions.model_config,
        model=decisions.model,
        prefill_attention=attention[0],
        decode_attention=attention[1],
        kernels=kernels,
        sampler=sampler,
        logits_processors=decisions.named("logits_processor"),
        tokenizer=os.path.expanduser(decisions.config.tokenizer or str(decisions.checkpoint)),
        kv_layout=decisions.attention.layout,
        block_size=decisions.block_size,
        max_model_len=decisions.max_model_len,
        device=decisions.device,
        dtype=decisions.dtype,
        cuda_graphs=decisions.cuda_graphs,
        prompt_graph_sizes=decisions.prompt_graph_sizes,
        needs_warm_up=any(
            decisions.plugins.spec(one.kind, one.name).needs_warm_up for one in in_steps
        ),
        clears_blocks=any(
            one.spec.capabilities.needs_finite_tail
            for one in (decisions.attention.prefill, decisions.attention.decode)
        ),
    )


def make_scheduler(plugins: PluginManager, resolved: ResolvedPlugin) -> Scheduler:
    """A scheduler; a policy is wrapped in the core's own scheduler.

    Raises PluginLoadError where it is not of the level that its spec states.
    """
    from nanovllm_core.engine.scheduler import TokenBudgetScheduler

    made = make_plugin(resolved)
    spec = cast(SchedulerSpec, plugins.spec(resolved.kind, resolved.name))
    level = "policy" if isinstance(made, SchedulingPolicy) else "scheduler"
    if spec.level != level:
        raise PluginLoadError(
            f"{resolved}: its level is {spec.level!r}, and {resolved.impl} makes a "
            f"{level}; state level={level!r} in its spec"
        )
    if level == "policy":
        return TokenBudgetScheduler(made, str(resolved))
    return cast(Scheduler, made)


def make_constraints(
    startup: Startup, eos_token_ids: tuple[int, ...]
) -> dict[str, LoadedConstraint]:
    """The constraints that requests may use, by name."""
    decisions = startup.decisions
    context = ConstraintContext(
        vocab_size=decisions.shape.vocab_size,
        max_model_len=startup.setup.max_model_len,
        tokenizer=startup.setup.tokenizer,
        eos_token_ids=eos_token_ids,
    )
    return {
        one.name: LoadedConstraint(
            str(one),
            cast(ConstraintSpec, decisions.plugins.spec(one.kind, one.name)),
            make_plugin(one, context),
        )
        for one in decisions.named("constraint")
    }


def make_observers(decisions: Decisions) -> dict[str, StepObserver]:
    """Make all, by a label that says where each is named and which distribution it is of.

    Where one cannot be made, those before it are closed.
    """
    context = ObserverContext(config=decisions.config, plugins=decisions.plugins)
    made: dict[str, StepObserver] = {}
    try:
        for index, one in enumerate(decisions.named("observer")):
            made[f"observers[{index}]: {one}"] = make_plugin(one, context)
    except BaseException:
        close_observers(made)
        raise
    return made
