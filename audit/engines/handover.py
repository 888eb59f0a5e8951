"""The folder in which a drawer and its engine hand each other weights, keys and values: gigabytes, for a moment.

    RUN/logs/engines/kvaudit-rollouts-XXXXXXXX/held    locked for as long as somebody uses the folder

It goes with the drawer. A process that is killed leaves it, and whoever next makes one in the same place removes it:
the kernel lets go of a lock when its process dies, so what a living one has stays.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from kvaudit.core.files import mutex

_NAMED, _HELD, _MUTEX = "kvaudit-rollouts-", "held", ".kvaudit-rollouts.lock"


class Handover:
    """A folder of this process's own in ``place``, which is made where it is not there."""

    def __init__(self, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        with mutex(place / _MUTEX):  # or another could find it before it is locked
            for folder in place.glob(f"{_NAMED}*"):
                _remove_left(folder)
            self._folder = tempfile.TemporaryDirectory(prefix=_NAMED, dir=place.resolve())
            self.path = Path(self._folder.name)
            self._held = (self.path / _HELD).open("w")
            fcntl.flock(self._held, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove it; a second call does nothing."""
        self._folder.cleanup()
        self._held.close()


def _remove_left(folder: Path) -> None:
    """Remove a folder of a process that is gone; what its engine, just ending, still writes is the next start's."""
    with suppress(OSError):  # somebody has it, or it is not ours to touch
        if not (folder / _HELD).exists():
            folder.rmdir()  # it was killed before it had any use for it
            return
        with (folder / _HELD).open("r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
