"""In which batches an engine is asked, and the A/A floor: the first of them twice more, once in another order.

    RUN/floor/again/UNIT.jsonl       the same requests in the same batches, by an engine that was started anew
    RUN/floor/shuffled/UNIT.jsonl    the same requests in another order, so with other neighbours

What a compressed engine answers can depend on what is answered beside it. How many answers change between two runs
that differ in nothing, or in their order alone, is what a change under a condition is to be held against.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from kvaudit.audit.engines import Condition
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.runs.units import PILOT_FOLDER, Unit
from kvaudit.core.records import Item
from kvaudit.core.spec import RunSpec
from kvaudit.suites.base import Suite

FLOOR_FOLDER, AGAIN, SHUFFLED = "floor", "again", "shuffled"


def whole_templates(suite: Suite, items: Sequence[Item], number: int) -> list[Item]:
    """The first items of whole clusters, each with all of its twins that are among ``items``: ``number`` of them or a
    few more.

    Where all clusters together have fewer, the next twins of the first ones follow. A larger number begins with what a
    smaller one has.
    """
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.cluster_id, []).append(item)
    chosen: list[Item] = []
    # of every cluster one template with its twins, then of every cluster the next
    for start in range(0, max(map(len, groups.values()), default=0), suite.twins):
        for own in groups.values():
            if len(chosen) >= number:
                return chosen
            chosen += own[start : start + suite.twins]
    return chosen


def engine_batches(spec: RunSpec, suite: Suite, items: Sequence[Item], unit: Unit, part: str) -> list[list[Item]]:
    """What an engine is handed at once, batch by batch; ``part`` is the folder of a run that the answers go to.

    The pilot's items come first and end a batch, so that the grid asks them beside the same neighbours. The first batch
    is small: there is something to see soon.
    """
    at_once = spec.engine(unit.policy.canonical).at_once
    ordered = whole_templates(suite, items, len(items))
    first = len(whole_templates(suite, items, spec.evaluate.pilot_size))
    size = max(1, 2 * at_once // spec.evaluate.samples_of(suite.name))
    # where batches begin: a small one first, then the end of the pilot, then every ``size`` items
    cuts = [0, *([max(1, size // 4)] if first > size // 4 else []), *([first] if first else [])]
    cuts += range(cuts[-1] + size, len(ordered), size)
    batches = [ordered[start:end] for start, end in zip(cuts, [*cuts[1:], len(ordered)], strict=True)]
    batches = [batch for batch in batches if batch]
    if part == PILOT_FOLDER:
        return _first(batches, first)
    if part in (AGAIN, SHUFFLED):
        batches = _first(batches, spec.evaluate.floor)
        return batches if part == AGAIN else _shuffled(batches, spec.evaluate.seed, unit)
    return batches


def floor_units(units: Sequence[Unit]) -> list[Unit]:
    """Those that have a floor: what an engine serves."""
    return [unit for unit in units if isinstance(unit.policy, Condition)]


def floor_rows(spec: RunSpec, unit: Unit) -> int:
    """About how many rows the floor of a unit has."""
    return spec.evaluate.floor * spec.evaluate.samples_of(unit.suite)


def floor_folders(run: Path) -> tuple[Path, Path]:
    """Where the second and third answers lie."""
    return run / FLOOR_FOLDER / AGAIN, run / FLOOR_FOLDER / SHUFFLED


def _first(batches: Sequence[list[Item]], items: int) -> list[list[Item]]:
    """Whole batches that hold so many items, all of them where there are fewer."""
    found: list[list[Item]] = []
    for batch in batches:
        if sum(map(len, found)) >= items:
            break
        found.append(batch)
    return found


def _shuffled(batches: Sequence[list[Item]], seed: int, unit: Unit) -> list[list[Item]]:
    """The same items in batches of the same sizes, in an order that is the same for every condition."""
    items = [item for batch in batches for item in batch]
    random.Random(derive_seed("floor", seed, unit.suite, unit.context_tokens)).shuffle(items)
    taken = iter(items)
    return [[next(taken) for _ in batch] for batch in batches]
