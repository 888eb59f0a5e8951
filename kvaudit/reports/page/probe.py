"""The findings of one probe of an endpoint: its noise, and the effect of a longer context on the same items.

Noise: how often two answers to one item differ. Effect: an item's score in the long context minus that in the short
one. With a baseline (an earlier probe by the same plan) also the change of this effect since then. If the endpoint
compresses its cache, scores change where the context is long, though the question is the same. A model that reads long
contexts badly changes them too, but then the baseline shows the same change. A failed request gives no answer, and its
item is left out on both sides.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvaudit.core.completions import starts_with_thought
from kvaudit.core.errors import DataError
from kvaudit.core.facets import facet_of
from kvaudit.core.provenance import ENDPOINT_REQUESTS
from kvaudit.core.provenance import table_of as recorded
from kvaudit.core.records import Outcome, Role
from kvaudit.core.text import inline
from kvaudit.reports.page.formats.markdown import escape, markdown_table
from kvaudit.reports.records.load import RunData
from kvaudit.reports.records.rows import FACET_COLUMNS, SCORE, facet_metrics, facet_scores
from kvaudit.reports.sections.shared.tables import Table, table_of
from kvaudit.reports.sections.shared.words import effect_text, percent
from kvaudit.reports.stats.effect import LEVEL, Array, Effect
from kvaudit.reports.stats.signflip import FEWEST_CLUSTERS, holm
from kvaudit.reports.stats.slope import slope_effect
from kvaudit.reports.stats.tango import ess_tango, rate_lower
from kvaudit.reports.verdict.contrast import Estimate, no_interval

_ALPHA = 0.05
_ROUNDING = 1e-9  # of a mean of draws that are 0 or 1
_KEY = ["suite", "cluster_id", "item_id"]


@dataclass(frozen=True)
class Noise:
    """The noise of a suite at one length: the shares of repeated items whose answers differ in words, and in score.

    ``low, high`` is the 95 % interval of ``scores``, the share that differs in score; None with too few ``templates``.
    """

    suite: str
    context_tokens: int
    items: int
    words: float
    scores: float
    templates: int
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Length:
    """The effect of context length on a suite's score or on a facet (1 = as wanted): long minus short context.

    ``effect`` has no interval where there are too few templates. ``against`` is the effect minus the effect in the
    baseline. ``sign`` is whether a loss with length is significant (with a baseline, a greater loss than the
    baseline's), at 5 % over all suites and lengths together (Holm).
    """

    metric: str
    long: int
    short: int
    long_rate: float
    short_rate: float
    effect: Effect | Estimate
    against: Effect | Estimate | None
    decides: bool  # only a suite's score: facets split it, and all suites together repeat it
    sign: bool = False


@dataclass(frozen=True)
class AnswerCounts:
    """Counts of the scored conversations, and of those whose answer says nothing about the model's behaviour.

    ``empty``: the answer has no text, with or without a thought; ``cut``: it has text and was cut off; ``thoughts``: it
    begins with a thought that was graded as text. ``beside``: field of the message -> answers whose text was in that
    field instead of the content.
    """

    scored: int
    empty: int
    cut: int
    thoughts: int
    beside: Mapping[str, int]

    @property
    def is_unusable(self) -> bool:
        """Whether every answer is empty or cut."""
        return self.scored > 0 and self.empty + self.cut == self.scored


@dataclass(frozen=True)
class ProbeFindings:
    """The findings of a probe. ``records`` counts its conversations, ``unscored`` those of them that have no score."""

    run: str
    baseline: str | None
    model: str
    temperature: float
    records: int
    unscored: int
    answers: AnswerCounts
    noise: tuple[Noise, ...]
    lengths: tuple[Length, ...]


def probe_findings(data: RunData, baseline: RunData | None = None) -> ProbeFindings:
    """Return the findings of a probe; raises DataError for another kind of run, or a baseline with other items."""
    _check_probe(data)
    if baseline is not None:
        check_same_requests(recorded(data.provenance, ENDPOINT_REQUESTS), baseline)
    return ProbeFindings(
        run=data.run.name,
        baseline=None if baseline is None else baseline.run.name,
        model=data.spec.model,
        temperature=data.spec.evaluate.temperature,
        records=len(data.records),
        unscored=int(data.records["score"].isna().sum()),
        answers=_count_answers(data),
        noise=tuple(_noise_by_cell(data)),
        lengths=tuple(_with_signs(list(_lengths(data, baseline)))),
    )


def _check_probe(run: RunData) -> None:
    if run.spec.probe is None:
        raise DataError(f"{str(run.run)!r} is not a probe; give a folder that kvaudit probe wrote")


def check_same_requests(requests: Mapping[str, str], baseline: RunData) -> None:
    """Raise DataError for a baseline that is not a probe, or that was sent other requests.

    ``requests`` maps names such as "items of refusal at 192" to a hash or to sampling settings.
    """
    _check_probe(baseline)
    earlier = recorded(baseline.provenance, ENDPOINT_REQUESTS)
    changed = [key for key in sorted({*requests, *earlier}) if requests.get(key) != earlier.get(key)]
    if changed:
        raise DataError(
            f"{str(baseline.run)!r} was asked something else ({changed[0]}); a baseline is a probe by the same plan "
            "and the same version of kvaudit"
        )


def _count_answers(data: RunData) -> AnswerCounts:
    scored = data.records[data.records["score"].notna()]
    places = [(str(file), int(line)) for file, line in scored[["file", "line"]].itertuples(index=False)]
    records = [record for _, record in data.records_at(places)]
    last = [record.transcript[-1] for record in records]
    has_text = [message.role is Role.ASSISTANT and bool(message.content.strip()) for message in last]
    beside = Counter(record.said_in for record in records if record.said_in)
    return AnswerCounts(
        scored=len(records),
        empty=has_text.count(False),
        cut=sum(text and record.outcome is Outcome.TRUNCATED for text, record in zip(has_text, records, strict=True)),
        thoughts=sum(starts_with_thought(message.content) for message in last),
        beside=dict(beside.most_common()),
    )


def _noise_by_cell(data: RunData) -> Iterator[Noise]:
    for suite in data.spec.evaluate.suites:
        for context in sorted(data.spec.evaluate.contexts_of(suite)):
            rows = data.records[(data.records["suite"] == suite) & (data.records["context_tokens"] == context)]
            repeated = [
                _draws_of(draws) for _, draws in _with_transcript_hashes(data, rows).groupby("item_id", observed=True)
            ]
            scored = [item for item in repeated if item.scores is not None]
            if scored:
                values = np.array([item.scores for item in scored])
                clusters = np.array([item.cluster for item in scored])
                low, high = _interval(values, clusters)
                words = float(np.mean([item.words for item in scored]))
                yield Noise(suite, context, len(scored), words, float(values.mean()), len(set(clusters)), low, high)


def _with_transcript_hashes(data: RunData, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the records with a hash of each transcript, which differs if two answers to one item do."""
    places = [(str(file), int(line)) for file, line in rows[["file", "line"]].itertuples(index=False)]
    transcripts = data.transcripts(places)
    return rows.assign(words=[hashlib.sha256(repr(transcripts[place]).encode()).hexdigest() for place in places])


class _ItemDraws(NamedTuple):
    """How the repeated answers to one item differ: the shares of pairs of answers that differ in words, and in score.

    ``scores`` is None unless two answers were scored.
    """

    cluster: str
    words: float
    scores: float | None


def _draws_of(rows: pd.DataFrame) -> _ItemDraws:
    scored = rows[rows["score"].notna()]
    words, scores = ([a != b for a, b in combinations(scored[key].tolist(), 2)] for key in ("words", "score"))
    share = float(np.mean(scores)) if scores else None
    return _ItemDraws(str(rows["cluster_id"].iloc[0]), float(np.mean(words)) if words else 0.0, share)


def _interval(values: Array, clusters: npt.NDArray[np.str_]) -> tuple[float | None, float | None]:
    if len(set(clusters)) < FEWEST_CLUSTERS:
        return None, None
    tail = (1 - LEVEL) / 2
    return rate_lower(values, clusters, alpha=tail), 1 - rate_lower(1 - values, clusters, alpha=tail)


def _lengths(data: RunData, baseline: RunData | None) -> Iterator[Length]:
    """Yield the effect of each length against the shortest one: by suite, for all suites together, then by facet."""
    grid = data.spec.evaluate
    requests = [([suite], SCORE, grid.contexts_of(suite)) for suite in grid.suites]
    if len(requests) > 1 and len({lengths for *_, lengths in requests}) == 1:
        # all suites together, where they were asked at the same lengths
        requests.append((list(grid.suites), SCORE, requests[0][2]))
    for name in facet_metrics(data.records):
        suite, facet = facet_of(name)
        requests.append(([suite], facet.name, grid.contexts_of(suite)))
    tables = [_item_means(run.records) for run in (data, baseline) if run is not None]
    samples = int(data.records["sample_index"].max()) + 1
    for suites, metric, lengths in requests:
        short, *longer = sorted(lengths)  # each longer one against the shortest
        contrasts = (_length(suites, metric, (short, long), tables, samples) for long in longer)
        yield from (length for length in contrasts if length is not None)


def _length(
    suites: list[str], metric: str, lengths: tuple[int, int], tables: list[pd.DataFrame], samples: int
) -> Length | None:
    """Return the effect of length on items that have a value at both lengths in every table; None without such items.

    ``lengths`` are the short and the long one in tokens. ``tables`` are the item means of the probe and, if there is
    one, of its baseline. ``samples`` is the number of answers per item.
    """
    columns = [table[metric].xs(length, level="context_tokens") for table in tables for length in lengths]
    common = pd.concat([column[column.index.isin(suites, level="suite")] for column in columns], axis=1).dropna()
    clusters = np.array([f"{suite}/{cluster}" for suite, cluster, _ in common.index])
    if not len(clusters):
        return None
    values: Array = common.to_numpy(dtype=np.float64).T  # [short and long, then those of the baseline; N]
    # whether some mean cannot come from this number of draws of 0 or 1
    graded = bool(np.any(np.abs(values * samples - np.round(values * samples)) > _ROUNDING))
    name, change = "all suites" if len(suites) > 1 else suites[0], values[1] - values[0]
    return Length(
        metric=name if metric == SCORE else f"{name}.{metric}",
        long=lengths[1],
        short=lengths[0],
        long_rate=float(values[1].mean()),
        short_rate=float(values[0].mean()),
        effect=_without_interval(change, clusters)
        or ess_tango(change, clusters, samples=samples, alpha=_ALPHA, graded=graded),
        against=_change_against(values, clusters) if len(tables) > 1 else None,
        decides=metric == SCORE and len(suites) == 1,
    )


def _change_against(values: Array, clusters: npt.NDArray[Any]) -> Effect | Estimate:
    """Return the effect of length (long - short) minus the same effect in the baseline.

    ``values`` [4, N]: short and long context, then short and long context of the baseline.
    """
    difference = values[:2] - values[2:]  # [2, N]
    return _without_interval(difference[1] - difference[0], clusters) or slope_effect(
        difference, (0.0, 1.0), clusters, alpha=_ALPHA, reach=2.0
    )


def _without_interval(change: Array, clusters: npt.NDArray[Any]) -> Estimate | None:
    """Return the mean of ``change`` without an interval if there are too few templates for one, else None."""
    templates = len(set(clusters))
    return Estimate(float(change.mean()), len(change), templates) if templates < FEWEST_CLUSTERS else None


def _item_means(records: pd.DataFrame) -> pd.DataFrame:
    """Return score and facets (1 = as wanted) by item and length, averaged over repeated answers that have a value."""
    columns = {SCORE: records["score"].to_numpy()}
    columns |= {name: facet_scores(records[column], name) for name, column in FACET_COLUMNS.items()}
    keys = [records[key].astype(str) for key in _KEY]
    return pd.DataFrame(columns, index=records.index).groupby([*keys, records["context_tokens"]]).mean()


def _with_signs(lengths: list[Length]) -> Iterator[Length]:
    """Yield the lengths with ``sign`` set: whether the loss with length is significant.

    Only the scores of suites (``decides``) are tested, with p-values adjusted together; ``sign`` is False for facets.
    """
    # against the baseline where there is one
    deciding = {n: length.against or length.effect for n, length in enumerate(lengths) if length.decides}
    effects = {n: effect for n, effect in deciding.items() if isinstance(effect, Effect)}
    adjusted = holm([effect.pvalue for effect in effects.values()])
    signs = {n: e.estimate < 0 and p < _ALPHA for (n, e), p in zip(effects.items(), adjusted, strict=True)}
    return (replace(length, sign=signs.get(n, False)) for n, length in enumerate(lengths))


FILES = ("probe.md", "probe.json")
_NOISE = ("suite", "tokens", "asked twice", "other words", "other score", "95 %")
_LENGTH = ("metric", "tokens", "items", "short", "long", "long - short", "against the baseline", "")
_HOW = (
    "Long minus short is of the same items, in percentage points of what is desired, with 95 % intervals clustered by "
    "template. LOSS: a suite's score is lower in the long context (with a baseline: more so than before), at 5 % over "
    "all suites and lengths together. Facets take the score apart and decide nothing."
)


def noise_table(findings: ProbeFindings) -> Table:
    """Return the table of how often two answers to one item differ."""
    return table_of(_NOISE, map(_noise_row, findings.noise))


def length_table(findings: ProbeFindings) -> Table:
    """Return the table of the effects of context length, the scores of suites first."""
    return table_of(_LENGTH, map(_length_row, findings.lengths))


def lines(findings: ProbeFindings) -> Iterator[str]:
    """Yield the sentences that explain the tables of a probe."""
    yield _noise_line(findings)
    if findings.unscored:
        share = percent(findings.unscored / findings.records)
        yield f"unscored: {findings.unscored} of {findings.records} conversations ({share}); no outcome"
    for place, count in findings.answers.beside.items():
        yield f"words: of {count} of {findings.answers.scored} answers in {place}, not in a plain content"
    yield _HOW
    yield _length_line(findings)


def probe_files(findings: ProbeFindings) -> dict[str, str]:
    """Return the text of each file of the probe by file name."""
    tables = ("Noise: two answers to one item", noise_table(findings)), ("Length", length_table(findings))
    parts = [f"# Probe {escape(findings.run)} of {escape(findings.model)}", *map(escape, first_lines(findings))]
    parts += [f"## {title}\n\n{markdown_table(table)}" for title, table in tables if table]
    parts += [escape(line) for line in lines(findings)]
    body = json.dumps({"format": 1, **asdict(findings)}, indent=1, ensure_ascii=False, allow_nan=False)
    return dict(zip(FILES, ("\n\n".join(parts) + "\n", body + "\n"), strict=True))


def _noise_row(noise: Noise) -> tuple[str, ...]:
    between = no_interval(noise.templates) if noise.low is None else f"{percent(noise.low)} to {percent(noise.high)}"
    shares = percent(noise.words), percent(noise.scores)
    return (noise.suite, str(noise.context_tokens), str(noise.items), *shares, between)


def _length_row(length: Length) -> tuple[str, ...]:
    against = "-" if length.against is None else effect_text(length.against)
    rates = percent(length.short_rate), percent(length.long_rate)
    tokens = f"{length.short}, {length.long}"
    items = str(length.effect.n_items)
    return (length.metric, tokens, items, *rates, effect_text(length.effect), against, "LOSS" if length.sign else "")


def _noise_line(findings: ProbeFindings) -> str:
    if not findings.noise:
        return "noise: no item has two scored answers, so the endpoint's own noise is unknown"
    worst = max(noise.scores for noise in findings.noise)
    most = f"noise: two answers to one item score differently in up to {percent(worst)} of the items"
    if findings.temperature > 0:
        return f"{most}; at temperature {findings.temperature:g} that is the draw's luck and the endpoint's together"
    if any(noise.words for noise in findings.noise):
        return f"{most}; at temperature 0 the draw has no luck, so the endpoint itself is not deterministic"
    return f"{most}; at temperature 0 every second answer was the first one's, word for word"


def first_lines(findings: ProbeFindings) -> Iterator[str]:
    """Yield sentences to read before the tables: how many answers are empty, cut off, or begin with a thought."""
    counts = findings.answers
    if counts.empty:
        thought = counts.beside.get("reasoning", 0)
        behind = f", {thought} of them after a thought" if thought else ""
        yield (
            f"empty: {counts.empty} of {counts.scored} answers are empty{behind}; an empty answer scores 0 "
            "whatever the model can do"
        )
    if counts.cut:
        cut = f"cut: {counts.cut} of {counts.scored} answers were cut before they ended"
        yield f"{cut}; give the suite more max_new_tokens"
    if counts.thoughts:
        yield (
            f"thoughts: {counts.thoughts} of {counts.scored} answers begin with a thought that was graded as said; "
            "evaluate: {think: strip} grades only the text after it"
        )


def _length_line(findings: ProbeFindings) -> str:
    if findings.answers.is_unusable:
        return "length: not measured, every answer is empty or cut"
    signs = [f"{length.metric} at {length.long}" for length in findings.lengths if length.sign]
    deciding = [length.against or length.effect for length in findings.lengths if length.decides]
    if not any(isinstance(effect, Effect) for effect in deciding):
        why = "no suite has enough templates for an interval" if deciding else "no item was answered at two lengths"
        return f"length: not measured, {why}"
    if not signs:
        return "length: no suite is shown to lose with it"
    than = (
        "more than at the baseline"
        if findings.baseline
        else "; a baseline would tell a policy from a model that reads long contexts badly"
    )
    return inline(f"length: {', '.join(signs)} loses with it {than}".replace(" ;", ";"))
