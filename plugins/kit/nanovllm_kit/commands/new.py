"""`nanovllm plugins new`: a complete package to start from."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from nanovllm_core.errors import ConfigError
from nanovllm_kit.scaffold import TEMPLATES, VARIANTS, new_plugin


def new(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(TEMPLATES)}.")],
    name: Annotated[
        str,
        typer.Argument(
            help="Its name in the configuration, such as my_plugin; of a model, its architecture, "
            "such as Phi3ForCausalLM."
        ),
    ],
    into: Annotated[Path, typer.Option(help="The folder in which to create KIND_NAME.")] = Path(),
    level: Annotated[
        str | None,
        typer.Option(
            help="For a scheduler: policy (an order; the default) or scheduler (every step)."
        ),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(help="For a model: dense (the default) or moe (a mixture of experts)."),
    ] = None,
) -> None:
    """Create a working plugin package: code, options, tests, README, CI."""
    chosen = {"scheduler": level, "model": like}
    for its_kind, value in chosen.items():
        if value is not None and kind != its_kind:
            option = VARIANTS[its_kind].option
            raise ConfigError(f"{option} {value}: only for a {its_kind}, not for {kind}; omit it")
    folder = new_plugin(kind, name, into, chosen.get(kind))
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(path)
    print(f'\nNext: pip install -e "{folder}[dev]" && pytest {folder}')
    for names in _entry_points(folder) if kind == "model" else ():
        print(
            f"It runs checkpoints of the architecture {names[0]}: nanovllm plugins show {names[0]}"
        )


def _entry_points(folder: Path) -> list[list[str]]:
    """The names in each group of the package's entry points."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [[*names] for names in project["entry-points"].values()]
