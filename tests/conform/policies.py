"""Which policies a conformance test meets: small variants of every one, built from its own fields by a general rule.

Everything here follows from a policy's class, its fields and the contract of ``audit/policies/base.py``; no policy is
known by name.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvaudit.audit.policies import POLICIES, Composed, Policy, evictor_of, quantiser_of, selector_of
from kvaudit.core.errors import SpecError

SMALL = {"budget": 16, "chunk": 16, "kernel": 3, "group": 4, "residual": 8, "page": 4, "dense": 1}
AT_MOST = {"window": 4, "interval": 3}
# every evicting policy also plays under these; a field that a policy refuses with others is its own business
SCHEDULES = {
    "each-step": {"interval": 1},
    "one-chunk": {"interval": 5, "chunk": 1000},
    "prefill": {"phase": "prefill"},
    "decode": {"phase": "decode", "interval": 2, "chunk": 1000},
}


# what one that quantises also plays, if it has the fields: a layer left alone, codes taken on write, fixed scales
CODINGS = {
    "skip": {"skip_layers": "1"},
    "write": {"residual": 0, "write": True},
    "fixed": {"residual": 0, "scale": "tensor", "scales": "0.05/0.04", "write": True},
    "fixed-late": {"scale": "head", "scales": "0.04"},
}


def small(cls: type[Policy], **fields: Any) -> Policy:
    """The policy with a budget that bites on forty tokens; fields that this rule does not know keep their defaults."""
    defaults = {f.name: f.default for f in dataclasses.fields(cls) if f.name in cls.field_names()}
    values = {name: value for name, value in SMALL.items() if name in defaults}
    values |= {name: min(most, defaults[name]) for name, most in AT_MOST.items() if name in defaults}
    return cls(**{**values, **fields})


def roomy(policy: Policy, **fields: Any) -> Policy:
    """The same rule with a budget in which sink and window fit beside a choice, whatever the rule asks of them."""
    return dataclasses.replace(policy, **{"budget": 48, "sink": 2, "window": 5, **fields})


def small_policies() -> list[Policy]:
    """A small variant of every registered policy."""
    return [small(cls) for cls in POLICIES.all().values()]


def variants(policy: Policy) -> list[Policy]:
    """The policy, with each of its switches turned, and under other schedules if it evicts; no two alike."""
    switches = [name for name in policy.field_names() if isinstance(getattr(policy, name), bool)]
    others = [{name: not getattr(policy, name)} for name in switches]
    others += SCHEDULES.values() if policy.evicts else []
    others += [fields for fields in CODINGS.values() if set(fields) <= set(policy.field_names())]
    others = [fields for fields in others if not refuses(policy, **fields)]
    return list(dict.fromkeys([policy, *(dataclasses.replace(policy, **fields) for fields in others)]))


def compositions(under_test: Sequence[Policy]) -> list[Policy]:
    """Every evicting policy with a quantising one and the other way round, partners taken in turn."""
    registered = small_policies()
    evictors, quantisers = ([p for p in registered if getattr(p, kind)] for kind in ("evicts", "quantises"))
    pairs = [*zip((p for p in under_test if p.evicts), itertools.cycle(quantisers), strict=False)]
    pairs += zip(itertools.cycle(evictors), (p for p in under_test if p.quantises), strict=False)
    return list(dict.fromkeys(Composed(parts=pair) for pair in pairs))


def policies_for(argument: str, under_test: Sequence[Policy]) -> list[Policy]:
    """The policies a test asks for by the name of its argument."""
    varied, pairs = [v for p in under_test for v in variants(p)], compositions(under_test)
    chosen = {
        "policy": under_test,
        "evictor": [p for p in under_test if p.evicts],
        "scheduled": [v for v in varied if v.evicts],
        "compressed": [*(v for v in varied if v.evicts), *pairs],
        "variant": [*varied, *pairs],
        "replayed": [p for p in under_test if p.replayable],
        "replayed_variant": [p for p in (*varied, *pairs) if p.replayable],
        "lossy": [
            p for p in (*under_test, *pairs) if p.replayable and (evictor_of(p).evicts or p.quantises or p.selects)
        ],
    }
    chosen["recorded"] = one_of_each(chosen["lossy"], record_of)
    chosen["asking"] = one_of_each(chosen["replayed"], asked_by)
    chosen["timed"] = [*one_of_each(chosen["scheduled"], shape_of), *one_of_each(chosen["scheduled"], schedule_of)]
    chosen["timed"] = list(dict.fromkeys(chosen["timed"]))
    return list(chosen[argument])


def one_of_each(policies: Sequence[Policy], kind: Callable[[Policy], object]) -> list[Policy]:
    """The first policy of every kind."""
    return list({kind(policy): policy for policy in reversed(policies)}.values())[::-1]


def record_of(policy: Policy) -> object:
    """What a replay is given of a policy: a replay knows the record alone, so rankings are all one to it."""
    evictor, others = evictor_of(policy), (quantiser_of(policy), selector_of(policy))
    return evictor.evicts, evictor.shares_heads, evictor.across_layers, *map(_type, others)


def asked_by(policy: Policy) -> tuple[object, ...]:
    """What a policy wants of a model beside its keys, in which model families differ."""
    evictor = evictor_of(policy)
    looks = evictor.accumulates, evictor.observed_queries > 0, evictor.moments, evictor.centres, evictor.seeded
    return looks, evictor.for_layer(0, 3) == evictor, record_of(policy)


def schedule_of(policy: Policy) -> object:
    """What decides when an evicting policy compresses a row: and whether its heads share."""
    own = evictor_of(policy)
    return own.interval, own.phase, own.chunk, own.shares_heads


def shape_of(policy: Policy) -> object:
    """What decides to how much an evicting policy compresses a row in its phase, whatever it ranks by."""
    own = evictor_of(policy)
    return own.phase, own.shares_heads, own.across_layers, own.for_layer(0, 3) == own, type(own).budget_at


def _type(part: object) -> type | None:
    return None if part is None else type(part)


ARGUMENTS = ("policy", "evictor", "scheduled", "compressed", "variant", "replayed", "replayed_variant", "lossy")
ARGUMENTS += ("recorded", "asking", "timed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test every policy its argument asks for: all registered ones, or those of ``--policy-file``.

    Of the registered ones those of ``further`` are slow; of an outsider's none is.
    """
    file = metafunc.config.getoption("policy_file")
    for argument in set(ARGUMENTS) & set(metafunc.fixturenames):
        chosen = policies_for(argument, _under_test(file))
        marked = chosen if file else slowed(chosen)
        metafunc.parametrize(argument, marked, ids=[policy_id(p) for p in chosen])


def slowed(policies: Sequence[Policy]) -> list[Any]:
    """The policies as parameters, those of ``further`` slow."""
    return [pytest.param(p, marks=[pytest.mark.slow] if p in further() else []) for p in policies]


@cache
def further() -> frozenset[Policy]:
    """Registered policies under a schedule, or in a composition, whose kind another one plays already.

    The simulator plays every ranking under random schedules, these included.
    """
    registered = small_policies()
    schedules = [(p, fields) for p in registered if p.evicts for fields in SCHEDULES.values()]
    scheduled = {dataclasses.replace(p, **fields) for p, fields in schedules if not refuses(p, **fields)}
    pairs = compositions(registered)
    return frozenset(
        {*scheduled, *pairs} - {*registered, *policies_for("timed", registered), *one_of_each(pairs, record_of)}
    )


@cache
def _under_test(file: Path | None) -> list[Policy]:
    return small_policies() if file is None else [small(POLICIES.get(name)) for name in POLICIES.load_file(file)]


def policy_id(policy: Policy) -> str:
    """The name and whatever differs from the small variant."""
    if isinstance(policy, Composed):
        return "+".join(map(policy_id, policy.parts))
    usual = small(type(policy)).parameters()
    other = [f"{k}={v}" for k, v in policy.parameters().items() if usual.get(k) != v]
    return ":".join([policy.name, ",".join(other)]) if other else policy.name


def refuses(policy: Policy, **fields: Any) -> bool:
    """Whether a policy cannot be built with these fields."""
    try:
        dataclasses.replace(policy, **fields)
    except SpecError:
        return True
    return False
