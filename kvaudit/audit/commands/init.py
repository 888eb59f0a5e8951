"""``kvaudit init``: write commented specs to start from, and a workflow for CI."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from kvaudit.audit.commands.base import Command, argument, expand_options, option, print_line, user_errors, wide_console
from kvaudit.audit.commands.check import CheckOptions, check_no_server
from kvaudit.core.errors import SpecError, UnknownName
from kvaudit.core.files import write_output
from kvaudit.core.text import shipped_folder

_CHECK, _QUARTERLY = "check", "quarterly"


class ShippedExample(NamedTuple):
    """A file of ``kvaudit/examples``, the name under which ``init`` writes it, and a line on how to use it."""

    example: str
    file_name: str
    usage: str


SHIPPED = {
    "audit": ShippedExample("audit.yaml", "spec.yaml", "run it with kvaudit run {out}, then kvaudit gate runs/audit"),
    "arms": ShippedExample("arms.yaml", "spec.yaml", "run it with kvaudit run {out}, then kvaudit gate runs/arms"),
    "agents": ShippedExample(
        "agents.yaml",
        "spec.yaml",
        "name your model in it, run it with kvaudit run {out}, then kvaudit gate runs/agents",
    ),
    "ci": ShippedExample("ci.yml", "kvaudit.yml", "commit it as .github/workflows/{out}; it runs spec.yaml"),
}


@expand_options
def init(
    kind: Annotated[
        str,
        argument(
            help="check: the spec that `check` runs; quarterly: harm at 16,384 tokens, of two servers; audit: a model "
            "under several settings; arms: paired training arms; agents: AgentDojo with tools; ci: a workflow that "
            "gates releases."
        ),
    ],
    model: Annotated[
        str | None, argument(help="For check and quarterly: the model's folder, a .gguf file, or embedded.")
    ] = None,
    *,
    options: CheckOptions,
    judge: Annotated[str | None, option(help="For quarterly: URL#MODEL of the server that judges answers.")] = None,
    rate: Annotated[float | None, option(help="For quarterly: measured answers per second, for the time.")] = None,
    out: Annotated[
        Path | None, option(help="File to write; - prints it. Default: spec.yaml, or kvaudit.yml for ci.")
    ] = None,
) -> None:
    """Write a commented spec to begin with.

    Comments explain every line, and everything may be changed. All options but --out, --judge and --rate are those of
    `check`. For quarterly its price is printed.
    """
    with user_errors():
        has_options = options != CheckOptions() or judge is not None or rate is not None
        # the former form, kvaudit init MODEL, still works
        if kind != _CHECK and kind not in SHIPPED and has_options and model is None:
            typer.echo(f"kvaudit init {kind} is now kvaudit init {_CHECK} {kind}", err=True)
            kind, model = _CHECK, kind
        if kind in SHIPPED:
            if model is not None or has_options:
                raise SpecError(f"init {kind} takes no model and no option but --out; edit the file it writes")
            example, file_name, usage = SHIPPED[kind]
            text = (shipped_folder("examples") / example).read_text(encoding="utf-8")
            if out is not None and str(out) != "-" and kind != "ci":  # whose spec.yaml is another file
                text = text.replace("spec.yaml", shlex.quote(str(out)))
            _write_spec(text, out or Path(file_name), usage)
            return
        if kind not in (_CHECK, _QUARTERLY):
            raise UnknownName("kind of file", kind, (_CHECK, _QUARTERLY, *SHIPPED))
        if model is None:
            raise SpecError(f"init {kind} needs the model: its folder, a .gguf file, or embedded")
        if kind == _QUARTERLY:
            _init_quarterly(model, options, judge, rate, out or Path("spec.yaml"))
            return
        if options.long:
            raise SpecError("init check takes no --long: its length follows from answers, so only check finds it")
        if judge is not None or rate is not None:
            raise SpecError("init check takes no --judge and no --rate; they are options of init quarterly")
        from kvaudit.audit.runs.question import parse_spec_text, spec_text

        options.set_data_folder()
        check_no_server(model)
        config = options.serving_config()
        text = spec_text(model, config, options.plan(model, config), options.command(model)) + options.spec_line
        folder = Path("runs") / parse_spec_text(text).name
        _write_spec(
            text, out or Path("spec.yaml"), f"run it with kvaudit run {{out}} --anyway, then kvaudit gate {folder}"
        )


def _init_quarterly(model: str, options: CheckOptions, judge: str | None, rate: float | None, out: Path) -> None:
    """Write the spec of a quarterly check of two servers with a judge; print how many requests and tokens it takes."""
    from transformers.utils.logging import set_verbosity_error

    from kvaudit.audit.runs.quarterly import judge_option, price_of, quarterly_text
    from kvaudit.audit.runs.question import parse_spec_text
    from kvaudit.audit.sampling.checkpoints import load_base_chat

    if options.minutes is not None or options.seed is not None or any(options.flags.values()):
        raise SpecError(
            "init quarterly takes no --minutes, --seed, --long, --sums, --agents or --made-up: it always asks the same "
            "rows"
        )
    if options.reference is None or options.candidate is None:
        raise SpecError(
            "init quarterly compares two running servers and needs a judge: give --reference URL#MODEL "
            "--candidate URL#MODEL --judge URL#MODEL"
        )
    if rate is not None and not rate > 0:
        raise SpecError(f"--rate is {rate:g}, wanted answers per second above 0")
    options.set_data_folder()
    check_no_server(model)
    config = options.serving_config()
    judging = judge_option(judge, config)
    words = ["kvaudit", "init", "quarterly", *shlex.split(options.command(model))[2:], "--judge", judge or ""]
    text = quarterly_text(model, config, judging, shlex.join(words)) + options.spec_line
    spec = parse_spec_text(text)
    set_verbosity_error()  # texts are counted whole before they are cut, which is no error
    price = price_of(spec, load_base_chat(model))
    _write_spec(text, out, "run it with kvaudit run {out}, then kvaudit gate runs/quarterly/judged/*")
    for line in price.lines(rate):
        typer.echo(line, err=str(out) == "-")


def _write_spec(text: str, out: Path, usage: str) -> None:
    if str(out) == "-":
        typer.echo(text, nl=False)
        return
    if out.exists():
        raise SpecError(f"{str(out)!r} exists already; give another --out")
    if not out.parent.is_dir():
        raise SpecError(f"--out is {str(out)!r}, but there is no folder {str(out.parent)!r}; make it, or give another")
    write_output(out, text)
    print_line(wide_console(), f"{out}: {usage.format(out=out)}")


COMMAND = Command("init", group="Audit", order=1, call=init)
