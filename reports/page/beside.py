"""The sections beside the gate: safe budget, dose, churn, concentration, seeds, displacement, other analyses."""

from __future__ import annotations

from kvaudit.reports.analysis.safe import cleared_sentence
from kvaudit.reports.gate.decided import Decided
from kvaudit.reports.page import detail_tables as tables
from kvaudit.reports.page import summaries
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.page import Section
from kvaudit.reports.page.people_tables import errors_table, labelled_cells_table, panel_notes

SAFE = {"budget": "smallest budget", "length": "longest context"}
CLEARED_SHOWN = 3  # sentences; the table has all


def dose_sections(findings: Findings) -> list[Section]:
    """How far down behaviour holds, and how fast it goes."""
    reference = findings.comparison.reference
    axes = list(dict.fromkeys(s.axis for s in findings.analysis.safe))
    return [
        Section(
            "safe",
            f"Safe {' and '.join(axes) or 'budget'}",
            f"The {' and the '.join(SAFE[axis] for axis in axes)} at which an arm is non-inferior within its margin to "
            "the uncompressed reference.",
            tables=(tables.safe_table(findings, "budget"), tables.safe_table(findings, "length")),
            notes=(
                "Tested in a fixed sequence from the largest budget down (lengths: from the shortest up), each at the "
                "full level, until the first that does not pass; later ones are not tested. NOT MEASURABLE: "
                "the reference itself has nothing to lose there, or cannot do it.",
            )
            if findings.analysis.safe
            else (),
            finding=summaries.safe(findings) if findings.analysis.safe else "",
        ),
        Section(
            "dose",
            "Dose and response",
            "How the rate changes with the cache budget and with the context length, on a log scale.",
            figures=("doses", "lengths") if findings.analysis.doses else (),
            tables=(tables.slope_table(findings, "budget"), tables.slope_table(findings, "length")),
            notes=(
                "Points: rates with pointwise 95 % score intervals. Lines: isotonic, drawn and not tested. Slope: pp "
                f"per doubling, CR3-t; beside it the slope minus {reference}'s own: on budgets, above zero means "
                "that training made the arm more sensitive. Families with a gated policy; drift.json holds all.",
            )
            if findings.analysis.doses
            else (),
            finding=summaries.dose(findings),
        ),
    ]


def loss_sections(findings: Findings) -> list[Section]:
    """What moved behind the net drift, and where it sits."""
    return [
        Section(
            "churn",
            "Churn",
            "Losses and gains cancel in a drift; this is what moved before they did.",
            figures=("churn",) if findings.analysis.churn else (),
            tables=(tables.churn_table(findings),),
            notes=(
                "Lost, gained, churn: of answers against the reference's of the same pair of seeds. A/A churn: two "
                "answers of one checkpoint, where it was sampled more than once; only churn beyond it is change. Any "
                "two seeds: the same without pairing, beside two seeds of one arm.",
            )
            if findings.analysis.churn
            else (),
            finding=summaries.churn(findings),
        ),
        Section(
            "concentration",
            "Where the losses sit",
            "Whether a drop is spread over templates or is a few templates that broke.",
            figures=("concentration",) if findings.analysis.concentration else (),
            tables=(tables.concentration_table(findings), tables.losing_items_table(findings)),
            notes=tables.concentration_notes(findings),
            finding=summaries.concentration(findings),
        ),
    ]


def seed_section(findings: Findings) -> Section:
    """The drift seed by seed, or that nothing is claimed of the recipe."""
    training = findings.comparison.mode == "training"
    few = any(s.sd is None for s in findings.analysis.seeds)
    return Section(
        "seeds",
        "Seeds",
        "The same drift seed by seed: how much of it depends on the training run.",
        figures=("seeds",) if training and findings.analysis.seeds else (),
        tables=(tables.seed_table(findings),) if training else (),
        notes=("Recipe claim not supported: it takes 3 paired seeds.",) if training and few else (),
        finding=summaries.seeds(findings) if training else "",
    )


def displacement_section(findings: Findings) -> Section:
    """Token distributions against the reference's; never gated."""
    floors = any(d.floor for d in findings.displacement)
    note = "The floor is the reference run again: what other batches, kernels or seeds do by themselves."
    return Section(
        "displacement",
        "Displacement of token distributions",
        "How far next-token probabilities moved on the reference's own text. Not part of the verdict: near the "
        "reference it does not tell the direction of behaviour.",
        tables=(tables.displacement_table(findings),),
        notes=((note if floors else "No A/A floor was measured: there is nothing to hold these numbers against."),)
        if findings.displacement
        else (),
        finding=summaries.displacement(findings),
    )


def judge_section(findings: Decided) -> Section | None:
    """The judge held against people; None where nobody labelled."""
    judged, status = findings.verdict.judged, findings.verdict.status
    if judged is None:
        return None
    same = "the same" if status is judged else f"{status.value} (by the judge {judged.value})"
    return Section(
        "judge",
        "Judge and people",
        "What people said of answers that the judge told apart, and the drift that their labels give.",
        tables=(labelled_cells_table(findings), errors_table(findings)),
        notes=(*panel_notes(findings), f"With human labels in these cells the verdict is {same}."),
        finding=f"With human labels the verdict is {same}.",
    )


def cleared_budgets(findings: Findings) -> list[str]:
    """The budgets that arms of the gated families were cleared to, in a sentence for those that are alike."""
    found: dict[tuple[str, str], list[str]] = {}  # arm, family: sentences by suite
    for s in findings.analysis.safe:
        if s.axis == "budget" and s.cleared is not None and s.family in _gated_families(findings):
            found.setdefault((s.arm, s.family), []).append(cleared_sentence(s))
    alike: dict[tuple[str, str], list[str]] = {}  # family, all its sentences: arms
    for (arm, family), said in found.items():
        alike.setdefault((family, "; ".join(said)), []).append(arm)
    shown = list(alike.items())[:CLEARED_SHOWN]
    return [f"Safe budget of {', '.join(arms)} @ {family}: {text}." for (family, text), arms in shown]


def _gated_families(findings: Findings) -> set[str]:
    """The families that have a gated policy."""
    gated = findings.rules.primary
    return {c.family for c in findings.analysis.doses if any(d.policy in gated for d in c.doses)}


def method_sections(findings: Findings) -> list[Section]:
    """Other ways to analyse the same cells, and the contrasts outside the gate."""
    notes = (summaries.methods(findings) + " It stays the pre-declared one; the t interval passes too easily.",)
    return [
        Section(
            "reach",
            "What this size can find",
            "The smallest true drop that each gated cell would have found, from its own interval. Where it is above "
            "the margin, a cell that is open was likely to stay open.",
            tables=(tables.reach_table(findings),),
            notes=("For the size of a next run: kvaudit plan.",) if findings.analysis.reach else (),
            finding=summaries.reach(findings),
        ),
        Section(
            "methods",
            "Other ways to analyse",
            "Would another analysis of the same cells have said something else?",
            tables=(tables.methods_table(findings), tables.sensitivity_table(findings)),
            notes=notes if findings.analysis.methods else (),
            finding=summaries.methods(findings),
        ),
    ]
