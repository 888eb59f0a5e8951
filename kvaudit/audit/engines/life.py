"""The life of an engine's process: begun in a group of its own, listened to with a time limit, ended whole.

    RUN/logs/engines/NAME.log    whatever it writes on stderr; a server, that is asked over HTTP, on stdout too

A keeper (``keeper``) stands between: it ends the group when this process goes, however that is, kill -9 included.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kvaudit.audit.engines.base import EngineFailed
from kvaudit.audit.engines.supervisor import PROCESS_ENDED
from kvaudit.core.text import inline, one_line

_KEEPER = Path(__file__).with_name("keeper.py")
_LAST_LINES, _LAST_BYTES = 3, 16_000
_LONGEST_LINE = 1 << 28
_ERROR = re.compile(r"\b(\w*Error|\w*Exception|error): ?\S")
_PATIENCE = 10.0  # seconds in which a killed group is gone


class Process:
    """An engine's process. ``who`` is what errors call it. Lines go in and come out, unless it does not ``speak``."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        who: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        speaks: bool = True,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._who, self._log = who, log
        self._said_before = log.stat().st_size if log.exists() else 0  # bytes of earlier starts
        # the kernel closes our end however this process ends, which is what the keeper waits for
        reading, self._lifeline = os.pipe()
        try:
            with log.open("ab") as said:
                self._process = subprocess.Popen(
                    [sys.executable, str(_KEEPER), str(reading), *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if speaks else said,
                    stderr=said,
                    pass_fds=(reading,),
                    start_new_session=True,
                    env={**os.environ, **(environment or {})},
                )
        finally:
            os.close(reading)
        self._heard = b""

    @property
    def is_running(self) -> bool:
        """Whether the engine has not ended by itself; its keeper takes a moment longer."""
        return self._process.poll() is None and PROCESS_ENDED not in self.log_text(_LAST_BYTES)

    def say(self, line: str, seconds: float) -> None:
        """Hand the engine a line; raises EngineFailed where nobody reads it in so many seconds, or it spoke unasked."""
        into, out = self._pipes()
        until = time.monotonic() + seconds
        # a line that nobody asked for would be taken for the next answer
        if self._heard or select.select([out], [], [], 0)[0]:
            raise self.failure("it spoke unasked" if self._heard or os.read(out, 1) else "it ended")
        left = memoryview(line.encode() + b"\n")
        while left:
            if not select.select([], [into], [], max(0.0, until - time.monotonic()))[1]:
                raise self.failure(f"it has not read what it was told for {seconds:g} s")
            try:
                # a pipe that can be written to takes so many bytes without making us wait
                left = left[os.write(into, left[: select.PIPE_BUF]) :]
            except OSError:
                raise self.failure("it ended") from None

    def hear(self, seconds: float, doing: str, patience: str) -> str:
        """The engine's next line; raises EngineFailed where it ends before, or says none in so many seconds.

        ``patience`` is where a user says how many.
        """
        out, until = self._pipes()[1], time.monotonic() + seconds
        while b"\n" not in self._heard:
            left = until - time.monotonic()
            if left <= 0:
                raise self.failure(f"it has said nothing for {seconds:g} s ({patience}) while {doing}")
            if not select.select([out], [], [], left)[0]:
                continue
            part = os.read(out, 1 << 16)
            if not part:
                raise self.failure(f"it ended while {doing}")
            self._heard += part
            if len(self._heard) > _LONGEST_LINE:
                raise self.failure(f"it says a line of more than {_LONGEST_LINE >> 20} MiB")
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode(errors="replace")

    def _pipes(self) -> tuple[int, int]:
        """What goes in and what comes out; raises EngineFailed where both are closed."""
        if self._lifeline < 0:
            raise self.failure("it ended")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin.fileno(), self._process.stdout.fileno()

    def failure(self, why: str) -> EngineFailed:
        """The error that says so, with what the engine said last; the process is ended."""
        self.stop()
        said = self.last_lines()
        more = f"; its last words: {said}" if said else ""
        return EngineFailed(f"engine {self._who}: {why}{more} (all in {self._log})")

    def last_lines(self) -> str:
        """The last lines that it wrote since it was begun, as one: what names an error, and the last."""
        lines = [line for text in self.log_text(_LAST_BYTES).splitlines() if (line := one_line(text))]
        errors = [line for line in lines if _ERROR.search(line) and "WARNING" not in line]
        telling = dict.fromkeys([*errors, lines[-1]] if errors else lines)
        return inline(" / ".join(list(telling)[-_LAST_LINES:]))

    def log_text(self, most: int) -> str:
        """The end of what it wrote since it was begun, ``most`` bytes of it."""
        try:
            with self._log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._said_before, size - most))
                return file.read(most).decode(errors="replace")
        except OSError:
            return ""

    def stop(self) -> None:
        """End the engine, its children and the keeper, which may take a moment; a second call does nothing."""
        if self._lifeline < 0:
            return  # the number of a group that is gone may be another's by now
        os.close(self._lifeline)
        self._lifeline = -1
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        # the keeper ends the group by itself; this is for one that hangs
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def free_port() -> int:
    """A port of the loopback that nobody listens on just now."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])
