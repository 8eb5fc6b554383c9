"""The command `nanovllm`, also as `python -m nanovllm_core`: Ctrl-C ends it with 130, in silence.

Nothing is imported here that Python itself has not, so that Ctrl-C is taken care of before the
imports of a command, which take most of its first second.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
"""The exit status of what Ctrl-C ends, by the convention of shells: 128 and SIGINT's number."""


def main() -> None:
    """Run the command; exit status 130 and no message where Ctrl-C ended it, at any moment."""
    ctrl_c = CtrlC()
    try:
        ctrl_c.watch()
        try:
            from nanovllm_core.cli.main import main as run

            run()
        finally:
            ctrl_c.is_over = True  # all is closed, and what Python does at its end is no concern
    except BaseException:
        if ctrl_c.came:  # whatever became of the KeyboardInterrupt on its way here
            sys.exit(INTERRUPTED)
        raise


class CtrlC:
    """The handler of Ctrl-C: raise KeyboardInterrupt as usual, but in an import end the process.

    A KeyboardInterrupt in the midst of an import may be swallowed there, become an ImportError, or
    leave half a module behind.
    """

    def __init__(self) -> None:
        self.came = False
        self.is_over = False
        """From now on Ctrl-C ends the process, wherever it is."""

    def watch(self) -> None:
        """Begin, unless this process was started to ignore Ctrl-C (`nohup`, `&` in a script)."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)
            sys.unraisablehook = _on_unraisable

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self.came = True
        # An engine starts on a thread of its own, which imports too.
        if self.is_over or any(map(_is_importing, sys._current_frames().values())):
            os._exit(INTERRUPTED)
        raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def _on_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """A KeyboardInterrupt in a finaliser, which Python would report and forget."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        os._exit(INTERRUPTED)
    sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    main()
