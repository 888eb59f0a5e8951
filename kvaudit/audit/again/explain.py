"""One recorded answer served again: the same checkpoint, prompt and seed under its policy, or under another."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Self

from kvaudit.audit.rerun.finished import AnswerMeasure, RerunAnswer, AnswerSet
from kvaudit.audit.rerun.finished import finished_records
from kvaudit.audit.engines.base import is_engine
from kvaudit.audit.policies import Policy, parse_policy
from kvaudit.audit.runs.evaluate import cache_policies, grid
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.units import Unit
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.core.conditions import engine_in
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.policy_names import match_policies
from kvaudit.core.records import Record, Role
from kvaudit.core.shading import ALL, AnswerKey
from kvaudit.core.text import inline, visible

_CLOSE = 3  # names that a refusal proposes
_INDENT = "\n" + " " * 12


class AnswerPlace(NamedTuple):
    """Which answer: ``length`` None where the item's name stands at one length alone."""

    item: str
    arm: str
    seed: int
    length: int | None
    sample: int


class Explain(AnswerMeasure[RerunAnswer]):
    """The answer to an item under each policy.

    Raises SpecError for an item, arm, seed, length or sample that the run has not.
    """

    name = "explain"

    def __init__(self, run: RunFolder, where: AnswerPlace, policies: Sequence[Policy]) -> None:
        super().__init__(run)
        self.title = f"{where.item}, {where.arm} seed {where.seed}, sample {where.sample}"
        records, answer = _records_of(run, where), AnswerKey(where.item, where.sample)
        known = next(iter(records.values()))
        self._pieces = [AnswerSet(policy, {answer: records.get(policy.canonical)}, known) for policy in policies]

    @classmethod
    def trial(cls, run: RunFolder) -> Self:
        record = next(finished_records(run, grid(run.spec)[0]))
        policies = [parse_policy(text) for text in run.spec.evaluate.policies]
        where = AnswerPlace(record.item_id, record.arm, record.train_seed, record.context_tokens, record.sample_index)
        return cls(run, where, policies)

    def pieces(self) -> Sequence[AnswerSet]:
        return self._pieces

    def summed(self, piece: AnswerSet, model: LoadedModel, parts: Iterator[list[RerunAnswer]]) -> RerunAnswer:  # noqa: ARG002
        ((answer,),) = parts  # one part of one answer
        return answer

    def differs(self, total: RerunAnswer) -> bool:
        return total.same is False

    def lines(self, found: Sequence[tuple[AnswerSet, RerunAnswer]]) -> Iterator[str]:
        yield inline(self.title)
        for _, one in found:
            yield ""
            yield from _lines(one)


def policies_meant(run: RunFolder, texts: Sequence[str]) -> list[Policy]:
    """Of the run's policies those that are meant, as elsewhere; what it did not serve is taken as it is written."""
    for engine in filter(is_engine, map(engine_in, texts)):
        raise SpecError(f"--policy names engine {engine}, which shows nobody its cache; name a policy of our own cache")
    known = [policy.canonical for policy in cache_policies(run.spec)]
    return [parse_policy(text) for text in match_policies(texts, known)]


def _records_of(run: RunFolder, where: AnswerPlace) -> Mapping[str, Record]:
    """The records of an answer by policy, one at least."""
    rows: dict[str, dict[tuple[str, int, int], Record]] = {}  # by policy; by suite, length and sample
    items = set[str]()
    for unit in _units(run, where):
        for record in finished_records(run, unit):
            items.add(record.item_id)
            if record.item_id == where.item:
                place = (record.suite, record.context_tokens, record.sample_index)
                rows.setdefault(unit.policy.canonical, {})[place] = record
    suite, length = _place({place[:2] for own in rows.values() for place in own}, items, where)
    found = {
        policy: own[suite, length, where.sample] for policy, own in rows.items() if (suite, length, where.sample) in own
    }
    if not found:
        raise SpecError(f"--sample is {where.sample}, the run has {run.spec.evaluate.samples_of(suite)} of an item")
    if not next(iter(found.values())).transcript:
        raise DataError(f"{str(run.path)!r} holds no transcripts, so no answer to compare with; evaluate it again")
    return found


def _units(run: RunFolder, where: AnswerPlace) -> list[Unit]:
    found = [unit for unit in grid(run.spec) if (unit.arm, unit.seed) == (where.arm, where.seed)]
    if not found:
        known = ", ".join(f"{arm} {seed}" for arm, seed in run.spec.arms)
        raise SpecError(f"the run has no arm {where.arm!r} with seed {where.seed}; it has {known}")
    return found


def _place(places: set[tuple[str, int]], items: set[str], where: AnswerPlace) -> tuple[str, int]:
    """Suite and length of the item; raises SpecError for none, and for several."""
    found = sorted(places)
    chosen = [place for place in found if where.length in (None, place[1])]
    if len(chosen) == 1:
        return chosen[0]
    if found:
        names = ", ".join(f"{suite} at {length}" for suite, length in found)
        raise SpecError(f"item {where.item!r} stands in {names}; choose one with --length")
    close = difflib.get_close_matches(where.item, items, n=_CLOSE, cutoff=0.3)
    near = f"; near are {', '.join(close)}" if close else ""
    raise SpecError(f"item {where.item!r} is not among the finished answers of {where.arm} seed {where.seed}{near}")


def _lines(one: RerunAnswer) -> Iterator[str]:
    played = one.played
    yield f"policy      {one.policy.canonical}"
    for message in played.transcript[len(played.item.messages) :]:
        who = "answer" if message.role is Role.ASSISTANT else message.role.value
        yield f"{who:<11} {visible(message.content)}".replace("\n", _INDENT)
    yield f"recorded    {_recorded(one)}"
    yield f"graded      {one.outcome}"
    shares = ", ".join(f"{role} {share:.1%}" for role, share in played.survival.items())
    yield f"kept        {played.rollout.retention:.1%} of the cache when the answer began: {shares}"
    if played.spans:
        yield f"by span     {', '.join(f'{name} {kept.share:.1%}' for name, kept in played.spans.items())}"
    yield f"by layer    {' '.join(f'{share:.0%}' for share in one.shading.depth[ALL])}"


def _recorded(one: RerunAnswer) -> str:
    if one.record is None:
        return "no: the run did not serve this policy"
    if one.same:
        return "yes: the same answer, text for text"
    said = one.record.transcript[len(one.played.item.messages) :]
    return f"ANOTHER ANSWER ({one.record.new_tokens} tokens): {inline(' | '.join(message.content for message in said))}"
