"""The private folder of a server's counts, which goes with the server, or at the next one's start.

Its file `lock` is locked while the server's process lives. The system unlocks it however the
process ends, and in whichever container it runs.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex

PREFIX = "nanovllm-metrics-"
LOCK = "lock"


@contextmanager
def metrics_folder() -> Iterator[Path]:
    """A new folder, and no folder of a server that was killed."""
    place = Path(tempfile.gettempdir())
    sweep(place)
    folder = place / f"{PREFIX}{token_hex(8)}"
    with ExitStack() as stack:
        # First, for a signal may end the process as soon as the folder is there.
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        unlocked = folder / f"{LOCK}.new"
        file = stack.enter_context(unlocked.open("w"))
        fcntl.flock(file, fcntl.LOCK_EX)
        unlocked.rename(folder / LOCK)  # Nobody sees a lock that is not held yet.
        yield folder


def sweep(place: Path) -> None:
    """Remove the folders whose servers have ended without removing them."""
    for path in place.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), path.open("r+") as file:  # another user's, or one that is held
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
