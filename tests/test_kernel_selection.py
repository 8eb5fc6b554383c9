"""Which kernel set `auto` takes, what is said of the others, and what a GPU without one is told."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import EntryPoint, distributions
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from nanovllm_core.api import KernelSetSpec, hookimpl
from nanovllm_core.config.choices import KernelSettings
from nanovllm_core.config.sources import load_config, load_with_sources
from nanovllm_core.diagnostics.doctor import check_defaults
from nanovllm_core.diagnostics.explain import explain
from nanovllm_core.diagnostics.status import plugin_statuses, typical_requirements
from nanovllm_core.errors import PluginLoadError, UnsupportedError
from nanovllm_core.registry.discovery import install_command
from nanovllm_core.registry.manager import PluginManager, get_plugin_manager
from nanovllm_core.selection import decisions, startup
from nanovllm_core.selection.decisions import Decisions
from nanovllm_core.selection.kernels import KernelTarget, select_kernels

AUTO = KernelSettings()
DTYPES = ("float32", "float16", "bfloat16")
CPU = KernelTarget(device="cpu", dtype="float32")
GPU = KernelTarget(device="cuda:0", dtype="bfloat16", compute_capability=(9, 0))
GROUP = "nanovllm.kernels"
Manager = Callable[..., PluginManager]


def kernel_set(name: str, **fields: Any) -> KernelSetSpec:
    fields = {"devices": frozenset({"cuda"}), **fields}
    return KernelSetSpec(
        name=name, impl="nanovllm_core.kernels.reference:TorchKernels", contract=4, **fields
    )


def installed() -> list[EntryPoint]:
    """What the plugin manager reads of this environment."""
    every = (entry for one in distributions() for entry in one.entry_points)
    return [entry for entry in every if entry.group.startswith("nanovllm.")]


@pytest.fixture(scope="module")
def manager() -> Iterator[Manager]:
    """A manager of the core's own plugins and of sets that a stranger's package would bring."""
    module = ModuleType("strange_sets")
    own = [entry for entry in installed() if entry.value.startswith("nanovllm_core")]

    def make(*specs: KernelSetSpec, disable: Sequence[str] = ()) -> PluginManager:
        module.nanovllm_kernels = hookimpl(specname="nanovllm_kernels")(lambda: specs)  # type: ignore[attr-defined]
        theirs = [EntryPoint(spec.name, "strange_sets", GROUP) for spec in specs]
        return get_plugin_manager(disable, entry_points=[*own, *theirs])

    sys.modules["strange_sets"] = module
    yield make
    del sys.modules["strange_sets"]


sets = st.builds(
    kernel_set,
    st.sampled_from(["alpha", "sigma", "zeta"]),
    devices=st.frozensets(st.sampled_from(["cpu", "cuda"]), min_size=1),
    dtypes=st.frozensets(st.sampled_from(DTYPES), min_size=1),
    min_compute_capability=st.sampled_from([None, (8, 0), (9, 0), (10, 0)]),
    rank=st.integers(0, 60),
)
targets = st.builds(
    KernelTarget,
    device=st.just("cuda:0"),
    dtype=st.sampled_from(DTYPES),
    compute_capability=st.sampled_from([(7, 5), (8, 0), (9, 0)]),
) | st.builds(KernelTarget, device=st.just("cpu"), dtype=st.sampled_from(DTYPES))


def fits(spec: KernelSetSpec, target: KernelTarget) -> bool:
    """By the words of KernelSetSpec."""
    low, kind = spec.min_compute_capability, target.device.split(":")[0]
    new_enough = low is None or (target.compute_capability or low) >= low
    return kind in spec.devices and target.dtype in spec.dtypes and new_enough


@settings(deadline=None, max_examples=60)
@given(specs=st.lists(sets, max_size=3, unique_by=lambda spec: spec.name), target=targets)
def test_auto_takes_the_highest_rank_of_those_that_fit(
    manager: Manager, specs: list[KernelSetSpec], target: KernelTarget
) -> None:
    """Whoever wrote it, the core's reference included; each other one has its reason."""
    selection = select_kernels(manager(*specs), AUTO, target)
    ranked = [spec for spec in specs if fits(spec, target) and spec.rank > 0]
    able = {"torch": 10} | {spec.name: spec.rank for spec in ranked}
    assert selection.chosen.name == min(able, key=lambda name: (-able[name], name))
    assert selection.rank == able[selection.chosen.name]
    names = {"torch"} | {spec.name for spec in specs}
    told = set(selection.others) - ({"triton"} if selection.warning else set())
    assert told == names - {selection.chosen.name}
    for name, why in selection.others.items():
        if name in able:
            assert why == (
                f"it can serve, but its rank {able[name]} is not above {selection.chosen.name}'s "
                f"{selection.rank}"
            )
    on_the_reference = selection.chosen.name == "torch" and target.device != "cpu"
    assert bool(selection.warning) == on_the_reference
    assert selection.report[-1].startswith(f"kernels: {selection.chosen.name} ")


@pytest.mark.parametrize(
    ("fields", "target", "reason"),
    [
        ({}, CPU, "does not run on cpu, only on cuda"),
        ({"dtypes": frozenset({"float16"})}, GPU, "does not compute in bfloat16, only in float16"),
        (
            {"min_compute_capability": (10, 0)},
            GPU,
            "needs compute capability 10.0, and this GPU has 9.0",
        ),
    ],
)
def test_a_set_that_does_not_fit_is_refused_by_its_name_and_passed_over_by_auto(
    manager: Manager, fields: dict[str, Any], target: KernelTarget, reason: str
) -> None:
    plugins = manager(kernel_set("strange", rank=99, **fields))
    assert select_kernels(plugins, AUTO, target).others["strange"] == reason
    with pytest.raises(UnsupportedError) as caught:
        select_kernels(plugins, KernelSettings(name="strange"), target)
    assert caught.value.reasons == (reason,)
    assert f"cannot serve {target.device} in {target.dtype}: {reason}" in str(caught.value)
    assert str(caught.value).endswith(". These can: torch")
    only = manager(kernel_set("strange", **fields), disable=["kernels:torch"])
    with pytest.raises(UnsupportedError, match=r"No other installed one can; .*'torch'"):
        select_kernels(only, KernelSettings(name="strange"), target)


def test_a_named_set_serves_whatever_its_rank_and_no_other_is_loaded(manager: Manager) -> None:
    plugins = manager(kernel_set("strange"))
    selection = select_kernels(plugins, KernelSettings(name="strange"), GPU)
    assert (selection.chosen.name, selection.others) == ("strange", {})
    assert "where it is named" in select_kernels(plugins, AUTO, GPU).others["strange"]
    reference = select_kernels(plugins, KernelSettings(name="torch"), GPU)
    assert reference.warning == ""  # it was meant


def test_a_set_that_cannot_be_loaded_is_passed_over_with_its_error(manager: Manager) -> None:
    selection = select_kernels(manager(kernel_set("broken", rank="high")), AUTO, GPU)
    assert selection.chosen.name == "torch"
    assert "rank 'high' is not an integer" in selection.others["broken"]


def test_without_any_set_the_remedy_is_the_reference(manager: Manager) -> None:
    unranked = kernel_set("strange", devices=frozenset({"cpu"}))
    plugins = manager(unranked, disable=["kernels:torch"])
    with pytest.raises(
        UnsupportedError,
        match=r"no kernels plugin can serve cpu in float32.*; the core's own, 'torch'",
    ):
        select_kernels(plugins, AUTO, CPU)


# -- a GPU on which only the reference fits -------------------------------------------------------


@pytest.mark.usefixtures("a_gpu")
def test_a_gpu_without_a_set_built_for_it_is_told_what_to_install(manager: Manager) -> None:
    """By the selection, in `explain`'s words and the doctor's."""
    selection = select_kernels(manager(), AUTO, GPU)
    assert selection.chosen.name == "torch"
    assert selection.others["triton"] == "not installed"
    assert "cuda:0 runs on the kernel set 'torch'" in selection.warning
    assert selection.remedy == install_command("kernels", "triton")
    gpu, cpu = typical_requirements("cuda:0", (9, 0)), typical_requirements("cpu", None)
    checks = {check.name: check for check in check_defaults(manager(), [], gpu)}
    assert (checks["kernels"].ok, checks["kernels"].fatal) == (False, False)
    assert checks["kernels"].remedy == install_command("kernels", "triton")
    assert "kernels" not in {check.name for check in check_defaults(manager(), [], cpu)}


def test_a_set_that_is_disabled_or_unfit_needs_no_install(manager: Manager) -> None:
    triton = kernel_set("triton", rank=50, min_compute_capability=(8, 0))
    off = select_kernels(manager(triton, disable=["kernels:triton"]), AUTO, GPU)
    assert off.others["triton"] == "disabled"
    assert off.remedy == "take the entry that disables it out of plugins.disable"
    old = KernelTarget(device="cuda", dtype="float16", compute_capability=(7, 5))
    unfit = select_kernels(manager(triton), AUTO, old)
    assert "needs compute capability 8.0, and this GPU has 7.5" in unfit.warning
    assert "pip install" not in unfit.remedy


def test_the_doctor_lists_a_set_by_what_it_states(manager: Manager) -> None:
    plugins = manager(kernel_set("strange", min_compute_capability=(10, 0)))
    statuses = plugin_statuses(plugins, typical_requirements("cuda", (9, 0)), "kernels")
    states = {status.plugin.name: (status.state, *status.reasons) for status in statuses}
    assert states["torch"] == ("ready",)
    assert states["strange"][0] == "unsupported"
    assert "needs compute capability 10.0" in states["strange"][1]


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


@pytest.mark.usefixtures("a_gpu")
def test_the_report_has_a_line_for_each_set(manager: Manager) -> None:
    """The loser with the reason, then the winner; a start writes them to its log."""
    config = load_config("demo", overrides={"device": "cuda", "dtype": "bfloat16"})
    selection = Decisions(config, manager(kernel_set("fast", rank=60))).kernels
    assert selection.chosen.name == "fast"
    loser, winner = selection.report
    assert loser == "kernels auto: not torch: it can serve, but its rank 10 is not above fast's 60"
    assert winner.startswith("kernels: fast ")


@pytest.mark.usefixtures("a_gpu")
def test_a_start_on_a_gpu_without_a_set_for_it_warns_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the command that installs one; `explain` shows the same reason."""
    for name in ("model_qwen3", "attention_sdpa", "checkpoint_demo"):
        pytest.importorskip(f"nanovllm_{name}", reason=f"needs the plugin {name}")
    without = [e for e in installed() if (e.group, e.name) != (GROUP, "triton")]
    monkeypatch.setattr(
        decisions, "get_plugin_manager", lambda disable: PluginManager(disable, without)
    )
    overrides = {"device": "cuda", "attention": "sdpa"}
    started = startup.start(load_config("demo", overrides=overrides))
    assert started.setup.kernels.name == "torch"
    assert "kernels auto: not triton: not installed" in started.choices
    [warning] = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert "cuda:0 runs on the kernel set 'torch'" in warning
    assert warning.endswith(install_command("kernels", "triton"))
    seams = {s.name: s for s in explain(load_with_sources("demo", overrides=overrides, env={}))}
    assert seams["kernels"].others["triton"] == "not installed"
    assert seams["kernels"].why == "auto: rank 10, the highest of those that fit"


# -- wakers ----------------------------------------------------------------------------------------


woken: list[str] = []


def wake_alpha() -> None:
    """What a set is woken by."""
    woken.append("alpha")


def wake_zeta() -> None:
    raise ValueError("not today")


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ({}, ["wake_alpha", "wake_zeta"]),
        ({"kernels": "alpha"}, ["wake_alpha"]),
        ({"kernels": "torch"}, []),
        ({"kernels": "unknown"}, []),
        ({"kernels": "sigma"}, ["wake_sigma"]),
        ({"tensor_parallel_size": 2}, []),
        ({"executor": "parallel"}, []),
        ({"cuda_graphs": {"enforce_eager": True}}, []),
    ],
)
def test_a_start_wakes_the_kernel_sets_that_it_may_take(
    manager: Manager, choice: dict[str, Any], found: list[str]
) -> None:
    """Ranks have processes of their own; for a set that is not installed the choice raises.

    Sigma has no rank, so that `auto` never takes it.
    """
    specs = [
        kernel_set(name, rank=rank, wake=f"{__name__}:wake_{name}")
        for name, rank in (("alpha", 20), ("sigma", 0), ("zeta", 30))
    ]
    config = load_config("demo", overrides=choice)
    wakers = startup.find_wakers(Decisions(config, manager(*specs)))
    assert [waker.partition(":")[2] for waker in wakers] == found


@pytest.mark.parametrize("has_gpu", [True, False])
def test_one_set_that_cannot_be_woken_delays_no_other(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it end the start; where there is no GPU none is woken."""
    driver = SimpleNamespace(cuInit=lambda _: 0 if has_gpu else 100)
    monkeypatch.setattr(startup.ctypes, "CDLL", lambda _: driver)
    woken.clear()
    startup.wake_gpu([f"{__name__}:wake_zeta", f"{__name__}:wake_alpha"])
    assert woken == ["alpha"] * has_gpu
    warning = f"the waker {__name__}:wake_zeta of a kernel set failed: not today"
    assert caplog.messages == [warning] * has_gpu


@pytest.mark.parametrize(("device", "woken_by"), [("auto", [["a:wake"]]), ("cpu", [])])
def test_a_start_wakes_beside_its_choices(
    device: str, woken_by: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where it is to run on a CPU."""
    calls: list[list[str]] = []

    class AtOnce:
        def __init__(self, target: Callable[..., None], args: list[Any], daemon: bool) -> None:
            self.start = partial(target, *args)

    monkeypatch.setattr(startup, "Thread", AtOnce)
    monkeypatch.setattr(startup, "find_wakers", lambda _: ["a:wake"])
    monkeypatch.setattr(startup, "wake_gpu", calls.append)
    monkeypatch.setattr(startup, "SEQUENCE", {"first": lambda _: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        startup.start(load_config("demo", overrides={"device": device}))
    assert calls == woken_by


def test_a_waker_that_names_no_function_is_a_fault_of_its_set(manager: Manager) -> None:
    plugins = manager(kernel_set("alpha", wake="no function"))
    with pytest.raises(PluginLoadError, match="wake 'no function' is not of the form"):
        plugins.spec("kernels", "alpha")
