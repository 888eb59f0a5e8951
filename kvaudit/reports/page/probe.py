"""The findings of one probe of an endpoint: its noise, and the effect of a longer context on the same items.

Noise is how often two answers to one item differ. The effect is an item's score in the long context minus its score in
the short one. If there is a baseline (an earlier probe by the same plan), the findings also say how this effect changed
since then. If the endpoint compresses its cache, scores change where the context is long, though the question is the
same. A model that reads long contexts badly changes them too, but then the baseline shows the same change. A failed
request gives no answer, and its item is left out on both sides.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
from kvaudit.core.records import Outcome, Record, Role
from kvaudit.core.spec_evaluate import EvaluateSpec
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

    ``low, high`` is the 95 % interval of ``scores``, the share that differs in score. Both are None if there are too
    few ``templates``.
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
    baseline. ``sign`` is whether the longer context loses significantly (if there is a baseline, whether it loses
    significantly more than in the baseline), at 5 % over all suites and lengths together (Holm).
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

    @property
    def tested(self) -> Effect | Estimate:
        """The effect that decides: ``against`` if there is a baseline, else ``effect``."""
        return self.against or self.effect


@dataclass(frozen=True)
class AnswerCounts:
    """Counts of the scored conversations, and of those whose answers may not show the model's behaviour.

    An answer counts as ``empty`` if it has no text, with or without a thought; as ``cut`` if it has text and was cut
    off; among ``thoughts`` if it begins with a thought that was graded as text. ``beside`` counts the answers whose
    text was not in the content of the message but in another field, by the name of that field.
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
    """The findings of a probe.

    ``records`` counts its conversations, ``unscored`` those among them that have no score.
    """

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
    grid, scored = data.spec.evaluate, _scored_answers(data)
    return ProbeFindings(
        run=data.run.name,
        baseline=None if baseline is None else baseline.run.name,
        model=data.spec.model,
        temperature=grid.temperature,
        records=len(data.records),
        unscored=len(data.records) - len(scored),
        answers=_count_answers(scored),
        noise=tuple(_noise_by_cell(scored, grid)),
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


# --- the answers, and how much two answers to one item differ ---------------------------------------------------------


class _AnswerFacts(NamedTuple):
    """Facts on an answer that only the transcript of its record shows; ``words`` is a hash of the transcript."""

    words: str
    has_text: bool
    is_thought: bool
    said_in: str  # field of the message that had the text, if not its content


def _answer_facts(record: Record) -> _AnswerFacts:
    last = record.transcript[-1]
    words = hashlib.sha256(repr(record.transcript).encode()).hexdigest()
    has_text = last.role is Role.ASSISTANT and bool(last.content.strip())
    return _AnswerFacts(words, has_text, starts_with_thought(last.content), record.said_in)


def _scored_answers(data: RunData) -> pd.DataFrame:
    """Return the records that have a score, with a column for each field of ``_AnswerFacts``."""
    scored = data.records[data.records["score"].notna()]
    places = [(str(file), int(line)) for file, line in scored[["file", "line"]].itertuples(index=False)]
    by_place = {place: _answer_facts(record) for place, record in data.records_at(places)}
    facts = [by_place[place] for place in places]
    return scored.join(pd.DataFrame(facts, columns=_AnswerFacts._fields, index=scored.index))


def _count_answers(scored: pd.DataFrame) -> AnswerCounts:
    has_text = scored["has_text"].to_numpy(dtype=np.bool_)
    return AnswerCounts(
        scored=len(scored),
        empty=int((~has_text).sum()),
        cut=int((has_text & (scored["outcome"] == Outcome.TRUNCATED.value)).sum()),
        thoughts=int(scored["is_thought"].sum()),
        beside=dict(Counter(filter(None, scored["said_in"])).most_common()),
    )


def _noise_by_cell(scored: pd.DataFrame, grid: EvaluateSpec) -> Iterator[Noise]:
    for suite in grid.suites:
        for context in sorted(grid.contexts_of(suite)):
            cell = scored[(scored["suite"] == suite) & (scored["context_tokens"] == context)]
            items = [draws for _, draws in cell.groupby("item_id", observed=True) if len(draws) > 1]
            if items:
                words, scores = (np.array([_share_of_pairs(draws[key]) for draws in items]) for key in ("words", SCORE))
                clusters = np.array([str(draws["cluster_id"].iloc[0]) for draws in items])
                templates, tail = len(set(clusters)), (1 - LEVEL) / 2
                low = high = None
                if templates >= FEWEST_CLUSTERS:
                    low = rate_lower(scores, clusters, alpha=tail)
                    high = 1 - rate_lower(1 - scores, clusters, alpha=tail)
                shares = float(words.mean()), float(scores.mean())
                yield Noise(suite, context, len(items), *shares, templates, low, high)


def _share_of_pairs(draws: pd.Series) -> float:
    """Return the share of pairs in which the two draws differ, over all pairs of these draws."""
    return float(np.mean([a != b for a, b in combinations(draws.tolist(), 2)]))


# --- the effect of length ---------------------------------------------------------------------------------------------


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
    """Return the effect of length on one metric of these suites together.

    ``lengths`` are the short and the long one in tokens. ``tables`` are the item means of the probe and, if there is
    one, of its baseline. ``samples`` is the number of answers per item. Only items with a value at both lengths in
    every table count; the result is None if there are no such items.
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
        effect=_effect(
            change, clusters, lambda: ess_tango(change, clusters, samples=samples, alpha=_ALPHA, graded=graded)
        ),
        against=_change_against(values[:2] - values[2:], clusters) if len(tables) > 1 else None,
        decides=metric == SCORE and len(suites) == 1,
    )


def _change_against(differences: Array, clusters: npt.NDArray[Any]) -> Effect | Estimate:
    """Return the effect of length (long - short) minus the same effect in the baseline.

    ``differences`` [2, N] are those from the baseline in the short and in the long context.
    """
    change = differences[1] - differences[0]
    return _effect(change, clusters, lambda: slope_effect(differences, (0.0, 1.0), clusters, alpha=_ALPHA, reach=2.0))


def _effect(change: Array, clusters: npt.NDArray[Any], interval: Callable[[], Effect]) -> Effect | Estimate:
    """Return ``interval()``, or only the mean of ``change`` if there are too few templates for an interval."""
    templates = len(set(clusters))
    return Estimate(float(change.mean()), len(change), templates) if templates < FEWEST_CLUSTERS else interval()


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
    effects = {n: t for n, length in enumerate(lengths) if length.decides and isinstance(t := length.tested, Effect)}
    adjusted = holm([effect.pvalue for effect in effects.values()])
    signs = {n: e.estimate < 0 and p < _ALPHA for (n, e), p in zip(effects.items(), adjusted, strict=True)}
    return (replace(length, sign=signs.get(n, False)) for n, length in enumerate(lengths))


# --- the page ---------------------------------------------------------------------------------------------------------

FILES = ("probe.md", "probe.json")
_NOISE = ("suite", "tokens", "asked twice", "other words", "other score", "95 %")
_LENGTH = ("metric", "tokens", "items", "short", "long", "long - short", "against the baseline", "")
_HOW = (
    "Long minus short is of the same items, in percentage points of what is desired, with 95 % intervals clustered by "
    "template. LOSS: a suite's score is lower in the long context (with a baseline: more so than before), at 5 % over "
    "all suites and lengths together. Facets are parts of the score and decide nothing."
)


def probe_tables(findings: ProbeFindings) -> dict[str, Table]:
    """Return the tables that have rows, by title: how often two answers differ, and the effects of length."""
    noise, lengths = map(_noise_row, findings.noise), map(_length_row, findings.lengths)
    tables = {"Noise: two answers to one item": table_of(_NOISE, noise), "Length": table_of(_LENGTH, lengths)}
    return {title: table for title, table in tables.items() if table}


def _noise_row(noise: Noise) -> tuple[str, ...]:
    between = no_interval(noise.templates) if noise.low is None else f"{percent(noise.low)} to {percent(noise.high)}"
    shares = percent(noise.words), percent(noise.scores)
    return (noise.suite, str(noise.context_tokens), str(noise.items), *shares, between)


def _length_row(length: Length) -> tuple[str, ...]:
    rates, tokens = (percent(length.short_rate), percent(length.long_rate)), f"{length.short}, {length.long}"
    effects = effect_text(length.effect), effect_text(length.against)
    return (length.metric, tokens, str(length.effect.n_items), *rates, *effects, "LOSS" if length.sign else "")


def probe_files(findings: ProbeFindings) -> dict[str, str]:
    """Return the text of each file of the probe by file name."""
    parts = [f"# Probe {escape(findings.run)} of {escape(findings.model)}", *map(escape, first_lines(findings))]
    parts += [f"## {title}\n\n{markdown_table(table)}" for title, table in probe_tables(findings).items()]
    parts += [escape(line) for line in lines(findings)]
    body = json.dumps({"format": 1, **asdict(findings)}, indent=1, ensure_ascii=False, allow_nan=False)
    return dict(zip(FILES, ("\n\n".join(parts) + "\n", body + "\n"), strict=True))


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
            f"thoughts: {counts.thoughts} of {counts.scored} answers begin with a thought that was graded as part of "
            "the answer; evaluate: {think: strip} grades only the text after it"
        )


def lines(findings: ProbeFindings) -> Iterator[str]:
    """Yield the sentences that explain the tables of a probe."""
    yield _noise_line(findings)
    if findings.unscored:
        share = percent(findings.unscored / findings.records)
        yield f"unscored: {findings.unscored} of {findings.records} conversations ({share}); no outcome"
    for place, count in findings.answers.beside.items():
        yield f"fields: {count} of {findings.answers.scored} answers have their text in {place}, not in content"
    yield _HOW
    yield inline(f"length: {_length_result(findings)}")


def _noise_line(findings: ProbeFindings) -> str:
    if not findings.noise:
        return "noise: no item has two scored answers, so the endpoint's own noise is unknown"
    worst = max(noise.scores for noise in findings.noise)
    if findings.temperature > 0:
        why = f"at temperature {findings.temperature:g} this is the noise of sampling and of the endpoint together"
    elif any(noise.words for noise in findings.noise):
        why = "at temperature 0 nothing is sampled, so the endpoint itself is not deterministic"
    else:
        why = "at temperature 0 every second answer equals the first one, word for word"
    return f"noise: two answers to one item score differently in up to {percent(worst)} of the items; {why}"


def _length_result(findings: ProbeFindings) -> str:
    deciding = [length.tested for length in findings.lengths if length.decides]
    if findings.answers.is_unusable:
        return "not measured, every answer is empty or cut"
    if not any(isinstance(effect, Effect) for effect in deciding):
        why = "no suite has enough templates for an interval" if deciding else "no item was answered at two lengths"
        return f"not measured, {why}"
    signs = [f"{length.metric} at {length.long}" for length in findings.lengths if length.sign]
    if not signs:
        return "no suite is shown to lose with it"
    losses = f"{', '.join(signs)} {'loses' if len(signs) == 1 else 'lose'} with it"
    if findings.baseline:
        return f"{losses} more than at the baseline"
    return f"{losses}; a baseline would show whether a policy is the cause or a model that reads long contexts badly"
