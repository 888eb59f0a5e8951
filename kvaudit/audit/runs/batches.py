"""Split a suite's items into batches: similar lengths together for kvaudit's own cache, a fixed order for an engine."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.runs.units import PILOT_FOLDER, Unit
from kvaudit.core.records import Item
from kvaudit.core.spec import RunSpec
from kvaudit.reports.records.load import SAME_ORDER, SHUFFLED
from kvaudit.suites.base import Suite


def batched(items: Sequence[Item], lengths: dict[str, int], tokens: int) -> list[list[Item]]:
    """Return the items in batches of similar prompt length; ``lengths`` has each item's prompt length by item id.

    A batch has at most ``tokens`` tokens, padding included, unless it is a single item.
    """
    batches: list[list[Item]] = []
    # the order is the same in every process, so that a resumed unit has the same batches
    for item in sorted(items, key=lambda item: (lengths[item.item_id], item.item_id)):
        # rows are padded to the longest, which is this one
        if batches and (len(batches[-1]) + 1) * lengths[item.item_id] <= tokens:
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches


def whole_templates(suite: Suite, items: Sequence[Item], number: int) -> list[Item]:
    """Return about ``number`` items; twins (items of one template with different right answers) stay together.

    The first twins of every cluster come before the second twins of any cluster. A smaller ``number`` gives the
    beginning of what a larger one gives.
    """
    clusters: dict[str, list[Item]] = {}
    for item in items:
        clusters.setdefault(item.cluster_id, []).append(item)
    chosen_items: list[Item] = []
    for start in range(0, max(map(len, clusters.values()), default=0), suite.twins):
        for cluster in clusters.values():
            if len(chosen_items) >= number:
                return chosen_items
            chosen_items += cluster[start : start + suite.twins]
    return chosen_items


def engine_batches(spec: RunSpec, suite: Suite, items: Sequence[Item], unit: Unit, folder: str) -> list[list[Item]]:
    """Return a unit's items in the batches in which its engine answers them.

    ``folder`` names the folder that gets the records: the main grid's, the pilot's, or one of the floor's two, whose
    repeated requests measure an engine's noise. The grid begins with the pilot's batches, so that each item of the
    pilot is in the same batch both times. The first batch is small, so that the first answers arrive soon.
    """
    at_once = spec.engine(unit.policy.canonical).at_once
    ordered = whole_templates(suite, items, len(items))
    pilot_size, floor_size = (
        len(whole_templates(suite, items, number)) for number in (spec.evaluate.pilot_size, spec.evaluate.floor)
    )
    size = max(1, 2 * at_once // spec.evaluate.samples_of(suite.name))
    # batches begin: a small one first, where floor and pilot end, then every ``size`` items
    ends = [number for number in (max(1, size // 4), floor_size) if 0 < number < pilot_size]
    starts = sorted({0, *ends, *([pilot_size] if pilot_size else [])})
    starts += range(starts[-1] + size, len(ordered), size)
    batches = [ordered[start:end] for start, end in zip(starts, [*starts[1:], len(ordered)], strict=True)]
    batches = [batch for batch in batches if batch]
    if folder == PILOT_FOLDER:
        return _take_batches(batches, pilot_size)
    if folder in (SAME_ORDER, SHUFFLED):
        batches = _take_batches(batches, spec.evaluate.floor)
        return batches if folder == SAME_ORDER else _shuffle_batches(batches, spec.evaluate.seed, unit)
    return batches


def _take_batches(batches: Sequence[list[Item]], number: int) -> list[list[Item]]:
    """Return the first batches: as many as are needed to hold ``number`` items together."""
    first_batches: list[list[Item]] = []
    for batch in batches:
        if sum(map(len, first_batches)) >= number:
            break
        first_batches.append(batch)
    return first_batches


def _shuffle_batches(batches: Sequence[list[Item]], seed: int, unit: Unit) -> list[list[Item]]:
    """Return batches of the same sizes, with the items of all batches shuffled together.

    The order depends only on ``seed`` and on the suite and length of ``unit``.
    """
    items = [item for batch in batches for item in batch]
    random.Random(derive_seed("floor", seed, unit.suite, unit.context_tokens)).shuffle(items)
    remaining = iter(items)
    return [[next(remaining) for _ in batch] for batch in batches]
