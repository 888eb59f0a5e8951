"""Claims: as long as the process lives and no longer, whatever host name, PID namespace or machine it had."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvaudit.audit.runs import claims
from kvaudit.audit.runs.claims import (
    TIMEOUT_SECONDS,
    ClaimedUnits,
    Claims,
    IdleSignal,
    kernel,
    work_on_groups,
    work_on_units,
)
from kvaudit.core.errors import RunError

HOLD = """
import socket, sys, time
from pathlib import Path
from kvaudit.audit.runs.claims import Claims
socket.gethostname = lambda: "elsewhere"
with Claims().claim(Path(sys.argv[1])) as mine:
    print(mine is not None, flush=True)
    time.sleep(600)
"""


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(claims, "time", found)
    return found


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "unit.lock"


def signature(path: Path, **changed: Any) -> dict[str, Any]:
    """What a process of this machine signs in ``path``'s folder."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "kernel": kernel(),
        "device": path.parent.stat().st_dev,
        "token": "theirs",
    } | changed


def left_behind(path: Path, **changed: Any) -> None:
    """The claim of a process that was killed."""
    path.write_text(json.dumps(signature(path, **changed)))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep the file locked as another living process does: a lock belongs to the opening, not to the process."""
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def free(path: Path, found: Claims | None = None) -> bool:
    with (found or Claims()).claim(path) as mine:
        return mine is not None


def test_a_claim_excludes_a_second_one_and_is_given_back(lock: Path) -> None:
    with Claims().claim(lock) as first:
        assert first is not None
        assert not free(lock)
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert not lock.exists()
    assert free(lock)


def test_a_claim_ends_with_its_process_whatever_its_host_name(lock: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        assert json.loads(lock.read_text())["host"] == "elsewhere"
        assert not free(lock)
    finally:
        process.kill()
        process.communicate()
    assert lock.exists()
    assert free(lock)


def test_a_living_claim_of_another_pid_namespace_is_never_taken(lock: Path, clock: Clock) -> None:
    left_behind(lock, pid=2**22 + 1)  # a number that no process here can have
    waiting = Claims(takeover=True)
    with locked(lock):
        for _ in range(3):
            assert not free(lock, waiting)
            clock.now += TIMEOUT_SECONDS
    assert json.loads(lock.read_text())["token"] == "theirs"


@pytest.mark.parametrize("changed", [{"kernel": "another"}, {"device": -1}])
def test_a_claim_of_another_machine_is_free_after_a_silence(lock: Path, clock: Clock, changed: dict[str, Any]) -> None:
    left_behind(lock, **changed)
    waiting = Claims()
    assert not free(lock, waiting)
    clock.now = TIMEOUT_SECONDS - 1
    assert not free(lock, waiting)
    clock.now = TIMEOUT_SECONDS
    assert free(lock, waiting)


def test_a_beat_of_another_machine_keeps_its_claim(lock: Path, clock: Clock) -> None:
    left_behind(lock, kernel="another")
    waiting = Claims()
    for beat in range(5):
        os.utime(lock, (beat, beat))
        assert not free(lock, waiting)
        clock.now += TIMEOUT_SECONDS


def test_a_claim_of_another_machine_is_free_at_once_where_the_user_says_so(lock: Path, clock: Clock) -> None:
    left_behind(lock, kernel="another")
    assert free(lock, Claims(takeover=True))


def test_a_lock_that_a_dead_machine_left_is_broken_after_a_silence_where_the_user_says_so(
    lock: Path, clock: Clock
) -> None:
    left_behind(lock, kernel="another")
    patient, told = Claims(), Claims(takeover=True)
    with locked(lock):
        assert not free(lock, patient)
        assert not free(lock, told)
        clock.now = TIMEOUT_SECONDS
        assert not free(lock, patient)
        assert free(lock, told)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1, "host": "old", "ticks": 1}', "\x00" * 9, "[" * 60_000])
def test_a_lock_file_of_any_content_ends_in_bounded_time(lock: Path, clock: Clock, text: str) -> None:
    lock.write_text(text)
    waiting = Claims()
    assert not free(lock, waiting)
    clock.now = TIMEOUT_SECONDS
    assert free(lock, waiting)


def test_a_file_nobody_signed_is_free_after_seconds(lock: Path, clock: Clock) -> None:
    lock.write_text("")
    waiting = Claims()
    assert not free(lock, waiting)
    clock.now = 2.0
    assert free(lock, waiting)


def test_of_two_machines_that_take_over_at_once_one_has_the_claim(
    lock: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_behind(lock, kernel="another")

    def the_other_signs_later(_: float) -> None:
        lock.write_text(json.dumps(signature(lock, kernel="a third")))

    monkeypatch.setattr(clock, "sleep", the_other_signs_later)
    assert not free(lock, Claims(takeover=True))
    assert json.loads(lock.read_text())["token"] == "theirs"


def test_a_holder_that_lost_its_claim_stops_and_leaves_it_to_the_other(lock: Path) -> None:
    with Claims().claim(lock) as mine:
        assert mine is not None
        mine.check()
        lock.write_text(json.dumps(signature(lock, kernel="another")))
        with pytest.raises(RunError, match=r"taken over by another process.*this process stops"):
            mine.check()
    assert json.loads(lock.read_text())["token"] == "theirs"


def test_a_file_that_was_removed_between_opening_and_locking_is_no_claim(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock.write_text("")
    flock, removed = fcntl.flock, []

    def remove_first(file: int, how: int) -> None:
        if how & fcntl.LOCK_NB and not removed:
            removed.append(lock.unlink())
        flock(file, how)

    monkeypatch.setattr(claims.fcntl, "flock", remove_first)
    with Claims().claim(lock) as mine:
        assert mine is not None
        assert os.path.samestat(os.fstat(mine.file), lock.stat())
        assert not free(lock)


def test_a_holder_touches_its_file(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "HEARTBEAT_SECONDS", 0.01)
    with Claims().claim(lock):
        os.utime(lock, (0, 0))
        for _ in range(1000):
            if lock.stat().st_mtime > 0:
                return
            claims.time.sleep(0.01)
    pytest.fail("no beat in ten seconds")


class World:
    """Units a to z, where ``others`` are done by another process while this one waits."""

    def __init__(self, folder: Path, units: str) -> None:
        self.folder, self.units = folder, units
        self.done: set[str] = set()
        self.order: list[str] = []
        self.told: list[str] = []
        self.said: list[str] = []
        self.looks = 0

    def lock(self, unit: str) -> Path:
        return self.folder / f"{unit}.lock"

    def is_done(self, unit: str) -> bool:
        self.looks += 1
        return unit in self.done

    def work(self, unit: str, _: Any) -> None:
        self.order.append(unit)
        self.done.add(unit)

    def run(self) -> None:
        work_on_units(
            self.units,
            is_done=self.is_done,
            lock=self.lock,
            work=self.work,
            on_done=self.told.append,
            on_wait=self.said.append,
        )


def test_work_waits_for_what_others_hold_and_does_the_rest_first(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, "abc")
    left_behind(world.lock("b"), kernel="another", host="else\x1bwhere", pid=7)
    monkeypatch.setattr(clock, "sleep", lambda _: world.done.add("b"))
    world.run()
    assert (world.order, world.told) == (["a", "c"], ["a", "c", "b"])
    assert len(world.said) == 1
    assert world.said[0].startswith(
        "waiting for 1 units that other processes have claimed: pid 7 of 'else\\x1bwhere'; "
    )


def test_units_of_a_dead_process_are_done_in_the_end(tmp_path: Path, clock: Clock) -> None:
    world = World(tmp_path, "abc")
    left_behind(world.lock("b"), kernel="another")
    world.run()
    assert world.order == ["a", "c", "b"]
    assert TIMEOUT_SECONDS <= clock.now < TIMEOUT_SECONDS + 5


def test_every_unit_is_told_once_whoever_did_it(tmp_path: Path) -> None:
    world = World(tmp_path, "abcd")
    world.done |= {"a", "c"}
    world.run()
    assert (world.order, sorted(world.told)) == (["b", "d"], ["a", "b", "c", "d"])


def test_looks_at_units_are_linear_in_their_number(tmp_path: Path) -> None:
    looks = []
    for folder, count in (("few", 20), ("more", 40)):
        world = World(tmp_path / folder, "".join(map(chr, range(97, 97 + count))))
        world.run()
        looks.append(world.looks)
    assert looks[1] <= 2 * looks[0]


class Groups(World):
    """Units a to z in groups, worked on together."""

    def __init__(self, folder: Path, *groups: str) -> None:
        super().__init__(folder, "".join(groups))
        self.groups, self.hands = groups, list[str]()
        self.rings = False  # another process has nothing to do, as soon as the first piece of work is done

    def work_on(self, held: ClaimedUnits[str]) -> None:
        self.hands.append("".join(held.units))
        for unit in held.units:
            if held.keep(unit):
                assert not free(self.lock(unit))
                self.done.add(unit)
                if self.rings:
                    IdleSignal(self.folder).send()
                    self.rings = False

    def run(self) -> None:
        work_on_groups(
            self.groups,
            is_done=self.is_done,
            lock=self.lock,
            work=self.work_on,
            on_done=self.told.append,
            on_wait=self.said.append,
        )


def test_units_of_a_group_are_held_together(tmp_path: Path) -> None:
    world = Groups(tmp_path, "abc", "d", "ef")
    world.done.add("b")
    world.run()
    assert world.hands == ["ac", "d", "ef"]
    assert sorted(world.told) == list("abcdef")
    assert not list(tmp_path.glob("?.lock"))


def test_a_group_that_another_process_has_begun_is_left_to_it_while_there_are_others(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Groups(tmp_path, "abc", "de")
    left_behind(world.lock("a"), kernel="another")
    monkeypatch.setattr(clock, "sleep", lambda _: world.done.add("a"))
    world.run()
    assert (world.hands, len(world.said)) == (["de", "bc"], 1)
    assert sorted(world.told) == list("abcde")


def test_an_idle_process_gets_half_of_the_claimed_units(tmp_path: Path) -> None:
    world = Groups(tmp_path, "abcdef")
    world.rings = True
    world.run()
    assert world.hands == ["abcdef", "ef"]  # a was done by then, and nobody came for the others
    assert sorted(world.told) == list("abcdef")


def test_released_units_are_free_at_once_and_the_unit_in_work_is_kept(tmp_path: Path) -> None:
    world, seen = Groups(tmp_path, "abcd"), []

    def work(held: ClaimedUnits[str]) -> None:
        if not seen:
            IdleSignal(tmp_path).send()
            seen.append([held.keep("d"), *map(held.keep, "abc"), *(free(world.lock(unit)) for unit in "abcd")])
        world.done |= set(held.units)

    world.work_on = work  # type: ignore[method-assign]
    world.run()
    assert seen == [[True, True, False, False, False, True, True, False]]


def test_an_idle_process_sends_the_idle_signal(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    world, idle = Groups(tmp_path, "ab"), IdleSignal(tmp_path)
    for unit in "ab":
        left_behind(world.lock(unit), kernel="another")
    monkeypatch.setattr(clock, "sleep", lambda _: world.done.update("ab"))
    world.run()
    assert idle.was_sent()
    assert not idle.was_sent()
