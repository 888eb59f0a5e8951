"""The grid: checkpoint x serving policy x suite x context length, one append-only file of records per unit."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvaudit.audit.cache.shared import SharedPrefill
from kvaudit.audit.engines import ENGINES, Condition, ServingMode, parse_serving_mode
from kvaudit.audit.engines.conversation import EngineAnswer, converse
from kvaudit.audit.policies import Policy
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.runs.engine_slot import EngineSlot
from kvaudit.audit.runs.floor import AGAIN, SHUFFLED, engine_batches, whole_templates
from kvaudit.audit.runs.folder import RunFolder
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
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.sampling.packing import pack_weights
from kvaudit.audit.sampling.sampler import Decoding, Sampler
from kvaudit.audit.training.adapters import check_adapter
from kvaudit.audit.training.rewards.base import parse_reward
from kvaudit.audit.training.sft import check_reward_on_gold, gold_rollout
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.provenance import (
    PROMPTS,
    TOOL_FORMS_USED,
    TOOL_SYSTEM_MOVED,
    UNSTEADY,
    both_prompts,
    table_of,
    unit_of_prompts,
)
from kvaudit.core.records import CacheUse, Item, Record, Serving, UngradedAnswer
from kvaudit.core.spans import fault
from kvaudit.core.spec import RunSpec
from kvaudit.core.spec_train import TrainSpec
from kvaudit.core.tool_forms.text import list_tools
from kvaudit.suites.base import SUITES, CountTokens, Split, Suite

RowsDone = Callable[[Unit, int, int], None]  # unit, rows done, rows in all
_MOST_CLUSTERS = 20_000  # that are counted


def grid(spec: RunSpec) -> list[Unit]:
    """Every unit of a run; those of one checkpoint stand together, so that each is loaded once."""
    part, parsed = spec.evaluate, dict(zip(spec.evaluate.policies, served(spec), strict=True))
    found = []
    for arm, seed in spec.arms:
        ways = [parsed[text] for text in spec.served(arm)]
        asked = [(suite, context) for suite in part.suites for context in part.contexts_of(suite)]
        found += [Unit(arm, seed, way, *one) for one in asked for way in ways if isinstance(way, Policy)]
        # an engine takes its time to start, so what is asked under one condition stands together
        found += [Unit(arm, seed, way, *one) for way in ways if isinstance(way, Condition) for one in asked]
    return found


def served(spec: RunSpec, arm: str | None = None) -> list[ServingMode]:
    """The ways of serving of the grid, in the order of the spec; those that an arm is served under."""
    return [parse_serving_mode(text) for text in (spec.evaluate.policies if arm is None else spec.served(arm))]


def served_by_us(spec: RunSpec, arm: str | None = None) -> list[Policy]:
    """``served`` without what an engine serves."""
    return [way for way in served(spec, arm) if isinstance(way, Policy)]


def selecting(spec: RunSpec) -> list[str]:
    """The policies of the grid that hold all and let a query read a part: no bytes tell whether they did."""
    ours = served_by_us(spec)
    return [way.canonical for way in ours if any(part.selects for drawn in way.draws for part in drawn.members)]


def asked_suite(spec: RunSpec, name: str) -> Suite:
    """The suite as the grid asks it: its answers, thoughts included, as long as the spec allows, its placements."""
    suite, part, thinking = SUITES.get(name)(), spec.evaluate.suites[name], spec.evaluate.think
    suite.max_new_tokens = part.max_new_tokens or suite.max_new_tokens
    suite.max_new_tokens += thinking.budget if thinking else 0
    suite.placements = part.placement or suite.placements
    return suite


def asked_in_training(section: TrainSpec) -> tuple[str, ...]:
    """The suites that training asks, validation's too."""
    return tuple(dict.fromkeys((*section.suites, *section.watched)))


def check_contexts(spec: RunSpec, model: LoadedModel) -> None:
    """Raise SpecError when a context length of the spec, with an answer, exceeds the model's positions."""
    grid = spec.evaluate
    asked = [("evaluate", suite, context) for suite in grid.suites for context in grid.contexts_of(suite)]
    if spec.train is not None:
        made = [suite for suite in asked_in_training(spec.train) if SUITES.get(suite).lengths != "none"]
        asked += [("train", suite, spec.train.context_tokens) for suite in made]
    for section, suite, context in asked:
        made_suite = SUITES.get(suite)() if section == "train" else asked_suite(spec, suite)
        needed = context + made_suite.max_new_tokens
        if needed > model.max_positions:
            raise SpecError(
                f"{section}.context_tokens {context} and an answer of suite {suite} need {needed} positions, "
                f"model {model.name!r} has {model.max_positions}; lower context_tokens"
            )


Batches = dict[tuple[str, int], list[list[Item]]]  # by suite and context length


class Evaluator:
    """Evaluates units of one model. Items are made once per suite and length and shared by all policies.

    ``known`` carries them from one model to the next of the same tokenizer, as all checkpoints of a run are. ``inputs``
    stands for what the run reads (``kvaudit.core.provenance``); seals carry it. ``slot`` holds the engine of units that
    one serves.
    """

    def __init__(
        self,
        model: LoadedModel,
        spec: RunSpec,
        known: Batches | None = None,
        inputs: str | None = None,
        slot: EngineSlot | None = None,
    ) -> None:
        self._model, self._spec, self._inputs, self._slot = model, spec, inputs, slot
        self._known: Batches = {} if known is None else known

    def prepare(self) -> None:
        """Make every item now; raises what would otherwise come up after hours: no data, no room in a context."""
        for suite in self._spec.evaluate.suites:
            for context in self._spec.evaluate.contexts_of(suite):
                self._batches(asked_suite(self._spec, suite), context)

    def items(self, suite: str, context: int) -> list[Item]:
        """What is asked of a suite at a length, batch by batch."""
        return [item for batch in self._batches(asked_suite(self._spec, suite), context) for item in batch]

    def _asked_batches(
        self, suite: Suite, unit: Unit, part: str, rows: Mapping[str, range] | None = None
    ) -> list[list[Item]]:
        """The batches of a unit whose records lie in this folder of a run, none of them empty; of ``rows`` alone."""
        context = unit.context_tokens
        if rows is not None:
            own = evaluation_items(self._spec, suite, context, self._model.chat.count_tokens)
            own = own[rows[suite.name].start : rows[suite.name].stop]
            if isinstance(unit.policy, Policy):
                return self._batched(suite, own)
            size = 2 * self._spec.engine(unit.policy.canonical).at_once
            return [own[start : start + size] for start in range(0, len(own), size)]
        batches = self._batches(suite, context)
        if not isinstance(unit.policy, Policy):
            asked = evaluation_items(self._spec, suite, context, self._model.chat.count_tokens)
            return engine_batches(self._spec, suite, asked, unit, part)
        if part != PILOT_FOLDER:
            return batches
        asked = evaluation_items(self._spec, suite, context, self._model.chat.count_tokens)
        chosen = {item.item_id for item in whole_templates(suite, asked, self._spec.evaluate.piloted)}
        parts = [[item for item in batch if item.item_id in chosen] for batch in batches]
        return [part for part in parts if part]

    def run_together(
        self,
        units: Sequence[Unit],
        run: RunFolder,
        progress: RowsDone,
        keeps: Callable[[Unit], bool] | None = None,
        *,
        folder: Path | None = None,
        rows: Mapping[str, range] | None = None,
    ) -> None:
        """Write what is missing of the records of units that differ in their policy alone, then seal them.

        They lie in ``folder``, by default that of the run's own grid; ``rows``, by suite, are those of a round. In the
        folder of the pilot only its items are played; what a sealed file there answers is taken from it everywhere else
        but in the floor. Those of an engine come by themselves.

        They are played batch by batch, one after the other, so that a batch is prefilled once (``SharedPrefill``).
        ``keeps`` is asked before every batch of every unit; one that it refuses is left as it is. Raises DataError when
        a file holds records of another checkpoint.
        """
        suite = asked_suite(self._spec, units[0].suite)
        part = (folder or run.records).name
        batches = self._asked_batches(suite, units[0], part, rows)
        anew = part in (PILOT_FOLDER, AGAIN, SHUFFLED)  # whatever the pilot has answered
        place = folder or run.records
        known = {unit: {} if anew else {**self._answered(unit, run), **self._kept(unit, place)} for unit in units}
        samples = range(self._spec.evaluate.samples_of(suite.name))
        wanted = [[(item.item_id, sample) for item in batch for sample in samples] for batch in batches]

        def note(unit: Unit, file: RecordFile) -> None:
            progress(unit, file.rows, sum(map(len, wanted)))
            if file.batches == len(batches):
                file.seal(self._inputs)

        with ExitStack() as stack:
            files = dict[Unit, RecordFile]()
            for unit in units:
                own, identity = UnitFiles.of(place, unit), unit.identity(self._model.sha256)
                files[unit] = stack.enter_context(RecordFile(own, wanted, identity))
            for unit, file in files.items():
                note(unit, file)
            if rows is not None or (folder or run.records) == run.records:
                self._note_prompts(run, files, batches, suite, rows)
            for number, batch in enumerate(batches):
                # a unit that was resumed waits for the others to come to where it is
                due = [unit for unit, file in files.items() if file.batches == number]
                # an item that the pilot has asked has all of its samples, so that the first tells
                fresh = {unit: [item for item in batch if (item.item_id, 0) not in known[unit]] for unit in due}
                prefills: dict[tuple[str, ...], SharedPrefill] = {}  # by what is played of the batch
                prompts: dict[str, ChatTokens] = {}
                for unit in due:
                    if keeps is None or keeps(unit):
                        # caches share a prefill where they are asked the same rows
                        key = tuple(item.item_id for item in fresh[unit])
                        alike = [other.policy for other in due if fresh[other] == fresh[unit]]
                        shared = prefills.setdefault(
                            key, SharedPrefill([way for way in alike if isinstance(way, Policy)])
                        )
                        for item in fresh[unit]:
                            prompts[item.item_id] = prompts.get(item.item_id) or item_prompt(self._model.chat, item)
                        openings = [prompts[name] for name in key]
                        records = self._answers(unit, suite, fresh[unit], openings, shared)
                        files[unit].append(_whole(batch, records, known[unit], samples))
                        note(unit, files[unit])

    def _note_prompts(
        self,
        run: RunFolder,
        files: Mapping[Unit, RecordFile],
        batches: Sequence[Sequence[Item]],
        suite: Suite,
        rows: Mapping[str, range] | None,
    ) -> None:
        """Note the hash of the prompts of every unit that is not whole, beside that of those it began with.

        Of a run in rounds it is that of all rounds so far.
        """
        due = {unit: file for unit, file in files.items() if rows or file.batches < len(batches)}
        if not due:
            return
        if rows is not None:
            context = next(iter(due)).context_tokens
            every = evaluation_items(self._spec, suite, context, self._model.chat.count_tokens)
            batches = [every[: rows[suite.name].stop]]
        now, known = prompts_sha256(self._model.chat, batches), table_of(run.provenance(), PROMPTS)
        found = {}
        for unit, file in due.items():
            name = unit_of_prompts(unit.arm, unit.seed, unit.suite, unit.context_tokens, unit.policy.canonical)
            found[name] = both_prompts(known.get(name) if file.rows and not rows else None, now)
        names = ", ".join(self._model.chat.unstable_names)
        forms = tool_forms_of(self._model.chat, batches)
        used: dict[str, Any] = {TOOL_FORMS_USED: {suite.name: forms}} if forms else {}
        if forms and self._model.chat.moves_system_with_tools:
            used[TOOL_SYSTEM_MOVED] = True
        run.note(**{PROMPTS: found}, **used, **({UNSTEADY: names} if names else {}))

    def _answers(
        self, unit: Unit, suite: Suite, items: Sequence[Item], prompts: Sequence[ChatTokens], shared: SharedPrefill
    ) -> list[Record]:
        """The records of a batch: our own cache's, or an engine's."""
        rows: Sequence[GradedRow | EngineAnswer] = ()
        if isinstance(unit.policy, Policy):
            rows = self._play(Sampler(self._served, unit.policy, shared), suite, items, prompts)
        elif items:
            assert self._slot is not None, "somebody has to hold the engine"
            decoding, seeds, samples, thinks = self._decoding(suite, items)
            session = self._slot.under(unit.policy, self._model)
            rows = converse(session, self._model, suite, items, prompts, decoding, seeds, samples, thinks=thinks)
        return [self._record(unit, suite, row) for row in rows]

    def _decoding(self, suite: Suite, items: Sequence[Item]) -> tuple[Decoding, list[int], int, bool]:
        """How items are answered: the decoding, a seed for every row, the rows of an item, whether thoughts come."""
        part, samples = self._spec.evaluate, self._spec.evaluate.samples_of(suite.name)
        decoding = Decoding(suite.max_new_tokens, temperature=part.temperature, top_p=part.top_p)
        # an item's samples stand together
        seeds = [row_seed(part.seed, item, sample) for item in items for sample in range(samples)]
        return decoding, seeds, samples, part.think is not None

    def _answered(self, unit: Unit, run: RunFolder) -> Mapping[Row, Record]:
        """What the pilot of a run has answered of a unit, nothing where it did not ask it; what a server refused then
        is asked again.
        """
        files = UnitFiles.of(run.path / PILOT_FOLDER, unit)
        return answered_rows(sealed_records(files, unit.identity(self._model.sha256)))

    @staticmethod
    def _kept(unit: Unit, folder: Path) -> Mapping[Row, Record]:
        return kept_rows(UnitFiles.of(folder, unit))

    @cached_property
    def _served(self) -> LoadedModel:
        return pack_weights(self._model)

    def again(self, policy: Policy, suite: Suite, items: Sequence[Item]) -> Iterator[list[GradedRow]]:
        """Some items as a unit serves them among others, batch by batch, a row for every sample."""
        for batch in self._batched(suite, items):
            yield self._play(Sampler(self._served, policy), suite, batch)

    def _play(
        self, sampler: Sampler, suite: Suite, batch: Sequence[Item], prompts: Sequence[ChatTokens] | None = None
    ) -> list[GradedRow]:
        if not batch:
            return []
        decoding, seeds, samples, thinks = self._decoding(suite, batch)
        asked = [(suite, item) for item in batch]
        return play(sampler, asked, decoding, seeds, group=samples, thinks=thinks, prompts=prompts)

    def _batches(self, suite: Suite, context: int) -> list[list[Item]]:
        key = (suite.name, context)
        if key not in self._known:
            items = evaluation_items(self._spec, suite, context, self._model.chat.count_tokens)
            self._known[key] = self._batched(suite, items)
        return self._known[key]

    def _batched(self, suite: Suite, items: Sequence[Item]) -> list[list[Item]]:
        lengths = {}
        for item in items:
            prompt = _opening_tokens(self._model, item)
            check_spans(suite, item)
            check_fits(self._model, suite, item, prompt)
            rows = max(1, len(suite.options(item)))  # each option has a row behind the prompt
            lengths[item.item_id] = rows * (prompt + suite.answer_tokens)  # padded tokens at the most
        if len(lengths) < len(items):
            raise DataError(f"suite {suite.name} gave two items the same item_id; its records could not be paired")
        # an item takes a row for each sample
        return batched(items, lengths, self._batch_tokens // self._spec.evaluate.samples_of(suite.name))

    @property
    def _batch_tokens(self) -> int:
        return self._spec.evaluate.batch_tokens

    def _record(self, unit: Unit, suite: Suite, said: GradedRow | EngineAnswer) -> Record:
        """The record of a row; an engine shows nobody its cache, we show nobody the log-prob of a whole answer."""
        serving = Serving(
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
        if isinstance(said, EngineAnswer):
            return Record.of(serving, said.item, said.grade, said.answer, CacheUse())
        answer = UngradedAnswer(
            sample_index=said.sample_index,
            finish_reason=said.finish_reason,
            prompt_tokens=said.prompt_tokens,
            new_tokens=said.new_tokens,
            seconds=said.seconds,
            transcript=said.transcript,
            unanswered=said.unanswered,
            tool_form=said.tool_form,
        )
        return Record.of(serving, said.item, said.grade, answer, _cache_use(said))


def _cache_use(played: GradedRow) -> CacheUse:
    rollout = played.rollout
    return CacheUse(
        retention=rollout.retention,
        survival=played.survival,
        kv_bytes_peak=rollout.kv_bytes_peak,
        kv_bytes_dense=rollout.kv_bytes_dense,
        kv_bytes_live=rollout.kv_bytes_live,
        spans=played.spans,
    )


def prompts_sha256(chat: Chat, batches: Sequence[Sequence[Item]]) -> str:
    """sha256 of items' prompts as the template writes them now, whatever their order."""
    texts = sorted((item.item_id, chat.prompt_text(item.messages, item.tools)) for batch in batches for item in batch)
    digest = hashlib.sha256()
    for name, text in texts:
        digest.update(json.dumps([name, text]).encode())
    return digest.hexdigest()


def tool_forms_of(chat: Chat, batches: Sequence[Sequence[Item]]) -> dict[str, int]:
    """Return the forms in which items offer tools, with the number of items in each; {} for items without tools."""
    forms = (chat.tool_form_of(item.messages, item.tools) for batch in batches for item in batch)
    return dict(sorted(Counter(filter(None, forms)).items()))


def evaluation_items(spec: RunSpec, suite: Suite, context: int, count: CountTokens) -> list[Item]:
    """What the grid asks of one suite at one length, under whatever policy and from whatever model.

    Until the pilot has told how many, ``auto`` is a round, as ``all`` is.
    """
    part = spec.evaluate
    number = part.suites[suite.name].items
    items = number if isinstance(number, int) else round_of(spec, suite, count)
    if spec.probe is not None and context:
        return _twins(suite, items, part.seed, context, max(part.contexts_of(suite.name)), count)
    return made("evaluate", suite, "eval", items, part.seed, context, count)


def round_of(spec: RunSpec, suite: Suite, count: CountTokens) -> int:
    """How many items are a round: every template with each of its twins, or every row of a suite that has an end."""
    part = spec.evaluate
    if (rows := suite.rows("eval", part.seed)) is not None:
        return rows
    return clusters_of(suite, part.seed, min(part.contexts_of(suite.name)), count) * suite.twins


def clusters_of(suite: Suite, seed: int, context: int, count: CountTokens) -> int:
    """How many clusters an evaluation visits before the first comes again; raises SpecError beyond 20,000."""
    asked = 64
    while True:
        names = [item.cluster_id for item in made("evaluate", suite, "eval", asked, seed, context, count)]
        held = set[str]()
        for name in names:
            if name in held:
                return len(held)
            held.add(name)
        if asked > _MOST_CLUSTERS:
            raise SpecError(f"suite {suite.name} has more than {_MOST_CLUSTERS:,} clusters; give a number of items")
        asked *= 4


def _whole(
    batch: Sequence[Item], played: Sequence[Record], known: Mapping[Row, Record], samples: range
) -> list[Record]:
    """The records of a batch in its order: those that were played now, and those of the pilot.

    Their seconds and peak bytes are a row's share of what it was played in.
    """
    rows = {(record.item_id, record.sample_index): record for record in played}
    wanted = [(item.item_id, sample) for item in batch for sample in samples]
    return [rows[row] if row in rows else known[row] for row in wanted]


def _twins(suite: Suite, number: int, seed: int, context: int, longest: int, count: CountTokens) -> list[Item]:
    """The items of the longest length with less around them: the same ids and words, in ``context`` tokens.

    A suite draws an item for the length it is asked for, and fills that length up by the count it is given. A count
    that is larger by longest/context therefore gives the same item in a shorter context.
    """
    try:
        items = suite.items("eval", number, seed, longest, lambda text: -(-count(text) * longest // context))
    except SpecError as error:
        short = f"an item of {longest} tokens does not fit {context} without its filler; give more"
        raise SpecError(f"evaluate.suites {suite.name}: {short if context < longest else error}") from error
    return [replace(item, context_tokens=context) for item in items]


def made(
    section: str, suite: Suite, split: Split, number: int, seed: int, context: int, count: CountTokens
) -> list[Item]:
    """A suite's items; what it refuses names the suite and where the spec asks for it."""
    try:
        return suite.items(split, number, seed, context, count)
    except SpecError as error:
        raise SpecError(f"{section}.suites {suite.name}: {error}") from error


def check_engines(spec: RunSpec, batches: Batches) -> None:
    """Raise SpecError for an engine that is not there, and for a suite that it cannot be asked."""
    ways = [way for way in served(spec) if isinstance(way, Condition)]
    for way in ways:
        ENGINES.get(way.engine).check(dict(way.settings), spec.engine(way.canonical))
    for (name, _), parts in batches.items() if ways else ():
        suite = asked_suite(spec, name)
        if any(suite.options(item) for part in parts for item in part):
            raise SpecError(
                f"suite {name} weighs given answers, which engine {ways[0].engine} is not asked for: one pass over "
                "them never reads the compressed cache; leave the suite out, or serve it in a run of its own "
                "under policies of ours"
            )


def check_training(spec: RunSpec, model: LoadedModel) -> None:
    """Make the first items that every suite trains on; raises what would otherwise come up in the first step.

    So do an adapter that has no place in the model, and gold answers that cannot be shown to it.
    """
    if spec.train is not None:
        check_adapter(model.model, spec.train.adapter)
        for name in asked_in_training(spec.train):
            context, suite, seed = spec.train.context_tokens, SUITES.get(name)(), spec.train.seeds[0]
            number = suite.item_count("train", spec.train.prompts_per_step, seed)
            for item in made("train", suite, "train", number, seed, context, model.chat.count_tokens):
                _opening_tokens(model, item)
                if spec.train.sft is not None and name in spec.train.suites:
                    gold_rollout(model, suite, item)


def check_reward(section: TrainSpec, model: LoadedModel) -> None:
    """Raise what a reward would raise in the first step: a file, module or key that is missing, or a broken number.

    It pays for one ideal answer of every suite, which asks an endpoint as many questions.
    """
    paying = parse_reward(section.reward, section.suites)
    paying.check()
    if not paying.uses_grade_only:
        suites = [SUITES.get(name)() for name in paying.reward_suites]
        asked = (1, section.seeds[0], section.context_tokens, model.chat.count_tokens)
        check_reward_on_gold(paying, [(suite, made("train", suite, "train", *asked)[0]) for suite in suites], model)


def _opening_tokens(model: LoadedModel, item: Item) -> int:
    """The length of an item's prompt; what the chat template refuses names the suite."""
    try:
        return len(model.chat.prompt(item.messages, (), item.tools).ids)
    except SpecError as error:
        raise SpecError(f"suite {item.suite}: {error}") from None


def check_spans(suite: Suite, item: Item) -> None:
    """Raise SpecError for a span that the suite names and that nobody could find."""
    texts = [*(message.content for message in item.messages), *([list_tools(item.tools)] if item.tools else [])]
    found = fault(item.spans, texts, said_later=suite.max_turns > 1)
    if found:
        raise SpecError(f"suite {suite.name} item {item.item_id} {found}; mend the suite's spans")


def batched(items: Sequence[Item], lengths: dict[str, int], tokens: int) -> list[list[Item]]:
    """Split items into batches of like length that hold at most ``tokens`` padded tokens, one item at the least."""
    batches: list[list[Item]] = []
    # one order in every process: a resumed unit must meet the same batches
    for item in sorted(items, key=lambda item: (lengths[item.item_id], item.item_id)):
        # rows are padded to the longest, which is this one
        if batches and (len(batches[-1]) + 1) * lengths[item.item_id] <= tokens:
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches


def row_seed(seed: int, item: Item, sample: int) -> int:
    """The sampling seed of one row: the same for every checkpoint and policy, so comparisons share random numbers."""
    return derive_seed("evaluate", seed, item.suite, item.item_id, sample)
