"""The removed features of kvaudit, with what to do instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Removed:
    """A removed feature: its commands, its keys of a spec, its suites, and its names and modules below ``kvaudit``."""

    instead: str
    commands: tuple[str, ...] = ()
    spec_keys: tuple[str, ...] = ()
    suites: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()


REMOVED = (
    Removed("Inspect plays its tasks itself: kvaudit.suites.inspect_task", imports=("suites.inspect_plan",)),
    Removed("in a clone of the repository: python -m bench.calibration", commands=("calibrate",)),
    Removed("in a clone of the repository: python -m bench.pretraining", commands=("pretrain",)),
    Removed(
        "measure a guard as a system of its own: put an endpoint that has it in front of the model, and audit that",
        commands=("guard", "grade guard", "list guards"),
        spec_keys=("guard",),
        imports=("Guard", "audit.judges.guards", "audit.runs.guard", "reports.records.guards"),
    ),
    Removed(
        "list the policies to try in evaluate.policies of a spec: each gets a verdict of its own",
        commands=("remedy", "replay remedy"),
        spec_keys=("remedies",),
        imports=("audit.policies.remedy", "audit.runs.remedy", "reports.records.remedies", "reports.analysis.remedies"),
    ),
    Removed(
        "serve the model under its policies (kvaudit serve MODEL) and ask it, or use kvaudit.CompressedCache in Python",
        commands=("generate",),
    ),
    Removed(
        "kvaudit diagnose MODEL measures how far a setting moves the model's probabilities, in nats",
        commands=("displace", "replay displace"),
        imports=("audit.again.displace", "audit.again.teacher_forcing", "reports.analysis.displacement"),
    ),
    Removed(
        "the verdict is the declared analysis alone; kvaudit plan RUN says what a next run would need",
        imports=("reports.analysis.sensitivity", "reports.sections.methods", "reports.sections.reach"),
    ),
    Removed(
        "kvaudit view RUN shows every answer that was lost, by template",
        imports=("reports.sections.concentration",),
    ),
    Removed(
        "kvaudit run asks these suites of any model, engine or endpoint, and kvaudit compare reads lm-eval's logs",
        commands=("tasks", "harness tasks"),
        imports=("audit.serving.harness.tasks",),
    ),
    Removed(
        "the bar of a run counts answers and estimates the rest by their speed (audit.runs.progress)",
        imports=("audit.runs.forecast",),
    ),
    Removed(
        "ask RULER's tasks through lm-eval (examples/ruler)",
        suites=("needle",),
        imports=("suites.needle",),
    ),
    Removed(
        "kvaudit explain RUN ITEM shows which tokens of a prompt a policy kept",
        commands=("show",),
    ),
)


def removed_command(words: Sequence[str]) -> str | None:
    """Return the error line of a removed command, None if the words begin with none."""
    for name in (" ".join(words[:2]), *words[:1]):
        if (instead := _instead(name, "commands")) is not None:
            return f"{name} is no longer a command of kvaudit; {instead}"
    return None


def removed_spec_key(key: str) -> str | None:
    """Return the error line of a removed key of a spec, None for another key."""
    instead = _instead(key, "spec_keys")
    return None if instead is None else f"{key} is no longer a key of a spec; {instead}"


def removed_suite(name: str) -> str | None:
    """Return the error line of a removed suite, None for another name."""
    instead = _instead(name, "suites")
    return None if instead is None else f"{name} is no longer a suite of kvaudit; {instead}"


def removed_import(name: str) -> str | None:
    """Return the error line of a removed import, such as ``kvaudit.Guard``, None for another name."""
    package, _, path = name.partition(".")
    if package != "kvaudit":
        return None
    for end in range(path.count(".") + 1, 0, -1):
        if (instead := _instead(".".join(path.split(".")[:end]), "imports")) is not None:
            return f"{name} is no longer part of kvaudit; {instead}"
    return None


def _instead(name: str, kind: str) -> str | None:
    return next((removed.instead for removed in REMOVED if name in getattr(removed, kind)), None)
