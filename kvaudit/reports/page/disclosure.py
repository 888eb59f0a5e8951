"""The disclosure of a run: how rollouts and serving were compressed, what that did, and what nobody asked.

Every fact is there as known, unknown or not applicable, so that what is missing shows. The formats of a disclosure
(card, bill of materials, ...) render this and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvaudit.core.conditions import engine_in, settings_in
from kvaudit.core.policy_names import DENSE_POLICY, match_policies
from kvaudit.core.provenance import said_by, table_of
from kvaudit.core.recipe import SECTIONS, digests
from kvaudit.core.spec import UNKNOWN as UNSAID
from kvaudit.core.spec_train import BASE_ARM
from kvaudit.core.text import at_length
from kvaudit.reports.page.findings import Findings
from kvaudit.reports.page.limits import limits
from kvaudit.reports.page.page import Page
from kvaudit.reports.page.remarks import remarks
from kvaudit.reports.page.tables import deployed
from kvaudit.reports.sections.base import sections_in
from kvaudit.reports.sections.shared.cache_use import CacheUse, cache_use
from kvaudit.reports.sections.shared.facts import NOT_APPLICABLE, UNKNOWN, Fact, Facts, fact_of
from kvaudit.reports.sections.shared.words import (
    NOT_SHOWN,
    blind_spot_text,
    held_to,
    interval_text,
    metric_label,
    ratio_text,
)
from kvaudit.reports.verdict.contrast import Contrast
from kvaudit.reports.verdict.row import row_of
from kvaudit.reports.verdict.verdict import PRECEDENCE, Decided, Decision

DISCLOSURE_FORMAT = 1
_MISMATCH = {  # name here -> key of the telemetry, a mean over all steps and seeds
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
    """How the checkpoints of one arm came about."""

    arm: str
    role: Literal["reference", "candidate", "base"]
    facts: Facts
    mask_schedule: Facts
    mismatch: Facts


@dataclass(frozen=True)
class Measured:
    """One difference: a decided cell, or a facet that nobody gated. Rates and drifts in score units (0.05 = 5 pp)."""

    estimand: str
    arm: str
    policy: str  # canonical
    policy_hash: Fact
    label: str  # the policy's short name
    metric: str  # a suite, or SUITE.FACET
    says: str  # what the number counts
    context_tokens: int
    estimate: float | None
    low: float | None  # 95 %
    high: float | None
    margin: float | None
    held_to: str | None  # 5 pp, or 1.1 x where a ratio decides and the margin is what that comes to
    verdict: str  # a status, or "not gated"
    items: int
    clusters: int
    why: str  # there is no number, or the cell does not pass

    @property
    def slice(self) -> str:
        """What tells this difference from every other."""
        return f"{self.estimand} {self.arm} @ {self.label}, {self.metric} {at_length(self.context_tokens)}"

    @property
    def number(self) -> str:
        """-1.8 pp [-4.6, +0.9]; why there is none otherwise."""
        if self.estimate is None or self.low is None or self.high is None:
            return f"no number ({self.why})"
        return interval_text(self.estimate, self.low, self.high)

    @property
    def sentence(self) -> str:
        """The number with what it counts, its margin and why it does not pass."""
        margin = "" if self.margin is None else f", margin {100 * self.margin:.4g} pp"
        return f"{self.says} {self.number}{margin}. {self.why}".strip()


@dataclass(frozen=True)
class Disclosure:
    """Everything that a model card owes its reader about KV-cache compression, as of one run."""

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
    drift: tuple[Measured, ...]
    worst: Measured | None
    limits: tuple[str, ...]


def disclosure_of(page: Page, arm: str | None = None) -> Disclosure:
    """What a page discloses, of all arms or of one.

    It decides nothing, so a status that was changed on the page is the one that is told.
    """
    if arm is None:
        return _of_all(page)
    own = findings_of_arm(page.findings, arm)
    return _of_arm(_of_all(replace(page, findings=own, remarks=tuple(remarks(own)))), page.findings, own, arm)


def findings_of_arm(found: Findings, arm: str) -> Findings:
    """What was found of one arm: its cells, its verdict, and the training curves of it and of the reference."""
    verdict = found.verdict
    decisions = tuple(d for d in verdict.decisions if d.arm == arm)
    status = next((own for own in verdict.arms if own.arm == arm), None)
    # the worst status first, then the least room above the margin; a cell without a number before any other
    rank = {n: (PRECEDENCE.index(d.standing), _room(d)) for n, d in enumerate(decisions) if d.gated}
    own = replace(
        verdict,
        status=status.status if status else verdict.status,
        unwaived=status.unwaived if status else verdict.status,
        recipe=status.recipe if status else None,
        arms=(status,) if status else (),
        decisions=decisions,
        headline=min(rank, key=rank.__getitem__, default=None),
    )
    reference = found.comparison.reference
    values = {section.name: section.of_arm(value, arm, reference) for section, value in sections_in(found.values)}
    return replace(found, verdict=own, values=values)


def _room(d: Decision) -> float:
    return d.effect.estimate + (d.margin or 0.0) if d.effect else float("-inf")


def _of_arm(told: Disclosure, whole: Findings, own: Findings, arm: str) -> Disclosure:
    """What is told of an arm's checkpoints: its recipe beside the reference's, its drift and its verdict."""
    drift, head = tuple(m for m in told.drift if m.arm == arm), own.verdict.head
    worst = _of(own, head) if head else _lowest(drift)
    status, says = _own_verdict(whole, own, arm)
    verdict = {"status": fact_of(status), "says": fact_of(says), "number": NOT_APPLICABLE, "about": NOT_APPLICABLE}
    if head and worst:
        verdict |= {"number": fact_of(worst.number), "about": fact_of(f"{worst.slice}. {worst.why}".strip())}
    return replace(
        told,
        verdict={**told.verdict, **verdict},
        recipes=tuple(recipe for recipe in told.recipes if recipe.arm in (arm, own.comparison.reference)),
        drift=drift,
        worst=worst,
    )


def _lowest(drift: Iterable[Measured]) -> Measured | None:
    return min((m for m in drift if m.estimate is not None), key=lambda m: m.estimate or 0.0, default=None)


def _own_verdict(whole: Findings, own: Decided, arm: str) -> tuple[str, str]:
    """An arm's status with a sentence; without gated cells it has none, whatever the run says of others."""
    judged = ", ".join(other.arm for other in whole.verdict.arms) or "no arm"
    rest = f"the verdict of the whole run, {whole.verdict.status.value}, is about {judged}"
    verdicts = [d.standing.value for d in own.verdict.gated]
    if own.verdict.arms and verdicts:
        counts = ", ".join(f"{verdicts.count(one)} {one}" for one in dict.fromkeys(verdicts))
        return own.verdict.status.value, f"Of this arm's gated cells: {counts}; {rest}."
    if arm == whole.comparison.reference:
        return "REFERENCE", f"This arm is what others are compared with and is not judged itself; {rest}."
    return "NOT GATED", f"Nothing was gated of this arm; {rest}."


def _of_all(page: Page) -> Disclosure:
    found = page.findings
    measured = tuple(_measured(found))
    uses = {use.policy: use for use in cache_use(found.drift)}
    rows = table_of(table_of(found.provenance, "inputs"), "rows")
    return Disclosure(
        run=_run(found),
        verdict=_verdict(page),
        model=_model(found),
        reference=_reference(found),
        recipes=tuple(_recipes(found)),
        serving=tuple(_served(found, policy, uses.get(policy)) for policy in found.comparison.policies),
        not_evaluated=_not_evaluated(found),
        suites=tuple(_suites(found)),
        judging={
            "by": fact_of(f"{'human labels before ' if found.verdict.judged else ''}the suites' own graders"),
            "rows_sha256": fact_of(dict(rows)) if rows else NOT_APPLICABLE,
        },
        stack=_stack(found),
        change_record=_change_record(found),
        drift=measured,
        worst=_worst(found, measured),
        limits=(_blind_spot(found), *limits(found)),
    )


def _run(found: Findings) -> Facts:
    provenance = found.provenance
    versions = table_of(provenance, "versions")
    return {
        "name": fact_of(found.drift.run),
        "spec_sha256": fact_of(provenance.get("spec_sha256")),
        "started": fact_of(provenance.get("started")),
        "finished": fact_of(provenance.get("finished")),
        "kvaudit": fact_of(versions.get("kvaudit")),
        "records": fact_of(found.drift.n_records),
    }


def _verdict(page: Page) -> Facts:
    banner, verdict, rules = page.banner, page.findings.verdict, page.findings.rules
    return {
        "status": fact_of(banner.status.value),
        "says": fact_of(banner.sentence),
        "number": fact_of(banner.number),
        "about": fact_of(banner.about),
        "recipe": Fact("known", verdict.recipe.value) if verdict.recipe else NOT_APPLICABLE,
        "level": fact_of(rules.alpha),
        "rules": fact_of(rules.source),
        "declared": fact_of(rules.declared),
        "alarm": fact_of(banner.alarm) if banner.alarm else NOT_APPLICABLE,
        "remarks": fact_of(list(page.remarks)) if page.remarks else NOT_APPLICABLE,
    }


def _model(found: Findings) -> Facts:
    provenance = found.provenance
    return {
        "name": fact_of(found.model),
        "base_sha256": fact_of(provenance.get("base_sha256")),
        "dtype": fact_of(provenance.get("dtype")),
        "device": fact_of(provenance.get("device")),
    }


def _reference(found: Decided) -> Facts:
    weights = {str(seed): sorted(names) for seed, names in sorted(found.drift.weights.items())}
    pin = found.rules.pin
    return {
        "arm": fact_of(found.comparison.reference),
        "served_under": fact_of("; ".join(map(found.comparison.label, found.comparison.uncompressed)) or DENSE_POLICY),
        "weights_sha256": fact_of(weights or None),
        "pin_sha256": fact_of(pin.sha256) if pin else NOT_APPLICABLE,
    }


def _recipes(found: Findings) -> list[ArmRecipe]:
    sides = found.comparison
    return [_recipe(found, arm) for arm in sides.arms if arm != BASE_ARM or sides.mode == "serving"]


def _recipe(found: Findings, arm: str) -> ArmRecipe:
    checkpoints = {seed: checkpoint for (name, seed), checkpoint in found.checkpoints.items() if name == arm}
    if arm == BASE_ARM:
        return ArmRecipe(arm, "base", {"rollouts": NOT_APPLICABLE}, {}, {})
    config, recipe = _shared(checkpoints, "config"), _shared(checkpoints, "recipe")
    declared = table_of(table_of(found.provenance, "declared"), arm)
    # what nobody said is no declaration
    declared = {key: value for key, value in declared.items() if value != UNSAID}
    # a checkpoint's own word goes before what was declared of it
    recipe, config = {**declared, **recipe}, {**declared, "suites": declared.get("trained_on"), **config}
    curve = next((curve for curve in found.values.get("training", ()) if curve.arm == arm), None)
    facts = {
        "rollouts": fact_of(recipe.get("rollouts")),
        "rollouts_hash": fact_of(recipe.get("rollouts_hash")),
        "learner_view": fact_of(recipe.get("learner")),
        "correction": fact_of(recipe.get("correction")),
        "distillation": fact_of(recipe.get("distillation")),
        "loss": fact_of(config.get("loss")),
        "reward": fact_of(recipe.get("reward")),
        "reward_sha256": fact_of(recipe.get("reward_sha256")),
        "constitution": _constitution(recipe, declared),
        "trained_on": fact_of(config.get("suites")),
        "said_by": fact_of(
            "whoever trained it; not verified" if declared else "its own provenance" if checkpoints else None
        ),
        "seeds": fact_of(sorted({c for cell in found.drift.cells if cell.arm == arm for c in cell.seeds}) or None),
        "weights_sha256": fact_of(_weights(found, arm) or None),
    }
    role: Literal["reference", "candidate"] = "reference" if arm == found.comparison.reference else "candidate"
    compressed = recipe.get("rollouts") not in (None, DENSE_POLICY)
    schedule = _schedule(checkpoints, config, curve.largest if curve else {}, compressed=compressed)
    mismatch = {name: fact_of(curve.mean.get(key) if curve else None) for name, key in _MISMATCH.items()}
    return ArmRecipe(arm, role, facts, schedule if recipe else dict.fromkeys(schedule, UNKNOWN), mismatch)


def _constitution(recipe: Mapping[str, Any], declared: Mapping[str, Any]) -> Fact:
    """What answers were held to; a checkpoint of ours whose reward has no constitution says so by a null."""
    held = "constitution" in recipe and not declared
    if recipe.get("constitution") is None and (held or recipe.get("reward") == "grade"):
        return NOT_APPLICABLE
    return fact_of(recipe.get("constitution"))


def _weights(found: Findings, arm: str) -> dict[str, str]:
    """Seed -> sha256 of the arm's checkpoints."""
    table = table_of(found.provenance, "checkpoints")
    return {key.rpartition("/")[2]: str(digest) for key, digest in table.items() if key.rpartition("/")[0] == arm}


def _schedule(
    checkpoints: Mapping[int, Mapping[str, Any]],
    config: Mapping[str, Any],
    largest: Mapping[str, float],
    *,
    compressed: bool,
) -> Facts:
    """The ledgers by which rollouts can be replayed: their hashes, how many steps have one, and how exact they are."""
    names = ("ledgers_sha256", "share_of_steps_logged", *_CERTIFICATE)
    if not compressed:
        return dict.fromkeys(names, NOT_APPLICABLE)
    hashes = {str(seed): dict(table_of(checkpoint, "ledgers")) for seed, checkpoint in sorted(checkpoints.items())}
    every, steps = config.get("ledger_every"), config.get("steps")
    share = None
    if isinstance(every, int) and isinstance(steps, int) and steps > 0 and every >= 0:
        share = steps // every / steps if every else 0.0  # a ledger every so many steps
    certificate = {name: fact_of(largest.get(key)) for name, key in _CERTIFICATE.items()}
    return {"ledgers_sha256": fact_of(hashes or None), "share_of_steps_logged": fact_of(share), **certificate}


def _shared(checkpoints: Mapping[int, Mapping[str, Any]], key: str) -> Mapping[str, Any]:
    """What the checkpoints of an arm say alike; an entry in which they differ is unknown."""
    tables = [table_of(checkpoint, key) for checkpoint in checkpoints.values()]
    if not tables:
        return {}
    return {name: value for name, value in tables[0].items() if all(t.get(name) == value for t in tables)}


def _served(found: Findings, policy: str, use: CacheUse | None) -> Facts:
    cells = [c for c in found.drift.cells if c.policy == policy and c.kv_bytes_dense]
    hidden = use is not None and not use.is_shown
    return {
        "policy": fact_of(policy),
        "policy_hash": _hash_of(found, policy),
        "gated": fact_of(policy in found.rules.primary),
        "kv_allocated_of_none": fact_of(NOT_SHOWN if hidden else use and use.allocated_share),
        "kv_live_of_none": fact_of(NOT_SHOWN if hidden else use and use.live_share),
        "retention": fact_of(NOT_SHOWN if hidden else min((c.retention or 0.0 for c in cells), default=None)),
        **_engine(found, policy),
    }


def _engine(found: Findings, policy: str) -> Facts:
    """What served, in the engine's own words, and what it is compared with; nothing in a run without engines."""
    sides = found.comparison
    if not sides.references:
        return {}
    plain, own = fact_of(sides.label(sides.uncompressed_of(policy))), sides.is_engine(policy)
    settings = "; ".join(f"{name}={value}" for name, value in settings_in(policy).items()) if own else ""
    said = "; ".join(f"{name}: {text}" for name, text in said_by(found.provenance, policy).items())
    return {
        "engine": fact_of(engine_in(policy) if own else "kvaudit"),
        "settings": fact_of(settings or "as it comes") if own else NOT_APPLICABLE,
        "says": fact_of(said) if own else NOT_APPLICABLE,
        "compared_with": NOT_APPLICABLE if sides.is_uncompressed(policy) else plain,
    }


def _not_evaluated(found: Findings) -> Facts:
    """Mechanisms that this kvaudit knows and the run did not serve, and what the grid left out by its nature."""
    families = found.provenance.get("known_policies")
    served = {
        part.partition(":")[0]
        for text in found.comparison.policies
        if not found.comparison.is_engine(text)
        for part in text.replace("|", "+").split("+")
    }
    left = sorted(set(families) - served) if isinstance(families, list) else None
    return {
        "mechanisms": fact_of(left),
        "rollout_policies": _rollouts_not_served(found),
        "lengths_beyond_tokens": fact_of(max(found.comparison.contexts, default=None)),
    }


def _rollouts_not_served(found: Findings) -> Fact:
    """What rollouts were sampled under and the run did not serve; unknown where none is known and an arm is silent."""
    declared, policies, told = table_of(found.provenance, "declared"), found.comparison.policies, list[Any]()
    for arm in found.comparison.arms:
        if arm != BASE_ARM:
            own = [table_of(checkpoint, "recipe") for (name, _), checkpoint in found.checkpoints.items() if name == arm]
            told += [recipe.get("rollouts") for recipe in own or [table_of(declared, arm)]]
    names = sorted({str(text) for text in told if text not in (None, UNSAID)})
    left = sorted(set(match_policies(names, policies)) - set(policies))
    if not left and any(text in (None, UNSAID) for text in told):
        return UNKNOWN
    return fact_of(left) if left else NOT_APPLICABLE


def _suites(found: Findings) -> list[Facts]:
    kinds, versions = (table_of(found.provenance, key) for key in ("suite_kinds", "suite_versions"))
    cells = {s: [cell for cell in found.drift.cells if cell.suite == s] for s in found.comparison.suites}
    return [
        {
            "suite": fact_of(suite),
            "kind": fact_of(kinds.get(suite)),
            "version": fact_of(versions.get(suite)),
            "items": fact_of(min((cell.n_items for cell in own), default=None)),
            "templates": fact_of(min((cell.n_clusters for cell in own), default=None)),
        }
        for suite, own in cells.items()
    ]


def _stack(found: Findings) -> Facts:
    """What a scan of configurations found and what a vendor answered; declared by others, not verified here."""
    scan, answers = found.evidence.scan, found.evidence.answers
    return {
        "scan_found": fact_of(None if scan is None else [_setting(row) for row in _rows(scan.get("found"))]),
        "scan_open": fact_of(None if scan is None else scan.get("open")),
        "scan_not_readable": fact_of(None if scan is None else len(_rows(scan.get("not_readable")))),
        "vendor": fact_of(None if answers is None else answers.get("vendor")),
        "vendor_answers": fact_of(None if answers is None else list(_answered(answers.get("answers")))),
    }


def _change_record(found: Findings) -> Facts:
    """The sha256 of ``recipe.json`` and of its sections; a run that trained nothing has none."""
    recipe, sections = found.evidence.recipe, [name for name in SECTIONS if name not in ("model", "training")]
    if recipe is None:
        trained = any(arm != BASE_ARM for arm, _ in found.checkpoints)
        return dict.fromkeys(("recipe", *sections), UNKNOWN if trained else NOT_APPLICABLE)
    told = {name: fact_of(digest) for name, digest in digests(recipe).items() if name in sections}
    if recipe["sections"]["constitution"]["holds"] is None:
        told["constitution"] = NOT_APPLICABLE
    return {"recipe": fact_of(recipe["sha256"]), **told}


def _setting(row: Mapping[str, Any]) -> str:
    keys = ("role", "mechanism", "key", "value", "state")
    role, mechanism, key, value, state = (str(row.get(name)) for name in keys)
    return f"{role}: {mechanism} by {key} = {value} ({row.get('file')}:{row.get('line')}), {state}"


def _rows(value: Any) -> list[Mapping[str, Any]]:
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def _answered(value: Any) -> Iterator[str]:
    """Every answer with its evidence, as declared."""
    for name, row in (value if isinstance(value, Mapping) else {}).items():
        said = row if isinstance(row, Mapping) else {"answer": row}
        evidence = f" ({said['evidence']})" if said.get("evidence") else ""
        yield f"{name}: {said.get('answer')}{evidence}"


def _measured(found: Findings) -> list[Measured]:
    """Every decided cell, then every other contrast that the run has."""
    decided = [_of(found, d) for d in found.verdict.gated]
    seen = {m.slice for m in decided}
    rest = [_of(found, c) for c in found.drift.contrasts]
    return [*decided, *(m for m in rest if m.slice not in seen)]


# columns of a row that a disclosure has under the same name
_ROW_COLUMNS = ["estimand", "arm", "policy", "label", "metric", "context_tokens", "estimate", "low", "high", "margin"]


def _of(found: Findings, cell: Contrast | Decision) -> Measured:
    decided = cell if isinstance(cell, Decision) else None
    row = row_of(found.comparison, None if isinstance(cell, Decision) else cell, decided)
    return Measured(
        **{name: getattr(row, name) for name in _ROW_COLUMNS},
        policy_hash=_hash_of(found, cell.policy),
        says=metric_label(found.comparison, cell.suite),
        held_to=held_to(decided) if decided and decided.margin is not None else None,
        verdict=row.standing or "not gated",
        items=row.items or 0,
        clusters=row.templates or 0,
        why="; ".join([*_by_ratio(cell), *map(str, row.reasons)]),
    )


def _by_ratio(cell: Decision | Contrast) -> Iterator[str]:
    """What a cell with a ratio is decided by: the margin is only what that comes to."""
    if isinstance(cell, Decision) and cell.ratio:
        yield f"decided by the ratio {ratio_text(cell.ratio.times)}, limit {held_to(cell)}"


def _worst(found: Findings, measured: Sequence[Measured]) -> Measured | None:
    """What a user of a candidate meets at worst, as deployed where that was measured."""
    served = deployed(found)
    return _of(found, served[0]) if served else _lowest(m for m in measured if m.verdict != "not gated")


def _blind_spot(found: Decided) -> str:
    head = found.verdict.head
    if head is None or head.blind_spot is None or head.effect is None:
        return "Blind spot: unknown, no gated cell has a number."
    return blind_spot_text(head.blind_spot, found.rules.alpha, head.effect.n_clusters)


def _hash_of(found: Findings, policy: str) -> Fact:
    return fact_of(table_of(found.provenance, "policies").get(policy))
