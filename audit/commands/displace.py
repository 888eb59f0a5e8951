"""``kvaudit displace``: leads every checkpoint along the reference's answers and writes displacement.json."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.command_line import Plugins, Run, say, set_data, user_errors, wide_console
from kvaudit.core.errors import SpecError
from kvaudit.core.provenance import INPUTS, PLUGINS, check_same
from kvaudit.core.text import inline, length_label

if TYPE_CHECKING:
    from kvaudit.audit.runs.displacement.units import Measured
    from kvaudit.audit.runs.folder import RunFolder
    from kvaudit.reports.analysis.displacement import Displacement


def displace(
    run: Run,
    *,
    tokens: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="At most this many tokens of a checkpoint, policy and suite.")
    ] = 16384,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: what the run began with.", show_default=False)
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Measure how far next-token distributions moved on the reference's own answers; `report` shows it, no gate."""
    with user_errors(f"kvaudit displace {run}"):
        _measure(run, tokens=tokens, threads=threads, plugins=tuple(plugin or ()))


def _measure(path: Path, *, tokens: int, threads: int | None, plugins: Sequence[Path]) -> None:
    """Measure what is missing, write the file, print its means over suites and seeds."""
    import torch
    from rich.console import Console
    from transformers.utils.logging import disable_progress_bar

    from kvaudit.audit.runs.displacement.produce import Producer
    from kvaudit.audit.runs.progress import Meter
    from kvaudit.core.provenance import check_checkpoints
    from kvaudit.reports.analysis.displacement import load_displacement

    run = opened(path, plugins)
    check_checkpoints(path)
    torch.set_num_threads(threads or threads_of(run))
    disable_progress_bar()
    producer = Producer(run, tokens=tokens)
    console = Console(stderr=True)
    for name in _unseen(run):
        say(console, f"{name}: not measured, an engine shows nobody its distributions")
    with Meter(console, "displace", len(producer.units), producer.finished()) as meter:
        written = producer.work(
            lambda done, unit: meter.at(done, _line(unit)),
            lambda text: say(console, text),
        )
        meter.at(len(producer.units), "all units")
    _print(load_displacement(path))
    say(wide_console(), f"written: {written}; show it with: kvaudit report {path}")


def _unseen(run: RunFolder) -> list[str]:
    """What engines serve under settings that compress, by name."""
    from kvaudit.core.conditions import condition_names

    names = condition_names(run.spec.evaluate.references)
    return [names[text] for text, plain in run.spec.evaluate.references.items() if text != plain]


def opened(path: Path, plugins: Sequence[Path]) -> RunFolder:
    """The run, by the spec and the plug-ins that it began with; raises DataError and RunError for others."""
    from kvaudit.audit.runs.folder import begun_run
    from kvaudit.audit.runs.names import load_plugins

    files = load_plugins(plugins)
    run = begun_run(path)
    if run.spec.probe is not None:
        raise SpecError(f"{str(path)!r} is a probe, and an endpoint shows no distributions; give the folder of a run")
    set_data(run.spec)
    if isinstance(noted := run.provenance().get(INPUTS), dict):  # a run of an earlier version noted none
        check_same(PLUGINS, noted.get(PLUGINS, {}), files)
    return run


def threads_of(run: RunFolder) -> int:
    """What the run began with: rounding can depend on it."""
    import torch

    from kvaudit.audit.runs.launchers.local import idle_cores

    known = run.provenance().get("threads")
    if isinstance(known, int) and known > 0:
        return min(known, os.cpu_count() or 1)
    return torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else idle_cores()


def _line(unit: Measured) -> str:
    name, _, fields = unit.policy.canonical.partition(":")
    kind = "floor" if unit.floor else f"{name} {fields.partition(',')[0]}".strip()
    return f"{unit.arm} seed {unit.seed}, {kind}, {unit.suite} {length_label(unit.context_tokens)}"


def _print(rows: Sequence[Displacement]) -> None:
    from rich.table import Table

    from kvaudit.reports.layout.words import percent

    table = Table("arm", "policy", "tokens", "mean KL, nats", "largest", "same top-1", "RMS dp")
    groups: dict[tuple[str, str, bool], list[Displacement]] = {}
    for row in rows:
        groups.setdefault((row.arm, row.policy, row.floor), []).append(row)
    for (arm, policy, floor), own in groups.items():
        tokens = sum(row.tokens for row in own)
        mean = sum(row.mean_kl * row.tokens for row in own) / tokens
        top1 = sum(row.same_top1 * row.tokens for row in own) / tokens
        rms = (sum(row.rms_dp**2 * row.tokens for row in own) / tokens) ** 0.5
        name = f"{inline(arm)} again (A/A floor)" if floor else inline(arm)
        largest = f"{max(row.max_kl for row in own):.3g}"
        table.add_row(name, inline(policy), str(tokens), f"{mean:.3g}", largest, percent(top1), percent(rms))
    wide_console().print(table, markup=False)
