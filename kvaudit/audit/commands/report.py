"""``kvaudit report`` and ``kvaudit gate``: a run's report and verdict, and pins; no model is loaded.

A pin is a file with the hashes of the checkpoints that later gates must have as their reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvaudit.audit.commands.base import (
    Command,
    Run,
    argument,
    check_report_folder,
    check_run,
    expand_options,
    option,
    print_line,
    typed_command,
    user_errors,
    wide_console,
)
from kvaudit.core.errors import DataError, RunError, SpecError
from kvaudit.core.files import read_json, write_output
from kvaudit.core.provenance import PROVENANCE, check_checkpoint
from kvaudit.core.text import inline
from kvaudit.reports.verdict.pin import Pin, PinnedCheckpoint, is_sha256, load_pin

if TYPE_CHECKING:
    from rich.console import Console

    from kvaudit.reports.page.findings import Findings
    from kvaudit.reports.verdict.rules import GateOverrides

Runs = Annotated[list[Path], argument(metavar="RUN", help="The folder of a run; with --pin, finished checkpoints.")]
PinFlag = Annotated[
    bool,
    typer.Option(
        "--pin",
        help="Instead of a verdict: pin a reference by its weights, for later gates. RUN is then one or more finished "
        "checkpoints, adapters or folders of an arm.",
    ),
]
PinOut = Annotated[Path | None, option("--out", help="With --pin: file to write. Default: pin.json.")]


@dataclass(frozen=True)
class GateOptions:
    """The options by which the command line changes a run's gate, such as another gate file or waivers."""

    gate_file: Annotated[
        Path | None, option("--gate", help="Gate file. Default: the gate declared in the run's spec.")
    ] = None
    waivers: Annotated[Path | None, option(help="File of waivers: which cells, by whom, why, until when.")] = None
    on_inconclusive: Annotated[
        str | None, option(help="If INCONCLUSIVE: block exits with 4, warn exits with 0 and prints a warning.")
    ] = None

    def read(self) -> GateOverrides:
        """Read and check the gate file and the waivers; raise SpecError and DataError for invalid ones."""
        from kvaudit.reports.verdict.rules import BLOCK, WARN, GateOverrides, load_gate_file
        from kvaudit.reports.verdict.verdict import read_waivers

        if self.on_inconclusive not in (None, BLOCK, WARN):
            raise SpecError(f"--on-inconclusive is {self.on_inconclusive!r}, wanted {BLOCK} or {WARN}")
        gate = None if self.gate_file is None else load_gate_file(self.gate_file)
        pin = None if gate is None else gate.table.get("pin")
        return GateOverrides(
            gate=gate,
            pin=load_pin(self.gate_file.parent / pin) if self.gate_file and isinstance(pin, str) else None,
            waivers=None if self.waivers is None else read_waivers(self.waivers),
            on_inconclusive=self.on_inconclusive,
            today=date.today(),
        )


@expand_options
def report(run: Run, *, options: GateOptions) -> None:
    """Write a run's report again from its records."""
    with user_errors(*typed_command()):
        overrides = options.read()
        check_run(run)
        write_report(run, overrides)


@expand_options
def gate(run: Runs, *, options: GateOptions, pin: PinFlag = False, out: PinOut = None) -> None:
    """Print a run's verdict, which is also the exit code.

    0 PASS, 3 FAIL, 4 INCONCLUSIVE, 5 INVALID, 6 NOT MEASURABLE.
    """
    with user_errors(*typed_command()):
        if pin:
            if options != GateOptions():
                raise SpecError("--pin gives no verdict; leave out --gate, --waivers and --on-inconclusive")
            _write_pin(run, out or Path("pin.json"))
            return
        if len(run) > 1 or out is not None:
            raise SpecError("gate takes one run and writes no file; several folders and --out need --pin")
        from kvaudit.reports.records.load import load_run
        from kvaudit.reports.run import decide_run
        from kvaudit.reports.verdict.rules import refuse_late_rules

        overrides = options.read()
        check_run(run[0])
        findings = decide_run(load_run(run[0]), overrides, everything=False)
        refuse_late_rules(findings.rules)  # a gate file that was written after the run began
        try:
            print_verdict(wide_console(), findings)
        except SystemExit as end:  # from rich; a reader that stopped reading, such as `head`, changes no verdict
            if not isinstance(end.__context__, BrokenPipeError):
                raise
        raise typer.Exit(findings.verdict.exit_code)


def write_report(run: Path, overrides: GateOverrides | None = None) -> None:
    """Write a run's report; print what was found and the report's path."""
    from kvaudit.reports.run import write_report as write_files

    check_report_folder(run)
    print_verdict(wide_console(), write_files(run, overrides), run)


def print_verdict(console: Console, findings: Findings, run: Path | None = None) -> None:
    """Print what was found on at most a dozen lines; with ``run``, also print where its report is."""
    from kvaudit.reports.page.terminal import terminal_lines

    for line in terminal_lines(findings, run):
        print_line(console, line)


def _write_pin(folders: Sequence[Path], out: Path) -> None:
    """Write a pin of finished checkpoints to ``out``; each folder holds one or all seeds of an arm.

    Raises RunError if ``out`` exists.
    """
    if out.exists():
        raise RunError(f"{str(out)!r} exists, and a pin must not change; give another --out")
    entries = tuple(entry for folder in folders for entry in _pin_entries(folder))
    names = [f"{e.arm} seed {e.seed}" if e.named else f"weights {e.sha256[:12]}" for e in entries]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{name} is given twice; give each checkpoint once, and only one per seed")
    pin = Pin(entries, datetime.now(UTC).date().isoformat(), out.name)
    write_output(out, pin.to_json())
    console = wide_console()
    for name, entry in zip(names, entries, strict=True):
        details = "trained outside kvaudit, so pinned without an arm's name"
        if entry.named:
            details = f"weights {entry.sha256[:12]}, base {entry.base_sha256[:12]}, policy {entry.policy}"
        print_line(console, inline(f"{name}: {details}"))
    print_line(console, f"pin: {out} ({pin.sha256[:12]})")


def _pin_entries(folder: Path) -> Iterator[PinnedCheckpoint]:
    """Yield the entries in a pin for the checkpoint in ``folder``, or for each seed's checkpoint in that folder."""
    seeds = sorted(folder.glob(f"seed-*/{PROVENANCE}"))
    if (folder / PROVENANCE).is_file():
        yield _pin_trained(folder)
    elif seeds:
        yield from (_pin_trained(path.parent) for path in seeds)
    else:
        yield _pin_untrained(folder)


def _pin_trained(folder: Path) -> PinnedCheckpoint:
    """Return the entry in a pin for a checkpoint that kvaudit trained, after checking it against its own hashes.

    Raises DataError if its provenance lacks arm, seed, base or policy, or names other weights.
    """
    from kvaudit.audit.sampling.checkpoints import checkpoint_files

    check_checkpoint(folder)
    provenance = read_json(folder / PROVENANCE)
    weights = _weights_sha256(folder, provenance)
    arm, seed, base, config = (provenance.get(key) for key in ("arm", "seed", "base_sha256", "config"))
    policy = config.get("policy") if isinstance(config, dict) else None
    has_texts = is_sha256(base) and isinstance(arm, str) and isinstance(policy, str)
    # not isinstance: True is an int too
    if not has_texts or type(seed) is not int or provenance.get("sha256") != weights:
        raise DataError(
            f"{str(folder / PROVENANCE)!r} lacks arm, seed, base, policy or the hash {weights[:12]} of the weights; "
            "give a checkpoint that kvaudit finished"
        )
    name = _arm_name(folder, str(arm), seed)
    return PinnedCheckpoint(name, seed, weights, str(base), str(policy), checkpoint_files(folder))


def _weights_sha256(folder: Path, provenance: Mapping[str, Any]) -> str:
    """Return the sha256 of a checkpoint's weights; for an adapter it also covers the base model.

    An adapter's sha256 is computed from the base model's hash in ``provenance``. The base model's files are read only
    if the result is not the sha256 that ``provenance`` states.
    """
    from kvaudit.audit.sampling.checkpoints import adapter_sha256, checkpoint_sha256, is_adapter

    if is_adapter(folder):
        sha256 = adapter_sha256(folder, str(provenance.get("base_sha256")))
        if sha256 == provenance.get("sha256"):  # otherwise training began from another adapter of the base model
            return sha256
    return checkpoint_sha256(folder)


def _arm_name(folder: Path, arm: str, seed: int) -> str:
    """Return the arm's name in its run: ``arm``, or ARM_POLICY if the run trains arms under several policies.

    The name ARM_POLICY is that of the folder above ``seed-N``.
    """
    folder = folder.resolve()
    name = folder.parent.name
    return name if folder.name == f"seed-{seed}" and name.startswith(f"{arm}_") else arm


def _pin_untrained(folder: Path) -> PinnedCheckpoint:
    """Return the entry in a pin for a model trained outside kvaudit; its arm and seed are placeholders."""
    from kvaudit.audit.sampling.checkpoints import checkpoint_files, checkpoint_sha256
    from kvaudit.core.spec_train import BASE_ARM

    if not list(folder.glob("*.safetensors")):
        raise DataError(
            f"{str(folder)!r} holds neither a finished checkpoint nor .safetensors weights; give a folder such as "
            "RUN/checkpoints/dense or RUN/checkpoints/dense/seed-11"
        )
    weights = checkpoint_sha256(folder)
    return PinnedCheckpoint(BASE_ARM, 0, weights, weights, "none", checkpoint_files(folder))


REPORT = Command("report", group="Audit", order=4, call=report)
GATE = Command("gate", group="Audit", order=5, call=gate, former_names={"pin": "gate --pin"})
