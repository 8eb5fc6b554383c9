"""The built-in checkpoint sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from nanovllm_core.errors import CheckpointNotFoundError
from nanovllm_core.interfaces.specs import NoOptions
from nanovllm_core.selection.checkpoint import HUB_FILES, HUB_STRAYS, from_folder, from_hub


def test_a_folder_is_its_own_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        from_folder(NoOptions(), "model")
        == from_folder(NoOptions(), "~/model")
        == tmp_path / "model"
    )


@pytest.mark.parametrize("reference", ["", "no/such/folder"])
def test_a_folder_that_is_not_there_is_named(reference: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match=f"the folder '{reference}' does not exist"):
        from_folder(NoOptions(), reference)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(
        CheckpointNotFoundError, match=r"model: '[^']*tensors' is a file; give the folder that"
    ):
        from_folder(NoOptions(), str(file))


@pytest.mark.parametrize(
    ("reference", "name", "revision"),
    [("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None), ("a/b@v2", "a/b", "v2")],
)
def test_a_hub_model_is_downloaded_at_its_revision(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    reference: str,
    name: str,
    revision: str | None,
) -> None:
    asked: list[Any] = []

    def download(repo_id: str, **kwargs: Any) -> str:
        asked.append((repo_id, kwargs))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert from_hub(NoOptions(), reference) == tmp_path
    patterns = {"allow_patterns": list(HUB_FILES), "ignore_patterns": list(HUB_STRAYS)}
    assert asked == [(name, {"revision": revision, **patterns})]


def test_a_failed_download_names_model_reason_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo_id: str, **kwargs: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointNotFoundError, match=r"'a/b' .*ConnectionError: no route.*check"):
        from_hub(NoOptions(), "a/b")
