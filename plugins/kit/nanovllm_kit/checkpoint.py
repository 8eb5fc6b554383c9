"""The conformance suite of checkpoint sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from nanovllm_core.errors import CheckpointNotFoundError
from nanovllm_kit.conformance import PluginUnderTest, SpecConformance


class CheckpointConformance(SpecConformance):
    """A reference becomes a folder, the same one every time, or an error that names it."""

    reference: ClassVar[str] = ""
    """What stands behind the source's name in `model: NAME:REFERENCE`, for one that exists.

    Where it is only known at the time of the test, override `existing`.
    """
    unknown: ClassVar[str] = "no-such/checkpoint-0f3a"
    """A reference to nothing."""

    @pytest.fixture
    def existing(self) -> str:
        """A reference to a checkpoint that is there."""
        return self.reference

    @pytest.fixture
    def folder(self, plugin: PluginUnderTest, existing: str) -> Path:
        """What the source finds for `existing`."""
        try:
            found: Any = plugin.load()(plugin.options, existing)
        except CheckpointNotFoundError as error:
            if existing:
                raise
            pytest.skip(
                f"an empty reference names nothing ({error}); state one: --reference REFERENCE, "
                "or `reference` in a test file"
            )
        assert isinstance(found, Path), f"{found!r} is no pathlib.Path"
        return found

    def test_a_checkpoint_is_a_folder_with_a_configuration(self, folder: Path) -> None:
        """The path is absolute, and config.json in it is a JSON object."""
        assert folder.is_absolute()
        assert folder.is_dir()
        assert isinstance(json.loads((folder / "config.json").read_text("utf-8")), dict)

    def test_a_reference_is_found_again_in_the_same_place(
        self, plugin: PluginUnderTest, existing: str, folder: Path
    ) -> None:
        """What was fetched or unpacked once is used the next time."""
        assert plugin.load()(plugin.options, existing) == folder

    def test_a_reference_to_nothing_is_an_error_that_names_it(
        self, plugin: PluginUnderTest
    ) -> None:
        """A CheckpointNotFoundError, so that the start can say what was looked for."""
        with pytest.raises(CheckpointNotFoundError) as caught:
            plugin.load()(plugin.options, self.unknown)
        assert self.unknown in str(caught.value)
