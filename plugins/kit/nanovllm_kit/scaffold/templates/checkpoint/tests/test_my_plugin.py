"""The source keeps the contract of checkpoint sources, and its own promise."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest
from nanovllm_core.api import CheckpointNotFoundError, NoOptions
from nanovllm_kit import CheckpointConformance, PluginUnderTest, plugin_under_test

from nanovllm_checkpoint_my_plugin.plugin import SPEC
from nanovllm_checkpoint_my_plugin.source import find


def pack(archive: Path, inner: str, size: int) -> Path:
    """An archive with a config.json at `inner`."""
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr(f"{inner}config.json", json.dumps({"hidden_size": size}))
    return archive


class TestMyPlugin(CheckpointConformance):
    @pytest.fixture
    def plugin(self) -> PluginUnderTest:
        return plugin_under_test(SPEC)

    @pytest.fixture
    def existing(self, tmp_path: Path) -> str:
        """A reference to a checkpoint that is there."""
        return str(pack(tmp_path / "model.zip", "", 8))


@pytest.mark.parametrize("inner", ["", "small/"])
def test_the_checkpoint_of_an_archive_is_found_at_the_top_or_one_down(
    inner: str, tmp_path: Path
) -> None:
    folder = find(NoOptions(), str(pack(tmp_path / "model.zip", inner, 8)))
    assert json.loads((folder / "config.json").read_text()) == {"hidden_size": 8}


def test_an_archive_is_unpacked_once(tmp_path: Path) -> None:
    archive = pack(tmp_path / "model.zip", "", 8)
    folder = find(NoOptions(), str(archive))
    (folder / "mark").touch()
    assert (find(NoOptions(), str(archive)) / "mark").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([archive.name, folder.name])


def test_another_archive_of_the_same_name_is_another_checkpoint(tmp_path: Path) -> None:
    archive = pack(tmp_path / "model.zip", "", 8)
    find(NoOptions(), str(archive))
    pack(archive, "", 16)
    os.utime(archive, ns=(1, 1))
    assert json.loads((find(NoOptions(), str(archive)) / "config.json").read_text()) == {
        "hidden_size": 16
    }


def test_what_is_no_archive_of_one_checkpoint_is_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="give the path of one"):
        find(NoOptions(), str(tmp_path / "none.zip"))
    with pytest.raises(CheckpointNotFoundError, match="holds 0 files"):
        find(NoOptions(), str(pack(tmp_path / "deep.zip", "a/b/", 8)))
