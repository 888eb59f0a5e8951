"""What a probe asks, fixed before it asks: every item at every length, counted, hashed and priced."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvaudit.audit.runs.evaluate import evaluation_items, suite_as_asked
from kvaudit.audit.sampling.model import load_chat
from kvaudit.core.errors import SpecError
from kvaudit.core.provenance import Digests
from kvaudit.core.records import Item, fingerprint_rows
from kvaudit.core.spec import RunSpec, expand
from kvaudit.core.spec_evaluate import ProbeSpec
from kvaudit.core.text import at_length
from kvaudit.core.tool_forms.reading import as_text
from kvaudit.suites.base import CountTokens, Suite
from kvaudit.suites.sources import collect_file_hashes

LEAST_ITEMS, LEAST_CLUSTERS = 300, 99  # 99 templates miss a failure of 3 % of them with probability 5 %
_CHARACTERS = 4  # of a token, where no tokenizer is named
_MILLION = 1e6


@dataclass(frozen=True, eq=False)  # a key by itself, since items are none
class ProbeUnit:
    """A suite's items at one length: what one file of records holds."""

    suite: Suite
    context_tokens: int
    items: tuple[Item, ...]

    @property
    def name(self) -> str:
        """The file name of its records, without an ending."""
        return f"endpoint--{self.suite.name.replace(':', '=')}--{self.context_tokens}"


@dataclass(frozen=True)
class Plan:
    """All that is asked, the short lengths first. ``count`` counts tokens, ``counted`` says how in words.

    ``rows`` are the files of public rows that were read, by their sha256.
    """

    spec: RunSpec
    units: tuple[ProbeUnit, ...]
    count: CountTokens
    counted: str
    rows: Digests

    @property
    def asked(self) -> dict[str, str]:
        """What two probes must share to be compared: the hash of the items of every unit, and how they are answered."""
        grid = self.spec.evaluate
        items = {f"items of {unit.suite.name} at {unit.context_tokens}": _sha256(unit.items) for unit in self.units}
        decoding = {
            f"decoding of {unit.suite.name}": f"temperature {grid.temperature:g}, top_p {grid.top_p:g}, "
            f"{grid.samples_of(unit.suite.name)} answers of at most {unit.suite.max_new_tokens} tokens"
            for unit in self.units
        }
        return {**items, **decoding}

    def lines(self) -> Iterator[str]:
        """What it comes to, before anything is asked."""
        requests, read, drawn = (sum(part) for part in zip(*map(self._size, self.units), strict=True))
        turns = " at most" if any(unit.suite.max_turns > 1 for unit in self.units) else ""
        for unit in self.units:
            samples = self.spec.evaluate.samples_of(unit.suite.name)
            yield f"{unit.suite.name} {at_length(unit.context_tokens)}: {len(unit.items)} items, {samples} answers each"
        yield f"requests: {requests}{turns}, of about {read:,} tokens to read and at most {drawn:,} to write"
        yield f"tokens are {self.counted}"
        price = _probe(self.spec).price
        if price is not None:
            cost = (read * price.input + drawn * price.output) / _MILLION
            yield f"cost: at most about {cost:,.2f} at the plan's prices"
        yield from self._remarks()

    def _size(self, unit: ProbeUnit) -> tuple[int, int, int]:
        """Requests, tokens to read and tokens to write of a unit, every turn of every conversation taken."""
        turns, new = unit.suite.max_turns, unit.suite.max_new_tokens
        samples = self.spec.evaluate.samples_of(unit.suite.name)
        opening = sum(self.tokens(item) for item in unit.items)
        # turn t reads t - 1 answers again: 0 + 1 + ... of them in all
        again = new * turns * (turns - 1) // 2  # what was said before is read again
        talks = len(unit.items) * samples
        return talks * turns, samples * opening * turns + talks * again, talks * turns * new

    def tokens(self, item: Item) -> int:
        """The tokens of an opening, without what a chat template puts around them."""
        return sum(self.count(message.content) for message in as_text(item.messages, item.tools))

    def _remarks(self) -> Iterator[str]:
        grid = self.spec.evaluate
        longest = [unit for unit in self.units if unit.context_tokens == max(grid.contexts_of(unit.suite.name))]
        items = sum(len(unit.items) for unit in longest)
        clusters = len({(unit.suite.name, item.cluster_id) for unit in longest for item in unit.items})
        if items < LEAST_ITEMS or clusters < LEAST_CLUSTERS:
            wanted = f"{LEAST_ITEMS} of {LEAST_CLUSTERS}"
            yield f"small: {items} items of {clusters} templates; with fewer than {wanted} most drifts stay unseen"
        single = [suite for suite in grid.suites if grid.samples_of(suite) < 2]
        if single:
            yield f"no A/A: {', '.join(single)} asks every item once, so the endpoint's own noise stays unknown"


def make_plan(spec: RunSpec) -> Plan:
    """Make every item; raises SpecError and DataError for what cannot be asked, before an endpoint is."""
    count, counted = counter(spec)
    with collect_file_hashes() as rows:
        units = [
            ProbeUnit(suite, context, tuple(evaluation_items(spec, suite, context, count)))
            for suite in (suite_as_asked(spec, name) for name in spec.evaluate.suites)
            for context in spec.evaluate.contexts_of(suite.name)
        ]
    for unit in units:
        if unit.suite.played_by:
            raise SpecError(
                f"suite {unit.suite.name} is played by another harness, which probe does not start; ask the endpoint "
                "in a run, with the policy {engine: endpoint, base_url: ..., model: ...}"
            )
        if any(unit.suite.options(item) for item in unit.items):
            raise SpecError(f"suite {unit.suite.name} weighs given answers, which no endpoint can; leave it out")
    units.sort(key=lambda unit: unit.context_tokens)
    return Plan(spec, tuple(units), count, counted, dict(rows))


def counter(spec: RunSpec) -> tuple[CountTokens, str]:
    """How a probe counts tokens, and that in words."""
    name = _probe(spec).tokenizer
    if name is None:
        return estimated_tokens, f"estimated, one for {_CHARACTERS} characters; probe.tokenizer would count them"
    return load_chat(expand("probe.tokenizer", name)).count_tokens, f"counted by the tokenizer {name}"


def estimated_tokens(text: str) -> int:
    """About how many tokens a text has, whatever the tokenizer."""
    return -(-len(text) // _CHARACTERS)  # rounded up


def _probe(spec: RunSpec) -> ProbeSpec:
    if spec.probe is None:
        raise SpecError("the plan has no probe section; an empty one will do (probe: {})")
    return spec.probe


def _sha256(items: Iterable[Item]) -> str:
    rows = [[i.item_id, i.cluster_id, fingerprint_rows(i.messages, i.tools)] for i in items]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
