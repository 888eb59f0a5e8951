"""``kvaudit init``: writes a commented file to begin with; those that are no answer to a question ship as examples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from kvaudit.audit.commands.base import Command, argument
from kvaudit.audit.commands.check import (
    CheckOptions,
    AsksMadeUp,
    CandidateUrl,
    DataFolder,
    EngineName,
    EnginePython,
    EngineWeights,
    Kv,
    Minutes,
    NamedSettings,
    Order,
    PolicyText,
    ReferenceUrl,
    set_rows,
    typed,
)
from kvaudit.audit.commands.base import print_line, user_errors, wide_console
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.text import shipped_folder

CHECK = "check"


class ShippedExample(NamedTuple):
    """A file of ``kvaudit/examples``, what it is written as, and what is done with it."""

    example: str
    written: str
    then: str


SHIPPED = {
    "audit": ShippedExample("audit.yaml", "spec.yaml", "run it with kvaudit run {out}, then kvaudit gate runs/audit"),
    "arms": ShippedExample("arms.yaml", "spec.yaml", "run it with kvaudit run {out}, then kvaudit gate runs/arms"),
    "ci": ShippedExample("ci.yml", "kvaudit.yml", "commit it as .github/workflows/{out}; it runs spec.yaml"),
}
SpecKind = Annotated[
    str,
    argument(
        help="check: the spec that `check` would run; audit: a model under several settings; arms: training, paired; "
        "ci: a workflow that holds a release to its gate."
    ),
]
InitModel = Annotated[str | None, argument(help="Of check: the model's folder, a .gguf file, or embedded.")]
Out = Annotated[Path | None, typer.Option(help="The file to write; - prints it.", show_default="spec.yaml")]


def init(
    kind: SpecKind,
    model: InitModel = None,
    *,
    engine: EngineName = None,
    kv: Kv = None,
    settings: NamedSettings = None,
    python: EnginePython = None,
    weights: EngineWeights = None,
    policy: PolicyText = None,
    reference: ReferenceUrl = None,
    candidate: CandidateUrl = None,
    minutes: Minutes = None,
    seed: Order = None,
    made_up: AsksMadeUp = False,
    out: Out = None,
    data: DataFolder = None,
) -> None:
    """Write a commented spec to begin with.

    Every line says what it is for, and all of it may be changed. The options but --out are those of `check`.
    """
    ways = (engine, kv, settings, python, weights, policy, reference, candidate, minutes, seed, made_up, data)
    with user_errors():
        # its former form, kvaudit init MODEL, still works
        if kind != CHECK and kind not in SHIPPED and any(ways) and model is None:
            typer.echo(f"kvaudit init {kind} is called kvaudit init {CHECK} {kind} now", err=True)
            kind, model = CHECK, kind
        if kind in SHIPPED:
            if model is not None or any(ways):
                raise SpecError(f"init {kind} takes no model and no options but --out; change what it writes")
            text = (shipped_folder("examples") / SHIPPED[kind].example).read_text(encoding="utf-8")
            _write(text, out or Path(SHIPPED[kind].written), SHIPPED[kind].then)
            return
        if kind != CHECK:
            raise UnknownName("kind of file", kind, (CHECK, *SHIPPED))
        if model is None:
            raise SpecError("init check needs the model: its folder, a .gguf file, or embedded")
        asking = CheckOptions(
            *(model, engine, kv, settings or [], python, weights, policy, reference, candidate),
            data=data,
            minutes=minutes,
            seed=seed,
            made_up=made_up,
        )
        from kvaudit.audit.runs.question import parse_spec_text, spec_text

        set_rows(asking)
        way = asking.way()
        text = spec_text(model, way, asking.plan(way), typed(asking))
        folder = Path("runs") / parse_spec_text(text).name  # which raises where it is none
        _write(text, out or Path("spec.yaml"), f"run it with kvaudit run {{out}} --anyway, then kvaudit gate {folder}")


def _write(text: str, out: Path, then: str) -> None:
    from kvaudit.core.files import write_output

    if str(out) == "-":
        typer.echo(text, nl=False)
        return
    if out.exists():
        raise SpecError(f"{str(out)!r} is there already; give another --out")
    write_output(out, text)
    print_line(wide_console(), f"{out}: {then.format(out=out)}")


COMMAND = Command("init", group="Audit", order=1, call=init)
