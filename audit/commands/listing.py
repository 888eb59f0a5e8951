"""``kvaudit list``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from audit.commands.console import say, wide_console
from audit.commands.plugins import load_plugins
from audit.policies import POLICIES, Evictor, Policy
from audit.policies.base import OPTIONAL
from audit.training.arms import ARMS
from suites.base import SUITES


def policies(plugins: Sequence[Path]) -> None:
    """Every policy with its defaults."""
    load_plugins(plugins)
    rows = [_row(name, cls) for name, cls in POLICIES.all().items()]
    _print(["policy", "keeps", "fields and defaults", "phase", "replay", "paper"], rows)
    say(
        wide_console(),
        "a+b evicts by a and quantises by b; a|b lets every request draw one; pin=system never lets a role's tokens go",
    )


def _row(name: str, cls: type[Policy]) -> list[str]:
    policy = cls()
    optional = [f"{field}={getattr(policy, field) or '-'}" for field in OPTIONAL if field in cls.field_names()]
    fields = [part for part in (policy.canonical.partition(":")[2], *optional) if part]
    decides = policy.phase if isinstance(policy, Evictor) and policy.evicts else "-"
    phase = "both" if cls.quantises else "decode" if cls.selects else decides
    # a field that a policy lists as optional may switch replay off
    replay = (
        "no" if not policy.replayable else "yes, unless repositioned" if "reposition" in cls.field_names() else "yes"
    )
    return [name, cls.keeps, ",".join(fields).lower(), phase, replay, cls.paper]


def suites(plugins: Sequence[Path]) -> None:
    """Every suite with its source."""
    load_plugins(plugins)
    rows = [
        [name, cls.kind, cls.version, str(cls.max_turns), str(cls.max_new_tokens), cls.source, cls.licence]
        for name, cls in SUITES.all().items()
    ]
    _print(["suite", "kind", "version", "turns", "new tokens", "source", "licence"], rows)


def arms() -> None:
    """Every training arm."""
    rows = [
        [arm.name, arm.rollout, arm.learner, arm.correction, "yes" if arm.distill else "no", arm.summary]
        for arm in ARMS.values()
    ]
    _print(["arm", "rollouts", "learner", "correction", "distil", "what it is"], rows)


def _print(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")  # nothing is cut off
    for row in rows:
        table.add_row(*row)
    wide_console().print(table, markup=False)
