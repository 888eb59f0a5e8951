"""The evaluation grid: checkpoint x serving policy x suite x context length, a file of records for each (a unit)."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from kvaudit.audit.cache.shared import SharedPrefill
from kvaudit.audit.engines import Condition, ServingMode, parse_serving_mode
from kvaudit.audit.engines.conversation import EngineAnswer, converse
from kvaudit.audit.policies import Policy
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.runs.batches import batched, engine_batches, whole_templates
from kvaudit.audit.runs.engine_slot import EngineSlot
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.inspect_units import (
    LOGS,
    SAMPLES_AT_ONCE,
    InspectUnit,
    inspect_batches,
    play_unit,
    session_answers,
)
from kvaudit.audit.runs.units import (
    PILOT_FOLDER,
    RecordFile,
    Row,
    Unit,
    UnitFiles,
    answered_rows,
    kept_rows,
    sealed_records,
)
from kvaudit.audit.sampling.chat import Chat, ChatTokens
from kvaudit.audit.sampling.conversations import GradedRow, check_fits, item_prompt, play
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.sampling.packing import pack_weights
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.audit.serving.batched import BatchedModel, cache_answers
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.provenance import (
    PROMPTS,
    TOOL_FORMS_USED,
    TOOL_SYSTEM_MOVED,
    UNSTABLE_NAMES,
    merge_prompt_digests,
    prompt_unit,
    table_of,
)
from kvaudit.core.records import ONE_CACHE, CacheUse, Item, Record, Serving, UngradedAnswer, fingerprint_rows
from kvaudit.core.spans import span_error
from kvaudit.core.spec import RunSpec
from kvaudit.core.tool_forms.text import list_tools
from kvaudit.reports.records.load import SAME_ORDER, SHUFFLED
from kvaudit.suites.base import SUITES, CountTokens, Split, Suite
from kvaudit.suites.inspect_task import Inspect
from kvaudit.suites.templates import Templated

RowsDone = Callable[[Unit, int, int], None]  # unit, rows done, rows in total
Batches = dict[tuple[str, int], list[list[Item]]]  # by suite and context length
_MOST_CLUSTERS = 20_000


def grid(spec: RunSpec) -> list[Unit]:
    """Return every unit of a run; those of one checkpoint are adjacent."""
    parsed = dict(zip(spec.evaluate.policies, served_policies(spec), strict=True))
    units = []
    for arm, seed in spec.arms:
        policies = [parsed[text] for text in spec.served(arm)]
        suites = [(suite, context) for suite in spec.evaluate.suites for context in spec.evaluate.contexts_of(suite)]
        units += [
            Unit(arm, seed, policy, *pair) for pair in suites for policy in policies if isinstance(policy, Policy)
        ]
        # an engine takes time to start, so the units of a condition are adjacent
        conditions = [policy for policy in policies if isinstance(policy, Condition)]
        units += [Unit(arm, seed, condition, *pair) for condition in conditions for pair in suites]
    return units


def served_policies(spec: RunSpec) -> list[ServingMode]:
    """Return the policies and the conditions (engines with settings) of the evaluation, in the order of the spec."""
    return [parse_serving_mode(text) for text in spec.evaluate.policies]


def cache_policies(spec: RunSpec) -> list[Policy]:
    """Return the policies of the evaluation that kvaudit's own cache serves, without those of engines."""
    return [policy for policy in served_policies(spec) if isinstance(policy, Policy)]


def selecting_policies(spec: RunSpec) -> list[str]:
    """Return the names of the policies that keep every cache entry but let each query read only some of them."""
    policies = cache_policies(spec)
    return [p.canonical for p in policies if any(member.selects for drawn in p.draws for member in drawn.members)]


def suite_as_asked(spec: RunSpec, name: str) -> Suite:
    """Return a suite with the spec's settings: most tokens per answer, and where a prompt holds the decisive texts."""
    suite, settings, thinking = SUITES.get(name)(), spec.evaluate.suites[name], spec.evaluate.think
    suite.max_new_tokens = settings.max_new_tokens or suite.max_new_tokens
    suite.max_new_tokens += thinking.budget if thinking else 0
    suite.placements = settings.placement or suite.placements
    return suite


class Evaluator:
    """Answers units with one model and writes their records.

    ``batches`` are the items made so far, shared by all policies and by all checkpoints, which have the same tokenizer.
    ``inputs`` is the hash of the run's inputs (``kvaudit.core.provenance``), which is stored with every finished file.
    ``slot`` starts the engines of units that an engine serves.
    """

    def __init__(
        self,
        model: LoadedModel,
        spec: RunSpec,
        batches: Batches | None = None,
        inputs: str | None = None,
        slot: EngineSlot | None = None,
    ) -> None:
        self._model, self._spec, self._inputs, self._slot = model, spec, inputs, slot
        self._made_batches: Batches = {} if batches is None else batches

    def prepare(self) -> None:
        """Make every item now, so that an error such as missing data shows before the run begins."""
        for suite in self._spec.evaluate.suites:
            for context in self._spec.evaluate.contexts_of(suite):
                self._batches(suite_as_asked(self._spec, suite), context)

    def answer_units(
        self,
        units: Sequence[Unit],
        run: RunFolder,
        progress: RowsDone,
        keep: Callable[[Unit], bool] | None = None,
        *,
        folder: Path | None = None,
        rows: Mapping[str, range] | None = None,
    ) -> None:
        """Write the missing records of units that differ only in their policy, then seal (finish) their files.

        ``folder`` holds the records, by default the folder of the run's grid. In a run in rounds, ``rows`` has the
        range of rows to ask of each suite. In the pilot's folder a unit has the pilot's items only. Elsewhere the
        answers of the pilot are copied, except into the folders of the floor, which repeats requests.

        A batch is answered for one unit after another, so that its prompts are prefilled once (``SharedPrefill``).
        ``keep`` is called before every batch of every unit; a unit for which it returns False is skipped. Raises
        DataError if a file holds records of another checkpoint.
        """
        suite, folder = suite_as_asked(self._spec, units[0].suite), folder or run.records
        batches = self._unit_batches(suite, units[0], folder.name, rows)
        existing = {unit: self._existing_rows(unit, run, folder) for unit in units}
        samples = range(self._spec.evaluate.samples_of(suite.name))
        expected = [[(item.item_id, sample) for item in batch for sample in samples] for batch in batches]

        def note(unit: Unit, file: RecordFile) -> None:
            progress(unit, file.rows, sum(map(len, expected)))
            if file.batches == len(batches):
                file.seal(self._inputs)

        with ExitStack() as stack:
            files = dict[Unit, RecordFile]()
            for unit in units:
                unit_files, identity = UnitFiles.of(folder, unit), unit.identity(self._model.sha256)
                files[unit] = stack.enter_context(RecordFile(unit_files, expected, identity))
            for unit, file in files.items():
                note(unit, file)
            if rows is not None or folder == run.records:
                self._note_prompts(run, files, batches, suite, rows)
            for number, batch in enumerate(batches):
                # a resumed unit waits until the others have reached its batch
                due_units = [unit for unit, file in files.items() if file.batches == number]
                # the pilot answers all samples of an item or none, so the first one shows which
                to_ask = {
                    unit: [item for item in batch if (item.item_id, 0) not in existing[unit]] for unit in due_units
                }
                prefills: dict[tuple[str, ...], SharedPrefill] = {}  # by the ids of the items that are asked
                prompts: dict[str, ChatTokens] = {}
                for unit in due_units:
                    if keep is None or keep(unit):
                        key = tuple(item.item_id for item in to_ask[unit])
                        policies = [other.policy for other in due_units if to_ask[other] == to_ask[unit]]
                        shared = prefills.setdefault(key, SharedPrefill([p for p in policies if isinstance(p, Policy)]))
                        logs = run.path / LOGS / folder.name / unit.name
                        records = self._answers(unit, suite, to_ask[unit], prompts, shared, logs)
                        answered = {(record.item_id, record.sample_index): record for record in records}
                        files[unit].append([answered.get(row) or existing[unit][row] for row in expected[number]])
                        note(unit, files[unit])

    def answer_items(self, policy: Policy, suite: Suite, items: Sequence[Item]) -> Iterator[list[GradedRow]]:
        """Yield the graded answers of each batch of items, sampled under ``policy`` as in a run; write nothing."""
        for batch in self._make_batches(suite, items):
            yield self._play_batch(Sampler(self._packed_model, policy), suite, batch)

    def _unit_batches(
        self, suite: Suite, unit: Unit, folder: str, rows: Mapping[str, range] | None = None
    ) -> list[list[Item]]:
        """Return a unit's items in batches, none empty; in a run in rounds, ``rows`` has each suite's range to ask.

        ``folder`` names the folder of the records: pilot and floor have fewer items, and one floor another order.
        """
        context = unit.context_tokens
        if rows is not None:
            items = self._items(suite, context)[rows[suite.name].start : rows[suite.name].stop]
            if isinstance(unit.policy, Policy):
                return self._make_batches(suite, items)
            size = 2 * self._spec.engine(unit.policy.canonical).at_once
            return [items[start : start + size] for start in range(0, len(items), size)]
        batches = self._batches(suite, context)
        if not isinstance(unit.policy, Policy):
            return engine_batches(self._spec, suite, self._items(suite, context), unit, folder)
        if folder != PILOT_FOLDER:
            return batches
        pilot_items = whole_templates(suite, self._items(suite, context), self._spec.evaluate.pilot_size)
        names = {item.item_id for item in pilot_items}
        pilot_batches = [[item for item in batch if item.item_id in names] for batch in batches]
        return [batch for batch in pilot_batches if batch]

    def _existing_rows(self, unit: Unit, run: RunFolder, folder: Path) -> dict[Row, Record]:
        """Return, by row, the pilot's answers, and those kept while a unit's refused requests are asked again."""
        if folder.name in (PILOT_FOLDER, SAME_ORDER, SHUFFLED):
            return {}
        files = UnitFiles.of(run.path / PILOT_FOLDER, unit)
        piloted = answered_rows(sealed_records(files, unit.identity(self._model.sha256)))
        return {**piloted, **kept_rows(UnitFiles.of(folder, unit))}

    def _note_prompts(
        self,
        run: RunFolder,
        files: Mapping[Unit, RecordFile],
        batches: Sequence[Sequence[Item]],
        suite: Suite,
        rows: Mapping[str, range] | None,
    ) -> None:
        """Store the hash of the prompts of every unfinished unit.

        If a unit has answers already and an earlier process stored another hash, both are kept. In a run in rounds, the
        hash covers the rows of all rounds so far and replaces the earlier one.
        """
        unfinished = {unit: file for unit, file in files.items() if rows or file.batches < len(batches)}
        if not unfinished:
            return
        if rows is not None:
            items = self._items(suite, next(iter(unfinished)).context_tokens)
            batches = [items[: rows[suite.name].stop]]
        sha256, stored = prompts_sha256(self._model.chat, batches), table_of(run.provenance(), PROMPTS)
        hashes = {}
        for unit, file in unfinished.items():
            name = prompt_unit(unit.arm, unit.seed, unit.suite, unit.context_tokens, unit.policy.canonical)
            hashes[name] = merge_prompt_digests(stored.get(name) if file.rows and not rows else None, sha256)
        names = ", ".join(self._model.chat.unstable_names)
        forms = {} if suite.played_by else tool_forms_of(self._model.chat, batches)
        used: dict[str, Any] = {TOOL_FORMS_USED: {suite.name: forms}} if forms else {}
        if forms and self._model.chat.moves_system_with_tools:
            used[TOOL_SYSTEM_MOVED] = True
        run.note(**{PROMPTS: hashes}, **used, **({UNSTABLE_NAMES: names} if names else {}))

    def _answers(
        self,
        unit: Unit,
        suite: Suite,
        items: Sequence[Item],
        prompt_cache: dict[str, ChatTokens],
        shared: SharedPrefill,
        logs: Path,
    ) -> list[Record]:
        """Let a unit's policy or engine answer a batch of items; return the graded records.

        ``prompt_cache`` has prompts by item id and is filled here. ``shared`` keeps prefilled beginnings of prompts for
        other policies. ``logs`` is the folder for the logs of Inspect.
        """
        if isinstance(suite, Inspect):
            return self._play_in_inspect(unit, suite, items, logs) if items else []
        for item in items:
            if item.item_id not in prompt_cache:
                prompt_cache[item.item_id] = item_prompt(self._model.chat, item)
        prompts = [prompt_cache[item.item_id] for item in items]
        rows: Sequence[GradedRow | EngineAnswer] = ()
        if isinstance(unit.policy, Policy):
            rows = self._play_batch(Sampler(self._packed_model, unit.policy, shared), suite, items, prompts)
        elif items:
            assert self._slot is not None, "an engine's units need a slot"
            decoding, seeds, samples, thinks = self._decoding(suite, items)
            session = self._slot.switch_to(unit.policy, self._model)
            rows = converse(session, self._model, suite, items, prompts, decoding, seeds, samples, thinks=thinks)
        return [self._record(unit, suite, row) for row in rows]

    def _play_in_inspect(self, unit: Unit, suite: Inspect, items: Sequence[Item], logs: Path) -> list[Record]:
        """Let Inspect run items with the unit's policy or engine as its model; return the records."""
        section, model, at_once = self._spec.evaluate, self._packed_model, SAMPLES_AT_ONCE
        if isinstance(unit.policy, Policy):
            answer = cache_answers(model, unit.policy, section.batch_tokens)
        else:
            assert self._slot is not None, "an engine's units need a slot"
            answer = session_answers(self._slot.switch_to(unit.policy, self._model), model)
            at_once = self._spec.engine(unit.policy.canonical).at_once
        decoding = {"temperature": section.temperature, "top_p": section.top_p, "max_tokens": suite.max_new_tokens}
        seed_of = partial(row_seed, section.seed)
        samples = section.samples_of(suite.name)
        inspect_unit = InspectUnit(suite, logs, self._serving(unit, suite), samples, decoding, seed_of)
        with closing(BatchedModel(model.chat, model.max_positions, answer, at_once)) as batched:
            return play_unit(inspect_unit, items, batched)

    def _decoding(self, suite: Suite, items: Sequence[Item]) -> tuple[Decoding, list[int], int, bool]:
        """Return (decoding settings, a seed per answer, number of answers per item, whether the model thinks first)."""
        section, samples = self._spec.evaluate, self._spec.evaluate.samples_of(suite.name)
        decoding = Decoding(suite.max_new_tokens, temperature=section.temperature, top_p=section.top_p)
        # the samples of an item are adjacent
        seeds = [row_seed(section.seed, item, sample) for item in items for sample in range(samples)]
        return decoding, seeds, samples, section.think is not None

    @cached_property
    def _packed_model(self) -> LoadedModel:
        return pack_weights(self._model)

    def _play_batch(
        self, sampler: Sampler, suite: Suite, batch: Sequence[Item], prompts: Sequence[ChatTokens] | None = None
    ) -> list[GradedRow]:
        if not batch:
            return []
        decoding, seeds, samples, thinks = self._decoding(suite, batch)
        pairs = [(suite, item) for item in batch]
        return play(sampler, pairs, decoding, seeds, group=samples, thinks=thinks, prompts=prompts)

    def _items(self, suite: Suite, context: int) -> list[Item]:
        return evaluation_items(self._spec, suite, context, self._model.chat.count_tokens)

    def _batches(self, suite: Suite, context: int) -> list[list[Item]]:
        key = (suite.name, context)
        if key not in self._made_batches:
            self._made_batches[key] = self._make_batches(suite, self._items(suite, context))
        return self._made_batches[key]

    def _make_batches(self, suite: Suite, items: Sequence[Item]) -> list[list[Item]]:
        if suite.played_by:  # the harness decides during the run what it asks, so lengths are unknown
            return inspect_batches(items)
        lengths = {}
        for item in items:
            prompt = prompt_token_count(self._model, item)
            check_spans(suite, item)
            check_fits(self._model, suite, item, prompt)
            rows = max(1, len(suite.options(item)))  # each option is a row after the prompt
            lengths[item.item_id] = rows * (prompt + suite.answer_tokens)  # padded tokens at most
        if len(lengths) < len(items):
            raise DataError(f"suite {suite.name} gave two items the same item_id; its records could not be paired")
        section = self._spec.evaluate
        return batched(items, lengths, section.batch_tokens // section.samples_of(suite.name))

    def _serving(self, unit: Unit, suite: Suite) -> Serving:
        return Serving(
            run=self._spec.name,
            checkpoint=self._model.sha256,
            arm=unit.arm,
            train_seed=unit.seed,
            policy=unit.policy.canonical,
            policy_hash=unit.policy.hash,
            suite=suite.name,
            suite_version=suite.version,
            context_tokens=unit.context_tokens,
        )

    def _record(self, unit: Unit, suite: Suite, row: GradedRow | EngineAnswer) -> Record:
        """Return the record of an answer; if an engine gave it, the record has no measurements of the cache."""
        serving = self._serving(unit, suite)
        if isinstance(row, EngineAnswer):
            return Record.of(serving, row.item, row.grade, row.answer, CacheUse())
        answer = UngradedAnswer(
            sample_index=row.sample_index,
            finish_reason=row.finish_reason,
            prompt_tokens=row.prompt_tokens,
            new_tokens=row.new_tokens,
            seconds=row.seconds,
            transcript=row.transcript,
            unanswered=row.unanswered,
            turns_read=ONE_CACHE if suite.max_turns > 1 else "",
        )
        use = CacheUse(
            retention=row.rollout.retention,
            survival=row.survival,
            kv_bytes_peak=row.rollout.kv_bytes_peak,
            kv_bytes_dense=row.rollout.kv_bytes_dense,
            kv_bytes_live=row.rollout.kv_bytes_live,
            spans=row.spans,
        )
        return Record.of(serving, row.item, row.grade, answer, use)


def prompts_sha256(chat: Chat, batches: Sequence[Sequence[Item]]) -> str:
    """Return the sha256 of all items' prompts as the chat template renders them, whatever the order of the items."""
    texts = sorted((item.item_id, _prompt_text(chat, item)) for batch in batches for item in batch)
    digest = hashlib.sha256()
    for name, text in texts:
        digest.update(json.dumps([name, text]).encode())
    return digest.hexdigest()


def _prompt_text(chat: Chat, item: Item) -> str:
    """Return an item's prompt; for an item that a harness runs, its first messages and tools as JSON."""
    if SUITES.get(item.suite).played_by:
        return json.dumps(fingerprint_rows(item.messages, item.tools))
    return chat.prompt_text(item.messages, item.tools)


def tool_forms_of(chat: Chat, batches: Sequence[Sequence[Item]]) -> dict[str, int]:
    """Return how many items offer tools in each tool form: {name of the form: items}."""
    forms = (chat.tool_form_of(item.messages, item.tools) for batch in batches for item in batch)
    return dict(sorted(Counter(filter(None, forms)).items()))


def evaluation_items(spec: RunSpec, suite: Suite, context: int, count: CountTokens) -> list[Item]:
    """Return the items of a suite at one length, the same for every policy and model.

    Until the pilot has fixed their number, ``auto`` and ``all`` mean the items of one round.
    """
    section = spec.evaluate
    number = section.suites[suite.name].items
    items = number if isinstance(number, int) else round_size(spec, suite, count)
    if spec.probe is not None and context:
        return _shortened_items(suite, items, section.seed, context, max(section.contexts_of(suite.name)), count)
    return make_items("evaluate", suite, "eval", items, section.seed, context, count)


def round_size(spec: RunSpec, suite: Suite, count: CountTokens) -> int:
    """Return how many items one round of a suite has: all public rows, or ``suite.twins`` items per cluster."""
    section = spec.evaluate
    if (rows := suite.rows("eval", section.seed)) is not None:
        return rows
    return count_clusters(suite, section.seed, min(section.contexts_of(suite.name)), count) * suite.twins


def count_clusters(suite: Suite, seed: int, context: int, count: CountTokens) -> int:
    """Return the number of clusters that a suite can make; raise SpecError for over 20,000."""
    # a suite of templates makes one item of each before any gets its next
    number = len(suite.pool("eval", seed)) + 1 if isinstance(suite, Templated) else 64
    while True:
        names = [item.cluster_id for item in make_items("evaluate", suite, "eval", number, seed, context, count)]
        seen = set[str]()
        for name in names:
            if name in seen:
                return len(seen)
            seen.add(name)
        if number > _MOST_CLUSTERS:
            raise SpecError(f"suite {suite.name} has more than {_MOST_CLUSTERS:,} clusters; give a number of items")
        number *= 4


def _shortened_items(
    suite: Suite, number: int, seed: int, context: int, longest: int, count: CountTokens
) -> list[Item]:
    """Return the items of the spec's longest length, with less filler text so that they fit ``context`` tokens.

    Ids and words stay the same. A suite adds filler until its ``count`` reaches ``longest``, so a count that is
    multiplied by longest/context gives the same item with less filler.
    """
    try:
        items = suite.items("eval", number, seed, longest, lambda text: -(-count(text) * longest // context))
    except SpecError as error:
        short = f"an item of {longest} tokens does not fit {context} without its filler; give more"
        raise SpecError(f"evaluate.suites {suite.name}: {short if context < longest else error}") from error
    return [replace(item, context_tokens=context) for item in items]


def make_items(
    section: str, suite: Suite, split: Split, number: int, seed: int, context: int, count: CountTokens
) -> list[Item]:
    """Return a suite's items; a SpecError that it raises gets the suite's name and the spec's ``section`` added."""
    try:
        return suite.items(split, number, seed, context, count)
    except SpecError as error:
        raise SpecError(f"{section}.suites {suite.name}: {error}") from error


def prompt_token_count(model: LoadedModel, item: Item) -> int:
    """Return the number of tokens in an item's prompt; raise SpecError, with the suite's name, if rendering fails."""
    try:
        return len(model.chat.prompt(item.messages, (), item.tools).ids)
    except SpecError as error:
        raise SpecError(f"suite {item.suite}: {error}") from None


def check_spans(suite: Suite, item: Item) -> None:
    """Raise SpecError if an item lacks the text of one of its spans (the parts that decide the answer)."""
    texts = [*(message.content for message in item.messages), *([list_tools(item.tools)] if item.tools else [])]
    problem = span_error(item.spans, texts, may_come_later=suite.max_turns > 1)
    if problem:
        raise SpecError(f"suite {suite.name} item {item.item_id} {problem}; fix the suite's spans")


def row_seed(seed: int, item: Item, sample: int) -> int:
    """Return the sampling seed of an answer, the same under all checkpoints and policies (common random numbers)."""
    return derive_seed("evaluate", seed, item.suite, item.item_id, sample)
