"""Claims on work units: a process holds the lock of a unit's lock file while it works on the unit.

The kernel releases the lock when the process ends for any reason, so neither host names nor process numbers are
compared. Some file systems do not share locks between machines. The owner of a claim therefore also touches its file
every few seconds, and a claim made under another kernel expires only after a timeout without such a heartbeat.
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
_UNSIGNED_SECONDS = 2.0  # a file without signature for longer comes from a process that died while creating it
_SETTLE_SECONDS = 2.0  # if two machines take over at once without a shared lock, the last to sign has the claim
_POLL_SECONDS = 1.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def kernel() -> str:
    """Return an identifier of the running kernel: the same in all containers of a machine, new after each boot."""
    if _BOOT_ID.exists():
        return _BOOT_ID.read_text(encoding="ascii").strip()
    # a sandbox can hide the boot id; with a new identifier the timeout decides, never the lock
    if os.uname().sysname == "Linux":
        return str(uuid.uuid4())
    return f"{socket.gethostname()} {uuid.getnode():x}"


class _ClaimState(NamedTuple):
    """The content and modification time of a lock file; the owner changes the time every few seconds (a heartbeat)."""

    touched: int  # mtime in ns
    text: str

    @classmethod
    def of(cls, file: int) -> _ClaimState:
        text = os.pread(file, 1 << 16, 0).decode(errors="replace")  # a claim is far shorter
        return cls(os.fstat(file).st_mtime_ns, text)

    @property
    def holder(self) -> dict[str, object]:
        """The process that signed the file: pid, host, kernel, ...; empty if the file is damaged or empty."""
        try:
            holder = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return holder if isinstance(holder, dict) else {}


@dataclass(frozen=True)
class Claim:
    """A unit of work that this process has locked (claimed), so that no other process works on it."""

    path: Path
    file: int  # open and locked
    token: str

    @classmethod
    def sign(cls, path: Path, file: int) -> Claim:
        """Write this process's number, host and kernel into the locked file; return the claim."""
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
    def is_valid(self) -> bool:
        """Whether this process still has the unit, or another one has taken it over."""
        return _is_current(self.file, self.path) and _ClaimState.of(self.file).holder.get("token") == self.token

    def check(self) -> None:
        """Raise RunError if another process has taken the claim over."""
        if not self.is_valid:
            raise RunError(
                f"claim {str(self.path)!r} was removed or taken over by another process, after no heartbeat of this "
                f"one for over {TIMEOUT_SECONDS:.0f} s; this process stops, the other one continues the run"
            )

    def release(self) -> None:
        """Give the unit up: remove the lock file, then unlock it, so that no process can lock a removed file."""
        if self.is_valid:
            self.path.unlink(missing_ok=True)
        os.close(self.file)

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Touch the lock file at intervals from a thread while the body runs, to show that this process lives."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(HEARTBEAT_SECONDS):
                try:
                    os.utime(self.file)
                except OSError:  # the file server may be back at the next beat; ``check`` notices a lost claim
                    continue

        thread = threading.Thread(target=beat, name=f"heartbeat {self.path.name}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class Claims:
    """The claims of one process, and what it has seen of the lock files of others.

    With ``takeover`` the user declares that processes on other machines are gone. A claim of theirs is then free at
    once if its file is unlocked, else after the timeout, because a dead machine can leave a lock for ever.
    """

    def __init__(self, *, takeover: bool = False) -> None:
        self._takeover = takeover
        self._seen: dict[Path, tuple[_ClaimState, float]] = {}  # state, and when this process first saw it

    @contextmanager
    def claim(self, path: Path) -> Iterator[Claim | None]:
        """Claim the unit of a lock file while the body runs; yield None if another live process has it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        claim = self._claim_settled(path)
        if claim is None:
            yield None
            return
        try:
            with claim.heartbeat():
                yield claim
        finally:
            claim.release()

    def holder(self, path: Path) -> dict[str, object]:
        """Return who held the claim when this process last tried to get it (pid, host, ...); empty if it never did."""
        return self._seen[path][0].holder if path in self._seen else {}

    def _claim_settled(self, path: Path) -> Claim | None:
        """Return a claim on a lock file, or None if another process has it.

        If another machine may sign the file at the same time, wait until its content shows which of the two has it.
        """
        with mutex(path.parent / ".claims.lock"):  # no other process may sign between our reading and signing
            claim, is_contested = self._take(path)
        if claim is None or not is_contested:
            return claim
        time.sleep(_SETTLE_SECONDS)
        if claim.is_valid:
            return claim
        os.close(claim.file)  # not unlinked: the file belongs to the other machine
        return None

    def _take(self, path: Path) -> tuple[Claim | None, bool]:
        """Sign the lock file if it is free; return the claim, which is None if another process has the file.

        The second value says whether a process on another machine may be signing the file at the same time.
        """
        file, is_new, is_locked = _open_and_lock(path)
        state = _ClaimState.of(file)
        signer = (state.holder.get("kernel"), state.holder.get("device"))
        # between processes of one kernel and mount the lock alone decides
        is_local = is_new or signer == (kernel(), os.fstat(file).st_dev)
        quiet = 0.0 if is_new else self._quiet_seconds(path, file)
        patience = 0.0 if self._takeover else TIMEOUT_SECONDS
        patience = patience if state.text else _UNSIGNED_SECONDS
        if is_locked and (is_local or quiet >= patience):
            return Claim.sign(path, file), not is_local
        os.close(file)
        if is_locked or is_local or not self._takeover or quiet < TIMEOUT_SECONDS:
            return None, False
        path.unlink(missing_ok=True)  # the lock of a machine that does not respond stays with the old file
        return self._take(path)[0], True

    def _quiet_seconds(self, path: Path, file: int) -> float:
        """Return for how many seconds this process has seen the lock file unchanged, by its own clock."""
        state, now = _ClaimState.of(file), time.monotonic()
        earlier, since = self._seen.get(path, (None, now))
        if state != earlier:
            since = now
        self._seen[path] = state, since
        return now - since


def _open_and_lock(path: Path) -> tuple[int, bool, bool]:
    """Open the lock file and try to lock it; return (file descriptor, is it new, is it locked)."""
    while True:
        try:
            file, is_new = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
        except FileExistsError:
            try:
                file, is_new = os.open(path, os.O_RDWR), False
            except FileNotFoundError:  # its holder has just released it
                continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return file, is_new, False
        if _is_current(file, path):
            return file, is_new, True
        os.close(file)  # its holder removed it between the two calls: try again with a new file


def _is_current(file: int, path: Path) -> bool:
    """Return whether the path still names the open file.

    The path is opened because a file server answers an open with the current file, but may answer a stat from a
    cache.
    """
    try:
        other = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return os.path.samestat(os.fstat(file), os.fstat(other))
    finally:
        os.close(other)


class IdleSignal:
    """A file that a process touches when it finds no free unit, so that processes with several units release some."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".idle"
        self._last = self._time()

    def send(self) -> None:
        """Ask processes that have claimed several units to release some."""
        self._path.touch()

    def was_sent(self) -> bool:
        """Return whether a process has touched the file since the last call.

        The file's time is compared only with its own earlier value, because another machine's clock may have set it.
        """
        earlier, self._last = self._last, self._time()
        return self._last != earlier

    def _time(self) -> int:
        return self._path.stat().st_mtime_ns if self._path.exists() else 0


class _HeldUnit(NamedTuple):
    claim: Claim
    release: Callable[[], None]


class ClaimedUnits(Generic[T]):
    """The units of one group that this process has claimed, and which it works on together, batch by batch."""

    def __init__(self, claimed_units: Mapping[T, _HeldUnit], is_done: Callable[[T], bool], idle: IdleSignal) -> None:
        self._claimed, self._is_done, self._idle = dict(claimed_units), is_done, idle

    @property
    def units(self) -> list[T]:
        """The units that are still claimed, in the order of the group."""
        return list(self._claimed)

    def claim(self, unit: T) -> Claim:
        """Return the claim that this process holds on a unit."""
        return self._claimed[unit].claim

    def keep(self, unit: T) -> bool:
        """Return whether a unit is still claimed; if another process is idle, first release units to it.

        Half of the other unfinished units of the group are released. Call this only between batches, because another
        process resumes a released unit from complete batches in its file.
        """
        others = [other for other in self._claimed if other != unit and not self._is_done(other)]
        if unit in self._claimed and others and self._idle.was_sent():
            for other in others[len(others) // 2 :]:  # this process would reach these last
                self._claimed.pop(other).release()
        return unit in self._claimed


@contextmanager
def _claim_group(
    claims: Claims, group: Sequence[T], lock: Callable[[T], Path], *, untouched: bool
) -> Iterator[dict[T, _HeldUnit]]:
    """Claim the free units of a group while the body runs; yield the claimed units with their claims.

    With ``untouched``, claim no unit if another process has the group's first one.
    """
    claimed_units: dict[T, _HeldUnit] = {}
    with ExitStack() as stack:
        for unit in group:
            single = stack.enter_context(ExitStack())  # so that a unit can be released before the others
            claim = single.enter_context(claims.claim(lock(unit)))
            if claim is not None:
                claimed_units[unit] = _HeldUnit(claim, single.close)
            elif untouched and not claimed_units:
                break
        yield claimed_units


def work_on_units(
    units: Sequence[T],
    *,
    is_done: Callable[[T], bool],
    lock: Callable[[T], Path],
    work: Callable[[T, Claim], None],
    on_done: Callable[[T], None],
    on_wait: Callable[[str], None],
    takeover: bool = False,
) -> None:
    """Work on every unit that is not done, one at a time, together with other processes.

    It is ``work_on_groups`` with every unit as a group of its own. ``work`` must check its claim, because another
    process may have taken the unit over.
    """

    def work_alone(claimed: ClaimedUnits[T]) -> None:
        for unit in claimed.units:
            work(unit, claimed.claim(unit))

    work_on_groups(
        [[unit] for unit in units],
        is_done=is_done,
        lock=lock,
        work=work_alone,
        on_done=on_done,
        on_wait=on_wait,
        takeover=takeover,
    )


def work_on_groups(
    groups: Sequence[Sequence[T]],
    *,
    is_done: Callable[[T], bool],
    lock: Callable[[T], Path],
    work: Callable[[ClaimedUnits[T]], None],
    on_done: Callable[[T], None],
    on_wait: Callable[[str], None],
    takeover: bool = False,
) -> None:
    """Work on every unit that is not done, and wait for the units that other live processes have claimed.

    The units of a group, whose lock files are in one folder, are claimed and worked on together. A process first takes
    groups that no other process has begun, then any free unit. A process that finds nothing free signals the others,
    which release half of their units. ``on_done`` is called once for every unit, whichever process did it. ``on_wait``
    is called with a line whenever the processes that hold the remaining units change. ``work`` must check its claims,
    because another process may have taken a unit over. The time is linear in the number of units: a process has at most
    one group, and only claimed groups are checked again.
    """
    claims, printed = Claims(takeover=takeover), ""
    has_groups = untouched = any(len(group) > 1 for group in groups)

    def still_open(candidates: Sequence[Sequence[T]]) -> list[list[T]]:
        return _open_units(candidates, is_done, on_done)

    open_groups = still_open(groups)
    while open_groups:
        busy: list[list[T]] = []
        for group in open_groups:
            with _claim_group(claims, group, lock, untouched=untouched) as claimed_units:
                # another process may have done a unit between the check and the claim
                due = {unit: claim for unit, claim in claimed_units.items() if not is_done(unit)}
                if due:
                    work(ClaimedUnits(due, is_done, IdleSignal(lock(group[0]).parent)))
                    busy = still_open(busy)
            busy += still_open([group]) if claimed_units else [group]
        open_groups = still_open(busy)
        if untouched:
            untouched = False  # from now on free units of groups that others have begun, too
            continue
        text = _waiting_text([lock(unit) for group in open_groups for unit in group], claims, takeover=takeover)
        if open_groups and text != printed:
            on_wait(text)
            printed = text
        if open_groups:
            if has_groups:
                IdleSignal(lock(open_groups[0][0]).parent).send()
            time.sleep(_POLL_SECONDS)


def _open_units(
    groups: Sequence[Sequence[T]], is_done: Callable[[T], bool], on_done: Callable[[T], None]
) -> list[list[T]]:
    """Call ``on_done`` with every unit that is done; return the other units in their groups, without empty groups."""
    open_groups: list[list[T]] = []
    for group in groups:
        open_units = []
        for unit in group:
            if is_done(unit):
                on_done(unit)
            else:
                open_units.append(unit)
        open_groups += [open_units] if open_units else []
    return open_groups


def _waiting_text(paths: Sequence[Path], claims: Claims, *, takeover: bool) -> str:
    holders = [claims.holder(path) for path in paths]
    names = sorted({f"pid {holder.get('pid')!s:.20} of {str(holder.get('host'))[:64]!r}" for holder in holders})
    text = f"waiting for {len(paths)} units that other processes have claimed: {', '.join(names)}"
    if takeover or all(holder.get("kernel") == kernel() for holder in holders):
        return text
    return (
        f"{text}; units of another machine are taken over after {TIMEOUT_SECONDS:.0f} s without a heartbeat, or with "
        "--takeover if they are still locked"
    )
