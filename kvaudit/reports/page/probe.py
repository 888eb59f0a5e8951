"""What one probe of an endpoint says by itself: its own noise, and what a longer context costs the same items.

Noise: an item that was asked twice. Length: an item's score in the long context minus its score in the short one, and
against a baseline the change of that difference. A policy of the endpoint's cache bites where the context is long and
the question is the same; so does a model that reads long contexts badly, which the baseline had too. What failed is no
answer, and its item is left out on both sides.
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
from kvaudit.reports.stats.few import Estimate, no_interval
from kvaudit.reports.stats.signflip import FEWEST_CLUSTERS, holm
from kvaudit.reports.stats.slope import slope_effect
from kvaudit.reports.stats.tango import ess_tango, rate_lower

_ALPHA = 0.05
_ROUNDING = 1e-9  # of a mean of draws that are 0 or 1
_KEY = ["suite", "cluster_id", "item_id"]


@dataclass(frozen=True)
class Noise:
    """Items of a suite at a length that were asked again, and the shares whose words, and whose scores, differ.

    ``low, high`` is the 95 % interval of ``scores``, None where its ``templates`` are too few.
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
    """A suite's score, or a facet as it is wanted, in a long and a short context; ``effect`` is long minus short,
    without an interval where its templates are too few for one.

    ``against`` is that minus the baseline's. ``sign``: a loss with length (a greater one than the baseline's, where
    there is one), at 5 % over all suites and lengths together (Holm).
    """

    metric: str
    long: int
    short: int
    long_rate: float
    short_rate: float
    effect: Effect | Estimate
    against: Effect | Estimate | None
    decides: bool  # of a suite's score: facets and the sum take it apart, or together
    sign: bool = False


@dataclass(frozen=True)
class AnswersHeard:
    """What came of the conversations that were scored: how many, and of how many nothing can be told.

    ``empty``: no word was said, whatever was thought; ``cut`` behind some words; ``thoughts`` were graded as said.
    ``beside``: place of the words -> answers, where that was not the content of a message.
    """

    scored: int
    empty: int
    cut: int
    thoughts: int
    beside: Mapping[str, int]

    @property
    def none_of_use(self) -> bool:
        """Whether there is no answer but empty and cut ones."""
        return self.scored > 0 and self.empty + self.cut == self.scored


@dataclass(frozen=True)
class ProbeFindings:
    """All of it. ``unscored`` conversations of ``records``."""

    run: str
    baseline: str | None
    model: str
    temperature: float
    records: int
    unscored: int
    answers: AnswersHeard
    noise: tuple[Noise, ...]
    lengths: tuple[Length, ...]


def probe_findings(data: RunData, baseline: RunData | None = None) -> ProbeFindings:
    """The findings of a probe; raises DataError for a run that is none, or a baseline of other items."""
    _check_probe(data)
    if baseline is not None:
        check_asked(recorded(data.provenance, ENDPOINT_REQUESTS), baseline)
    return ProbeFindings(
        run=data.run.name,
        baseline=None if baseline is None else baseline.run.name,
        model=data.spec.model,
        temperature=data.spec.evaluate.temperature,
        records=len(data.records),
        unscored=int(data.records["score"].isna().sum()),
        answers=_answers(data),
        noise=tuple(_noise(data)),
        lengths=tuple(_signed(list(_lengths(data, baseline)))),
    )


def _check_probe(run: RunData) -> None:
    if run.spec.probe is None:
        raise DataError(f"{str(run.run)!r} is no probe; give the folder that kvaudit probe wrote")


def check_asked(now: Mapping[str, str], baseline: RunData) -> None:
    """Raise DataError for a baseline that is no probe, or was asked something else than ``now``."""
    _check_probe(baseline)
    then = recorded(baseline.provenance, ENDPOINT_REQUESTS)
    changed = [key for key in sorted({*now, *then}) if now.get(key) != then.get(key)]
    if changed:
        raise DataError(
            f"{str(baseline.run)!r} was asked something else ({changed[0]}); a baseline is a probe by the same plan "
            "and the same version of kvaudit"
        )


def _answers(data: RunData) -> AnswersHeard:
    scored = data.records[data.records["score"].notna()]
    places = [(str(file), int(line)) for file, line in scored[["file", "line"]].itertuples(index=False)]
    records = [record for _, record in data.records_at(places)]
    last = [record.transcript[-1] for record in records]
    spoke = [said.role is Role.ASSISTANT and bool(said.content.strip()) for said in last]
    beside = Counter(record.said_in for record in records if record.said_in)
    return AnswersHeard(
        scored=len(records),
        empty=spoke.count(False),
        cut=sum(own and record.outcome is Outcome.TRUNCATED for own, record in zip(spoke, records, strict=True)),
        thoughts=sum(starts_with_thought(said.content) for said in last),
        beside=dict(beside.most_common()),
    )


def _noise(data: RunData) -> Iterator[Noise]:
    for suite in data.spec.evaluate.suites:
        for context in sorted(data.spec.evaluate.contexts_of(suite)):
            part = data.records[(data.records["suite"] == suite) & (data.records["context_tokens"] == context)]
            twice = [_drawn(own) for _, own in _with_words(data, part).groupby("item_id", observed=True)]
            scored = [item for item in twice if item.scores is not None]
            if scored:
                values = np.array([item.scores for item in scored])
                clusters = np.array([item.cluster for item in scored])
                low, high = _interval(values, clusters)
                words = float(np.mean([item.words for item in scored]))
                yield Noise(suite, context, len(scored), words, float(values.mean()), len(set(clusters)), low, high)


def _with_words(data: RunData, part: pd.DataFrame) -> pd.DataFrame:
    """The records with a hash of each transcript; those of one item open alike."""
    places = [(str(file), int(line)) for file, line in part[["file", "line"]].itertuples(index=False)]
    said = data.transcripts(places)
    return part.assign(words=[hashlib.sha256(repr(said[place]).encode()).hexdigest() for place in places])


class _Drawn(NamedTuple):
    """The draws of an item: the shares of their pairs that differ in words and in score; None without two scores."""

    cluster: str
    words: float
    scores: float | None


def _drawn(own: pd.DataFrame) -> _Drawn:
    scored = own[own["score"].notna()]
    words, scores = ([a != b for a, b in combinations(scored[key].tolist(), 2)] for key in ("words", "score"))
    share = float(np.mean(scores)) if scores else None
    return _Drawn(str(own["cluster_id"].iloc[0]), float(np.mean(words)) if words else 0.0, share)


def _interval(values: Array, clusters: npt.NDArray[np.str_]) -> tuple[float | None, float | None]:
    if len(set(clusters)) < FEWEST_CLUSTERS:
        return None, None
    tail = (1 - LEVEL) / 2
    return rate_lower(values, clusters, alpha=tail), 1 - rate_lower(1 - values, clusters, alpha=tail)


def _lengths(data: RunData, baseline: RunData | None) -> Iterator[Length]:
    """Every suite at each longer length, all suites together, then every facet."""
    grid = data.spec.evaluate
    asked = [([suite], SCORE, grid.contexts_of(suite)) for suite in grid.suites]
    if len(asked) > 1 and len({lengths for *_, lengths in asked}) == 1:
        # all suites together, where they were asked at the same lengths
        asked.append((list(grid.suites), SCORE, asked[0][2]))
    for name in facet_metrics(data.records):
        suite, facet = facet_of(name)
        asked.append(([suite], facet.name, grid.contexts_of(suite)))
    tables = [_items(run.records) for run in (data, baseline) if run is not None]
    samples = int(data.records["sample_index"].max()) + 1
    for suites, metric, lengths in asked:
        short, *longer = sorted(lengths)  # each longer one against the shortest
        found = (_length(suites, metric, (short, long), tables, samples) for long in longer)
        yield from (length for length in found if length is not None)


def _length(
    suites: list[str], metric: str, lengths: tuple[int, int], tables: list[pd.DataFrame], samples: int
) -> Length | None:
    """One contrast over the items that have a value everywhere; None where no item has."""
    columns = [table[metric].xs(length, level="context_tokens") for table in tables for length in lengths]
    common = pd.concat([column[column.index.isin(suites, level="suite")] for column in columns], axis=1).dropna()
    clusters = np.array([f"{suite}/{cluster}" for suite, cluster, _ in common.index])
    if not len(clusters):
        return None
    values: Array = common.to_numpy(dtype=np.float64).T  # [short and long, then those of the baseline; N]
    # whether some mean is none of so many draws of 0 or 1
    graded = bool(np.any(np.abs(values * samples - np.round(values * samples)) > _ROUNDING))
    name = "all suites" if len(suites) > 1 else suites[0]
    return Length(
        metric=name if metric == SCORE else f"{name}.{metric}",
        long=lengths[1],
        short=lengths[0],
        long_rate=float(values[1].mean()),
        short_rate=float(values[0].mean()),
        effect=_effect(values[1] - values[0], clusters, samples, graded=graded),
        against=_against(values, clusters) if len(tables) > 1 else None,
        decides=metric == SCORE and len(suites) == 1,
    )


def _effect(change: Array, clusters: npt.NDArray[Any], samples: int, *, graded: bool) -> Effect | Estimate:
    alone = _alone(change, clusters)
    return alone or ess_tango(change, clusters, samples=samples, alpha=_ALPHA, graded=graded)


def _against(values: Array, clusters: npt.NDArray[Any]) -> Effect | Estimate:
    """The change of values [0:2] with length minus the baseline's [2:4]."""
    apart = values[:2] - values[2:]  # [2, N]
    return _alone(apart[1] - apart[0], clusters) or slope_effect(apart, (0.0, 1.0), clusters, alpha=_ALPHA, reach=2.0)


def _alone(change: Array, clusters: npt.NDArray[Any]) -> Estimate | None:
    """The estimate without an interval, where the templates are too few for one."""
    templates = len(set(clusters))
    return Estimate(float(change.mean()), len(change), templates) if templates < FEWEST_CLUSTERS else None


def _items(records: pd.DataFrame) -> pd.DataFrame:
    """Item means of the score and of every facet, 1 as wanted, over the draws that have one; by length."""
    read = {SCORE: records["score"].to_numpy()}
    read |= {name: facet_scores(records[column], name) for name, column in FACET_COLUMNS.items()}
    keys = [records[key].astype(str) for key in _KEY]
    return pd.DataFrame(read, index=records.index).groupby([*keys, records["context_tokens"]]).mean()


def _signed(found: list[Length]) -> Iterator[Length]:
    """The same with the signs of what decides, which are decided together."""
    # against the baseline where there is one
    deciding = {n: length.against or length.effect for n, length in enumerate(found) if length.decides}
    effects = {n: effect for n, effect in deciding.items() if isinstance(effect, Effect)}
    adjusted = holm([effect.pvalue for effect in effects.values()])
    signs = {n: e.estimate < 0 and p < _ALPHA for (n, e), p in zip(effects.items(), adjusted, strict=True)}
    return (replace(length, sign=signs.get(n, False)) for n, length in enumerate(found))


FILES = ("probe.md", "probe.json")
_NOISE = ("suite", "tokens", "asked twice", "other words", "other score", "95 %")
_LENGTH = ("metric", "tokens", "items", "short", "long", "long - short", "against the baseline", "")
_HOW = (
    "Long minus short is of the same items, in percentage points of what is desired, with 95 % intervals clustered by "
    "template. LOSS: a suite's score is lower in the long context (with a baseline: more so than before), at 5 % over "
    "all suites and lengths together. Facets take the score apart and decide nothing."
)


def noise_table(found: ProbeFindings) -> Table:
    """How often two answers to one item differ."""
    return table_of(_NOISE, map(_noise_row, found.noise))


def length_table(found: ProbeFindings) -> Table:
    """What length costs, the scores of suites first."""
    return table_of(_LENGTH, map(_length_row, found.lengths))


def lines(found: ProbeFindings) -> Iterator[str]:
    """What the tables mean."""
    yield _meaning(found)
    if found.unscored:
        share = percent(found.unscored / found.records)
        yield f"unscored: {found.unscored} of {found.records} conversations ({share}); no outcome"
    for place, count in found.answers.beside.items():
        yield f"words: of {count} of {found.answers.scored} answers in {place}, not in a plain content"
    yield _HOW
    yield _said(found)


def probe_files(found: ProbeFindings) -> dict[str, str]:
    """File name -> text."""
    tables = ("Noise: two answers to one item", noise_table(found)), ("Length", length_table(found))
    parts = [f"# Probe {escape(found.run)} of {escape(found.model)}", *map(escape, first_lines(found))]
    parts += [f"## {title}\n\n{markdown_table(table)}" for title, table in tables if table]
    parts += [escape(line) for line in lines(found)]
    body = json.dumps({"format": 1, **asdict(found)}, indent=1, ensure_ascii=False, allow_nan=False)
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


def _meaning(found: ProbeFindings) -> str:
    if not found.noise:
        return "noise: no item has two scored answers, so the endpoint's own noise is unknown"
    worst = max(noise.scores for noise in found.noise)
    most = f"noise: two answers to one item score differently in up to {percent(worst)} of the items"
    if found.temperature > 0:
        return f"{most}; at temperature {found.temperature:g} that is the draw's luck and the endpoint's together"
    if any(noise.words for noise in found.noise):
        return f"{most}; at temperature 0 the draw has no luck, so the endpoint itself is not deterministic"
    return f"{most}; at temperature 0 every second answer was the first one's, word for word"


def first_lines(found: ProbeFindings) -> Iterator[str]:
    """What has to be known before the tables: of which answers no behaviour can be read."""
    said = found.answers
    if said.empty:
        thought = said.beside.get("reasoning", 0)
        behind = f", {thought} of them behind a thought" if thought else ""
        yield (
            f"empty: {said.empty} of {said.scored} answers are empty{behind}; an answer that is not there scores "
            "nothing, whatever the model would have said"
        )
    if said.cut:
        yield f"cut: {said.cut} of {said.scored} answers were cut before they ended; give the suite more max_new_tokens"
    if said.thoughts:
        yield (
            f"thoughts: {said.thoughts} of {said.scored} answers begin with a thought that was graded as said; "
            "evaluate: {think: strip} grades what comes behind it"
        )


def _said(found: ProbeFindings) -> str:
    if found.answers.none_of_use:
        return "length: not measured, every answer is empty or cut"
    signs = [f"{length.metric} at {length.long}" for length in found.lengths if length.sign]
    deciding = [length.against or length.effect for length in found.lengths if length.decides]
    if not any(isinstance(effect, Effect) for effect in deciding):
        why = "no suite has enough templates for an interval" if deciding else "no item was answered at two lengths"
        return f"length: not measured, {why}"
    if not signs:
        return "length: no suite is shown to lose with it"
    than = "more than at the baseline" if found.baseline else "; a baseline would tell a policy from a weak reader"
    return inline(f"length: {', '.join(signs)} loses with it {than}".replace(" ;", ";"))
