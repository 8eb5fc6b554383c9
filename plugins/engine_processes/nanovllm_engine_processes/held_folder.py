"""A private folder that goes with its process, or when the next one of its kind is made.

Its file `lock` is locked while the process lives. The system unlocks it however the process ends,
and in whichever container it runs.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path
from secrets import token_hex

LOCK = "lock"
_files: weakref.WeakSet[ExitStack] = weakref.WeakSet()
"""The files that are locked. A fork closes its own, or it would hold the folders of its parent."""

_held: weakref.WeakValueDictionary[Path, HeldFolder] = weakref.WeakValueDictionary()
"""The folders that this process holds."""


def _close_files() -> None:
    _held.clear()
    for files in tuple(_files):
        files.close()


os.register_at_fork(after_in_child=_close_files)


class HeldFolder:
    """A new folder for temporary files, readable by this user alone.

    `remove` removes it, once; so does the end of the program, or of the last reference. Folders of
    the same prefix whose processes were killed go now.
    """

    def __init__(self, prefix: str) -> None:
        sweep(prefix)
        self.path = Path(tempfile.gettempdir()) / f"{prefix}{token_hex(4)}"
        self._locks = ExitStack()
        _files.add(self._locks)
        _held[self.path] = self
        # First, for a signal may end the process as soon as the folder is there.
        self.remove = weakref.finalize(self, _remove, self.path, self._locks, os.getpid())
        self.make()

    def make(self) -> None:
        """Make the folder and lock it; the locks of one that was removed are given up."""
        self._locks.close()
        self.path.mkdir(mode=0o700)
        # systemd-tmpfiles spares a locked folder, and all beneath it, however old its files are.
        handle = os.open(self.path, os.O_RDONLY)
        self._locks.callback(os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_SH)
        unlocked = self.path / f"{LOCK}.new"
        file = self._locks.enter_context(unlocked.open("w"))
        fcntl.flock(file, fcntl.LOCK_EX)
        unlocked.rename(self.path / LOCK)  # Nobody sees a lock that is not held yet.


def _remove(path: Path, files: ExitStack, pid: int) -> None:
    """Remove the folder, unless this process is a fork of the one that has made it."""
    if os.getpid() == pid:
        # Under another name, for an engine that starts may make files in it meanwhile.
        removed = path.with_suffix(".removed")
        with suppress(FileNotFoundError):  # a signal came before it was made
            path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    files.close()


def make_again(path: Path) -> None:
    """Make a folder that this process holds, if another program has removed it."""
    held = _held.get(path)
    if held is not None and held.remove.alive and not path.exists():
        held.make()


def sweep(prefix: str) -> None:
    """Remove the folders of the prefix whose processes have ended without removing them."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*/{LOCK}"):
        with suppress(OSError), path.open("r+") as file:  # another user's, or one that is held
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
