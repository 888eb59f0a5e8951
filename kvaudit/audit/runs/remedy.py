"""The second round of serving: what fails under a gated policy, served again under every remedy.

The items, their order in batches and the decoding seeds are those of the grid, so each answer has its pair there. Which
arms fail is told from outside: it follows from the run's verdict, and nothing here decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvaudit.audit.policies import parse_policy
from kvaudit.audit.policies.remedy import check_remedies, parse_remedy, remedied
from kvaudit.audit.runs.folder import RunFolder, make_folder
from kvaudit.audit.runs.pipeline import Pipeline
from kvaudit.audit.runs.units import Unit
from kvaudit.core.errors import DataError
from kvaudit.core.files import mutex, write_json
from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.core.provenance import table_of
from kvaudit.core.spec import RunSpec
from kvaudit.reports.records.remedies import (
    AFTER_RUN,
    REMEDIES_FOLDER,
    REMEDIES_FORMAT,
    REMEDIES_VERSION,
    TRIED_FILE,
    WITH_RUN,
    Tried,
    read_tried,
)
from kvaudit.suites.base import SUITES


class AskedByVerdict(NamedTuple):
    """What the verdict asks for: which arm fails under which policy, what is gated, at which lengths."""

    failing: Sequence[tuple[str, str]]  # arm, canonical policy
    gated: Sequence[str]
    contexts: Sequence[int]


def check_suites(run: RunFolder) -> None:
    """Raise DataError where a suite has another version than the run asked: its items might not be the same."""
    asked = table_of(run.provenance(), "suite_versions")
    for name in run.spec.evaluate.suites:
        if (now := SUITES.get(name).version) != asked.get(name, now):
            raise DataError(
                f"suite {name} is version {now}, the run asked version {asked[name]}: no answer would have its pair; "
                "install the kvaudit that the run was made with"
            )


def serve_remedies(pipeline: Pipeline, run: RunFolder, asked: AskedByVerdict, added: Sequence[str] = ()) -> None:
    """Serve every failing arm under what each remedy makes of the policy it fails under, at the gated lengths.

    ``added`` are tested behind those that were tried before. Raises SpecError for one that has no hold on any gated
    policy, DataError for a checkpoint that is not there any more; nothing is written then.
    """
    gated = _of_our_cache(run.spec, asked.gated)
    units = list(_units(run.spec, asked, _family(run, gated, added)))
    pipeline.check_there({(unit.arm, unit.seed) for unit in units})
    folder = run.path / REMEDIES_FOLDER
    make_folder(folder)
    with mutex(folder / ".tried.lock"):  # another process may have added to the family meanwhile
        tried = [one._asdict() for one in _family(run, gated, added)]
        write_json(folder / TRIED_FILE, {"format": REMEDIES_FORMAT, "version": REMEDIES_VERSION, "tried": tried})
    pipeline.serve_again(units, folder)


def _family(run: RunFolder, gated: Sequence[str], added: Sequence[str]) -> list[Tried]:
    """The spec's remedies, then those that were added, in the order in which they were."""
    declared = run.spec.remedies
    new = [parse_remedy(text).text for text in added]
    texts = dict.fromkeys([*declared, *(one.remedy for one in read_tried(run.path)), *new])
    check_remedies(list(texts), gated)
    return [Tried(text, WITH_RUN if text in declared else AFTER_RUN, _instead(gated, text)) for text in texts]


def _of_our_cache(spec: RunSpec, gated: Sequence[str]) -> list[str]:
    """The gated policies that remedies can have a hold on: what an engine serves is its own affair."""
    engines = {text for pair in spec.evaluate.references.items() for text in pair}
    return [policy for policy in gated if policy not in engines]


def _instead(gated: Sequence[str], text: str) -> dict[str, str]:
    """What a remedy makes of each gated policy that it has a hold on."""
    remedy, policies = parse_remedy(text), [parse_policy(policy) for policy in gated if policy != DENSE_POLICY]
    served = {policy.canonical: remedied(remedy, policy) for policy in policies}
    return {policy: found.canonical for policy, found in served.items() if found is not None}


def _units(spec: RunSpec, asked: AskedByVerdict, family: Sequence[Tried]) -> Iterator[Unit]:
    """What the grid has not served already; the units of one checkpoint stand together."""
    for arm, seed in spec.arms:
        failing = [policy for failed, policy in asked.failing if failed == arm]
        found = dict.fromkeys(one.instead[policy] for policy in failing for one in family if policy in one.instead)
        new = [parse_policy(text) for text in found if text not in spec.evaluate.policies]
        for suite in spec.evaluate.suites:
            for context in spec.evaluate.contexts_of(suite):
                if context in asked.contexts:
                    yield from (Unit(arm, seed, policy, suite, context) for policy in new)
