"""`nanovllm plugins new`: a complete package to start from."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from nanovllm_core.errors import ConfigError
from nanovllm_kit.scaffold import TEMPLATES, VARIANTS, known_to_transformers, new_plugin


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
    if kind == "model":
        _explain_model(folder, VARIANTS[kind].templates[like or "dense"].reference)


def _explain_model(folder: Path, otherwise: str) -> None:
    """Its architecture; `otherwise` is the reference of one that transformers does not have."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [name] = project["entry-points"]["nanovllm.models"]
    print(f"It runs checkpoints of the architecture {name}: nanovllm plugins show {name}")
    if not known_to_transformers(name):
        [test] = folder.glob("tests/test_*.py")
        print(
            f"transformers has no {name}: the test compares with {otherwise}. Name another in "
            f"{test.relative_to(folder)}."
        )
