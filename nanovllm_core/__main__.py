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
            ctrl_c.leave_at_once()  # all is closed, and what Python does at its end is no concern
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

    def watch(self) -> None:
        """Begin, unless this process was started to ignore Ctrl-C (`nohup`, `&` in a script)."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)
            sys.unraisablehook = self._on_unraisable

    def leave_at_once(self) -> None:
        """From now on Ctrl-C ends the process, wherever it is."""
        if signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.signal(signal.SIGINT, _leave)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        if _is_import(frame):
            _leave()
        signal.default_int_handler(number, frame)

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """A KeyboardInterrupt in a finaliser, which Python would report and forget."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _leave()
        sys.__unraisablehook__(unraisable)


def _is_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _leave(*_: object) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
