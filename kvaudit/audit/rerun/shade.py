"""Serve recorded answers again: one answer under several policies (``Explain``), or many (``Shade``).

Both return a shading: which tokens the cache still held when the answer began. ``shading_svg`` draws it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple, Self

from kvaudit.audit.engines.base import is_engine
from kvaudit.audit.policies import Policy, parse_policy
from kvaudit.audit.rerun.measure import AnswerMeasure, AnswerSet, RerunAnswer, finished_records
from kvaudit.audit.runs.evaluate import cache_policies, grid
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.runs.units import Unit
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.policy_names import engine_name, match_policies
from kvaudit.core.records import Record, Role
from kvaudit.core.spans import ALL_TOKENS, AnswerKey, Shadings, read_shadings, write_shadings
from kvaudit.core.text import inline, length_label, visible

_CLOSE = 3  # similar names that an error proposes
_INDENT = "\n" + " " * 12


class Shade(AnswerMeasure[Shadings]):
    """Serves some answers again and stores their shadings: for each token, by how many heads the cache still held it.

    ``requested`` has the keys of the answers, by the name of their unit (file of records); those whose shading is
    stored already are left out.
    """

    name = "shade"
    by_item = True

    def __init__(self, run: RunFolder, requested: Mapping[str, Collection[AnswerKey]]) -> None:
        super().__init__(run)
        self._requested = requested

    @classmethod
    def trial(cls, run: RunFolder) -> Self:
        unit = grid(run.spec)[0]
        return cls(run, {unit.name: {_key(record) for record in finished_records(run, unit)}})

    def units(self) -> Sequence[AnswerSet]:
        # a serving engine does not expose its cache
        cells = [(cell, cell.policy) for cell in grid(self._run.spec) if isinstance(cell.policy, Policy)]
        missing = ((policy, self._missing_records(cell)) for cell, policy in cells)
        return [AnswerSet(policy, records, next(iter(records.values()))) for policy, records in missing if records]

    def label(self, unit: AnswerSet) -> str:
        example = unit.example
        suite = f"{example.suite} {length_label(example.context_tokens)}"
        return f"{example.arm} seed {example.train_seed}, {engine_name(unit.policy.canonical)}, {suite}"

    def reduce(self, unit: AnswerSet, model: LoadedModel, batches: Iterator[list[RerunAnswer]]) -> Shadings:  # noqa: ARG002
        """Store the shadings after every batch; return the new ones.

        The shading of an answer that differs from its record is None.
        """
        example = unit.example
        name = Unit(example.arm, example.train_seed, unit.policy, example.suite, example.context_tokens).name
        stored, new = read_shadings(self._run.path, name), Shadings()
        for batch in batches:
            for answer in batch:
                key = AnswerKey(answer.row.item.item_id, answer.row.sample_index)
                new[key] = answer.shading if answer.is_same else None
            write_shadings(self._run.path, name, stored | new)
        return new

    def differs(self, total: Shadings) -> bool:
        return None in total.values()

    def lines(self, results: Sequence[tuple[AnswerSet, Shadings]]) -> Iterator[str]:
        for unit, total in results:
            same = sum(shading is not None for shading in total.values())
            yield f"{self.label(unit)}: {same} of {len(total)} answers came out as recorded"

    def _missing_records(self, unit: Unit) -> dict[AnswerKey, Record]:
        """Return the records of those requested answers of a unit for which no shading is stored."""
        requested = self._requested.get(unit.name, ())
        missing = set(requested) - set(read_shadings(self._run.path, unit.name)) if requested else set()
        records = finished_records(self._run, unit) if missing else ()
        return {key: record for record in records if (key := _key(record)) in missing}


def _key(record: Record) -> AnswerKey:
    return AnswerKey(record.item_id, record.sample_index)


class AnswerPlace(NamedTuple):
    """The place of an answer in a run: item, arm, training seed, length (context tokens) and number of the sample.

    ``length`` may be None if the item was asked at one length only.
    """

    item: str
    arm: str
    seed: int
    length: int | None
    sample: int


class Explain(AnswerMeasure[RerunAnswer]):
    """Asks one recorded item again under each policy and compares the answers with the record.

    Raises SpecError if the run has no such answer.
    """

    name = "explain"

    def __init__(self, run: RunFolder, place: AnswerPlace, policies: Sequence[Policy]) -> None:
        super().__init__(run)
        self.title = f"{place.item}, {place.arm} seed {place.seed}, sample {place.sample}"
        records, key = _records_at(run, place), AnswerKey(place.item, place.sample)
        example = next(iter(records.values()))
        self._units = [AnswerSet(policy, {key: records.get(policy.canonical)}, example) for policy in policies]

    @classmethod
    def trial(cls, run: RunFolder) -> Self:
        record = next(finished_records(run, grid(run.spec)[0]))
        policies = [parse_policy(text) for text in run.spec.evaluate.policies]
        place = AnswerPlace(record.item_id, record.arm, record.train_seed, record.context_tokens, record.sample_index)
        return cls(run, place, policies)

    def units(self) -> Sequence[AnswerSet]:
        return self._units

    def reduce(self, unit: AnswerSet, model: LoadedModel, batches: Iterator[list[RerunAnswer]]) -> RerunAnswer:  # noqa: ARG002
        ((answer,),) = batches  # one batch of one answer
        return answer

    def differs(self, total: RerunAnswer) -> bool:
        return total.is_same is False

    def lines(self, results: Sequence[tuple[AnswerSet, RerunAnswer]]) -> Iterator[str]:
        yield inline(self.title)
        for _, answer in results:
            yield ""
            yield from _lines(answer)


def match_run_policies(run: RunFolder, texts: Sequence[str]) -> list[Policy]:
    """Return the policy that each text names: the run's policy that matches it, or else the text parsed as a policy."""
    for engine in filter(is_engine, map(engine_name, texts)):
        raise SpecError(f"--policy names engine {engine}, whose cache cannot be inspected; name a kvaudit policy")
    run_policies = [policy.canonical for policy in cache_policies(run.spec)]
    return [parse_policy(text) for text in match_policies(texts, run_policies)]


def _records_at(run: RunFolder, place: AnswerPlace) -> Mapping[str, Record]:
    """Return the records of one item and sample as {policy: record}; raise SpecError if there are none.

    Raises DataError if the records hold no transcripts, to which a new answer could be compared.
    """
    rows: dict[str, dict[tuple[str, int, int], Record]] = {}  # by policy; by suite, length and sample
    items = set[str]()
    units = [unit for unit in grid(run.spec) if (unit.arm, unit.seed) == (place.arm, place.seed)]
    if not units:
        arms = ", ".join(f"{arm} {seed}" for arm, seed in run.spec.arms)
        raise SpecError(f"the run has no arm {place.arm!r} with seed {place.seed}; it has {arms}")
    for unit in units:
        for record in finished_records(run, unit):
            items.add(record.item_id)
            if record.item_id == place.item:
                key = (record.suite, record.context_tokens, record.sample_index)
                rows.setdefault(unit.policy.canonical, {})[key] = record
    suite, length = _suite_and_length({key[:2] for by_key in rows.values() for key in by_key}, items, place)
    key = (suite, length, place.sample)
    records = {policy: by_key[key] for policy, by_key in rows.items() if key in by_key}
    if not records:
        raise SpecError(f"--sample is {place.sample}, the run has {run.spec.evaluate.samples_of(suite)} of an item")
    if not next(iter(records.values())).transcript:
        raise DataError(f"{str(run.path)!r} holds no transcripts, so no answer to compare with; evaluate it again")
    return records


def _suite_and_length(pairs: set[tuple[str, int]], items: set[str], place: AnswerPlace) -> tuple[str, int]:
    """Return the suite and the length (context tokens) at which the item of ``place`` was asked.

    ``pairs`` are all (suite, length) at which it was asked, ``items`` the names of all items. Raises SpecError if it
    was not asked, or at several lengths of which ``place`` chooses none.
    """
    matches = [pair for pair in sorted(pairs) if place.length in (None, pair[1])]
    if len(matches) == 1:
        return matches[0]
    if pairs:
        names = ", ".join(f"{suite} at {length}" for suite, length in sorted(pairs))
        raise SpecError(f"item {place.item!r} was asked in {names}; choose one with --length")
    close = difflib.get_close_matches(place.item, items, n=_CLOSE, cutoff=0.3)
    similar = f"; similar names: {', '.join(close)}" if close else ""
    raise SpecError(f"item {place.item!r} is not among the finished answers of {place.arm} seed {place.seed}{similar}")


def _lines(answer: RerunAnswer) -> Iterator[str]:
    row = answer.row
    yield f"policy      {answer.policy.canonical}"
    for message in row.transcript[len(row.item.messages) :]:
        label = "answer" if message.role is Role.ASSISTANT else message.role.value
        yield f"{label:<11} {visible(message.text)}".replace("\n", _INDENT)
    yield f"recorded    {_compare_with_record(answer)}"
    yield f"graded      {answer.outcome}"
    shares = ", ".join(f"{role} {share:.1%}" for role, share in row.survival.items())
    yield f"kept        {row.rollout.retention:.1%} of the cache when the answer began: {shares}"
    if row.spans:
        yield f"by span     {', '.join(f'{name} {survival.share:.1%}' for name, survival in row.spans.items())}"
    yield f"by layer    {' '.join(f'{share:.0%}' for share in answer.shading.depth[ALL_TOKENS])}"


def _compare_with_record(answer: RerunAnswer) -> str:
    if answer.record is None:
        return "no: the run did not serve this policy"
    if answer.is_same:
        return "yes: the same answer, text for text"
    messages = answer.record.transcript[len(answer.row.item.messages) :]
    text = inline(" | ".join(message.text for message in messages))
    return f"ANOTHER ANSWER ({answer.record.new_tokens} tokens): {text}"


# --- the drawing of a shading ---------------------------------------------------------------------------------------

COLUMNS = 110  # characters per line
WIDTH, HEIGHT, MARGIN = 7.3, 19.0, 20.0  # of a character, of a line, around the page; in pixels
_STYLE = """
text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1b1f24; white-space: pre; }
.head { font: 600 13px system-ui, sans-serif; }
.about { font: 12px system-ui, sans-serif; }
.page { fill: #ffffff; }
.held { fill: #2f86cf; }
.gone { fill: #8b949e; text-decoration: line-through; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb; }
  .page { fill: #14171b; }
  .gone { fill: #6b7480; }
}
"""
_MOST_OPACITY = 0.55  # of the shade, so that the text stays readable


class _PlacedToken(NamedTuple):
    line: int
    column: int
    text: str
    share: float
    number: int


def shading_svg(title: str, answers: Sequence[RerunAnswer]) -> str:
    """Return an SVG, for light and dark mode, that shows the answers' prompts below one another, every token shaded.

    The shade is the share of layers and KV heads whose cache still holds the token; a token that none holds is struck
    through.
    """
    width, y = 2 * MARGIN + COLUMNS * WIDTH, MARGIN
    body: list[str] = []
    for answer in answers:
        tokens = list(_place_tokens(answer.shading.pieces, answer.held_shares))
        body.append(f'<text class="head" x="{MARGIN:g}" y="{y:g}">{_escape(answer.policy.canonical)}</text>')
        body.append(f'<text class="about" x="{MARGIN:g}" y="{y + HEIGHT:g}">{_escape(answer.outcome)}</text>')
        top = y + HEIGHT * 2.4
        body += [element for token in tokens for element in _token_elements(token, top)]
        y = top + HEIGHT * (max((token.line for token in tokens), default=0) + 2)
    caption = "Every token is shaded by the share of layers and KV heads that still held it when the answer began."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {y:g}" width="{width:g}" height="{y:g}" '
            'role="img" aria-labelledby="title about">',
            f'<title id="title">{_escape(title)}</title>',
            f'<desc id="about">{caption}</desc>',
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{width:g}" height="{y:g}"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def _place_tokens(pieces: Sequence[str], shares: Sequence[float]) -> Iterator[_PlacedToken]:
    """Yield the tokens of a prompt with their line and column in the drawing; a token longer than a line is cut.

    ``pieces`` are the tokens' texts. ``shares`` has, for each token, the share of heads that held it. A line break of
    the text begins a new line.
    """
    line = column = 0
    for number, (piece, share) in enumerate(zip(pieces, shares, strict=True)):
        text = inline(piece) or "·"  # so that an invisible token has a place
        while text:
            # a token is cut only if it is longer than a line
            if column >= COLUMNS or (column + len(text) > COLUMNS >= len(text)):
                line, column = line + 1, 0
            head, text = text[: COLUMNS - column], text[COLUMNS - column :]
            yield _PlacedToken(line, column, head, share, number)
            column += len(head)
        if "\n" in piece:
            line, column = line + 1, 0


def _token_elements(token: _PlacedToken, top: float) -> Iterator[str]:
    x, y, width = MARGIN + WIDTH * token.column, top + HEIGHT * token.line, WIDTH * len(token.text)
    yield f"<g><title>token {token.number}: held by {100 * token.share:.0f} %</title>"
    if token.share > 0:
        shade = f'width="{width:g}" height="17" fill-opacity="{_MOST_OPACITY * token.share:.3f}"'
        yield f'<rect class="held" x="{x:g}" y="{y - 13:g}" {shade}/>'
    style = ' class="gone"' if token.share == 0 else ""
    # textLength: the same width in any font
    position = f'x="{x:g}" y="{y:g}" textLength="{width:g}"'
    yield f'<text{style} {position} xml:space="preserve">{escape(token.text)}</text></g>'


def _escape(text: str) -> str:
    return escape(inline(text))
