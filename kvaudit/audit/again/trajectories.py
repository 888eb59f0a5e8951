"""Recorded answers as token sequences that every model can be led along (teacher forcing), and who is led along whose.

The opening, each answer and each reply of the environment are rendered as they were while sampling. A record holds
text, so an answer's tokens are those the tokenizer makes of it; where it was sampled in other pieces, both models are
still asked about the same tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, zip_longest

from kvaudit.audit.policies import Dense, Policy
from kvaudit.audit.policies.draws import derive_seed
from kvaudit.audit.runs.evaluate import row_seed, served_by_us
from kvaudit.audit.sampling.chat import Chat, Rendered
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.files import in_file_name
from kvaudit.core.records import Item, Message, Record, Role
from kvaudit.core.spec import RunSpec
from kvaudit.core.spec_train import BASE_ARM
from kvaudit.core.thoughts import drawn

DENSE = Dense()
_HALF = re.compile("[\ud800-\udfff]")
NOTHING = Rendered((), ())


@dataclass(frozen=True)
class Turn:
    """One answer, every token of which is predicted, and what the environment gave after it."""

    answer: tuple[int, ...]
    reply: Rendered


@dataclass(frozen=True)
class Trajectory:
    """One recorded conversation. ``seed`` is its row's sampling seed, from which policies that draw derive theirs."""

    item_id: str
    cluster_id: str
    seed: int
    prompt: Rendered
    turns: tuple[Turn, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens, without what would follow the last answer."""
        parts = [self.prompt.ids, *(part for turn in self.turns for part in (turn.answer, turn.reply.ids))]
        return tuple(token for part in parts for token in part)

    @property
    def scored(self) -> tuple[int, ...]:
        """Indices into ``ids`` of the predicted tokens."""
        found: list[int] = []
        start = len(self.prompt.ids)
        for turn in self.turns:
            found += range(start, start + len(turn.answer))
            start += len(turn.answer) + len(turn.reply.ids)
        return tuple(found)


def trajectory(record: Record, chat: Chat, seed: int) -> Trajectory | None:
    """The conversation of a record; ``seed`` is the evaluation's. None where the model said nothing to predict.

    A turn that was not cut off at its length ends with the template's end-of-turn token, which is predicted too.
    Raises DataError for a transcript that no evaluation writes.
    """
    _check(record)
    parts = [(is_answer, tuple(part)) for is_answer, part in groupby(drawn(record.transcript), key=_is_answer)]
    opening = parts[0][1]
    answers = [part for is_answer, part in parts if is_answer]
    replies = [part for is_answer, part in parts[1:] if not is_answer]
    item = Item(record.suite, record.item_id, record.cluster_id, opening, record.context_tokens, record.placement)
    # the stop token that the template writes after an answer, None where it writes none
    end = next((token for token in chat.reply([Message(Role.USER, ".")]).ids if token in chat.stop_ids), None)
    turns = []
    for number, (answer,) in enumerate(answers):  # one message each: ``_check`` has seen to it
        last = number == len(answers) - 1
        ids = chat.encode(answer.content)
        if end is not None and not (last and record.finish_reason == "length"):
            ids = (*ids, end)
        turns.append(Turn(ids, NOTHING if last else chat.continuation(ids, replies[number])))
    whole = Trajectory(
        record.item_id,
        record.cluster_id,
        row_seed(seed, item, record.sample_index),
        chat.opening(opening),
        tuple(turns),
    )
    return whole if whole.scored else None


def _is_answer(message: Message) -> bool:
    return message.role is Role.ASSISTANT


def _check(record: Record) -> None:
    texts = [record.item_id, record.cluster_id, *(message.content for message in record.transcript)]
    # text that can be written: JSON can spell half of a surrogate pair, no file can hold it
    readable = all(isinstance(text, str) and not _HALF.search(text) for text in texts)
    roles = [_is_answer(message) for message in drawn(record.transcript)] if readable else []
    doubled = any(one and other for one, other in pairwise(roles))
    if not roles or roles[0] or not roles[-1] or doubled:
        raise DataError(
            f"record of item {str(record.item_id)[:80]!r} holds no conversation of questions and answers in turn; "
            "evaluate its unit again"
        )


def first_tokens(found: Iterable[Trajectory], most: int) -> list[Trajectory]:
    """Whole sequences with at most ``most`` predicted tokens together, one at the least, template after template.

    The order of templates, and of the items of each, is a fixed random one: names often sort by what is asked.
    """
    by_cluster: dict[str, list[Trajectory]] = {}
    for one in sorted(found, key=lambda t: derive_seed("displacement", t.item_id, t.seed)):
        by_cluster.setdefault(one.cluster_id, []).append(one)
    order = sorted(by_cluster, key=lambda name: derive_seed("displacement", name))
    # the first of every template, then the second of every one
    rounds = zip_longest(*(by_cluster[name] for name in order))
    chosen: list[Trajectory] = []
    total = 0
    for one in (entry for part in rounds for entry in part if entry is not None):
        total += len(one.scored)
        if chosen and total > most:
            break
        chosen.append(one)
    return chosen


def batches(found: Sequence[Trajectory], *, tokens: int, logits: int, vocabulary: int) -> list[list[Trajectory]]:
    """Sequences of like length: up to ``tokens`` padded tokens and ``logits`` numbers of one pass, one at the least."""
    result: list[list[Trajectory]] = []
    columns: set[int] = set()
    for one in sorted(found, key=lambda t: (len(t.ids), t.item_id, t.seed)):
        union = columns | set(one.scored)  # of one pass, every row has logits at every column that some row needs
        rows = len(result[-1]) + 1 if result else 1
        if result and rows * len(one.ids) <= tokens and rows * len(union) * vocabulary <= logits:
            result[-1].append(one)
            columns = union
        else:
            result.append([one])
            columns = set(one.scored)
    return result


@dataclass(frozen=True)
class DisplacementUnit:
    """One checkpoint under one policy on the answers of ``reference_seed``; ``floor`` is the reference run again."""

    arm: str
    seed: int
    policy: Policy
    suite: str
    context_tokens: int
    reference_seed: int
    floor: bool

    @property
    def name(self) -> str:
        """The file name of the unit, without its ending."""
        kind = "floor" if self.floor else self.policy.hash
        return f"{self.arm}-seed{self.seed}--{kind}--{in_file_name(self.suite)}--{self.context_tokens}"


def units(spec: RunSpec) -> list[DisplacementUnit]:
    """Every unit of a run; those of one checkpoint and reference stand together, the floors first.

    Seed s of an arm follows seed s of the reference; a reference of one seed serves all. The reference itself is
    measured under every policy but ``none``, and uncompressed its other seeds against its first.
    Raises SpecError where engines alone served: they show no distributions.
    """
    if DENSE not in served_by_us(spec):
        raise SpecError(
            "engines alone served this run, and they show nobody their distributions; add none and policies of our own "
            "cache to evaluate.policies"
        )
    reference = spec.gate.reference
    own = [seed for arm, seed in spec.arms if arm == reference]
    found: list[DisplacementUnit] = []
    for arm, seed in spec.arms:
        if arm == reference:
            found += _grid(spec, arm, seed, seed, (DENSE,), floor=True)
    for arm, seed in spec.arms:
        known = seed if seed in own else own[0]
        policies = served_by_us(spec, arm)
        deployed = [policy for policy in policies if policy != DENSE]
        if arm == reference:
            found += _grid(spec, arm, seed, seed, deployed)
            if seed != own[0]:
                found += _grid(spec, arm, seed, own[0], (DENSE,))
        elif arm != BASE_ARM:
            found += _grid(spec, arm, seed, known, policies)
    return found


def _grid(
    spec: RunSpec, arm: str, seed: int, reference_seed: int, policies: Sequence[Policy], *, floor: bool = False
) -> Iterator[DisplacementUnit]:
    for suite in spec.evaluate.suites:
        for context in spec.evaluate.contexts_of(suite):
            for policy in policies:
                yield DisplacementUnit(arm, seed, policy, suite, context, reference_seed, floor)
