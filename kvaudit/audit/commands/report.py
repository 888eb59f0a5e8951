"""``kvaudit report`` and ``kvaudit gate``: a run's report and verdict, and pins (files with a reference's hashes).

No model is loaded. Prompts in a report's examples are drawn as SVG; each token is shaded by the share of layers and
heads that still held it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

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
    """Write a pin: a file with the sha256 of finished checkpoints.

    A folder may hold one checkpoint or all seeds of an arm. Raises RunError if ``out`` exists.
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
    """Yield the entries in a pin (file of hashes) for the checkpoint in ``folder``, or for each seed's in that folder.

    The checkpoints are first checked against their own hashes.
    """
    seeds = sorted(folder.glob(f"seed-*/{PROVENANCE}"))
    if (folder / PROVENANCE).is_file():
        yield _pin_trained(folder)
    elif seeds:
        yield from (_pin_trained(path.parent) for path in seeds)
    else:
        yield _pin_untrained(folder)


def _pin_trained(folder: Path) -> PinnedCheckpoint:
    """Return the entry in a pin (file of checkpoint hashes) for a checkpoint that kvaudit trained.

    It holds arm, seed, policy and the hashes of the files. Raises DataError if the checkpoint's provenance lacks one of
    these or names other weights.
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

    An adapter's is computed from the base model's hash in ``provenance`` if the result is the sha256 that
    ``provenance`` states; only otherwise are the base model's files read.
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
    """Return the entry in a pin (file of checkpoint hashes) for a model trained outside kvaudit.

    Its arm and seed are placeholders.
    """
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


COLUMNS = 110  # characters per line
WIDTH, HEIGHT, MARGIN = 7.3, 19.0, 20.0  # of a character, of a line, around the page; in pixels
_STYLE = """
text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1b1f24; white-space: pre; }
.head { font: 600 13px system-ui, sans-serif; }
.about { font: 12px system-ui, sans-serif; }
.page { fill: #ffffff; }
.held { fill: #2f86cf; }
.gone { fill: #8b949e; text-decoration: line-through; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb; }
  .page { fill: #14171b; }
  .gone { fill: #6b7480; }
}
"""
_MOST_OPACITY = 0.55  # of the shade, so that the text stays readable


class ShadedPrompt(NamedTuple):
    """A prompt under a policy: for each token its text and the share of layers and heads whose cache still held it.

    ``pieces`` are the texts, ``held`` the shares; ``caption`` describes the answer to the prompt.
    """

    heading: str
    caption: str
    pieces: Sequence[str]
    held: Sequence[float]


class _PlacedToken(NamedTuple):
    line: int
    column: int
    text: str
    share: float
    number: int


def shading_svg(title: str, prompts: Sequence[ShadedPrompt]) -> str:
    """Return an SVG, for light and dark mode, of prompts below one another, each token shaded.

    The shade is the share of layers and KV heads whose cache still holds the token; a token that none holds is struck
    through.
    """
    width, y = 2 * MARGIN + COLUMNS * WIDTH, MARGIN
    body: list[str] = []
    for prompt in prompts:
        tokens = list(_place_tokens(prompt))
        body.append(f'<text class="head" x="{MARGIN:g}" y="{y:g}">{_escape(prompt.heading)}</text>')
        body.append(f'<text class="about" x="{MARGIN:g}" y="{y + HEIGHT:g}">{_escape(prompt.caption)}</text>')
        top = y + HEIGHT * 2.4
        body += [element for token in tokens for element in _token_elements(token, top)]
        y = top + HEIGHT * (max((token.line for token in tokens), default=0) + 2)
    caption = "Every token is shaded by the share of layers and KV heads that still held it when the answer began."
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {y:g}" width="{width:g}" height="{y:g}" '
            'role="img" aria-labelledby="title about">',
            f'<title id="title">{_escape(title)}</title>',
            f'<desc id="about">{caption}</desc>',
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{width:g}" height="{y:g}"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def _place_tokens(prompt: ShadedPrompt) -> Iterator[_PlacedToken]:
    """Yield the tokens of a prompt with their line and column in the drawing; one longer than a line is cut.

    A line break of the text begins a new line.
    """
    line = column = 0
    for number, (piece, share) in enumerate(zip(prompt.pieces, prompt.held, strict=True)):
        text = inline(piece) or "·"  # so that an invisible token has a place
        while text:
            # a token is cut only if it is longer than a line
            if column >= COLUMNS or (column + len(text) > COLUMNS >= len(text)):
                line, column = line + 1, 0
            head, text = text[: COLUMNS - column], text[COLUMNS - column :]
            yield _PlacedToken(line, column, head, share, number)
            column += len(head)
        if "\n" in piece:
            line, column = line + 1, 0


def _token_elements(token: _PlacedToken, top: float) -> Iterator[str]:
    x, y, width = MARGIN + WIDTH * token.column, top + HEIGHT * token.line, WIDTH * len(token.text)
    yield f"<g><title>token {token.number}: held by {100 * token.share:.0f} %</title>"
    if token.share > 0:
        shade = f'width="{width:g}" height="17" fill-opacity="{_MOST_OPACITY * token.share:.3f}"'
        yield f'<rect class="held" x="{x:g}" y="{y - 13:g}" {shade}/>'
    style = ' class="gone"' if token.share == 0 else ""
    # textLength: the same width in any font
    position = f'x="{x:g}" y="{y:g}" textLength="{width:g}"'
    yield f'<text{style} {position} xml:space="preserve">{escape(token.text)}</text></g>'


def _escape(text: str) -> str:
    return escape(inline(text))
