"""`nanovllm plugins validate`: is a plugin's package right, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nanovllm_core.cli.plugins import KindOption, installed_plugins, line, one_plugin
from nanovllm_kit.validation import validate_installed, validate_package


def validate(
    target: Annotated[
        str, typer.Argument(help="A package's folder, or the name of an installed plugin.")
    ] = ".",
    kind: KindOption = None,
) -> None:
    """Check entry points, spec, contract version, options and imports; exit status 1 on failure.

    A line that begins with `-` is a note.

    `nanovllm plugins test NAME` then checks that it works.
    """
    folder = Path(target)
    # A name stays a name where a folder of the same name lies about.
    if (folder / "pyproject.toml").exists() or "/" in target or target in (".", ".."):
        checks = validate_package(folder)
    else:
        checks = validate_installed(one_plugin(installed_plugins(), target, kind))
    console = Console(soft_wrap=True)
    for check in checks:
        console.print(line(check))
        if check.remedy:
            console.print(f"       -> {check.remedy}", markup=False)
    if any(check.remedy for check in checks if not check.ok):
        raise typer.Exit(1)
