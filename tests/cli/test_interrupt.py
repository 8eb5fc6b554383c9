"""Ctrl-C ends any command with exit status 130 and in silence, whatever it is at."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nanovllm_core.cli.main import make_app

Install = Callable[..., None]

SCRIPT = Path(sys.executable).with_name("nanovllm")
MODULE = (sys.executable, "-m", "nanovllm_core")
WRITING = ("generate", "--model", "demo", "--set", "device=cpu", "--max-tokens", "1800", "Once")
WRITING += ("Twice", "--temperature", "1", "--ignore-eos")
OWN_CODE = str(Path("nanovllm_core", "__main__.py"))


def take_ctrl_c() -> None:
    """A test run in the background of a script ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def begin(command: Sequence[str | Path]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=take_ctrl_c,
    )


def interrupted(command: Sequence[str | Path], delay: float) -> tuple[int, str] | None:
    """Exit status and stderr of a command that gets SIGINT; None where it ended before.

    Or None where it is Python's own affair: before a line of the command has run (some 20 ms), and
    when Python, done with the command, has taken its handlers down.
    """
    process = begin(command)
    time.sleep(delay)
    ended = process.poll() is not None
    process.send_signal(signal.SIGINT)
    sent = time.perf_counter()
    _, told = process.communicate(timeout=120)
    # It was leaving when the signal came. One that lost the signal would go on with its work.
    ended |= process.returncode == 0 and time.perf_counter() - sent < 0.1
    not_ours = process.returncode == -signal.SIGINT or (told and OWN_CODE not in told)
    return None if ended or not_ours else (process.returncode, told)


@pytest.fixture(scope="module")
def start() -> float:
    """Seconds within which Python surely runs the command's first line, on this machine now."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import nanovllm_core.__main__"], check=True)
    return 0.05 + 2 * (time.perf_counter() - began)


@pytest.mark.parametrize(
    "command",
    [(SCRIPT, *WRITING), (*MODULE, "plugins", "test", "Qwen3ForCausalLM")],
    ids=["generate, by the script", "plugins test, by the module"],
)
def test_a_command_ends_in_silence_from_its_imports_to_its_work(
    command: Sequence[str | Path], start: float
) -> None:
    pytest.importorskip("nanovllm_model_qwen3", reason="needs the qwen3 plugin")
    pytest.importorskip("nanovllm_checkpoint_demo", reason="needs the demo plugin")
    seen = {interrupted(command, start + delay) for delay in (0.0, 0.25, 0.7, 1.4)}
    assert seen - {None} == {(130, "")}  # None where other work kept Python from its first line


COMMANDS = [
    (SCRIPT, *WRITING),
    (*MODULE, "plugins", "test", "sdpa"),
    (SCRIPT, "plugins", "doctor"),
    (SCRIPT, "explain", "--model", "demo"),
    (SCRIPT, "chat", "--model", "demo"),
    (SCRIPT, "bench", "throughput", "--model", "demo"),
    (SCRIPT, "--help"),
]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[1:5]))
def test_every_command_ends_in_silence_at_any_moment(command: Sequence[str | Path]) -> None:
    """Through the first two seconds, at other moments than the next command; some end sooner.

    The shortest takes a third of a second where a processor is quick and has the files in memory.
    """
    first = 0.05 + 0.4 / len(COMMANDS) * COMMANDS.index(command)
    moments = (first / 3, first / 2, *(first + 0.4 * step for step in range(5)))
    seen = {interrupted(command, moment) for moment in moments}
    assert seen - {None} == {(130, "")}


def run_as_the_command(body: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """A process in which `body` stands for what the command does; `ctrl_c()` is a Ctrl-C."""
    program = f"""
import os, signal, sys, time
from types import SimpleNamespace
from nanovllm_core.__main__ import main

def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)

def command():
{textwrap.indent(textwrap.dedent(body), "    ")}

{before}
sys.modules["nanovllm_core.cli.main"] = SimpleNamespace(main=command, ctrl_c=ctrl_c)
main()
"""
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=take_ctrl_c,
    )


SWALLOWED = {
    "by an import": "import swallowing",
    "by a finaliser": """
        class Sick:
            def __del__(self):
                ctrl_c()
        Sick()
    """,
    "by code that makes another error of it": """
        try:
            ctrl_c()
        except KeyboardInterrupt as error:
            raise ImportError("half a module") from error
    """,
    "by code that gives up with a message": """
        try:
            ctrl_c()
        except KeyboardInterrupt:
            sys.exit("error: it did not work")
    """,
    "by what Python does at its end": """
        import atexit
        atexit.register(ctrl_c)
    """,
    "by nobody": "ctrl_c()",
}


@pytest.mark.parametrize("body", SWALLOWED.values(), ids=SWALLOWED)
def test_an_interrupt_ends_the_command_though_it_is_swallowed(body: str, tmp_path: Path) -> None:
    (tmp_path / "swallowing.py").write_text(
        "import sys\ntry:\n    sys.modules['nanovllm_core.cli.main'].ctrl_c()\n"
        "except BaseException:\n    pass\n"
    )
    ended = run_as_the_command(body, before=f"sys.path.insert(0, {str(tmp_path)!r})")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_a_command_closes_what_it_opened_before_it_ends() -> None:
    """Only in the midst of an import the process ends at once."""
    ended = run_as_the_command("""
        try:
            ctrl_c()
        finally:
            print("closed", flush=True)
    """)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "closed\n", "")


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    """As below `nohup`, or in the background of a script; other errors are told as ever."""
    ignoring = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    ended = run_as_the_command("ctrl_c()\nsys.exit('error: full')", before=ignoring)
    assert (ended.returncode, ended.stderr) == (1, "error: full\n")


INTERRUPTED_CHECK = """
from nanovllm_core.api import KindSpec, PluginSpec, hookimpl
from nanovllm_kit import SpecConformance

@hookimpl
def nanovllm_kinds():
    return [KindSpec(name="vase", contract=2, spec=PluginSpec, hookspecs="vase_hookspecs",
                     conformance="vase_plugin:VaseConformance")]

@hookimpl
def nanovllm_vases():
    return [PluginSpec(name="ming", impl="vase_plugin:Ming", contract=1)]

class Ming:
    pass

class VaseConformance(SpecConformance):
    def test_it_stands(self, plugin):
        raise KeyboardInterrupt
"""
HOOKSPECS = """
from nanovllm_core.api import hookspec

@hookspec
def nanovllm_vases():
    "Vases."
"""


def test_an_interrupted_suite_is_no_suite_that_could_not_run(install: Install) -> None:
    """pytest keeps the KeyboardInterrupt to itself and returns a status of its own."""
    groups = {"nanovllm.kinds": {"vase": "vase_plugin"}, "nanovllm.vases": {"ming": "vase_plugin"}}
    modules = {"vase_plugin": INTERRUPTED_CHECK, "vase_hookspecs": HOOKSPECS}
    install("nanovllm-vases", groups, modules)
    ended = CliRunner().invoke(make_app(), ["plugins", "test", "ming"])
    assert ended.exit_code == 130
    assert "BREAKS" not in ended.output
    assert "could not run" not in ended.output
