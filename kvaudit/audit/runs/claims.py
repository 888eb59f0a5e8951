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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from kvaudit.audit.runs.folder import utc_now
from kvaudit.core.errors import RunError
from kvaudit.core.files import mutex

T = TypeVar("T")

HEARTBEAT_SECONDS = 5.0
TIMEOUT_SECONDS = 60.0
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


class _ClaimState(NamedTuple):
    """A claim as it was seen: it changes with every beat."""

    touched: int  # mtime in ns
    text: str

    @classmethod
    def of(cls, file: int) -> _ClaimState:
        text = os.pread(file, 1 << 16, 0).decode(errors="replace")  # a claim is far shorter
        return cls(os.fstat(file).st_mtime_ns, text)

    @property
    def signed(self) -> dict[str, object]:
        """What the holder wrote, nothing for a file that is damaged or empty."""
        try:
            holder = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return holder if isinstance(holder, dict) else {}


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
        return _is_at(self.file, self.path) and _ClaimState.of(self.file).signed.get("token") == self.token

    def check(self) -> None:
        """Raise RunError where the claim was taken over: this process was silent for too long."""
        if not self.holds:
            raise RunError(
                f"claim {str(self.path)!r} was taken over by another process while this one gave no sign for over "
                f"{TIMEOUT_SECONDS:.0f} s, or was removed; this process stops, the run goes on there"
            )

    def release(self) -> None:
        """Let go; the file goes first, so that nobody can lock it in between and find it gone."""
        if self.holds:
            self.path.unlink(missing_ok=True)
        os.close(self.file)

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Touch the file now and then from a thread, while the body works."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(HEARTBEAT_SECONDS):
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
        self._seen: dict[Path, tuple[_ClaimState, float]] = {}  # and since when, on our own clock

    @contextmanager
    def claim(self, path: Path) -> Iterator[Claim | None]:
        """Hold the unit of a lock file while the body works; None where a living process holds it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        claim = self._settled(path)
        if claim is None:
            yield None
            return
        try:
            with claim.heartbeat():
                yield claim
        finally:
            claim.release()

    def holder(self, path: Path) -> dict[str, object]:
        """What the holder of a claim that was not free had signed."""
        return self._seen[path][0].signed if path in self._seen else {}

    def _settled(self, path: Path) -> Claim | None:
        # nobody else may sign between the look and the signature
        with mutex(path.parent / ".claims.lock"):
            claim, is_contested = self._take(path)
        if claim is None or not is_contested:
            return claim
        # another machine may sign at the same time: a little later the file says whose it is
        time.sleep(_SETTLE_SECONDS)
        if claim.holds:
            return claim
        os.close(claim.file)  # and never unlink: the file is another's now
        return None

    def _take(self, path: Path) -> tuple[Claim | None, bool]:
        """The signed claim, and whether another machine may be taking it in this very moment."""
        file, is_new, is_locked = _opened(path)
        holder = _ClaimState.of(file).signed  # under this kernel and mount locks are the whole truth
        is_own = is_new or (holder.get("kernel"), holder.get("device")) == (kernel(), os.fstat(file).st_dev)
        quiet = 0.0 if is_new else self._quiet_seconds(path, file)
        # a lock is the whole truth where the last holder was of this kernel; another's may not reach here
        patience = 0.0 if self._takeover else TIMEOUT_SECONDS
        # a file without a word is being made, or its maker died at it
        patience = patience if _ClaimState.of(file).text else _BIRTH_SECONDS
        if is_locked and (is_own or quiet >= patience):
            return Claim.signed(path, file), not is_own
        os.close(file)
        if is_locked or is_own or not self._takeover or quiet < TIMEOUT_SECONDS:
            return None, False
        path.unlink(missing_ok=True)  # the lock of a machine that does not answer stays with the old file
        return self._take(path)[0], True

    def _quiet_seconds(self, path: Path, file: int) -> float:
        """For how many seconds this process has seen no sign; by its own clock, since those of machines differ."""
        state, now = _ClaimState.of(file), time.monotonic()
        known, since = self._seen.get(path, (None, now))
        if state != known:
            since = now
        self._seen[path] = state, since
        return now - since


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


class IdleSignal:
    """A file that processes touch again and again while they have nothing to do."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".idle"
        self._known = self._time()

    def send(self) -> None:
        """Let those who hold several units know."""
        self._path.touch()

    def was_sent(self) -> bool:
        """Whether the file has changed since this was last asked; its time itself may be another machine's."""
        before, self._known = self._known, self._time()
        return self._known != before

    def _time(self) -> int:
        return self._path.stat().st_mtime_ns if self._path.exists() else 0


class ClaimedUnits(Generic[T]):
    """Units of one group that this process holds and works on together; made by ``work_on_groups``.

    Where another process has nothing left to do, this one lets go of half of what it has before it.
    """

    def __init__(self, held: Mapping[T, _Held], done: Callable[[T], bool], idle: IdleSignal) -> None:
        self._held, self._done, self._idle = dict(held), done, idle

    @property
    def units(self) -> list[T]:
        """What is held now, in the order of the group."""
        return list(self._held)

    def claim(self, unit: T) -> Claim:
        """The claim of a unit that is held."""
        return self._held[unit].claim

    def keeps(self, unit: T) -> bool:
        """Whether this unit is still held; asked before every piece of work on it, when all are as after a kill."""
        others = [one for one in self._held if one != unit and not self._done(one)]
        if unit in self._held and others and self._idle.was_sent():
            # the later half, which this process would come to last
            for one in others[len(others) // 2 :]:
                self._held.pop(one).release()
        return unit in self._held


class _Held(NamedTuple):
    claim: Claim
    release: Callable[[], None]


@contextmanager
def _held(
    claims: Claims, group: Sequence[T], lock: Callable[[T], Path], *, untouched: bool
) -> Iterator[dict[T, _Held]]:
    """Hold those units of a group that nobody else holds; ``untouched``: none where somebody holds the first."""
    found: dict[T, _Held] = {}
    with ExitStack() as every:
        # in a stack of its own, so that one can be let go of before the others
        for unit in group:
            own = every.enter_context(ExitStack())
            claim = own.enter_context(claims.claim(lock(unit)))
            if claim is not None:
                found[unit] = _Held(claim, own.close)
            elif untouched and not found:
                break
        yield found


def work_on_units(
    units: Sequence[T],
    *,
    done: Callable[[T], bool],
    lock: Callable[[T], Path],
    work: Callable[[T, Claim], None],
    finished: Callable[[T], None],
    waiting: Callable[[str], None],
    takeover: bool = False,
) -> None:
    """``work_on_groups`` for units that are worked on one by one; ``work`` checks its claim."""

    def work_alone(held: ClaimedUnits[T]) -> None:
        for unit in held.units:
            work(unit, held.claim(unit))

    work_on_groups(
        [[unit] for unit in units],
        done=done,
        lock=lock,
        work=work_alone,
        finished=finished,
        waiting=waiting,
        takeover=takeover,
    )


def work_on_groups(
    groups: Sequence[Sequence[T]],
    *,
    done: Callable[[T], bool],
    lock: Callable[[T], Path],
    work: Callable[[ClaimedUnits[T]], None],
    finished: Callable[[T], None],
    waiting: Callable[[str], None],
    takeover: bool = False,
) -> None:
    """Do every unit that is not done and not claimed; wait for those that other living processes have claimed.

    Units of a group, whose locks lie in one folder, are claimed and worked on together. A group that another process
    has begun is left to it while there are others; then whatever is free is taken, and who finds nothing free lets the
    others know, which give some back (``ClaimedUnits``). ``finished`` is told every unit once, whoever did it, and
    ``waiting`` whom for, whenever that changes. ``work`` checks its claims. Time is linear in the units: what others
    hold is at most one group a process, and only that is looked at again.
    """
    claims, last = Claims(takeover=takeover), ""
    together = untouched = any(len(group) > 1 for group in groups)

    def still_open(some: Sequence[Sequence[T]]) -> list[list[T]]:
        return _open_units(some, done, finished)

    left = still_open(groups)
    while left:
        busy: list[list[T]] = []
        for group in left:
            with _held(claims, group, lock, untouched=untouched) as held:
                # another may have done it between the look and the claim
                mine = {unit: own for unit, own in held.items() if not done(unit)}
                if mine:
                    work(ClaimedUnits(mine, done, IdleSignal(lock(group[0]).parent)))
                    busy = still_open(busy)
            busy += still_open([group]) if held else [group]
        left = still_open(busy)
        if untouched:
            untouched = False  # from now on also what is free of groups that others have begun
            continue
        text = _waiting_for([lock(unit) for group in left for unit in group], claims, takeover=takeover)
        if left and text != last:
            waiting(text)
            last = text
        if left:
            if together:
                IdleSignal(lock(left[0][0]).parent).send()
            time.sleep(_POLL_SECONDS)


def _open_units(
    groups: Sequence[Sequence[T]], done: Callable[[T], bool], finished: Callable[[T], None]
) -> list[list[T]]:
    """Tells of the units that are done, and returns the others."""
    left: list[list[T]] = []
    for group in groups:
        own = []
        for unit in group:
            if done(unit):
                finished(unit)
            else:
                own.append(unit)
        left += [own] if own else []
    return left


def _waiting_for(paths: Sequence[Path], claims: Claims, *, takeover: bool) -> str:
    holders = [claims.holder(path) for path in paths]
    names = sorted({f"pid {one.get('pid')!s:.20} of {str(one.get('host'))[:64]!r}" for one in holders})
    text = f"waiting for {len(paths)} units that other processes hold: {', '.join(names)}"
    if takeover or all(one.get("kernel") == kernel() for one in holders):
        return text
    return (
        f"{text}; what another machine holds is taken over after {TIMEOUT_SECONDS:.0f} s without a sign, or, where it "
        "is still locked, with --takeover"
    )
