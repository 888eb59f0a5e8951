"""Who works on what: a unit is claimed by a lock file that its process keeps locked for as long as it lives.

The kernel lets go of the lock when the process ends, however it ends, so host names, process numbers and their
namespaces decide nothing. Not every file system carries locks from one machine to another. So a holder also touches
its file every few seconds, and a claim that was signed under another kernel is free only after a silence.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from audit.core.errors import RunError
from audit.core.files import mutex
from audit.runs.folder import utc_now

T = TypeVar("T")

BEAT_SECONDS = 5.0
SILENCE_SECONDS = 60.0
_BIRTH_SECONDS = 2.0  # a file that nobody signed for so long is of a process that died as it made it
_SETTLE_SECONDS = 2.0  # where two machines take over at once and no lock is between them, the last to sign has it
_POLL_SECONDS = 1.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@cache
def kernel() -> str:
    """What tells this running system from any other, by whatever name and in whatever container; new after a boot."""
    if _BOOT.exists():
        return _BOOT.read_text(encoding="ascii").strip()
    if os.uname().sysname == "Linux":  # a sandbox that shows no boot: then silence decides, never the lock alone
        return str(uuid.uuid4())
    return f"{socket.gethostname()} {uuid.getnode():x}"


class _Sight(NamedTuple):
    """A claim as it was seen: it changes with every beat."""

    touched: int  # mtime in ns
    text: str

    @classmethod
    def of(cls, file: int) -> _Sight:
        text = os.pread(file, 1 << 16, 0).decode(errors="replace")
        return cls(os.fstat(file).st_mtime_ns, text)

    @property
    def signed(self) -> dict[str, object]:
        """What the holder wrote, nothing for a file that is damaged or empty."""
        try:
            holder = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return holder if isinstance(holder, dict) else {}

    def is_of(self, file: int) -> bool:
        """Whether it was signed under this kernel and mount, whose locks are the whole truth."""
        holder = self.signed
        return (holder.get("kernel"), holder.get("device")) == (kernel(), os.fstat(file).st_dev)


@dataclass(frozen=True)
class Claim:
    """A unit that is this process's own; made by ``Claims``."""

    path: Path
    file: int  # open and locked
    token: str

    @classmethod
    def signed(cls, path: Path, file: int) -> Claim:
        """Write into the locked file whose it is, for people and for other processes."""
        claim = cls(path, file, str(uuid.uuid4()))
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "kernel": kernel(),
            "device": os.fstat(file).st_dev,
            "since": utc_now(),
            "token": claim.token,
        }
        os.ftruncate(file, 0)
        os.pwrite(file, (json.dumps(holder) + "\n").encode(), 0)
        return claim

    @property
    def holds(self) -> bool:
        """Whether nobody has taken it over meanwhile."""
        return _is_at(self.file, self.path) and _Sight.of(self.file).signed.get("token") == self.token

    def check(self) -> None:
        """Raise RunError where the claim was taken over: this process was silent for too long."""
        if not self.holds:
            raise RunError(
                f"claim {str(self.path)!r} was taken over by another process while this one gave no sign for over "
                f"{SILENCE_SECONDS:.0f} s, or was removed; this process stops, the run goes on there"
            )

    def release(self) -> None:
        """Let go; the file goes first, so that nobody can lock it in between and find it gone."""
        if self.holds:
            self.path.unlink(missing_ok=True)
        os.close(self.file)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Touch the file now and then from a thread, while the body works."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_SECONDS):
                try:
                    os.utime(self.file)
                except OSError:  # the server is away: the next beat may reach it, and ``check`` sees what came of it
                    continue

        thread = threading.Thread(target=beat, name=f"beat {self.path.name}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class Claims:
    """The claims of one process, and what it has seen of others'.

    ``takeover`` is the user's word that processes on other machines are gone: their claims are free at once, and
    even one that is still locked, as a dead machine's can be for ever, is free after a silence.
    """

    def __init__(self, *, takeover: bool = False) -> None:
        self._takeover = takeover
        self._seen: dict[Path, tuple[_Sight, float]] = {}

    @contextmanager
    def claim(self, path: Path) -> Iterator[Claim | None]:
        """Hold the unit of a lock file while the body works; None where a living process holds it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        claim = self._settled(path)
        if claim is None:
            yield None
            return
        try:
            with claim.beating():
                yield claim
        finally:
            claim.release()

    def holder(self, path: Path) -> dict[str, object]:
        """What the holder of a claim that was not free had signed."""
        return self._seen[path][0].signed if path in self._seen else {}

    def _settled(self, path: Path) -> Claim | None:
        with mutex(path.parent / ".claims.lock"):
            claim, is_contested = self._take(path)
        if claim is None or not is_contested:
            return claim
        time.sleep(_SETTLE_SECONDS)
        if claim.holds:
            return claim
        os.close(claim.file)
        return None

    def _take(self, path: Path) -> tuple[Claim | None, bool]:
        """The signed claim, and whether another machine may be taking it in this very moment."""
        file, is_new, is_locked = _opened(path)
        is_own = is_new or _Sight.of(file).is_of(file)
        quiet = 0.0 if is_new else self._watch(path, file)
        # a lock is the whole truth where the last holder was of this kernel; another's may not reach here
        if is_locked and (is_own or quiet >= self._patience(file)):
            return Claim.signed(path, file), not is_own
        os.close(file)
        if is_locked or is_own or not self._takeover or quiet < SILENCE_SECONDS:
            return None, False
        path.unlink(missing_ok=True)  # the lock of a machine that does not answer stays with the old file
        return self._take(path)[0], True

    def _watch(self, path: Path, file: int) -> float:
        """For how many seconds this process has seen no sign; by its own clock, since those of machines differ."""
        sight, now = _Sight.of(file), time.monotonic()
        known, since = self._seen.get(path, (None, now))
        if sight != known:
            since = now
        self._seen[path] = sight, since
        return now - since

    def _patience(self, file: int) -> float:
        if not _Sight.of(file).text:
            return _BIRTH_SECONDS
        return 0.0 if self._takeover else SILENCE_SECONDS


def _opened(path: Path) -> tuple[int, bool, bool]:
    """The lock file, open; whether this made it, and whether this process has it locked now."""
    while True:
        try:
            file, is_new = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
        except FileExistsError:
            try:
                file, is_new = os.open(path, os.O_RDWR), False
            except FileNotFoundError:  # its holder has just let go
                continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return file, is_new, False
        if _is_at(file, path):
            return file, is_new, True
        os.close(file)  # its holder removed it between the two calls: whoever comes now makes another


def _is_at(file: int, path: Path) -> bool:
    """Whether the path still names the open file. Opening asks the server; a look at the path may get an old answer."""
    try:
        other = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return os.path.samestat(os.fstat(file), os.fstat(other))
    finally:
        os.close(other)


def work_through(
    units: Sequence[T],
    *,
    done: Callable[[T], bool],
    lock: Callable[[T], Path],
    work: Callable[[T, Claim], None],
    finished: Callable[[T], None],
    waiting: Callable[[str], None],
    takeover: bool = False,
) -> None:
    """Do every unit that is not done and not claimed; wait for those that other living processes have claimed.

    ``finished`` is told every unit once, whoever did it, and ``waiting`` whom for, whenever that changes. ``work``
    checks its claim. Time is linear in the units: what others hold is at most one unit a process, and only that is
    looked at again.
    """
    claims, last = Claims(takeover=takeover), ""

    def still_open(some: Sequence[T]) -> list[T]:
        """Tells of those that are done, and returns the others."""
        left = []
        for unit in some:
            if done(unit):
                finished(unit)
            else:
                left.append(unit)
        return left

    left = still_open(units)
    while left:
        busy: list[T] = []
        for unit in left:
            with claims.claim(lock(unit)) as mine:
                if mine is None:
                    busy.append(unit)
                    continue
                if not done(unit):  # another may have done it between the look and the claim
                    work(unit, mine)
                    busy = still_open(busy)
            finished(unit)
        left = still_open(busy)
        text = _waiting_for([lock(unit) for unit in left], claims, takeover=takeover)
        if left and text != last:
            waiting(text)
            last = text
        if left:
            time.sleep(_POLL_SECONDS)


def _waiting_for(paths: Sequence[Path], claims: Claims, *, takeover: bool) -> str:
    holders = [claims.holder(path) for path in paths]
    names = sorted({f"pid {one.get('pid')!s:.20} of {str(one.get('host'))[:64]!r}" for one in holders})
    text = f"waiting for {len(paths)} units that other processes hold: {', '.join(names)}"
    if takeover or all(one.get("kernel") == kernel() for one in holders):
        return text
    return (
        f"{text}; what another machine holds is taken over after {SILENCE_SECONDS:.0f} s without a sign, or, where it "
        "is still locked, with --takeover"
    )
