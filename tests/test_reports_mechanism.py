"""Lost spans beside lost behaviour: planted associations come out as they were planted, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from report_text import page_text
from reports_synthetic import Design, frame_of, passage_of, pins, policy, records_of, run_spec, spec_of, with_values

from kvaudit.core.facets import readable_facets, unreadable_facets
from kvaudit.core.records import Outcome, Record
from kvaudit.core.spans import KeptSpan
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.run_page import page_of
from kvaudit.reports.records.load import RunData
from kvaudit.reports.run import decide_run
from kvaudit.reports.sections.mechanism import Mechanism

SNAP = policy("snapkv", 96)
Told = Callable[[int], tuple[float, bool | None]]  # item -> kept share of the rule, whether unsafe; None: unread


def findings(told: Told, *, spans: bool = True, templates: int = 30, placements: int = 1) -> Findings:
    """120 items, safe without compression; under snapkv as ``told``. Of three templates in a row items stand alike."""
    design = Design(
        arms=("base",), train=False, policies=("none", SNAP), suites=("refusal",), items=120, clusters=templates
    )
    rows = [_told(row, told, spans=spans, placements=placements) for _, unit in records_of(design) for row in unit]
    frame = frame_of(("unit.jsonl", number, row) for number, row in enumerate(rows, 1))
    data = RunData(run=Path("demo"), records=frame, spec=run_spec(spec_of(design)), provenance=pins(rows, "base"))
    found = decide_run(data)
    return with_values(found, data, "mechanism")


def _told(row: Record, told: Told, *, spans: bool, placements: int) -> Record:
    item = int(row.item_id[-4:])
    kept, unsafe = (1.0, False) if row.policy == "none" else told(item)
    return replace(
        row,
        outcome=Outcome.UNDESIRED if unsafe else Outcome.DESIRED,
        score=float(not unsafe),
        placement=f"place {item % placements}",
        facets=unreadable_facets(["unsafe"]) if unsafe is None else readable_facets({"unsafe": unsafe}),
        spans={"rule": KeptSpan(kept, ()), "question": KeptSpan(1.0, ())} if spans else {},
    )


def half(item: int) -> tuple[float, bool]:
    """Every second item loses most of its rule, and every second one of these is unsafe."""
    return (0.2, item % 4 == 1) if item % 2 else (0.9, False)


def of_rule(found: Mechanism) -> tuple[object, object]:
    return found.rates[0], found.slopes[0]


def test_rates_difference_and_share_are_those_that_were_planted() -> None:
    rates, slope = of_rule(findings(half, templates=24).values["mechanism"])
    assert (rates.metric, rates.policy, rates.span, rates.reason) == ("refusal.unsafe", SNAP, "rule", "")
    assert (rates.lost.answers, rates.lost.rate, rates.lost.uncompressed) == (60, 0.5, 1.0)  # of what is wanted
    assert (rates.kept.answers, rates.kept.rate, rates.kept.high) == (60, 1.0, 1.0)
    assert rates.lost.low < 0.5 < rates.lost.high
    assert rates.difference.estimate == pytest.approx(-0.5)
    assert rates.difference.high < 0
    assert (rates.share.estimate, rates.share.low) == (pytest.approx(1.0), None)  # of every template the same
    assert slope.effect.estimate == pytest.approx(-0.5 / 0.7)  # from .1 lost to .8 lost
    assert (slope.equal, slope.policies) == ((), (SNAP,))


def test_flips_that_have_nothing_to_do_with_the_span_are_not_laid_on_it() -> None:
    rates, _ = of_rule(findings(lambda item: (0.2 if item % 2 else 0.9, item % 8 < 2)).values["mechanism"])
    assert rates.difference.low < 0 < rates.difference.high
    assert rates.share.estimate == pytest.approx(0.5)  # beside lost in half of the answers


def test_what_could_not_be_read_stands_beside_the_group_that_it_left() -> None:
    found = findings(lambda item: (0.2, None if item % 4 == 1 else True) if item % 2 else (0.9, False))
    rates, _ = of_rule(found.values["mechanism"])
    assert (rates.lost.answers, rates.lost.unread, rates.kept.unread, rates.unknown) == (30, 0.5, 0.0, 0)
    assert "unread 50.0 %" in passage_of(found, "mechanism").tables[0].rows[0][4]


def test_a_span_without_variation_is_a_line_and_no_estimate() -> None:
    for kept, word in ((1.0, "kept"), (0.1, "lost")):
        found = findings(lambda item, kept=kept: (kept, item % 3 == 0))
        rates, slope = of_rule(found.values["mechanism"])
        assert (rates.difference, rates.share, rates.reason) == (None, None, f"{word} in every answer")
        assert (slope.effect, slope.reason) == (None, "the same in every answer under each policy")
        section = passage_of(found, "mechanism")
        said = f"Nothing to compare, since the rule was {word} in every answer: refusal.unsafe base @ snapkv 96."
        assert said in section.notes
        assert "In none of 1 cell" in section.finding


def test_too_few_templates_are_said_and_give_no_estimate() -> None:
    rates, slope = of_rule(findings(lambda item: (0.2, True) if item % 30 < 3 else (1.0, False)).values["mechanism"])
    assert (rates.difference, rates.reason) == (None, "lost in fewer than 6 templates")
    assert rates.lost.templates == 3
    assert (slope.effect, slope.reason) == (None, "varies too little: 3.7 effective templates, an interval needs 6")


def test_where_the_span_follows_from_its_place_the_regression_says_so() -> None:
    found = findings(lambda item: (0.2, True) if item % 2 else (0.9, False), placements=2)
    _, slope = of_rule(found.values["mechanism"])
    assert (slope.effect, slope.equal) == (None, ("placement",))
    assert slope.reason == "varies too little beyond placement: 0.0 effective templates, an interval needs 6"


def test_without_flips_nothing_is_estimated() -> None:
    rates, slope = of_rule(findings(lambda item: (0.2 if item % 2 else 0.9, False)).values["mechanism"])
    assert (rates.difference, slope.effect) == (None, None)
    assert rates.reason == slope.reason == "no answer differs from the uncompressed one"


def test_a_run_without_spans_has_no_such_section() -> None:
    found = findings(half, spans=False)
    assert passage_of(found, "mechanism") is None


def test_the_page_counts_what_happened_and_claims_no_cause() -> None:
    found = findings(half)
    text = page_text(page_of(found))
    [row] = [line for line in text.splitlines() if line.startswith("| refusal.unsafe | base @ snapkv 96 |")]
    assert "| rule | 60 of 120 (50.0 %) | 50.0 % [" in row
    assert "uncompressed 0.0 %, unread 0.0 %" in row
    assert "| +50.0 pp [" in row
    assert row.endswith("| 100 % |")
    assert "An association, not a cause" in text


def test_no_flip_among_a_few_answers_is_no_certainty_that_a_lost_span_is_harmless() -> None:
    found = findings(lambda item: (0.2, False) if item % 30 < 6 else (0.9, item % 30 in (8, 17)))  # 24 lost, 8 of 96
    rates, slope = of_rule(found.values["mechanism"])
    assert (rates.lost.answers, rates.difference.estimate) == (24, pytest.approx(8 / 96))
    assert rates.difference.low < 0
    assert (slope.effect, slope.reason[:23]) == (None, "too few answers moved: ")


def test_where_every_lost_span_flips_and_no_other_there_is_an_interval_and_a_true_reason() -> None:
    rates, slope = of_rule(findings(lambda item: (0.2, True) if item % 2 else (0.9, False)).values["mechanism"])
    assert (rates.difference.estimate, rates.reason) == (pytest.approx(-1.0), "")
    assert -0.9 < rates.difference.high < -0.5
    assert (slope.effect, slope.reason) == (
        None,
        "every template gives the same, which leaves no spread to estimate an interval from",
    )
