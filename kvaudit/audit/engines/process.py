"""The process of an engine: started in its own group, read and written with time limits, ended with its children.

RUN/logs/engines/NAME.log holds its stderr. If the engine is a server, which answers over HTTP, it holds stdout too.

kvaudit starts ``supervisor.py``. This starts the engine, and ends the whole group when kvaudit's process ends, even if
that is killed by SIGKILL.
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

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_LAST_LINES, _LAST_BYTES = 3, 16_000
_LONGEST_LINE = 1 << 28
_ERROR = re.compile(r"\b(\w*Error|\w*Exception|error): ?\S")
_STOP_SECONDS = 10.0  # for a killed group to be gone


class Process:
    """The running process of an engine; ``engine`` is the name used in errors.

    With ``is_piped``, kvaudit writes lines to its stdin and reads them from its stdout; otherwise stdout goes into
    the log.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        engine: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        is_piped: bool = True,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._engine, self._log = engine, log
        self._log_start = log.stat().st_size if log.exists() else 0  # the log of earlier starts comes before it
        # the kernel closes the writing end however this process ends, which ends the supervisor
        lifeline, self._lifeline = os.pipe()
        try:
            with log.open("ab") as file:
                self._process = subprocess.Popen(
                    [sys.executable, str(_SUPERVISOR), str(lifeline), *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if is_piped else file,
                    stderr=file,
                    pass_fds=(lifeline,),
                    start_new_session=True,
                    env={**os.environ, **(environment or {})},
                )
        finally:
            os.close(lifeline)
        self._unread = b""  # output after the last line that was returned

    @property
    def is_running(self) -> bool:
        """Whether the engine still runs.

        The supervisor process outlives the engine by a moment, so the log is searched for its note about the end.
        """
        return self._process.poll() is None and PROCESS_ENDED not in self.log_text(_LAST_BYTES)

    def write_line(self, line: str, seconds: float) -> None:
        """Send a line to the engine's stdin.

        Raises EngineFailed if the engine does not read it in time, or has sent output without a request.
        """
        stdin, stdout = self._pipes()
        until = time.monotonic() + seconds
        # unexpected output would be taken for the next answer
        if self._unread or select.select([stdout], [], [], 0)[0]:
            raise self.failure("it sent output without a request" if self._unread or os.read(stdout, 1) else "it ended")
        unsent = memoryview(line.encode() + b"\n")
        while unsent:
            if not select.select([], [stdin], [], max(0.0, until - time.monotonic()))[1]:
                raise self.failure(f"it did not read its input for {seconds:g} s")
            try:
                # a writable pipe takes this many bytes without blocking
                unsent = unsent[os.write(stdin, unsent[: select.PIPE_BUF]) :]
            except OSError:
                raise self.failure("it ended") from None

    def read_line(self, seconds: float, doing: str, setting: str) -> str:
        """Return the next line of output; raise EngineFailed if the engine ends first or sends none in ``seconds``.

        The error message says what the engine was ``doing`` and which ``setting`` of the spec is the time limit.
        """
        stdout, until = self._pipes()[1], time.monotonic() + seconds
        while b"\n" not in self._unread:
            seconds_left = until - time.monotonic()
            if seconds_left <= 0:
                raise self.failure(f"no output for {seconds:g} s ({setting}) while {doing}")
            if not select.select([stdout], [], [], seconds_left)[0]:
                continue
            chunk = os.read(stdout, 1 << 16)
            if not chunk:
                raise self.failure(f"it ended while {doing}")
            self._unread += chunk
            if len(self._unread) > _LONGEST_LINE:
                raise self.failure(f"it sent a line of more than {_LONGEST_LINE >> 20} MiB")
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace")

    def _pipes(self) -> tuple[int, int]:
        """Return the descriptors of stdin and stdout; raise EngineFailed once the engine is stopped."""
        if self._lifeline < 0:
            raise self.failure("it ended")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin.fileno(), self._process.stdout.fileno()

    def failure(self, reason: str) -> EngineFailed:
        """Stop the engine and return the error to raise for ``reason``; its message quotes the log.

        It quotes the last lines about errors and the very last line; if there are none about errors, the last lines.
        """
        self.stop()
        lines = [line for text in self.log_text(_LAST_BYTES).splitlines() if (line := one_line(text))]
        errors = [line for line in lines if _ERROR.search(line) and "WARNING" not in line]
        quoted = dict.fromkeys([*errors, lines[-1]] if errors else lines)
        tail = f"; last log lines: {inline(' / '.join(list(quoted)[-_LAST_LINES:]))}" if quoted else ""
        return EngineFailed(f"engine {self._engine}: {reason}{tail} (full log: {self._log})")

    def log_text(self, limit: int) -> str:
        """Return what was written to the log since this process was started, at most the last ``limit`` bytes."""
        try:
            with self._log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - limit))
                return file.read(limit).decode(errors="replace")
        except OSError:
            return ""

    def stop(self) -> None:
        """End the engine, its children and the supervisor, which may take seconds; a second call does nothing."""
        if self._lifeline < 0:
            return  # the group's number may belong to another group by now
        os.close(self._lifeline)
        self._lifeline = -1
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        # the supervisor has ended the group, unless it hangs
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
