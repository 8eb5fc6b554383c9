"""The packages that bring FlashAttention, as data: finding out what is installed imports none.

Block sizes, from each package's own documentation:

- FlashAttention-4 (`flash_attn.cute`): any block size; blocks of one key tile, 128 tokens at head
  sizes 64 and 128 on compute capability 9.0, are read by the tensor memory accelerator.
- FlashAttention-3 (`flash_attn_interface.flash_attn_with_kvcache`): "page_block_size can be
  arbitrary".
- flash-attn 2 (`flash_attn.flash_attn_with_kvcache`): "page_block_size must be a multiple of 256".
- torch's `varlen_attn` runs flash-attn 2's kernels and has their multiple of 256.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Literal

ProviderName = Literal["fa4", "fa3", "fa2", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """One package that brings FlashAttention, and what must be known before importing it.

    `capabilities` are the compute capabilities it runs on, first and last major version.
    `sliding_window` and `soft_cap`: whether this backend hands them to the provider. fa4, which
    `auto` takes, has both, but they have not been run on a GPU here.
    """

    name: ProviderName
    distribution: str
    adapter: str
    install: str
    block_multiple: int
    capabilities: tuple[int, int]
    min_version: tuple[int, int] = (0, 0)
    verified: bool = False
    sliding_window: bool = False
    soft_cap: bool = False

    @property
    def version(self) -> str | None:
        """The installed version, or None; read from metadata."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def missing(self) -> str | None:
        """Why the package cannot be used, with the install that mends it; None if it can."""
        version = self.version
        if version is None:
            return f"{self.distribution} is not installed; {self.install}"
        if _major_minor(version) < self.min_version:
            least = ".".join(map(str, self.min_version))
            return f"{self.distribution} {version} is older than {least}; {self.install}"
        return None

    def unsupported(self, *, sliding_window: bool, soft_cap: bool) -> list[str]:
        """Why it cannot serve a model with these, one reason for each."""
        asked = {"sliding_window": sliding_window, "soft_cap": soft_cap}
        return [
            f"provider {self.name} is not given a {name.replace('_', ' ')} here, and the model "
            f"needs one; choose provider: {_names_with(name)}, or the triton backend"
            for name, needed in asked.items()
            if needed and not getattr(self, name)
        ]

    def label(self) -> str:
        """For listings and benchmarks: name, package, version, and whether a GPU has run it."""
        if self.missing() is not None:
            return f"{self.name} ({self.missing()})"
        label = f"{self.name}: {self.distribution} {self.version}"
        return label if self.verified else f"{label}, unverified on hardware"


_ADAPTERS = "nanovllm_attention_flash.adapters"

PROVIDERS: Mapping[str, Provider] = MappingProxyType(
    {
        provider.name: provider
        for provider in (
            Provider(
                name="fa4",
                distribution="flash-attn-4",
                adapter=f"{_ADAPTERS}.fa4:FlashAttention4",
                install="pip install 'nanovllm-attention-flash[fa4]'",
                block_multiple=16,
                # 8.x and 12.x run kernels that read no block table.
                capabilities=(9, 11),
                verified=True,
            ),
            Provider(
                name="fa3",
                distribution="flash-attn-3",
                adapter=f"{_ADAPTERS}.fa3:FlashAttention3",
                install="build it from github.com/Dao-AILab/flash-attention, folder hopper",
                block_multiple=16,
                capabilities=(8, 9),
                sliding_window=True,
                soft_cap=True,
            ),
            Provider(
                name="fa2",
                distribution="flash-attn",
                adapter=f"{_ADAPTERS}.fa2:FlashAttention2",
                install="pip install flash-attn --no-build-isolation (it compiles)",
                block_multiple=256,
                capabilities=(8, 12),
                sliding_window=True,
                soft_cap=True,
            ),
            Provider(
                name="torch",
                distribution="torch",
                adapter=f"{_ADAPTERS}.torch_varlen:TorchVarlen",
                install="pip install 'torch>=2.12'",
                block_multiple=256,
                capabilities=(8, 12),
                min_version=(2, 12),
                sliding_window=True,  # its varlen_attn has no soft cap
            ),
        )
    }
)
"""By name. `auto` is fa4 alone: the others have not been run on a GPU here, so they are named."""


def provider_for(choice: str) -> Provider:
    """The provider that an option names; `auto` is the verified one."""
    return PROVIDERS["fa4" if choice == "auto" else choice]


def other_installs(provider: Provider) -> str:
    """What else could be installed, for the error of a missing provider."""
    others = (
        f"provider: {other.name} ({other.install})"
        for other in PROVIDERS.values()
        if other is not provider
    )
    return f"or choose another by option, each unverified on hardware but fa4: {'; '.join(others)}"


def _names_with(feature: str) -> str:
    return ", ".join(name for name, other in PROVIDERS.items() if getattr(other, feature))


def _major_minor(version: str) -> tuple[int, int]:
    numbers = re.findall(r"\d+", version)
    return int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0
