"""A probe at work: conversations over calls, records of them, and an end where an endpoint answers no more.

    records/endpoint--SUITE--LENGTH.jsonl + .done.json    {"failed": {why: conversations}, "lasting": [why], ...}

A conversation in which a call failed is unscored. The unit is sealed all the same, and made again when the probe goes
on: what was answered is remembered (``calls``), so only what failed is asked. What is ``lasting`` another try would not
mend.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence, Set
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from kvaudit.audit.runs.claims import Claim, work_on_units
from kvaudit.audit.runs.evaluate import row_seed
from kvaudit.audit.runs.folder import RunFolder, utc_now
from kvaudit.audit.runs.probe.calls import Calls, call_key, request
from kvaudit.audit.runs.probe.plan import Plan, ProbeUnit
from kvaudit.audit.runs.progress import Meter, print_line
from kvaudit.audit.sampling.chat_calls import Answer, Readings, SentRequest, answer
from kvaudit.audit.sampling.exchange import Exchange
from kvaudit.core.endpoint import EndpointClient, Scope, Unanswered
from kvaudit.core.errors import RunError
from kvaudit.core.files import read_json, write_json, write_whole
from kvaudit.core.network import start_all, wait_in_slices
from kvaudit.core.provenance import (
    ENDPOINT,
    ENDPOINT_REQUESTS,
    INPUTS,
    ROWS,
    TOOL_FORMS_USED,
    check_inputs,
    inputs_sha256,
)
from kvaudit.core.records import CacheUse, Item, Message, Record, Role, Serving, UngradedAnswer
from kvaudit.core.spec import ENDPOINT_ARM, UNKNOWN
from kvaudit.core.text import length_label
from kvaudit.core.tool_forms.base import Tools
from kvaudit.core.tool_forms.reading import as_text
from kvaudit.core.tool_forms.text import TextForm
from kvaudit.suites.base import SUITES

CALLS = "calls.jsonl"
_STREAK = 8  # calls that fail one after the other before the rest is left for another time
_LAST_WORDS = 3.0  # seconds in which calls that were paid for may still be answered where a probe ends early
_NAMED = 20  # reasons that a seal names
_LARGEST_SEED = 2**31 - 1  # that every endpoint can read
_NUMBER = re.compile(r"(?<!status )\b\w*\d[\w.]*")  # and the names of requests, which hold some
# what it does, and what to do about it; what waiting never mends is not told to be resumed
_REMEDY = {
    Scope.TRY: ("does not answer", "go on with --resume when it answers"),
    Scope.ENDPOINT: ("does not answer", "mend what it names, then go on with --resume"),
    Scope.QUESTION: (
        f"gave no answer that counts to {_STREAK} questions in a row",
        "asked again it would say the same; see what it serves, and whether the plan suits it",
    ),
}


@dataclass(frozen=True)
class _Talk:
    sample: int
    exchange: Exchange
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Failure:
    """Why so many conversations are unscored. ``alike``: other reasons that differ from it in numbers alone."""

    why: str
    count: int
    alike: int
    lasting: bool

    @property
    def line(self) -> str:
        """What is said of it, and what to do about it."""
        others = f" ({self.alike} more reasons differ in their numbers alone)" if self.alike else ""
        does = "asked again it would say the same" if self.lasting else "--resume asks them again"
        return f"unscored: {self.count} conversations, {self.why}{others}; {does}"


def grouped(failed: Counter[str], lasting: Set[str]) -> list[Failure]:
    """Reasons that differ in numbers alone as one, told by its most frequent wording."""
    kinds: dict[tuple[str, bool], list[str]] = {}
    for why, _ in failed.most_common():
        kinds.setdefault((_NUMBER.sub("#", why), why in lasting), []).append(why)
    found = [
        Failure(alike[0], sum(failed[why] for why in alike), len(alike) - 1, known)
        for (_, known), alike in kinds.items()
    ]
    return sorted(found, key=lambda failure: -failure.count)


class Probe:
    """One process's work on a probe; raises RunError where it was begun with another address, items or rows."""

    def __init__(self, run: RunFolder, plan: Plan, base_url: str, client: EndpointClient, console: Console) -> None:
        self._run, self._plan, self._url, self._client, self._console = run, plan, base_url, client, console
        spec = plan.spec
        assert spec.probe is not None
        self._spec, self._part = spec, spec.probe
        check_inputs(ROWS, run.keep(INPUTS, ROWS, dict(plan.rows)), plan.rows)
        self._hold(plan.asked)
        run.note(
            suite_kinds={name: SUITES.get(name).kind for name in spec.evaluate.suites},
            suite_versions={name: SUITES.get(name).version for name in spec.evaluate.suites},
        )
        tools = Counter(unit.suite.name for unit in plan.units for item in unit.items if item.tools)
        if tools:
            run.note(**{TOOL_FORMS_USED: {suite: {TextForm.name: count} for suite, count in tools.items()}})
        self._inputs = inputs_sha256(run.provenance()[INPUTS])
        self._lock, self._streak, self._is_ending = threading.Lock(), 0, False
        self._tried = set[str]()
        self._models = Counter[str]()
        self._readings, self._lasting = Readings(), set[str]()

    def work(self) -> list[Failure]:
        """Ask what is not answered yet; returns why conversations are unscored, the most frequent reason first."""
        units = self._plan.units
        with Meter(self._console, "probe", sum(map(self._rows, units)), self._done_rows()) as self._meter:
            work_on_units(
                units,
                is_done=self._is_done,
                lock=lambda unit: self._run.records / f"{unit.name}.lock",
                work=self._ask,
                on_done=lambda _: None,
                on_wait=partial(print_line, self._console),
            )
        if self._models:
            self._run.note(**{ENDPOINT: {"models": ", ".join(sorted(self._models)[:_NAMED])}})
        self._run.note(finished=utc_now())
        failed, lasting = Counter[str](), set[str]()
        for unit in units:
            seal = read_json(self._seal(unit))
            failed.update(seal.get("failed", {}))
            lasting.update(seal.get("lasting", []))
        return grouped(failed, lasting)

    def _hold(self, asked: dict[str, str]) -> None:
        """Note what is asked and where, and refuse to go on with anything else."""
        for table, entries in ((ENDPOINT_REQUESTS, asked), (ENDPOINT, {"base_url": self._url})):
            for key, now in entries.items():
                then = self._run.keep(table, key, now)
                if then != now:
                    raise RunError(
                        f"the probe began with {key} {str(then)[:60]}, now it is {now[:60]}; go on with what it began "
                        "with, or give another --out"
                    )

    def _seal(self, unit: ProbeUnit) -> Path:
        return self._run.records / f"{unit.name}.done.json"

    def _is_done(self, unit: ProbeUnit) -> bool:
        if not self._seal(unit).exists():
            return False
        return unit.name in self._tried or not read_json(self._seal(unit)).get("failed")

    def _rows(self, unit: ProbeUnit) -> int:
        return len(unit.items) * self._spec.evaluate.samples_of(unit.suite.name)

    def _done_rows(self) -> int:
        return sum(self._rows(unit) for unit in self._plan.units if self._is_done(unit))

    def _ask(self, unit: ProbeUnit, mine: Claim) -> None:
        """Hold every conversation of a unit, write its records beside their place, and seal them."""
        self._before, self._over = self._done_rows(), 0
        self._calls = Calls(self._run.path / CALLS)  # another process may have asked since
        talks = self._talks(unit)
        mine.check()
        lines = "".join(self._record(unit, talk).to_json() + "\n" for talk in talks).encode()
        self._seal(unit).unlink(missing_ok=True)  # of an earlier try: never beside records that are not its own
        write_whole(self._run.records / f"{unit.name}.jsonl", lines)
        self._tried.add(unit.name)
        failed = Counter(talk.exchange.unanswered for talk in talks if talk.exchange.unanswered)
        told = dict(failed.most_common(_NAMED))
        sealed = {"records": len(talks), "sha256": hashlib.sha256(lines).hexdigest(), "checkpoint": UNKNOWN}
        lasting = sorted(self._lasting & told.keys())
        write_json(self._seal(unit), {**sealed, "inputs": self._inputs, "failed": told, "lasting": lasting})

    def _talks(self, unit: ProbeUnit) -> list[_Talk]:
        samples = range(self._spec.evaluate.samples_of(unit.suite.name))

        def talks(item: Item) -> list[_Talk]:
            # one after the other: what an endpoint claims of the first tells how to read its claim of the next
            return [self._talk(unit, item, sample) for sample in samples]

        futures = start_all(talks, unit.items, self._part.at_once)
        try:
            talks_of_items = list[_Talk]()
            for future in futures:
                wait_in_slices([future])
                talks_of_items += future.result()
            return talks_of_items
        except BaseException:
            self._is_ending = True  # conversations that are under way end with the call that they wait for
            for future in futures:
                future.cancel()
            wait([future for future in futures if not future.cancelled()], _LAST_WORDS)
            raise

    def _talk(self, unit: ProbeUnit, item: Item, sample: int) -> _Talk:
        """One conversation, from its opening to its end or to the first call that fails."""
        thinks = self._spec.evaluate.think is not None
        # nobody sees the template of an endpoint, so an answer itself tells whether a thought was begun for it
        exchange = Exchange(unit.suite, item, thinks=thinks, opens_thought=None)
        found = list[Answer]()
        while exchange.open:
            try:
                row = row_seed(self._spec.evaluate.seed, item, sample)
                said = self._answer(unit, exchange.transcript, item.tools, row, sample)
            except Unanswered as error:
                exchange.abort(str(error))
                if error.scope is not Scope.TRY:
                    self._lasting.add(exchange.unanswered)
                break
            found.append(said)
            exchange.add(exchange.step(said.text, said.finish, said.thought))
        if not found:
            exchange.add((Message(Role.ASSISTANT, ""),))  # a transcript has an answer, if only the lack of one
        with self._lock:
            self._over += 1
            self._models.update(said.model for said in found if said.model)
            self._meter.at(self._before + self._over, f"{unit.suite.name} {length_label(unit.context_tokens)}")
        return _Talk(sample, exchange, tuple(found))

    def _answer(self, unit: ProbeUnit, transcript: Sequence[Message], tools: Tools, seed: int, sample: int) -> Answer:
        """The remembered answer to the next call of a conversation, or the endpoint's."""
        # whether an endpoint takes tools is unknown, so they stand in the prompt as text
        body = request(self._spec, unit.suite, as_text(transcript, tools), seed & _LARGEST_SEED)
        key = call_key(body, sample)
        known = self._calls.find(key)
        rows = body["messages"]
        if known is not None:
            if known.prompt_tokens is not None:
                self._readings.note(rows)
            return known
        if self._is_ending:
            raise Unanswered("it was not asked")
        tokens = sum(self._plan.count(row["content"]) for row in rows)
        sent = SentRequest(rows, tokens, self._part.tokenizer is not None, unit.suite.max_new_tokens)
        started = time.perf_counter()
        try:
            completion = self._client.ask(body)
            found = answer(completion, sent, time.perf_counter() - started, self._readings)
            self._hold_model(found.model)
        except Unanswered as error:
            self._calls.keep(key, error)
            self._failed(error)
            raise
        self._calls.keep(key, found)
        self._streak = 0
        return found

    def _hold_model(self, named: str) -> None:
        """Raise Unanswered for an answer of another model than the first one: gateways fall back on others."""
        with self._lock:
            first = self._calls.model = self._calls.model or named
        if named != first:
            raise Unanswered(f"an answer of model {named!r}, the first was of model {first!r}")

    def _failed(self, why: Unanswered) -> None:
        """Count a failed call; raises RunError where the next ones would fail too."""
        with self._lock:
            self._streak += 1
            if why.scope is not Scope.ENDPOINT and self._streak < _STREAK:
                return
        key = f"key from {self._part.key}" if self._part.key else "no key"
        said, does = _REMEDY[why.scope]
        raise RunError(
            f"probe: {self._url} {said} ({why}; model {self._spec.model}, {key}); what was answered is kept: {does}"
        )

    def _record(self, unit: ProbeUnit, talk: _Talk) -> Record:
        exchange, item = talk.exchange, talk.exchange.item
        grade = exchange.grade()
        read = talk.answers[0].prompt_tokens if talk.answers else None
        drawn = [said.new_tokens for said in talk.answers]
        new_tokens = sum(
            self._plan.count(said.text) if known is None else known
            for said, known in zip(talk.answers, drawn, strict=True)
        )
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
        spoken = UngradedAnswer(
            sample_index=talk.sample,
            finish_reason=exchange.finish,
            prompt_tokens=self._plan.tokens(item) if read is None else read,
            new_tokens=new_tokens,
            seconds=sum(said.seconds for said in talk.answers),
            transcript=exchange.transcript,
            unanswered=exchange.unanswered,
            said_in=talk.answers[-1].said_in if talk.answers else "",
            tool_form=TextForm.name if item.tools else "",
        )
        # the cache is out of sight: kept and allocated are unknown
        cache = CacheUse(retention=0.0, kv_bytes_peak=0, kv_bytes_dense=0)
        return Record.of(serving, item, grade, spoken, cache)
