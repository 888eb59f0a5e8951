"""The disclosure of a run: how rollouts and serving were compressed, the measured drift, and what was not evaluated.

Every fact is marked known, unknown or not applicable, so that gaps show. The model card, the bill of materials and
disclosure.json show these facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvaudit.core.policy_names import DENSE_POLICY, engine_name, engine_settings, match_policies
from kvaudit.core.provenance import RECIPE_SECTIONS, engine_facts, recipe_digests, table_of
from kvaudit.core.spec import UNKNOWN as NOT_DECLARED
from kvaudit.core.spec_train import BASE_ARM
from kvaudit.core.text import at_length
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.page import Page
from kvaudit.reports.page.remarks import blind_spot_line, limits, remarks
from kvaudit.reports.page.tables import deployed_cells
from kvaudit.reports.sections.base import sections_in
from kvaudit.reports.sections.shared.cache_use import CacheUse, cache_use
from kvaudit.reports.sections.shared.words import (
    NOT_APPLICABLE,
    NOT_SHOWN,
    UNKNOWN,
    Fact,
    Facts,
    fact_of,
    held_to,
    interval_text,
    metric_label,
    ratio_text,
)
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.row import row_of
from kvaudit.reports.verdict.verdict import PRECEDENCE, Decided, Decision

DISCLOSURE_FORMAT = 1
_MISMATCH = {  # name -> key of the telemetry, a mean over all steps and seeds
    "k3_kl": "mismatch/k3_kl",
    "overlap_p5": "mismatch/overlap_p5",
    "effective_sample_size": "mismatch/ess",
    "rejected_sequences": "mismatch/rejected_sequences",
    "masked_tokens": "mismatch/masked_tokens",
    "kv_tokens_saved": "token_savings",
    "gradient_variance": "grad_variance",
}
_CERTIFICATE = {"max_abs_gap": "shadow/max_abs_gap", "k3_kl": "shadow/k3_kl"}  # largest over the logged steps


@dataclass(frozen=True)
class ArmRecipe:
    """How the checkpoints of one arm were trained."""

    arm: str
    role: Literal["reference", "candidate", "base"]
    facts: Facts
    mask_schedule: Facts
    mismatch: Facts


@dataclass(frozen=True)
class MeasuredCell:
    """The drift (candidate minus reference) of a cell, gated or not, in score units (0.05 = 5 pp)."""

    estimand: str
    arm: str
    policy: str  # canonical
    policy_hash: Fact
    label: str  # the policy's short name
    metric: str  # a suite, or SUITE.FACET
    says: str  # the metric in words
    context_tokens: int
    estimate: float | None
    low: float | None  # 95 %
    high: float | None
    margin: float | None
    held_to: str | None  # "5 pp", or "1.1 x" if a ratio decides; then ``margin`` is the ratio in points
    verdict: str  # a status, or "not gated"
    items: int
    clusters: int
    why: str  # the reason for no number or no pass

    @property
    def slice(self) -> str:
        """The name of this cell, unique in the run: the kind of difference, arm, policy, metric and length."""
        return f"{self.estimand} {self.arm} @ {self.label}, {self.metric} {at_length(self.context_tokens)}"

    @property
    def number(self) -> str:
        """The drift as text, -1.8 pp [-4.6, +0.9], or the reason why there is none."""
        if self.estimate is None or self.low is None or self.high is None:
            return f"no number ({self.why})"
        return interval_text(self.estimate, self.low, self.high)

    @property
    def sentence(self) -> str:
        """What the cell measures, with its drift, margin and reason, as a sentence."""
        margin = "" if self.margin is None else f", margin {100 * self.margin:.4g} pp"
        return f"{self.says} {self.number}{margin}. {self.why}".strip()


@dataclass(frozen=True)
class Disclosure:
    """The facts of one run that a model card should state about KV-cache compression."""

    run: Facts
    verdict: Facts
    model: Facts
    reference: Facts
    recipes: tuple[ArmRecipe, ...]
    serving: tuple[Facts, ...]
    not_evaluated: Facts
    suites: tuple[Facts, ...]
    judging: Facts
    stack: Facts
    change_record: Facts
    drift: tuple[MeasuredCell, ...]
    worst: MeasuredCell | None
    limits: tuple[str, ...]


def disclosure_of(page: Page, arm: str | None = None) -> Disclosure:
    """Return the facts to publish with a model (a disclosure), of all arms or of ``arm`` alone.

    The verdict is that of the page; nothing is decided here.
    """
    if arm is None:
        return _run_disclosure(page)
    findings = findings_of_arm(page.findings, arm)
    disclosure = _run_disclosure(replace(page, findings=findings, remarks=tuple(remarks(findings))))
    return _arm_disclosure(disclosure, page.findings, findings, arm)


def findings_of_arm(findings: Findings, arm: str) -> Findings:
    """Return the findings of one arm alone: its decisions, its verdict, and what every report section has about it."""
    verdict = findings.verdict
    decisions = tuple(d for d in verdict.decisions if d.arm == arm)
    arm_verdict = next((a for a in verdict.arms if a.arm == arm), None)
    # as in a run's verdict, the headline has the worst status, then the least room to the margin
    rank = {n: (PRECEDENCE.index(d.standing), d.room) for n, d in enumerate(decisions) if d.gated}
    narrowed = replace(
        verdict,
        status=arm_verdict.status if arm_verdict else verdict.status,
        unwaived=arm_verdict.unwaived if arm_verdict else verdict.status,
        recipe=arm_verdict.recipe if arm_verdict else None,
        arms=(arm_verdict,) if arm_verdict else (),
        decisions=decisions,
        headline=min(rank, key=rank.__getitem__, default=None),
    )
    reference = findings.comparison.reference
    values = {section.name: section.of_arm(value, arm, reference) for section, value in sections_in(findings.values)}
    return replace(findings, verdict=narrowed, values=values)


def _arm_disclosure(disclosure: Disclosure, run_findings: Findings, findings: Findings, arm: str) -> Disclosure:
    """Return a disclosure restricted to one arm: its recipe and the reference's, its drift and its verdict.

    ``run_findings`` are those of the whole run, ``findings`` those of the arm.
    """
    drift, head = tuple(m for m in disclosure.drift if m.arm == arm), findings.verdict.head
    worst = _measured_cell(findings, head) if head else _lowest_cell(drift)
    status, says = _arm_verdict(run_findings, findings, arm)
    verdict = {"status": fact_of(status), "says": fact_of(says), "number": NOT_APPLICABLE, "about": NOT_APPLICABLE}
    if head and worst:
        verdict |= {"number": fact_of(worst.number), "about": fact_of(f"{worst.slice}. {worst.why}".strip())}
    return replace(
        disclosure,
        verdict={**disclosure.verdict, **verdict},
        recipes=tuple(recipe for recipe in disclosure.recipes if recipe.arm in (arm, findings.comparison.reference)),
        drift=drift,
        worst=worst,
    )


def _lowest_cell(drift: Iterable[MeasuredCell]) -> MeasuredCell | None:
    return min((m for m in drift if m.estimate is not None), key=lambda m: m.estimate or 0.0, default=None)


def _arm_verdict(run_findings: Findings, findings: Decided, arm: str) -> tuple[str, str]:
    """Return the status of an arm and a sentence on it.

    For an arm without gated cells the status is REFERENCE or NOT GATED.
    """
    gated_arms = ", ".join(a.arm for a in run_findings.verdict.arms) or "no arm"
    run_verdict = f"the verdict of the whole run, {run_findings.verdict.status.value}, is about {gated_arms}"
    verdicts = [d.standing.value for d in findings.verdict.gated]
    if findings.verdict.arms and verdicts:
        counts = ", ".join(f"{verdicts.count(status)} {status}" for status in dict.fromkeys(verdicts))
        return findings.verdict.status.value, f"Of this arm's gated cells: {counts}; {run_verdict}."
    if arm == run_findings.comparison.reference:
        return "REFERENCE", f"Other arms are compared with this one, which has no verdict; {run_verdict}."
    return "NOT GATED", f"No cell of this arm is gated; {run_verdict}."


def _run_disclosure(page: Page) -> Disclosure:
    findings, banner = page.findings, page.banner
    provenance, verdict, rules, sides = findings.provenance, findings.verdict, findings.rules, findings.comparison
    measured = tuple(_measured_cells(findings))
    uses = {use.policy: use for use in cache_use(findings.drift)}
    rows = table_of(table_of(provenance, "inputs"), "rows")
    weights = {str(seed): sorted(names) for seed, names in sorted(findings.drift.weights.items())}
    blind_spot = "Blind spot: unknown, no gated cell has a number."
    if verdict.head and verdict.head.effect:
        blind_spot = blind_spot_line(findings, verdict.head, 0)
    return Disclosure(
        run={
            "name": fact_of(findings.drift.run),
            **_facts(provenance, "spec_sha256", "started", "finished"),
            **_facts(table_of(provenance, "versions"), "kvaudit"),
            "records": fact_of(findings.drift.n_records),
        },
        verdict={
            "status": fact_of(banner.status.value),
            "says": fact_of(banner.sentence),
            "number": fact_of(banner.number),
            "about": fact_of(banner.about),
            "recipe": fact_of(verdict.recipe.value) if verdict.recipe else NOT_APPLICABLE,
            "level": fact_of(rules.alpha),
            "rules": fact_of(rules.source),
            "declared": fact_of(rules.declared),
            "alarm": fact_of(banner.alarm) if banner.alarm else NOT_APPLICABLE,
            "remarks": fact_of(list(page.remarks)) if page.remarks else NOT_APPLICABLE,
        },
        model={"name": fact_of(findings.model), **_facts(provenance, "base_sha256", "dtype", "device")},
        reference={
            "arm": fact_of(sides.reference),
            "served_under": fact_of("; ".join(map(sides.label, sides.uncompressed)) or DENSE_POLICY),
            "weights_sha256": fact_of(weights or None),
            "pin_sha256": fact_of(rules.pin.sha256) if rules.pin else NOT_APPLICABLE,
        },
        recipes=tuple(_recipe(findings, arm) for arm in sides.arms if arm != BASE_ARM or sides.mode == "serving"),
        serving=tuple(_serving_facts(findings, policy, uses.get(policy)) for policy in sides.policies),
        not_evaluated=_not_evaluated(findings),
        suites=tuple(_suite_facts(findings)),
        judging={
            "by": fact_of(f"{'human labels before ' if verdict.judged else ''}the suites' own graders"),
            "rows_sha256": fact_of(dict(rows)) if rows else NOT_APPLICABLE,
        },
        stack=_stack_facts(findings),
        change_record=_change_record(findings),
        drift=measured,
        worst=_worst_cell(findings, measured),
        limits=(blind_spot, *limits(findings)),
    )


def _facts(table: Mapping[str, Any], *keys: str) -> Facts:
    """Return the entries ``keys`` of a table as facts; a missing entry is unknown."""
    return {key: fact_of(table.get(key)) for key in keys}


def _recipe(findings: Findings, arm: str) -> ArmRecipe:
    checkpoints = {seed: checkpoint for (name, seed), checkpoint in findings.checkpoints.items() if name == arm}
    if arm == BASE_ARM:
        return ArmRecipe(arm, "base", {"rollouts": NOT_APPLICABLE}, {}, {})
    config, recipe = _shared_entries(checkpoints, "config"), _shared_entries(checkpoints, "recipe")
    declared = table_of(table_of(findings.provenance, "declared"), arm)
    declared = {key: value for key, value in declared.items() if value != NOT_DECLARED}
    # the checkpoint's provenance takes precedence over the spec's declaration
    recipe, config = {**declared, **recipe}, {**declared, "suites": declared.get("trained_on"), **config}
    digests_by_place = table_of(findings.provenance, "checkpoints")  # keys are ARM/SEED
    weights = {
        key.rpartition("/")[2]: str(digest) for key, digest in digests_by_place.items() if key.rpartition("/")[0] == arm
    }
    curve = next((curve for curve in findings.values.get("training", ()) if curve.arm == arm), None)
    source = "declared in the spec; not verified" if declared else "its own provenance" if checkpoints else None
    facts = {
        **_facts(recipe, "rollouts", "rollouts_hash"),
        "learner_view": fact_of(recipe.get("learner")),
        **_facts(recipe, "correction", "distillation"),
        **_facts(config, "loss"),
        **_facts(recipe, "reward", "reward_sha256"),
        "constitution": _constitution(recipe, declared),
        "trained_on": fact_of(config.get("suites")),
        "said_by": fact_of(source),
        "seeds": fact_of(sorted({c for cell in findings.drift.cells if cell.arm == arm for c in cell.seeds}) or None),
        "weights_sha256": fact_of(weights or None),
    }
    role: Literal["reference", "candidate"] = "reference" if arm == findings.comparison.reference else "candidate"
    compressed = recipe.get("rollouts") not in (None, DENSE_POLICY)
    schedule = _ledger_facts(checkpoints, config, curve.largest if curve else {}, compressed=compressed)
    mismatch = {name: fact_of(curve.mean.get(key) if curve else None) for name, key in _MISMATCH.items()}
    return ArmRecipe(arm, role, facts, schedule if recipe else dict.fromkeys(schedule, UNKNOWN), mismatch)


def _constitution(recipe: Mapping[str, Any], declared: Mapping[str, Any]) -> Fact:
    """Return the constitution (written principles) by which the reward judged answers.

    Not applicable if the checkpoint records that there was none.
    """
    is_recorded = "constitution" in recipe and not declared
    if recipe.get("constitution") is None and (is_recorded or recipe.get("reward") == "grade"):
        return NOT_APPLICABLE
    return fact_of(recipe.get("constitution"))


def _ledger_facts(
    checkpoints: Mapping[int, Mapping[str, Any]],
    config: Mapping[str, Any],
    largest: Mapping[str, float],
    *,
    compressed: bool,
) -> Facts:
    """Return facts on the ledgers (records of what left the cache) by which rollouts are replayed.

    These are their hashes, the share of training steps that logged a ledger, and the largest replay error. If rollouts
    were not compressed, all of them are "not applicable".
    """
    names = ("ledgers_sha256", "share_of_steps_logged", *_CERTIFICATE)
    if not compressed:
        return dict.fromkeys(names, NOT_APPLICABLE)
    hashes = {str(seed): dict(table_of(checkpoint, "ledgers")) for seed, checkpoint in sorted(checkpoints.items())}
    interval, steps = config.get("ledger_every"), config.get("steps")
    share = None
    if isinstance(interval, int) and isinstance(steps, int) and steps > 0 and interval >= 0:
        share = steps // interval / steps if interval else 0.0
    certificate = {name: fact_of(largest.get(key)) for name, key in _CERTIFICATE.items()}
    return {"ledgers_sha256": fact_of(hashes or None), "share_of_steps_logged": fact_of(share), **certificate}


def _shared_entries(checkpoints: Mapping[int, Mapping[str, Any]], key: str) -> Mapping[str, Any]:
    """Return the entries that all checkpoints of an arm have in common in their mapping ``key``.

    ``checkpoints`` holds the metadata of each checkpoint by training seed.
    """
    tables = [table_of(checkpoint, key) for checkpoint in checkpoints.values()]
    if not tables:
        return {}
    return {name: value for name, value in tables[0].items() if all(t.get(name) == value for t in tables)}


def _serving_facts(findings: Findings, policy: str, use: CacheUse | None) -> Facts:
    cells = [c for c in findings.drift.cells if c.policy == policy and c.kv_bytes_dense]
    is_hidden = use is not None and not use.is_shown
    return {
        "policy": fact_of(policy),
        "policy_hash": _policy_hash(findings, policy),
        "gated": fact_of(policy in findings.rules.primary),
        "kv_allocated_of_none": fact_of(NOT_SHOWN if is_hidden else use and use.allocated_share),
        "kv_live_of_none": fact_of(NOT_SHOWN if is_hidden else use and use.live_share),
        "retention": fact_of(NOT_SHOWN if is_hidden else min((c.retention or 0.0 for c in cells), default=None)),
        **_engine(findings, policy),
    }


def _engine(findings: Findings, policy: str) -> Facts:
    """Return facts on a policy's engine: its name, its settings, what it reports of itself, its uncompressed setting.

    The mapping is empty if no engine takes part in the run.
    """
    sides = findings.comparison
    if not sides.references:
        return {}
    plain, is_engine = fact_of(sides.label(sides.uncompressed_of(policy))), sides.is_engine(policy)
    settings = "; ".join(f"{name}={value}" for name, value in engine_settings(policy).items()) if is_engine else ""
    statements = "; ".join(f"{name}: {text}" for name, text in engine_facts(findings.provenance, policy).items())
    return {
        "engine": fact_of(engine_name(policy) if is_engine else "kvaudit"),
        "settings": fact_of(settings or "as it comes") if is_engine else NOT_APPLICABLE,
        "says": fact_of(statements) if is_engine else NOT_APPLICABLE,
        "compared_with": NOT_APPLICABLE if sides.is_uncompressed(policy) else plain,
    }


def _not_evaluated(findings: Findings) -> Facts:
    """Return facts on what the run did not evaluate: compression mechanisms, rollout policies and context lengths."""
    families = findings.provenance.get("known_policies")
    served = {
        mechanism.partition(":")[0]
        for text in findings.comparison.policies
        if not findings.comparison.is_engine(text)
        for mechanism in text.replace("|", "+").split("+")
    }
    not_served = sorted(set(families) - served) if isinstance(families, list) else None
    return {
        "mechanisms": fact_of(not_served),
        "rollout_policies": _rollouts_not_served(findings),
        "lengths_beyond_tokens": fact_of(max(findings.comparison.contexts, default=None)),
    }


def _rollouts_not_served(findings: Findings) -> Fact:
    """Return the policies under which arms sampled rollouts, but under which this run evaluated nothing.

    If there are no such policies, the fact is "not applicable"; it is "unknown" if the rollout policy of an arm is
    unknown.
    """
    declared, policies, rollouts = table_of(findings.provenance, "declared"), findings.comparison.policies, list[Any]()
    for arm in findings.comparison.arms:
        if arm != BASE_ARM:
            checkpoints = [checkpoint for (name, _), checkpoint in findings.checkpoints.items() if name == arm]
            recipes = [table_of(checkpoint, "recipe") for checkpoint in checkpoints]
            rollouts += [recipe.get("rollouts") for recipe in recipes or [table_of(declared, arm)]]
    names = sorted({str(text) for text in rollouts if text not in (None, NOT_DECLARED)})
    not_served = sorted(set(match_policies(names, policies)) - set(policies))
    if not not_served and any(text in (None, NOT_DECLARED) for text in rollouts):
        return UNKNOWN
    return fact_of(not_served) if not_served else NOT_APPLICABLE


def _suite_facts(findings: Findings) -> list[Facts]:
    kinds, versions = (table_of(findings.provenance, key) for key in ("suite_kinds", "suite_versions"))
    cells = {s: [cell for cell in findings.drift.cells if cell.suite == s] for s in findings.comparison.suites}
    return [
        {
            "suite": fact_of(suite),
            "kind": fact_of(kinds.get(suite)),
            "version": fact_of(versions.get(suite)),
            "items": fact_of(min((cell.n_items for cell in cells_of_suite), default=None)),
            "templates": fact_of(min((cell.n_clusters for cell in cells_of_suite), default=None)),
        }
        for suite, cells_of_suite in cells.items()
    ]


def _stack_facts(findings: Findings) -> Facts:
    """Return unverified facts on the serving stack: what a scan of configurations found, and what a vendor answered."""
    scan, answers = findings.evidence.scan, findings.evidence.answers
    return {
        "scan_found": fact_of(None if scan is None else [_setting(row) for row in _rows(scan.get("found"))]),
        "scan_open": fact_of(None if scan is None else scan.get("open")),
        "scan_not_readable": fact_of(None if scan is None else len(_rows(scan.get("not_readable")))),
        "vendor": fact_of(None if answers is None else answers.get("vendor")),
        "vendor_answers": fact_of(None if answers is None else list(_vendor_answers(answers.get("answers")))),
    }


def _change_record(findings: Findings) -> Facts:
    """Return the sha256 of recipe.json (how arms were trained) and of its sections; not applicable without training."""
    recipe, sections = findings.evidence.recipe, [name for name in RECIPE_SECTIONS if name not in ("model", "training")]
    if recipe is None:
        trained = any(arm != BASE_ARM for arm, _ in findings.checkpoints)
        return dict.fromkeys(("recipe", *sections), UNKNOWN if trained else NOT_APPLICABLE)
    sections_sha256 = {name: fact_of(digest) for name, digest in recipe_digests(recipe).items() if name in sections}
    if recipe["sections"]["constitution"]["holds"] is None:
        sections_sha256["constitution"] = NOT_APPLICABLE
    return {"recipe": fact_of(recipe["sha256"]), **sections_sha256}


def _setting(row: Mapping[str, Any]) -> str:
    keys = ("role", "mechanism", "key", "value", "state")
    role, mechanism, key, value, state = (str(row.get(name)) for name in keys)
    return f"{role}: {mechanism} by {key} = {value} ({row.get('file')}:{row.get('line')}), {state}"


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def _vendor_answers(value: Any) -> Iterator[str]:
    """Yield a line for each answer that a vendor gave to the questionnaire, with the evidence that the vendor names."""
    for name, row in (value if isinstance(value, Mapping) else {}).items():
        entry = row if isinstance(row, Mapping) else {"answer": row}
        evidence = f" ({entry['evidence']})" if entry.get("evidence") else ""
        yield f"{name}: {entry.get('answer')}{evidence}"


def _measured_cells(findings: Findings) -> list[MeasuredCell]:
    """Return every gated cell, then every other difference between two sides that the run computed."""
    decided = [_measured_cell(findings, d) for d in findings.verdict.gated]
    slices = {m.slice for m in decided}
    other_contrasts = [_measured_cell(findings, c) for c in findings.drift.contrasts]
    return [*decided, *(m for m in other_contrasts if m.slice not in slices)]


# columns of a Row that a MeasuredCell has under the same name
_ROW_COLUMNS = ["estimand", "arm", "policy", "label", "metric", "context_tokens", "estimate", "low", "high", "margin"]


def _measured_cell(findings: Findings, cell: Contrast | Decision) -> MeasuredCell:
    decided = cell if isinstance(cell, Decision) else None
    row = row_of(findings.comparison, None if isinstance(cell, Decision) else cell, decided)
    ratio = []
    if decided and decided.ratio:
        ratio = [f"decided by the ratio {ratio_text(decided.ratio.times)}, limit {held_to(decided)}"]
    return MeasuredCell(
        **{name: getattr(row, name) for name in _ROW_COLUMNS},
        policy_hash=_policy_hash(findings, cell.policy),
        says=metric_label(findings.comparison, cell.suite),
        held_to=held_to(decided) if decided and decided.margin is not None else None,
        verdict=row.standing or "not gated",
        items=row.items or 0,
        clusters=row.templates or 0,
        why="; ".join([*ratio, *map(str, row.reasons)]),
    )


def _worst_cell(findings: Findings, measured: Sequence[MeasuredCell]) -> MeasuredCell | None:
    """Return the worst cell whose reference is uncompressed; if there is none, the gated cell with the lowest drift."""
    served = deployed_cells(findings)
    return (
        _measured_cell(findings, served[0]) if served else _lowest_cell(m for m in measured if m.verdict != "not gated")
    )


def _policy_hash(findings: Findings, policy: str) -> Fact:
    return fact_of(table_of(findings.provenance, "policies").get(policy))
