"""The pages of a probe: its noise and what length costs, for the terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from kvaudit.core.text import inline
from kvaudit.reports.analysis.probe import Length, Noise, ProbeFindings
from kvaudit.reports.layout.tables import Table, table_of
from kvaudit.reports.layout.words import drift, percent
from kvaudit.reports.page.formats.markdown import as_table, escape
from kvaudit.reports.stats.few import no_interval

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
        yield f"unscored: {found.unscored} of {found.records} conversations ({share}); no outcome, and asked again"
    yield _HOW
    yield _said(found)


def probe_files(found: ProbeFindings) -> dict[str, str]:
    """File name -> text."""
    tables = ("Noise: two answers to one item", noise_table(found)), ("Length", length_table(found))
    parts = [f"# Probe {escape(found.run)} of {escape(found.model)}"]
    parts += [f"## {title}\n\n{as_table(table)}" for title, table in tables if table]
    parts += [escape(line) for line in lines(found)]
    body = json.dumps({"format": 1, **asdict(found)}, indent=1, ensure_ascii=False, allow_nan=False)
    return dict(zip(FILES, ("\n\n".join(parts) + "\n", body + "\n"), strict=True))


def _noise_row(noise: Noise) -> tuple[str, ...]:
    between = no_interval(noise.templates) if noise.low is None else f"{percent(noise.low)} to {percent(noise.high)}"
    shares = percent(noise.words), percent(noise.scores)
    return (noise.suite, str(noise.context_tokens), str(noise.items), *shares, between)


def _length_row(length: Length) -> tuple[str, ...]:
    against = "-" if length.against is None else drift(length.against)
    rates = percent(length.short_rate), percent(length.long_rate)
    tokens = f"{length.short}, {length.long}"
    items = str(length.effect.n_items)
    return (length.metric, tokens, items, *rates, drift(length.effect), against, "LOSS" if length.sign else "")


def _meaning(found: ProbeFindings) -> str:
    """What the noise is made of."""
    if not found.noise:
        return "noise: no item has two scored answers, so the endpoint's own noise is unknown"
    worst = max(noise.scores for noise in found.noise)
    most = f"noise: two answers to one item score differently in up to {percent(worst)} of the items"
    if found.temperature > 0:
        return f"{most}; at temperature {found.temperature:g} that is the draw's luck and the endpoint's together"
    if any(noise.words for noise in found.noise):
        return f"{most}; at temperature 0 the draw has no luck, so the endpoint itself is not deterministic"
    return f"{most}; at temperature 0 every second answer was the first one's, word for word"


def _said(found: ProbeFindings) -> str:
    signs = [f"{length.metric} at {length.long}" for length in found.lengths if length.sign]
    if not signs:
        return "length: no suite is shown to lose with it"
    than = "more than at the baseline" if found.baseline else "; a baseline would tell a policy from a weak reader"
    return inline(f"length: {', '.join(signs)} loses with it {than}".replace(" ;", ";"))
