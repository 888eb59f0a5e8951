"""The units of a displacement measurement: which checkpoint, served how, is led along whose answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvaudit.audit.policies import Dense, Policy
from kvaudit.audit.runs.evaluate import served_by_us
from kvaudit.core.errors import SpecError
from kvaudit.core.files import in_file_name
from kvaudit.core.spec import RunSpec
from kvaudit.core.spec_train import BASE_ARM

DENSE = Dense()


@dataclass(frozen=True)
class Measured:
    """One checkpoint under one policy on the answers of ``reference_seed``; ``floor`` is the reference run again."""

    arm: str
    seed: int
    policy: Policy
    suite: str
    context_tokens: int
    reference_seed: int
    floor: bool

    @property
    def name(self) -> str:
        """The file name of the unit, without its ending."""
        kind = "floor" if self.floor else self.policy.hash
        return f"{self.arm}-seed{self.seed}--{kind}--{in_file_name(self.suite)}--{self.context_tokens}"


def units(spec: RunSpec) -> list[Measured]:
    """Every unit of a run; those of one checkpoint and reference stand together, the floors first.

    Seed s of an arm follows seed s of the reference; a reference of one seed serves all. The reference itself is
    measured under every policy but ``none``, and uncompressed its other seeds against its first.
    Raises SpecError where engines alone served: they show no distributions.
    """
    if DENSE not in served_by_us(spec):
        raise SpecError(
            "engines alone served this run, and they show nobody their distributions; add none and policies of our own "
            "cache to evaluate.policies"
        )
    reference = spec.gate.reference
    own = [seed for arm, seed in spec.arms if arm == reference]
    found: list[Measured] = []
    for arm, seed in spec.arms:
        if arm == reference:
            found += _grid(spec, arm, seed, seed, (DENSE,), floor=True)
    for arm, seed in spec.arms:
        known = seed if seed in own else own[0]
        policies = served_by_us(spec, arm)
        deployed = [policy for policy in policies if policy != DENSE]
        if arm == reference:
            found += _grid(spec, arm, seed, seed, deployed)
            if seed != own[0]:
                found += _grid(spec, arm, seed, own[0], (DENSE,))
        elif arm != BASE_ARM:
            found += _grid(spec, arm, seed, known, policies)
    return found


def _grid(
    spec: RunSpec, arm: str, seed: int, reference_seed: int, policies: Sequence[Policy], *, floor: bool = False
) -> Iterator[Measured]:
    for suite in spec.evaluate.suites:
        for context in spec.evaluate.contexts_of(suite):
            for policy in policies:
                yield Measured(arm, seed, policy, suite, context, reference_seed, floor)
