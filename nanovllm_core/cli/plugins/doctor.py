"""`nanovllm plugins doctor`: what is wrong here, and what to do next."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.text import Text

from nanovllm_core.cli.extensions import VARIABLE, add_extensions
from nanovllm_core.cli.plugins.choice import AsJson
from nanovllm_core.diagnostics.doctor import examine, next_steps
from nanovllm_core.interfaces.doctor import DoctorCheck


def doctor(as_json: AsJson = False) -> None:
    """Check Python, torch, GPUs and every plugin; say what to do next.

    Exit status 1 if something prevents generation.
    """
    checks = examine()
    try:
        add_extensions(typer.Typer())
    except Exception as error:  # whatever it is, the doctor goes on
        detail = f"no other command can start: {type(error).__name__}: {error}"
        remedy = f"mend what {VARIABLE} names, or take it out of there"
        checks.append(DoctorCheck("plugins.enable", False, detail, remedy, fatal=True))
    steps = next_steps(checks)
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in checks], "next": steps}, indent=2))
    else:
        console = Console(soft_wrap=True)
        for check in checks:
            console.print(line(check))
        console.print("\nWhat to do next:")
        for number, step in enumerate(steps, 1):
            console.print(Text(f"  {number}. {step}"))
    if any(check.fatal and not check.ok for check in checks):
        raise typer.Exit(1)


def line(check: DoctorCheck) -> Text:
    """`ok    torch: 2.13.0`; a check that is not ok says how bad it is."""
    word, colour = "ok", "green"
    if not check.ok:
        word, colour = ("wrong", "yellow") if check.remedy else ("-", "dim")
    if check.fatal and not check.ok:
        word, colour = "stops", "red"
    return Text.assemble((f"{word:<7}", colour), (check.name, "bold"), f": {check.detail}")
