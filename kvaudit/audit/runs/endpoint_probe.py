"""The probe of an endpoint whose model we do not have: fixed items, each at a short and a long context length.

    records/endpoint--SUITE--LENGTH.jsonl + .done.json    {"failed": {reason: conversations}, "lasting": [reason], ...}
    calls.jsonl    {"question": sha256 of the request, "answer": {"text": ..., ...}, "sha256": 16 hex digits}

Answers that were paid for are never asked for again: they are on disk before they are used, and a stopped probe resumes
at the next call. A conversation with a failed call is unscored; its file is sealed (marked as finished) all the same,
and the failed calls are made again when the probe is resumed. ``lasting`` failures are those that would occur again.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from rich.console import Console

from kvaudit.audit.runs.claims import Claim, work_on_units
from kvaudit.audit.runs.evaluate import evaluation_items, row_seed, suite_as_asked
from kvaudit.audit.runs.folder import RunFolder, check_inputs_unchanged, utc_now
from kvaudit.audit.runs.progress import Meter, print_line
from kvaudit.audit.runs.units import write_sealed
from kvaudit.audit.sampling.chat_calls import LARGEST_SEED, Answer, Readings, SentRequest, ask, request_body, wire
from kvaudit.audit.sampling.exchange import Exchange
from kvaudit.audit.sampling.model import load_chat
from kvaudit.core.endpoint import EndpointClient, FirstModel, Scope, Unanswered
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.files import read_json
from kvaudit.core.judge_answers import AnswerCache
from kvaudit.core.network import map_in_order
from kvaudit.core.provenance import (
    ENDPOINT,
    ENDPOINT_REQUESTS,
    INPUTS,
    ROWS,
    TOOL_FORMS_USED,
    Digests,
    inputs_sha256,
    seal_path,
)
from kvaudit.core.records import CacheUse, Item, Record, Serving, UngradedAnswer, fingerprint_rows
from kvaudit.core.spec import ENDPOINT_ARM, UNKNOWN, RunSpec, expand
from kvaudit.core.spec_evaluate import ProbeSpec
from kvaudit.core.text import at_length, length_label
from kvaudit.core.tool_forms.text import TextForm, as_text
from kvaudit.suites.base import SUITES, CountTokens, Suite
from kvaudit.suites.sources import collect_file_hashes

CALLS = "calls.jsonl"
LEAST_ITEMS, LEAST_CLUSTERS = 300, 99  # 99 templates miss a failure of 3 % of them with probability 5 %
_CHARACTERS_PER_TOKEN = 4  # without a tokenizer
_MILLION = 1e6
_FAILURES_IN_A_ROW = 8  # then the probe stops
_GRACE_SECONDS = 3.0  # for calls under way when a probe is stopped, since they are paid for
_MOST_REASONS, _OTHERS = 20, "for other reasons"  # in a seal: the most reasons, and the key that counts the rest
_NUMBER = re.compile(r"(?<!status )\b\w*\d[\w.]*")  # also the ids of requests, most of which contain digits
_ANSWER = TypeAdapter(Answer)
# what the endpoint did, and what to do about it
_REMEDY = {
    Scope.TRY: ("does not answer", "go on with --resume when it answers"),
    Scope.ENDPOINT: ("does not answer", "mend what it names, then go on with --resume"),
    Scope.QUESTION: (
        f"gave no valid answer to {_FAILURES_IN_A_ROW} questions in a row",
        "asking again would not help; check which model it serves, and whether the plan suits it",
    ),
}


# the plan


@dataclass(frozen=True, eq=False)  # hashed by identity, since items cannot be hashed
class ProbeUnit:
    """The items of a suite at one length, each answered ``samples`` times; the records of the answers are one file."""

    suite: Suite
    context_tokens: int
    items: tuple[Item, ...]
    samples: int

    @property
    def name(self) -> str:
        """The name of the file of records, without its ending."""
        return f"endpoint--{self.suite.name.replace(':', '=')}--{self.context_tokens}"

    @property
    def conversations(self) -> int:
        """The number of conversations, each of which becomes a record."""
        return len(self.items) * self.samples


@dataclass(frozen=True)
class Plan:
    """Everything that a probe asks, items of short contexts first.

    ``count`` returns the number of tokens of a text, ``counted`` says in words how it counts, and ``rows`` maps each
    file of public data to its sha256.
    """

    spec: RunSpec
    units: tuple[ProbeUnit, ...]
    count: CountTokens
    counted: str
    rows: Digests

    @property
    def probe(self) -> ProbeSpec:
        """The probe section of the spec."""
        return _probe_section(self.spec)

    @property
    def asked(self) -> dict[str, str]:
        """The items' hashes and the sampling settings, by name; probes are comparable only if all of them are equal."""
        grid, hashes = self.spec.evaluate, dict[str, str]()
        for unit in self.units:
            hashes[f"items of {unit.suite.name} at {unit.context_tokens}"] = _items_sha256(unit.items)
            hashes[f"decoding of {unit.suite.name}"] = (
                f"temperature {grid.temperature:g}, top_p {grid.top_p:g}, {unit.samples} answers of at most "
                f"{unit.suite.max_new_tokens} tokens"
            )
        return hashes

    def lines(self) -> Iterator[str]:
        """Yield lines on the plan: items of each suite, requests, tokens, cost, and remarks on its size."""
        requests = read = written = 0  # at most
        for unit in self.units:
            size = f"{len(unit.items)} items, {unit.samples} answers each"
            yield f"{unit.suite.name} {at_length(unit.context_tokens)}: {size}"
            counts = most_requests(unit.suite, [self.tokens(item) for item in unit.items] * unit.samples)
            requests, read, written = requests + counts[0], read + counts[1], written + counts[2]
        at_most = " at most" if any(unit.suite.max_turns > 1 for unit in self.units) else ""
        yield f"requests: {requests}{at_most}, of about {read:,} tokens to read and at most {written:,} to write"
        yield f"tokens are {self.counted}"
        if (price := self.probe.price) is not None:
            cost = (read * price.input + written * price.output) / _MILLION
            yield f"cost: at most about {cost:,.2f} at the plan's prices"
        yield from self._remarks()

    def tokens(self, item: Item) -> int:
        """Return the number of tokens in an item's first prompt, without those that a chat template adds."""
        return sum(self.count(message.content) for message in as_text(item.messages, item.tools))

    def _remarks(self) -> Iterator[str]:
        grid = self.spec.evaluate
        longest = [unit for unit in self.units if unit.context_tokens == max(grid.contexts_of(unit.suite.name))]
        items = sum(len(unit.items) for unit in longest)
        clusters = len({(unit.suite.name, item.cluster_id) for unit in longest for item in unit.items})
        if items < LEAST_ITEMS or clusters < LEAST_CLUSTERS:
            least = f"{LEAST_ITEMS} of {LEAST_CLUSTERS}"
            yield f"small: {items} items of {clusters} templates; with fewer than {least} most drifts stay unseen"
        if single := [suite for suite in grid.suites if grid.samples_of(suite) < 2]:
            yield f"no A/A: {', '.join(single)} asks every item once, so the endpoint's own noise stays unknown"


def make_plan(spec: RunSpec) -> Plan:
    """Return the plan with all its items; raise SpecError or DataError for a suite that no endpoint can answer."""
    (count, counted), grid, units = counter(spec), spec.evaluate, list[ProbeUnit]()
    with collect_file_hashes() as rows:
        for suite in (suite_as_asked(spec, name) for name in grid.suites):
            for context in grid.contexts_of(suite.name):
                items = tuple(evaluation_items(spec, suite, context, count))
                units.append(ProbeUnit(suite, context, items, grid.samples_of(suite.name)))
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


def most_requests(suite: Suite, prompts: Sequence[int]) -> tuple[int, int, int]:
    """Return (requests, tokens to read, tokens to write): the most of each that conversations of a suite can need.

    ``prompts`` has the length of each conversation's first prompt, in tokens.
    """
    turns, limit, count = suite.max_turns, suite.max_new_tokens, len(prompts)
    # turn t reads the prompt and the t - 1 answers before it: 0 + 1 + ... of them in all
    earlier_answers = count * limit * turns * (turns - 1) // 2
    return count * turns, turns * sum(prompts) + earlier_answers, count * turns * limit


def counter(spec: RunSpec) -> tuple[CountTokens, str]:
    """Return the function that counts the tokens of a text, and a description of how it counts."""
    name = _probe_section(spec).tokenizer
    if name is None:
        how = f"estimated, one for {_CHARACTERS_PER_TOKEN} characters; probe.tokenizer would count them"
        return lambda text: -(-len(text) // _CHARACTERS_PER_TOKEN), how  # rounded up
    return load_chat(expand("probe.tokenizer", name)).count_tokens, f"counted by the tokenizer {name}"


def _probe_section(spec: RunSpec) -> ProbeSpec:
    if spec.probe is None:
        raise SpecError("the plan has no probe section; an empty one will do (probe: {})")
    return spec.probe


def _items_sha256(items: Iterable[Item]) -> str:
    rows = [[i.item_id, i.cluster_id, fingerprint_rows(i.messages, i.tools)] for i in items]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


# its calls, and those that fail


class Call(NamedTuple):
    """A request: its body, and the number of its repetition."""

    body: Mapping[str, Any]
    sample: int

    @property
    def key(self) -> str:
        """The sha256 by which its answer is stored."""
        # endpoints have two names for the limit of tokens
        named = {("limit" if name.startswith("max_") else name): value for name, value in self.body.items()}
        return hashlib.sha256(json.dumps([named, self.sample], sort_keys=True).encode()).hexdigest()


class Calls(AnswerCache[Call, dict[str, Any]]):
    """The answers that a probe has paid for, in ``calls.jsonl``; ``ask`` fetches an answer that is not stored yet."""

    def __init__(self, path: Path, ask: Callable[[Call], Answer]) -> None:
        super().__init__(path, lambda call: call.key, lambda calls: [asdict(ask(*calls))], "answer", (dict,))

    @property
    def first_model(self) -> str:
        """The model's name in the first stored answer that has one; empty if none has."""
        return next((kept["model"] for kept in self.stored.values() if kept and kept["model"]), "")

    def answer(self, call: Call) -> Answer:
        """Return the answer to a call, stored or from ``ask``; an error of ``ask`` is raised and not stored."""
        (kept,) = self.answers([call])
        assert kept is not None
        return Answer(**kept)

    def _entry(self, row: Any) -> tuple[str, dict[str, Any] | None]:
        # as earlier versions wrote a line: {"call": sha256 of the request, "text": ..., "finish": ..., ...}
        key, kept = (row["call"], row) if "call" in row else super()._entry(row)
        return key, asdict(_ANSWER.validate_python(kept))


def failure_lines(failed: Counter[str], lasting: Set[str]) -> list[str]:
    """Return a line for each kind of failure, most frequent first: how many conversations, why, and what helps.

    ``failed`` counts conversations by reason. ``lasting`` holds the reasons that would occur again. Reasons that differ
    only in numbers are one kind; its line gives the most frequent of them.
    """
    kinds: dict[tuple[str, bool], Counter[str]] = {}
    for why, count in failed.most_common():
        kinds.setdefault((_NUMBER.sub("#", why), why in lasting), Counter())[why] = count
    lines = []
    for (_, is_lasting), reasons in sorted(kinds.items(), key=lambda kind: -kind[1].total()):
        others = f" ({len(reasons) - 1} more reasons differ in their numbers alone)" if len(reasons) > 1 else ""
        remedy = "asked again it would say the same" if is_lasting else "--resume asks them again"
        lines.append(f"unscored: {reasons.total()} conversations, {next(iter(reasons))}{others}; {remedy}")
    return lines


# its work


class Probe:
    """One process's part in asking an endpoint all items of a plan and storing the graded answers.

    Raises RunError if the probe in the folder began with another address, other items or other public rows.
    """

    def __init__(self, run: RunFolder, plan: Plan, client: EndpointClient, console: Console) -> None:
        self._run, self._plan, self._client, self._console = run, plan, client, console
        self._spec, self._section = plan.spec, plan.probe
        check_inputs_unchanged(run, ROWS, plan.rows)
        self._check_unchanged(ENDPOINT_REQUESTS, plan.asked)
        self._check_unchanged(ENDPOINT, {"base_url": client.endpoint.base_url})
        run.note(
            suite_kinds={name: SUITES.get(name).kind for name in plan.spec.evaluate.suites},
            suite_versions={name: SUITES.get(name).version for name in plan.spec.evaluate.suites},
        )
        tools = Counter(unit.suite.name for unit in plan.units for item in unit.items if item.tools)
        if tools:
            run.note(**{TOOL_FORMS_USED: {suite: {TextForm.name: count} for suite, count in tools.items()}})
        self._inputs = inputs_sha256(run.provenance()[INPUTS])
        self._lock, self._stop, self._failures_in_a_row = threading.Lock(), threading.Event(), 0
        self._tried_units, self._lasting = set[str](), set[str]()
        self._readings, self._model = Readings(), FirstModel()

    def work(self) -> list[str]:
        """Ask everything that is not answered yet; return lines on why conversations are unscored."""
        units = self._plan.units
        total = sum(unit.conversations for unit in units)
        with Meter(self._console, "probe", total, self._conversations_done) as self._meter:
            work_on_units(
                units,
                is_done=self._is_done,
                lock=lambda unit: self._records(unit).with_suffix(".lock"),
                work=self._answer_unit,
                on_done=lambda _: None,
                on_wait=partial(print_line, self._console),
            )
        self._run.note(**{ENDPOINT: {"models": self._model.name}} if self._model.name else {}, finished=utc_now())
        failed, lasting = Counter[str](), set[str]()
        for seal in (read_json(seal_path(self._records(unit))) for unit in units):
            failed.update(seal.get("failed", {}))
            lasting.update(seal.get("lasting", []))
        return failure_lines(failed, lasting)

    def _check_unchanged(self, table: str, entries: Mapping[str, str]) -> None:
        """Store entries in a table of provenance.json; raise RunError if the probe began with other values."""
        for key, current in entries.items():
            stored = self._run.keep(table, key, current)
            if stored != current:
                raise RunError(
                    f"the probe began with {key} {str(stored)[:60]}, now it is {current[:60]}; go on with what it "
                    "began with, or give another --out"
                )

    def _records(self, unit: ProbeUnit) -> Path:
        return self._run.records / f"{unit.name}.jsonl"

    def _is_done(self, unit: ProbeUnit) -> bool:
        seal = seal_path(self._records(unit))
        return seal.exists() and (unit.name in self._tried_units or not read_json(seal).get("failed"))

    @property
    def _conversations_done(self) -> int:
        return sum(unit.conversations for unit in self._plan.units if self._is_done(unit))

    def _answer_unit(self, unit: ProbeUnit, claim: Claim) -> None:
        """Hold all conversations of a unit, then write and seal their records."""
        self._held = self._conversations_done
        self._calls = Calls(self._run.path / CALLS, self._ask)  # read anew: another process may have asked since
        self._model = FirstModel(self._calls.first_model)

        def hold_all(item: Item) -> list[Record]:
            # one after the other: the token counts of the first answer show how to read those of the next
            return [self._hold(unit, item, sample) for sample in range(unit.samples)]

        at_once = self._section.at_once
        records_by_item = map_in_order(hold_all, unit.items, at_once, stop=self._stop, grace=_GRACE_SECONDS)
        records = [record for item_records in records_by_item for record in item_records]
        claim.check()
        failed = Counter(record.unanswered for record in records if record.unanswered)
        reasons = dict(failed.most_common(_MOST_REASONS))
        if others := failed.total() - sum(reasons.values()):
            reasons[_OTHERS] = others
        entries = {"checkpoint": UNKNOWN, "inputs": self._inputs, "failed": reasons}
        entries["lasting"] = sorted(self._lasting & reasons.keys())
        lines = "".join(record.to_json() + "\n" for record in records)
        write_sealed(self._records(unit), lines.encode(), entries)
        self._tried_units.add(unit.name)

    def _hold(self, unit: ProbeUnit, item: Item, sample: int) -> Record:
        """Hold one conversation until it ends or a call fails; return its record."""
        # the endpoint's chat template is unknown: the answer shows whether the template began a thought for it
        exchange = Exchange(unit.suite, item, thinks=self._spec.evaluate.think is not None, opens_thought=None)
        answers = list[Answer]()
        while exchange.open:
            call = self._next_call(exchange, sample)
            try:
                reply = self._calls.answer(call)
            except Unanswered as error:
                exchange.abort(str(error))
                if error.scope is not Scope.TRY:
                    self._lasting.add(exchange.unanswered)
            else:
                answers.append(reply)
                if reply.prompt_tokens is not None:
                    self._readings.note(call.body["messages"])
                exchange.add(exchange.step(reply.text, reply.finish, reply.thought))
        with self._lock:
            self._held += 1
            self._meter.at(self._held, f"{unit.suite.name} {length_label(unit.context_tokens)}")
        return self._record(unit, exchange, sample, answers)

    def _next_call(self, exchange: Exchange, sample: int) -> Call:
        """Return the next call of a conversation."""
        section, grid, suite, item = self._section, self._spec.evaluate, exchange.suite, exchange.item
        # whether an endpoint takes tools is unknown, so they are part of the prompt as text
        rows = wire(as_text(exchange.transcript, item.tools), section.tool_role)
        seed = row_seed(grid.seed, item, sample) & LARGEST_SEED if section.seeded else None
        model, limit = self._spec.model_path, suite.max_new_tokens
        body = request_body(model, rows, limit, grid.temperature, grid.top_p, seed, section.limit)
        return Call(body | ({"stop": list(suite.until)} if suite.until else {}), sample)

    def _ask(self, call: Call) -> Answer:
        """Return the endpoint's answer to a call; raise Unanswered if it fails, RunError if the probe has to stop."""
        if self._stop.is_set():
            raise Unanswered("it was not asked")
        rows = call.body["messages"]
        tokens = sum(self._plan.count(row["content"]) for row in rows)
        sent = SentRequest(rows, tokens, self._section.tokenizer is not None, call.body[self._section.limit])
        try:
            reply = ask(self._client, call.body, sent, self._readings, self._model)
        except Unanswered as error:
            self._count_failure(error)
            raise
        self._failures_in_a_row = 0
        return reply

    def _count_failure(self, why: Unanswered) -> None:
        """Count a failed call; raise RunError if all requests would fail, or too many calls have failed in a row."""
        with self._lock:
            self._failures_in_a_row += 1
            if why.scope is not Scope.ENDPOINT and self._failures_in_a_row < _FAILURES_IN_A_ROW:
                return
        symptom, remedy = _REMEDY[why.scope]
        endpoint = self._client.endpoint
        raise RunError(
            f"probe: {endpoint.base_url} {symptom} ({endpoint.cause(why, self._spec.model)}); answers so far are kept: "
            f"{remedy}"
        )

    def _record(self, unit: ProbeUnit, exchange: Exchange, sample: int, answers: Sequence[Answer]) -> Record:
        item, count = exchange.item, self._plan.count
        read = answers[0].prompt_tokens if answers else None
        serving = Serving(
            run=self._spec.name,
            checkpoint=UNKNOWN,
            arm=ENDPOINT_ARM,
            train_seed=0,
            policy=UNKNOWN,
            policy_hash=UNKNOWN,
            suite=unit.suite.name,
            suite_version=unit.suite.version,
            context_tokens=unit.context_tokens,
        )
        ungraded = UngradedAnswer(
            sample_index=sample,
            finish_reason=exchange.finish,
            prompt_tokens=self._plan.tokens(item) if read is None else read,
            new_tokens=sum(count(reply.text) if reply.new_tokens is None else reply.new_tokens for reply in answers),
            seconds=sum(reply.seconds for reply in answers),
            transcript=exchange.transcript,
            unanswered=exchange.unanswered,
            said_in=answers[-1].said_in if answers else "",
            tool_form=TextForm.name if item.tools else "",
        )
        # the endpoint does not show its cache
        cache = CacheUse(retention=0.0, kv_bytes_peak=0, kv_bytes_dense=0)
        return Record.of(serving, item, exchange.grade(), ungraded, cache)
