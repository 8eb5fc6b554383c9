"""The flash spec is light, and says before any import what will run and what is missing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from pydantic import ValidationError

from nanovllm_attention_flash import providers
from nanovllm_attention_flash.plugin import FlashOptions, nanovllm_attention, nanovllm_doctor
from nanovllm_core.api import AttentionRequirements

(SPEC,) = nanovllm_attention()
INSTALLED = {"flash-attn-4": "4.0.0b36", "flash-attn": "2.8.3", "torch": "2.13.0+cu130"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is installed; a test may change it."""
    packages = dict(INSTALLED)

    def version(name: str) -> str:
        if name not in packages:
            raise providers.metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(providers.metadata, "version", version)
    return packages


def requirements(
    compute_capability: tuple[int, int] | None = (9, 0), block_size: int | None = None
) -> AttentionRequirements:
    return AttentionRequirements(
        phase="decode", device="cuda", dtype="bfloat16", num_heads=16, num_kv_heads=8,
        head_size=128, compute_capability=compute_capability, block_size=block_size,
    )  # fmt: skip


def options(provider: str) -> FlashOptions:
    return FlashOptions.model_validate({"provider": provider})


def test_the_spec_modules_import_no_torch_and_no_provider() -> None:
    """Listing plugins, versions included, imports nothing heavy."""
    code = (
        "import sys; from nanovllm_attention_flash.plugin import nanovllm_attention, FlashOptions;"
        "spec, = nanovllm_attention(); spec.provider(FlashOptions());"
        "print([m for m in ('torch', 'flash_attn', 'flash_attn_interface') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_entry_point_names_the_spec_module() -> None:
    """`flash` in the group `nanovllm.attention` is this plugin."""
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="nanovllm.attention", name="flash")
    assert entry.value == "nanovllm_attention_flash.plugin"
    assert entry.dist is not None
    assert entry.dist.name == "nanovllm-attention-flash"


def test_provider_says_what_would_run(installed: dict[str, str]) -> None:
    """Name, package and version; or the reason and the install."""
    assert SPEC.provider is not None
    assert SPEC.provider(options("auto")) == "fa4: flash-attn-4 4.0.0b36"
    assert SPEC.provider(options("fa2")) == "fa2: flash-attn 2.8.3, unverified on hardware"
    assert SPEC.provider(options("torch")) == "torch: torch 2.13.0+cu130, unverified on hardware"
    assert SPEC.provider(options("fa3")).startswith("fa3 (flash-attn-3 is not installed; build it")


def test_only_fa4_is_captured_with_prompts(installed: dict[str, str]) -> None:
    """The others have not been on a GPU; their decode steps are captured all the same."""
    asked = replace(requirements(), phase="prefill", cuda_graphs=True)
    assert SPEC.check(asked, options("fa4")) == []
    assert SPEC.check(replace(asked, cuda_graphs=False), options("fa2")) == []
    assert SPEC.check(replace(asked, phase="decode"), options("fa2")) == []
    (reason,) = SPEC.check(asked, options("fa2"))
    assert reason == "provider fa2 was not captured with prompts on a GPU, fa4 was"


def test_auto_is_never_another_provider(installed: dict[str, str]) -> None:
    """Without fa4 `auto` has a reason, though flash-attn 2 and torch could run."""
    assert SPEC.check(requirements(), options("auto")) == []
    del installed["flash-attn-4"]
    (reason,) = SPEC.check(requirements(), options("auto"))
    assert "provider fa4: flash-attn-4 is not installed" in reason
    assert "pip install 'nanovllm-attention-flash[fa4]'" in reason
    assert "provider: fa2" in reason


@pytest.mark.parametrize(
    ("provider", "here", "serves"),
    [
        ("fa4", (8, 0), False),
        ("fa4", (9, 0), True),
        ("fa4", (10, 0), True),
        ("fa4", (12, 0), False),
        ("fa2", (8, 0), True),
        ("fa2", (12, 0), True),
        ("torch", (7, 5), False),
    ],
)
def test_each_provider_has_its_gpus(
    installed: dict[str, str], provider: str, here: tuple[int, int], serves: bool
) -> None:
    """fa4's paged kernels are those of compute capability 9 to 11."""
    reasons = SPEC.check(requirements(here, block_size=256), options(provider))
    assert (reasons == []) is serves
    if not serves:
        assert f"this GPU has {here[0]}.{here[1]}" in reasons[0]


@pytest.mark.parametrize(
    ("provider", "window", "cap"),
    [("fa4", False, False), ("fa3", True, True), ("fa2", True, True), ("torch", True, False)],
)
def test_each_provider_says_whether_it_has_windows_and_soft_caps(
    installed: dict[str, str], provider: str, window: bool, cap: bool
) -> None:
    """What is not handed on is a reason with the providers that have it."""
    installed["flash-attn-3"] = "3.0"
    for name, has in (("sliding_window", window), ("soft_cap", cap)):
        reasons = SPEC.check(
            replace(requirements(block_size=256), **{name: True}), options(provider)
        )
        assert (reasons == []) is has
        if not has:
            assert "choose provider: fa3, fa2" in reasons[0]


@pytest.mark.parametrize(
    ("provider", "multiples"),
    [("fa4", [128, 16]), ("fa3", [128, 16]), ("fa2", [256]), ("torch", [256])],
)
def test_each_provider_has_its_blocks(provider: str, multiples: list[int]) -> None:
    """128 tokens, a key tile, where the provider takes them; flash-attn 2's kernels want 256."""
    layouts = SPEC.kv_layouts(requirements(), options(provider))
    assert [layout.block_multiple for layout in layouts] == multiples


def test_an_old_torch_is_refused_with_its_version(installed: dict[str, str]) -> None:
    """torch 2.11 has varlen_attn without blocks."""
    installed["torch"] = "2.11.0+cu130"
    (reason,) = SPEC.check(requirements(block_size=256), options("torch"))
    assert "torch 2.11.0+cu130 is older than 2.12; pip install 'torch>=2.12'" in reason


def test_unknown_providers_and_options_are_refused() -> None:
    """The options model forbids what it does not know."""
    for wrong in ({"provider": "fa5"}, {"providor": "fa4"}):
        with pytest.raises(ValidationError):
            FlashOptions.model_validate(wrong)


def test_the_doctor_hears_of_each_provider(installed: dict[str, str]) -> None:
    """What is missing comes with the command that installs it."""
    checks = {check.name.removeprefix("flash provider "): check for check in nanovllm_doctor()}
    assert set(checks) == set(providers.PROVIDERS)
    assert checks["fa4"].ok
    assert checks["fa4"].detail == "fa4: flash-attn-4 4.0.0b36"
    assert not checks["fa3"].ok
    assert "flash-attn-3 is not installed; build it" in checks["fa3"].detail
