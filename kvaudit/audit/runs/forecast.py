"""How long a run still takes, from what its parts took so far.

A run is made of parts: a checkpoint that is trained, a unit of the grid that is answered, an engine that is started.
Every part has a cost, which says what it weighs beside others before anything was timed, and a kind, whose parts take
the same time for a cost. What was timed of a kind soon tells more than what was guessed; a kind of which nothing was
timed goes by those that are most like it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

WorkKind = tuple[str, ...]  # the phase first, then what tells its parts apart, the most telling first
_GUESS = 0.05  # of a kind's whole cost: so much is what was guessed worth beside what was timed
_OUTLIER = 3.0  # a phase's first interval that is so many times slower than the others was a start, no rate


@dataclass(frozen=True)
class Part:
    """What is to be done. ``like`` is a kind that is timed before and takes about as long for a cost.

    ``apart``: its time tells of no other kind, such as the start of an engine. ``seconds`` is what it takes where none
    of its kind was timed; without it one that is ``apart`` counts for nothing until then.
    """

    kind: WorkKind
    cost: float
    like: WorkKind | None = None
    apart: bool = False
    seconds: float | None = None


@dataclass
class _Timed:
    """The seconds of this process for so much cost."""

    cost: float = 0.0
    seconds: float = 0.0

    def add(self, cost: float, seconds: float) -> None:
        self.cost, self.seconds = self.cost + cost, self.seconds + seconds

    @property
    def rate(self) -> float:
        return self.seconds / self.cost


class Forecast:
    """The seconds that are left, and the share of the run that is done, by ``processes`` of which this is one."""

    def __init__(self, processes: int = 1, clock: Callable[[], float] | None = None) -> None:
        self._processes, self._clock = processes, clock or time.monotonic
        self._parts: dict[Hashable, Part] = {}
        self._done: dict[Hashable, float] = {}  # cost, whoever did it
        self._timed: dict[WorkKind, _Timed] = {}
        self._firsts: dict[str, tuple[WorkKind, float, float]] = {}  # by phase: the first interval, cost and seconds
        self._mark, self.last_share = self._clock(), 0.0

    def expect(self, name: Hashable, part: Part) -> None:
        """A part is to be done, or is another size than was thought."""
        self._parts[name] = part
        self._done.setdefault(name, 0.0)

    @property
    def open_parts(self) -> list[tuple[Hashable, Part]]:
        """What is not done yet."""
        return [(name, part) for name, part in self._parts.items() if self._done[name] < part.cost]

    def cost(self, name: Hashable) -> float:
        """The whole cost of a part."""
        return self._parts[name].cost

    def known(self, name: Hashable, done: float) -> None:
        """So much of a part's cost was done by an earlier run, or by another process: nothing is timed by it."""
        if name in self._parts:
            self._done[name] = min(done, self._parts[name].cost)

    def worked(self, name: Hashable, done: float) -> None:
        """So much of a part's cost is done, the last of it by this process since it last said what it did."""
        if name not in self._parts:
            return
        part, now = self._parts[name], self._clock()
        gained = min(done, part.cost) - self._done[name]
        if gained <= 0:
            return  # the time since counts for what comes next
        self._done[name] += gained
        self._time(part.kind, gained, now - self._mark)
        self._mark = now

    def resume(self) -> None:
        """Work begins now; the time before it was spent on nothing that comes again."""
        self._mark = self._clock()

    def took(self, name: Hashable, seconds: float) -> None:
        """A part ``apart`` was done in so many seconds, just now; they are not counted for what is under way."""
        if name in self._parts:
            part = self._parts[name]
            self._done[name] = part.cost
            self._time(part.kind, part.cost, seconds)
        self._mark += seconds

    def _time(self, kind: WorkKind, cost: float, seconds: float) -> None:
        phase = kind[0]
        self._timed.setdefault(kind, _Timed()).add(cost, seconds)
        if phase not in self._firsts:
            self._firsts[phase] = kind, cost, seconds

    def _timed_of(self, kind: WorkKind) -> _Timed:
        """What was timed of a kind, without the first interval of its phase where that was a start."""
        own = self._timed.get(kind, _Timed())
        first = self._firsts.get(kind[0])
        if first is None or first[0] != kind:
            return own
        _, cost, seconds = first
        others = _Timed()  # the phase without it
        for other, timed in self._timed.items():
            if other[0] == kind[0]:
                others.add(timed.cost, timed.seconds)
        others.add(-cost, -seconds)
        # one beside less work than its own may be as slow as the rest will be
        if others.cost >= cost and seconds / cost > _OUTLIER * others.rate:
            return _Timed(own.cost - cost, own.seconds - seconds)
        return own

    def rates(self) -> dict[WorkKind, float | None]:
        """Seconds for a cost of 1 of every kind; None where nothing tells."""
        wholes: dict[WorkKind, float] = {}
        sample: dict[WorkKind, Part] = {}
        for part in self._parts.values():
            wholes[part.kind] = wholes.get(part.kind, 0.0) + part.cost
            sample[part.kind] = part
        timed = {kind: self._timed_of(kind) for kind in {*wholes, *self._timed}}
        timed = {kind: one for kind, one in timed.items() if one.cost > 0}
        apart = {kind for kind, part in sample.items() if part.apart}
        usual = {kind: one for kind, one in timed.items() if kind not in apart}
        scales = self._scales(usual, sample)
        found: dict[WorkKind, float | None] = {}
        for kind, part in sample.items():
            own = timed.get(kind, _Timed())
            if part.apart:
                guess = None if part.seconds is None else part.seconds / part.cost
                found[kind] = own.rate if own.cost else guess
                continue
            like = _like(part, usual)
            guess = _nearest(kind, usual) if like is None else like * scales.get(kind[0], 1.0)
            # what was guessed counts as if a share of the whole cost had been timed by it
            weight = _GUESS * wholes[kind] if guess is not None else 0.0
            total = own.cost + weight
            found[kind] = (own.seconds + weight * (guess or 0.0)) / total if total else None
        return found

    def _scales(self, timed: dict[WorkKind, _Timed], sample: dict[WorkKind, Part]) -> dict[str, float]:
        """By phase: how much longer than the kinds that its own are like they took, where both were timed."""
        # seconds that were measured, and that they would have been by the kinds they are like
        took, thought = dict[str, float](), dict[str, float]()
        for kind, one in timed.items():
            like = _like(sample[kind], timed) if kind in sample else None
            if like is not None:
                took[kind[0]] = took.get(kind[0], 0.0) + one.seconds
                thought[kind[0]] = thought.get(kind[0], 0.0) + one.cost * like
        return {phase: seconds / thought[phase] for phase, seconds in took.items() if thought[phase] > 0}

    def left(self) -> float | None:
        """Seconds until all is done, None before anything was timed."""
        return self._seconds()[1]

    def share(self) -> float:
        """What part of the whole is spent, 0 to 1, by time; it falls where what comes turns out to take longer."""
        spent, ahead = self._seconds()
        if ahead is not None and spent + ahead > 0:
            self.last_share = spent / (spent + ahead)
        return self.last_share

    def _seconds(self) -> tuple[float, float | None]:
        """What all parts took, or would have taken this process, and what they will take all processes."""
        rates = self.rates()
        spent = ahead = 0.0
        for name, part in self._parts.items():
            rate = rates[part.kind]
            if rate is None:
                if not part.apart:  # without a rate of every kind of work nothing can be said
                    return 0.0, None
                continue  # a start or the like: counts for nothing until one is timed
            spent += self._done[name] * rate
            ahead += (part.cost - self._done[name]) * rate
        return spent / self._processes, ahead / self._processes


def _like(part: Part, timed: dict[WorkKind, _Timed]) -> float | None:
    """The rate of what a part is like, None where nothing of that phase was timed."""
    return None if part.like is None else _nearest(part.like, timed, least=1)


def _nearest(kind: WorkKind, timed: dict[WorkKind, _Timed], least: int = 0) -> float | None:
    """The rate of the kinds that share the most of a kind's first words, ``least`` of them at the least."""
    for words in range(len(kind), least - 1, -1):
        near = _Timed()
        for other, one in timed.items():
            if other[:words] == kind[:words]:
                near.add(one.cost, one.seconds)
        if near.cost > 0:
            return near.rate
    return None
