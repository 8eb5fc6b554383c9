"""The hooks of this extension. They run at start and at shutdown, never inside a step.

Importing this module imports no torch: commands are put together before anything is loaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from nanovllm_core.api import ConfigError, DoctorCheck, EngineConfig, hookimpl
from pydantic import BaseModel, ConfigDict, Field, ValidationError

NAME = "my_plugin"
GIB = 2**30


class MyPluginOptions(BaseModel):
    """The options under `plugins.options.my_plugin`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    folder: str = Field(default="~", description="A folder on the disk that fills up.")
    min_free_gib: float = Field(
        default=1.0, ge=0, description="An engine does not start with less room than this, in GiB."
    )


def free_gib(folder: str) -> float:
    """The room on the disk of a folder, in GiB; ConfigError where there is no such folder."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ConfigError(f"plugins.options.{NAME}.folder: {folder!r} is no folder; name one")
    return shutil.disk_usage(path).free / GIB


@hookimpl
def nanovllm_configure(config: EngineConfig) -> None:
    """Once per engine, before anything is loaded; an error stops the start."""
    given = config.plugins.options.get(NAME, {})
    try:
        options = MyPluginOptions.model_validate(given)
    except ValidationError as error:
        raise ConfigError(f"plugins.options.{NAME}: {error}") from None
    free = free_gib(options.folder)
    if free < options.min_free_gib:
        raise ConfigError(
            f"{free:.1f} GiB are free on the disk of {options.folder}, and "
            f"plugins.options.{NAME}.min_free_gib is {options.min_free_gib}; make room, or lower it"
        )


@hookimpl
def nanovllm_cli(app: typer.Typer) -> None:
    """Add the command `nanovllm my-plugin`."""

    @app.command("my-plugin")
    def command(
        folder: Annotated[str, typer.Argument(help="A folder on the disk in question.")] = "~",
    ) -> None:
        """Print the room that is left on a disk."""
        print(f"{free_gib(folder):.1f} GiB free")


@hookimpl
def nanovllm_doctor() -> Sequence[DoctorCheck]:
    """What `nanovllm plugins doctor` shows of this extension."""
    options = MyPluginOptions()
    free = free_gib(options.folder)
    return [
        DoctorCheck(
            name=f"{NAME}: disk",
            ok=free >= options.min_free_gib,
            detail=f"{free:.1f} GiB free on the disk of {options.folder}",
            remedy="" if free >= options.min_free_gib else "make room on that disk",
        )
    ]
