"""A probe asks an endpoint whose model we do not have: fixed items, each at a short and a long context length.

    records/endpoint--SUITE--LENGTH.jsonl + .done.json    {"failed": {reason: conversations}, "lasting": [reason], ...}
    calls.jsonl    {"call": sha256 of the request, "text": ..., "finish": ..., ...}, one line per answer, or
                   {"call": sha256 of the request, "failed": reason}, which is asked again

Answers that were paid for are never asked for again: they are on disk before they are used, and a stopped probe resumes
at the next call. A conversation with a failed call is unscored; its file is sealed (marked as finished) all the same,
and the failed calls are made again when the probe is resumed. ``lasting`` failures are those that would occur again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from kvaudit.audit.runs.claims import Claim, work_on_units
from kvaudit.audit.runs.evaluate import evaluation_items, row_seed, suite_as_asked
from kvaudit.audit.runs.folder import RunFolder, utc_now
from kvaudit.audit.runs.progress import Meter, print_line
from kvaudit.audit.sampling.chat_calls import Answer, Readings, SentRequest, answer, wire
from kvaudit.audit.sampling.exchange import Exchange
from kvaudit.audit.sampling.model import load_chat
from kvaudit.core.endpoint import EndpointClient, Scope, Unanswered
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.files import read_json, write_json, write_whole
from kvaudit.core.network import start_all, wait_in_slices
from kvaudit.core.provenance import (
    ENDPOINT,
    ENDPOINT_REQUESTS,
    INPUTS,
    ROWS,
    TOOL_FORMS_USED,
    Digests,
    check_inputs,
    inputs_sha256,
)
from kvaudit.core.records import CacheUse, Item, Message, Record, Role, Serving, UngradedAnswer, fingerprint_rows
from kvaudit.core.spec import ENDPOINT_ARM, UNKNOWN, RunSpec, expand
from kvaudit.core.spec_evaluate import ProbeSpec
from kvaudit.core.text import at_length, is_text, length_label
from kvaudit.core.tool_forms.base import Tools
from kvaudit.core.tool_forms.text import TextForm, as_text
from kvaudit.suites.base import SUITES, CountTokens, Suite
from kvaudit.suites.sources import collect_file_hashes

CALLS = "calls.jsonl"
LEAST_ITEMS, LEAST_CLUSTERS = 300, 99  # 99 templates miss a failure of 3 % of them with probability 5 %
_CHARACTERS_PER_TOKEN = 4  # without a tokenizer
_MILLION = 1e6
_FAILURES_IN_A_ROW = 8  # then the probe stops
_GRACE_SECONDS = 3.0  # for calls under way when a probe is stopped, since they are paid for
_MOST_REASONS = 20  # in a seal
_LARGEST_SEED = 2**31 - 1  # that every endpoint accepts
_NUMBER = re.compile(r"(?<!status )\b\w*\d[\w.]*")  # also the ids of requests, most of which contain digits
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
    """The items of a suite at one length; the records of their answers are one file."""

    suite: Suite
    context_tokens: int
    items: tuple[Item, ...]

    @property
    def name(self) -> str:
        """The name of the file of records, without its ending."""
        return f"endpoint--{self.suite.name.replace(':', '=')}--{self.context_tokens}"


@dataclass(frozen=True)
class Plan:
    """Everything that a probe asks (one round of fixed questions to an endpoint), items of short contexts first.

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
        """What two probes must share to be compared, by name: hashes of the items and sampling settings."""
        grid = self.spec.evaluate
        items = {
            f"items of {unit.suite.name} at {unit.context_tokens}": _items_sha256(unit.items) for unit in self.units
        }
        decoding = {
            f"decoding of {unit.suite.name}": f"temperature {grid.temperature:g}, top_p {grid.top_p:g}, "
            f"{grid.samples_of(unit.suite.name)} answers of at most {unit.suite.max_new_tokens} tokens"
            for unit in self.units
        }
        return {**items, **decoding}

    def lines(self) -> Iterator[str]:
        """Yield lines on the plan: items of each suite, requests, tokens, cost, and remarks on its size."""
        requests, read, written = (sum(numbers) for numbers in zip(*map(self._size, self.units), strict=True))
        turns = " at most" if any(unit.suite.max_turns > 1 for unit in self.units) else ""
        for unit in self.units:
            samples = self.spec.evaluate.samples_of(unit.suite.name)
            yield f"{unit.suite.name} {at_length(unit.context_tokens)}: {len(unit.items)} items, {samples} answers each"
        yield f"requests: {requests}{turns}, of about {read:,} tokens to read and at most {written:,} to write"
        yield f"tokens are {self.counted}"
        price = self.probe.price
        if price is not None:
            cost = (read * price.input + written * price.output) / _MILLION
            yield f"cost: at most about {cost:,.2f} at the plan's prices"
        yield from self._remarks()

    def tokens(self, item: Item) -> int:
        """Return the number of tokens in an item's first prompt, without those that a chat template adds."""
        return sum(self.count(message.content) for message in as_text(item.messages, item.tools))

    def _size(self, unit: ProbeUnit) -> tuple[int, int, int]:
        """Return the most requests, tokens to read and tokens to write that a unit (suite and length) can need."""
        turns, limit = unit.suite.max_turns, unit.suite.max_new_tokens
        samples = self.spec.evaluate.samples_of(unit.suite.name)
        prompts = sum(self.tokens(item) for item in unit.items)
        # turn t reads the t - 1 answers before it: 0 + 1 + ... of them in all
        earlier_answers = limit * turns * (turns - 1) // 2
        conversations = len(unit.items) * samples
        read = samples * prompts * turns + conversations * earlier_answers
        return conversations * turns, read, conversations * turns * limit

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
    """Return the plan with all its items; raise SpecError or DataError for a suite that no endpoint can be asked."""
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
    """Return the function that counts the tokens of a text, and a description of how it counts."""
    name = _probe_section(spec).tokenizer
    if name is None:
        how = f"estimated, one for {_CHARACTERS_PER_TOKEN} characters; probe.tokenizer would count them"
        return estimate_tokens, how
    return load_chat(expand("probe.tokenizer", name)).count_tokens, f"counted by the tokenizer {name}"


def estimate_tokens(text: str) -> int:
    """Return a rough number of tokens in a text, from its number of characters."""
    return -(-len(text) // _CHARACTERS_PER_TOKEN)  # rounded up


def _probe_section(spec: RunSpec) -> ProbeSpec:
    if spec.probe is None:
        raise SpecError("the plan has no probe section; an empty one will do (probe: {})")
    return spec.probe


def _items_sha256(items: Iterable[Item]) -> str:
    rows = [[i.item_id, i.cluster_id, fingerprint_rows(i.messages, i.tools)] for i in items]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


# its calls


def request_body(plan: Plan, suite: Suite, transcript: Sequence[Message], seed: int) -> dict[str, Any]:
    """Return the body of the next request of a conversation."""
    probe, grid = plan.probe, plan.spec.evaluate
    body = {
        "model": plan.spec.model_path,
        "messages": wire(transcript, probe.tool_role),
        "temperature": grid.temperature,
        probe.limit: suite.max_new_tokens,
    }
    body |= {"top_p": grid.top_p} if grid.top_p < 1 else {}
    body |= {"seed": seed} if probe.seeded else {}
    return body | ({"stop": list(suite.until)} if suite.until else {})


def call_key(body: Mapping[str, Any], sample: int) -> str:
    """Return the sha256 of a request and ``sample`` (the number of its repetition), by which its answer is stored."""
    # endpoints have two names for the limit of tokens
    named = {("limit" if key.startswith("max_") else key): value for key, value in body.items()}
    return hashlib.sha256(json.dumps([named, sample], sort_keys=True).encode()).hexdigest()


class Calls:
    """The answers that a probe has paid for, by the ``call_key`` of their request, kept in ``calls.jsonl``.

    Safe between threads.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        raw = path.read_bytes() if path.exists() else b""
        self._ends_in_part = bool(raw) and not raw.endswith(b"\n")  # a killed process left half a line
        self._answers = dict(_stored_answers(raw))
        self.model = next((stored.model for stored in self._answers.values() if stored.model), "")  # of the first

    def find(self, key: str) -> Answer | None:
        """Return the stored answer to the request with this ``call_key``, or None."""
        return self._answers.get(key)

    def keep(self, key: str, result: Answer | Unanswered) -> None:
        """Store an answer, or the reason why there is none, under the ``call_key`` of its request."""
        fields = {"failed": str(result)} if isinstance(result, Unanswered) else asdict(result)
        with self._lock:
            if isinstance(result, Answer):
                self._answers[key] = result
            self._append(json.dumps({"call": key, **fields}, ensure_ascii=False))

    def _append(self, line: str) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            # a whole line in one write, so that lines of two processes do not mix
            os.write(descriptor, ("\n" * self._ends_in_part + line + "\n").encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._ends_in_part = False


def _stored_answers(raw: bytes) -> Iterator[tuple[str, Answer]]:
    """Yield (``call_key``, answer) of each call in calls.jsonl; skip failures and damaged lines (asked again)."""
    for line in raw.splitlines():
        try:
            row = json.loads(line)
            key = row.pop("call")
            stored = Answer(**row)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        if isinstance(key, str) and _is_valid(stored):
            yield key, stored


def _is_valid(stored: Answer) -> bool:
    words = (stored.text, stored.model, stored.said_in, "" if stored.thought is None else stored.thought)
    has_texts = all(isinstance(text, str) and is_text(text) for text in words)
    has_counts = all(n is None or (type(n) is int and n >= 0) for n in (stored.prompt_tokens, stored.new_tokens))
    has_time = isinstance(stored.seconds, float) and math.isfinite(stored.seconds)
    return has_texts and has_counts and has_time and stored.finish in ("stop", "length")


# its failures


@dataclass(frozen=True)
class Failure:
    """A reason for which ``count`` conversations are unscored: ``why``, or one of ``alike`` similar reasons.

    Similar reasons differ from ``why`` only in numbers. A ``lasting`` failure would occur again.
    """

    why: str
    count: int
    alike: int
    lasting: bool

    @property
    def line(self) -> str:
        """A line about the failure: the number of conversations, the reason, and whether --resume can help."""
        others = f" ({self.alike} more reasons differ in their numbers alone)" if self.alike else ""
        remedy = "asked again it would say the same" if self.lasting else "--resume asks them again"
        return f"unscored: {self.count} conversations, {self.why}{others}; {remedy}"


def group_failures(failed: Counter[str], lasting: Set[str]) -> list[Failure]:
    """Return failures, most frequent first; reasons that differ only in numbers are merged under the commonest one.

    ``failed`` counts conversations by reason, ``lasting`` holds the reasons that would occur again.
    """
    kinds: dict[tuple[str, bool], list[str]] = {}
    for why, _ in failed.most_common():
        kinds.setdefault((_NUMBER.sub("#", why), why in lasting), []).append(why)
    failures = [
        Failure(reasons[0], sum(failed[why] for why in reasons), len(reasons) - 1, is_lasting)
        for (_, is_lasting), reasons in kinds.items()
    ]
    return sorted(failures, key=lambda failure: -failure.count)


# its work


@dataclass(frozen=True)
class _Conversation:
    sample: int
    exchange: Exchange
    answers: tuple[Answer, ...]


class Probe:
    """One process's part in asking an endpoint all items of a plan and storing the graded answers.

    Raises RunError if the probe's folder began with another address, items or public rows.
    """

    def __init__(self, run: RunFolder, plan: Plan, base_url: str, client: EndpointClient, console: Console) -> None:
        self._run, self._plan, self._url, self._client, self._console = run, plan, base_url, client, console
        self._spec, self._section = plan.spec, plan.probe
        check_inputs(ROWS, run.keep(INPUTS, ROWS, dict(plan.rows)), plan.rows)
        self._check_unchanged(plan.asked)
        run.note(
            suite_kinds={name: SUITES.get(name).kind for name in plan.spec.evaluate.suites},
            suite_versions={name: SUITES.get(name).version for name in plan.spec.evaluate.suites},
        )
        tools = Counter(unit.suite.name for unit in plan.units for item in unit.items if item.tools)
        if tools:
            run.note(**{TOOL_FORMS_USED: {suite: {TextForm.name: count} for suite, count in tools.items()}})
        self._inputs = inputs_sha256(run.provenance()[INPUTS])
        self._lock, self._failures_in_a_row, self._is_stopping = threading.Lock(), 0, False
        self._tried_units = set[str]()
        self._models = Counter[str]()
        self._readings, self._lasting = Readings(), set[str]()

    def work(self) -> list[Failure]:
        """Ask everything that is not answered yet; return why conversations are unscored, most frequent first."""
        units = self._plan.units
        with Meter(self._console, "probe", sum(map(self._rows, units)), self._done_rows()) as self._meter:
            work_on_units(
                units,
                is_done=self._is_done,
                lock=lambda unit: self._run.records / f"{unit.name}.lock",
                work=self._answer_unit,
                on_done=lambda _: None,
                on_wait=partial(print_line, self._console),
            )
        if self._models:
            self._run.note(**{ENDPOINT: {"models": ", ".join(sorted(self._models)[:_MOST_REASONS])}})
        self._run.note(finished=utc_now())
        failed, lasting = Counter[str](), set[str]()
        for unit in units:
            seal = read_json(self._seal(unit))
            failed.update(seal.get("failed", {}))
            lasting.update(seal.get("lasting", []))
        return group_failures(failed, lasting)

    def _check_unchanged(self, asked: dict[str, str]) -> None:
        """Store the hashes of what is ``asked``, and the address; raise RunError if the run began with others."""
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
        return unit.name in self._tried_units or not read_json(self._seal(unit)).get("failed")

    def _rows(self, unit: ProbeUnit) -> int:
        return len(unit.items) * self._spec.evaluate.samples_of(unit.suite.name)

    def _done_rows(self) -> int:
        return sum(self._rows(unit) for unit in self._plan.units if self._is_done(unit))

    def _answer_unit(self, unit: ProbeUnit, claim: Claim) -> None:
        """Hold all conversations of a unit, then write their records and the seal that marks the file as finished."""
        self._rows_before, self._new_rows = self._done_rows(), 0
        self._calls = Calls(self._run.path / CALLS)  # read anew: another process may have asked since
        conversations = self._hold_conversations(unit)
        claim.check()
        lines = "".join(self._record(unit, held).to_json() + "\n" for held in conversations).encode()
        self._seal(unit).unlink(missing_ok=True)  # an earlier seal must never stand beside new records
        write_whole(self._run.records / f"{unit.name}.jsonl", lines)
        self._tried_units.add(unit.name)
        failed = Counter(held.exchange.unanswered for held in conversations if held.exchange.unanswered)
        reasons = dict(failed.most_common(_MOST_REASONS))
        seal = {"records": len(conversations), "sha256": hashlib.sha256(lines).hexdigest(), "checkpoint": UNKNOWN}
        lasting = sorted(self._lasting & reasons.keys())
        write_json(self._seal(unit), {**seal, "inputs": self._inputs, "failed": reasons, "lasting": lasting})

    def _hold_conversations(self, unit: ProbeUnit) -> list[_Conversation]:
        samples = range(self._spec.evaluate.samples_of(unit.suite.name))

        def hold_all(item: Item) -> list[_Conversation]:
            # one after the other: the token counts of the first answer show how to read those of the next
            return [self._hold_conversation(unit, item, sample) for sample in samples]

        futures = start_all(hold_all, unit.items, self._section.at_once)
        try:
            conversations = list[_Conversation]()
            for future in futures:
                wait_in_slices([future])
                conversations += future.result()
            return conversations
        except BaseException:
            self._is_stopping = True  # conversations under way end with the call that they wait for
            for future in futures:
                future.cancel()
            wait([future for future in futures if not future.cancelled()], _GRACE_SECONDS)
            raise

    def _hold_conversation(self, unit: ProbeUnit, item: Item, sample: int) -> _Conversation:
        """Hold one conversation until it ends or a call fails; return it with its answers."""
        thinks = self._spec.evaluate.think is not None
        # the endpoint's chat template is unknown: the answer shows whether the template began a thought for it
        exchange = Exchange(unit.suite, item, thinks=thinks, opens_thought=None)
        answers = list[Answer]()
        while exchange.open:
            try:
                seed = row_seed(self._spec.evaluate.seed, item, sample)
                reply = self._next_answer(unit, exchange.transcript, item.tools, seed, sample)
            except Unanswered as error:
                exchange.abort(str(error))
                if error.scope is not Scope.TRY:
                    self._lasting.add(exchange.unanswered)
                break
            answers.append(reply)
            exchange.add(exchange.step(reply.text, reply.finish, reply.thought))
        if not answers:
            exchange.add((Message(Role.ASSISTANT, ""),))  # a transcript always holds an answer, even an empty one
        with self._lock:
            self._new_rows += 1
            self._models.update(reply.model for reply in answers if reply.model)
            label = f"{unit.suite.name} {length_label(unit.context_tokens)}"
            self._meter.at(self._rows_before + self._new_rows, label)
        return _Conversation(sample, exchange, tuple(answers))

    def _next_answer(
        self, unit: ProbeUnit, transcript: Sequence[Message], tools: Tools, seed: int, sample: int
    ) -> Answer:
        """Return the answer to the next call of a conversation, stored or else asked for; raise Unanswered if none."""
        # whether an endpoint takes tools is unknown, so they are part of the prompt as text
        body = request_body(self._plan, unit.suite, as_text(transcript, tools), seed & _LARGEST_SEED)
        key, rows = call_key(body, sample), body["messages"]
        stored = self._calls.find(key)
        if stored is not None:
            if stored.prompt_tokens is not None:
                self._readings.note(rows)
            return stored
        if self._is_stopping:
            raise Unanswered("it was not asked")
        tokens = sum(self._plan.count(row["content"]) for row in rows)
        sent = SentRequest(rows, tokens, self._section.tokenizer is not None, unit.suite.max_new_tokens)
        started = time.perf_counter()
        try:
            completion = self._client.ask(body)
            reply = answer(completion, sent, time.perf_counter() - started, self._readings)
            self._check_model(reply.model)
        except Unanswered as error:
            self._calls.keep(key, error)
            self._count_failure(error)
            raise
        self._calls.keep(key, reply)
        self._failures_in_a_row = 0
        return reply

    def _check_model(self, name: str) -> None:
        """Raise Unanswered if ``name`` is not the model of the first answer; a gateway may switch between models."""
        with self._lock:
            first = self._calls.model = self._calls.model or name
        if name != first:
            raise Unanswered(f"an answer of model {name!r}, the first was of model {first!r}")

    def _count_failure(self, why: Unanswered) -> None:
        """Count a failed call; raise RunError if all requests would fail, or too many calls have failed in a row."""
        with self._lock:
            self._failures_in_a_row += 1
            if why.scope is not Scope.ENDPOINT and self._failures_in_a_row < _FAILURES_IN_A_ROW:
                return
        key = f"key from {self._section.key}" if self._section.key else "no key"
        symptom, remedy = _REMEDY[why.scope]
        raise RunError(
            f"probe: {self._url} {symptom} ({why}; model {self._spec.model}, {key}); answers so far are kept: {remedy}"
        )

    def _record(self, unit: ProbeUnit, held: _Conversation) -> Record:
        exchange, item = held.exchange, held.exchange.item
        grade = exchange.grade()
        read = held.answers[0].prompt_tokens if held.answers else None
        new_tokens = sum(
            self._plan.count(reply.text) if reply.new_tokens is None else reply.new_tokens for reply in held.answers
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
        ungraded = UngradedAnswer(
            sample_index=held.sample,
            finish_reason=exchange.finish,
            prompt_tokens=self._plan.tokens(item) if read is None else read,
            new_tokens=new_tokens,
            seconds=sum(reply.seconds for reply in held.answers),
            transcript=exchange.transcript,
            unanswered=exchange.unanswered,
            said_in=held.answers[-1].said_in if held.answers else "",
            tool_form=TextForm.name if item.tools else "",
        )
        # the endpoint does not show its cache
        cache = CacheUse(retention=0.0, kv_bytes_peak=0, kv_bytes_dense=0)
        return Record.of(serving, item, grade, ungraded, cache)
