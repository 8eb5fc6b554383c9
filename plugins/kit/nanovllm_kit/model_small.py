"""What the models' suite is made of: a small configuration, its checkpoints, models of them.

The first check builds the plugin's model from it. Where that fails, every other check would fail
for the same reason; these are skipped instead.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from nanovllm_core.errors import ArchitectureError, WeightsError
from nanovllm_kit.conformance import PluginUnderTest
from nanovllm_kit.model_settings import LLAMA_LIKE, Settings
from nanovllm_kit.reference_model import ReferenceCheckpoint, load_model, run_model

NOT_BUILT = pytest.StashKey[bool]()
"""On the class that is collected: its small model was tried, and cannot be built."""


def known_settings(reference_class: Any) -> Set[str]:
    """What a class of transformers reads in a configuration, under all of its names."""
    config_class = reference_class.config_class
    return {*config_class().to_dict(), *config_class.attribute_map}


class SmallModel:
    """Inherited by all parts of `ModelConformance`."""

    tiny_config: ClassVar[Settings] = LLAMA_LIKE
    """What transformers' configuration class takes, small. Heads must divide by four. Settings of
    the Llama family that the class does not know are left out.
    """
    test_config: ClassVar[Settings] = {}
    """Settings to change in `tiny_config`, over those of the spec's own `test_config`."""
    reference_name: ClassVar[str] = ""
    """The class of transformers to compare with, if its name is not the architecture's."""
    _of_spec: Settings = MappingProxyType({})

    @pytest.fixture(autouse=True)
    def _read_the_spec(self, plugin: PluginUnderTest) -> None:
        self._of_spec = getattr(plugin.spec, "test_config", {})

    @pytest.fixture
    def reference_class(self, plugin: PluginUnderTest) -> Any:
        """The class of transformers to compare with: `reference_name`, or the plugin's own."""
        import transformers

        name = self.reference_name or plugin.spec.name
        found = getattr(transformers, name, None)
        if found is None:
            raise LookupError(
                f"transformers has no class {name!r}; override the fixture `reference_class`"
            )
        if getattr(found, "config_class", None) and "hidden_size" not in known_settings(found):
            pytest.skip(
                f"{found.__name__} of transformers has no hidden_size: its settings lie in configs "
                "of its parts, of which this suite makes no checkpoints; compare the model with "
                "transformers in a test of its own"
            )
        return found

    @pytest.fixture
    def model_class(
        self,
        plugin: PluginUnderTest,
        reference_class: Any,
        request: pytest.FixtureRequest,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Any:
        """The plugin's `CausalLM`; a skip once its small model could not be built."""
        model_class, stash = plugin.load(), request.node.parent.stash
        if NOT_BUILT not in stash:  # this check runs without the first one
            self._try_to_build(reference_class, model_class, tmp_path_factory, stash)
        if stash[NOT_BUILT]:
            pytest.skip("not run: the model of the test configuration cannot be built, see above")
        return model_class

    @pytest.fixture
    def reference(self, reference_class: Any, tmp_path: Path) -> ReferenceCheckpoint:
        """A checkpoint of the small configuration."""
        return self.save(reference_class, tmp_path, {})

    @pytest.fixture
    def ids(self) -> Tensor:
        """A prompt longer than any sliding window or original length of the suite."""
        generator = torch.Generator().manual_seed(1)
        vocab_size = {**self.tiny_config, **self._of_spec, **self.test_config}["vocab_size"]
        return torch.randint(0, int(vocab_size), (24,), generator=generator)

    def test_the_model_of_the_test_configuration_can_be_built(
        self,
        plugin: PluginUnderTest,
        reference_class: Any,
        request: pytest.FixtureRequest,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> None:
        """Its configuration read, its weights loaded, a few tokens computed.

        Where it fails every other check would fail alike, and is skipped.
        """
        stash = request.node.parent.stash
        self._try_to_build(reference_class, plugin.load(), tmp_path_factory, stash)

    def small_config(self, reference_class: Any) -> dict[str, Any]:
        """The settings of every checkpoint that a check changes nothing of."""
        known = known_settings(reference_class)
        base = {k: v for k, v in self.tiny_config.items() if k in known or k not in LLAMA_LIKE}
        return {**base, **self._of_spec, **self.test_config}

    def stated_config(self) -> dict[str, Any]:
        """What of it the author stated, so that no draw may change it."""
        changed = {k: v for k, v in self.tiny_config.items() if v != LLAMA_LIKE.get(k)}
        return {**changed, **self._of_spec, **self.test_config}

    def save(self, reference_class: Any, folder: Path, changes: Settings) -> ReferenceCheckpoint:
        """A checkpoint of the small configuration with changes."""
        settings = {**self.small_config(reference_class), **changes}
        return ReferenceCheckpoint.save(folder, reference_class, settings)

    def save_served(
        self, reference_class: Any, model_class: Any, folder: Path, changes: Settings
    ) -> ReferenceCheckpoint:
        """The same, or a skip: the reference knows no such setting, or it or the model refuses."""
        known = known_settings(reference_class)
        relevant = {key: value for key, value in changes.items() if key in known}
        if not relevant:
            pytest.skip(f"{reference_class.__name__} has no {', '.join(changes)}")
        try:
            reference = self.save(reference_class, folder, relevant)
        except Exception as error:  # transformers has many kinds
            pytest.skip(f"transformers refuses: {' '.join(str(error).split())}")
        try:
            model_class.shape(reference.config)
        except ArchitectureError as error:
            pytest.skip(f"refused: {error}")
        return reference

    def _try_to_build(
        self, reference_class: Any, model_class: Any, folders: Any, stash: pytest.Stash
    ) -> None:
        """Everything that other checks begin with; AssertionError with what the author can do."""
        folder = folders.mktemp("small")
        stash[NOT_BUILT] = True
        try:
            reference = self.save(reference_class, folder, {})
            model_class.shape(reference.config)
            run_model(load_model(model_class, folder, reference.config), torch.arange(3))
        except WeightsError as error:
            reasons = str(error).partition(". Check that")[0]
            raise AssertionError(
                f"{reasons}. {reference_class.__name__} of transformers has weights under other "
                "names or of other shapes; map the names in packed_modules "
                "(docs/write/model.md#weights)"
            ) from None
        except Exception as error:
            raise AssertionError(
                f"the model of the test configuration cannot be built: {type(error).__name__}: "
                f"{error}. That configuration is of the Llama family, with "
                f"{self.stated_config() or 'no changes'}; where this architecture needs another, "
                "state the settings to change: test_config of its ModelSpec, or --test-config "
                "KEY=VALUE"
            ) from error
        stash[NOT_BUILT] = False
