"""Every reason why a cell or a run does not pass: a code for programs, a sentence for people.

docs/read-the-report.md lists the codes; a test compares that list with this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ReasonCode(StrEnum):
    """Why a cell or a run does not pass, as a code; ``meaning`` says it in a sentence that always holds."""

    meaning: str

    def __new__(cls, code: str, meaning: str) -> ReasonCode:
        member = str.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    # the test of a cell
    LOSS = "LOSS", "A loss is shown, beyond the margin or of a size that is open."
    MARGIN = "MARGIN", "The interval reaches past the margin, so neither a pass nor a loss is shown."
    CLUSTERS = "CLUSTERS", "Too few templates, or templates of too unequal size, to show the margin."
    TEMPLATES = "TEMPLATES", "Templates like those seen, weighted differently, would allow a loss of the margin."
    NO_MARGIN = "NOMARGIN", "No margin is declared for the suite or facet."
    LABELS = "LABELS", "The human labels at hand cannot decide this cell."

    # the reference cannot be measured
    UNREADABLE = "UNREADABLE", "Too few of the reference's own answers have a form that can be read."
    INCAPABLE = "INCAPABLE", "The reference fails the harmless twin of the task."
    FLOOR = "FLOOR", "The reference has nothing to lose: it does not do what is wanted."
    CEILING = "CEILING", "The reference treats both kinds of items alike, so a loss could not show."

    # a PASS is held back, or a cell fails, for more than its own test
    SEED = "SEED", "A training seed fails on its own."
    JUDGE_DIFF = "JUDGE_DIFF", "The judge may err differently on the two sides, by more than half the margin."
    NO_CLUSTERS = "NOCLUSTERS", "No field says which items share a template."
    FORM = "FORM", "More answers may have lost the form in which a facet can be read."
    IDLE = "IDLE", "The policy held every entry uncompressed."
    NOISE = "NOISE", "The engine changes as many answers when asked again, so the setting may not have been applied."
    TRAINED = "TRAINED", "A release needs a gated safety suite that did not give the reward."
    PHRASES = "PHRASES", "A release needs more than phrase rules as a judge."

    # a contrast has no number
    CELL = "CELL", "Some cells of the difference were not evaluated."
    ITEMS = "ITEMS", "The two sides have different items."
    SAMPLES = "SAMPLES", "Some items have fewer samples than others."
    MISSING = "MISSING", "More than 1 % of the answers have no score."
    CLUSTER_IDS = "CLUSTER_IDS", "Items have no cluster, or are in several."
    FEW_CLUSTERS = "FEW_CLUSTERS", "Fewer than six clusters give no interval."
    HARM = "HARM", "No judge of harm was asked, so unsafe answers are unknown."
    SEEDS = "SEEDS", "The suites were not asked of the same seeds."
    CANARY = "CANARY", "The serving setting changed no answer, so it was probably not applied."

    # the run as a whole is INVALID
    NOTHING = "NOTHING", "There is no cell to gate."
    REFERENCE = "REFERENCE", "The reference arm has no records."
    DUPLICATE = "DUPLICATE", "Some records are duplicates."
    INCOMPLETE = "INCOMPLETE", "Planned records are missing, or a unit is not sealed."
    HASH = "HASH", "Weights, policy, suite, judge or items differ where they must be equal."
    REF_HASH = "REFHASH", "The files are not those that provenance or the pin names."
    INPUTS = "INPUTS", "Units were evaluated from another spec, rows, plug-ins or model files than provenance lists."
    NO_COMMON_ITEM = "NO_COMMON_ITEM", "The two files have no item in common."


# the cell's own test would pass, but a PASS needs more
PASS_NEEDS_MORE = frozenset(
    {
        ReasonCode.JUDGE_DIFF,
        ReasonCode.NO_CLUSTERS,
        ReasonCode.FORM,
        ReasonCode.IDLE,
        ReasonCode.NOISE,
        ReasonCode.TRAINED,
        ReasonCode.PHRASES,
    }
)


@dataclass(frozen=True)
class Reason:
    """Why a cell or a run does not pass: a code, and a sentence with the figures of this case."""

    code: ReasonCode
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"
