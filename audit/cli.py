"""The command line: parses options, calls ``audit.commands``, and turns what users can mend into one line.

Heavy imports wait inside the commands, so that ``--help`` answers at once.
Exit codes: 0 done (gate: PASS), 1 crash, 2 usage or input, 3 FAIL, 4 INCONCLUSIVE, 5 INVALID,
130 interrupted, 143 terminated.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from audit import __version__
from audit.commands.command_line import (
    Limit,
    Out,
    Plugins,
    Resume,
    Run,
    SpecFile,
    Takeover,
    Threads,
    Workers,
    end_on_sigterm,
    resume_hint,
    user_errors,
)
from audit.commands.verdicts import verdicts

app = typer.Typer(
    name="kvaudit",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Measure what KV-cache compression did to the alignment of a model.",
)
listing = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show what can be named in a spec.")
app.add_typer(listing, name="list")
app.registered_commands += verdicts.registered_commands


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvaudit {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Measure what KV-cache compression did to the alignment of a model."""


@app.command()
def run(
    spec: SpecFile,
    *,
    out: Out = None,
    resume: Resume = False,
    limit: Limit = None,
    threads: Threads = None,
    workers: Workers = None,
    plugin: Plugins = None,
    takeover: Takeover = False,
) -> None:
    """Train the arms, evaluate the grid, write the report. Exits with 0 once it is written; `gate` decides."""
    with user_errors(resume_hint("run", spec, out, limit)):
        from audit.commands.run import Options, run_all

        options = Options(limit=limit, threads=threads, workers=workers, plugins=tuple(plugin or ()), takeover=takeover)
        run_all(spec, out, options, resume=resume)


@app.command()
def join(run: Run, *, threads: Threads = None, plugin: Plugins = None, takeover: Takeover = False) -> None:
    """Help with a run that another process has started, until nothing of it is left to do."""
    with user_errors(f"kvaudit join {run}"):
        from audit.commands.run import Options, join_run

        join_run(run, Options(threads=threads, plugins=tuple(plugin or ()), takeover=takeover))


@app.command()
def train(
    spec: SpecFile,
    *,
    out: Out = None,
    resume: Resume = False,
    limit: Limit = None,
    threads: Threads = None,
    plugin: Plugins = None,
    takeover: Takeover = False,
) -> None:
    """Only train the arms of a spec."""
    with user_errors(resume_hint("train", spec, out, limit)):
        from audit.commands.run import Options, train_only

        options = Options(limit=limit, threads=threads, plugins=tuple(plugin or ()), takeover=takeover)
        train_only(spec, out, options, resume=resume)


@app.command()
def evaluate(
    spec: SpecFile,
    *,
    out: Out = None,
    limit: Limit = None,
    threads: Threads = None,
    plugin: Plugins = None,
    takeover: Takeover = False,
) -> None:
    """Only evaluate the grid of a spec, on the checkpoints that `train` left in the run folder."""
    with user_errors(resume_hint("evaluate", spec, out, limit).removesuffix(" --resume")):
        from audit.commands.run import Options, evaluate_only

        options = Options(limit=limit, threads=threads, plugins=tuple(plugin or ()), takeover=takeover)
        evaluate_only(spec, out, options)


@app.command()
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
        from audit.commands.displace import displace as measure

        measure(run, tokens=tokens, threads=threads, plugins=tuple(plugin or ()))


@app.command()
def generate(
    text: Annotated[str, typer.Argument(help="What to ask; '-' reads it from standard input.", show_default=False)],
    *,
    model: Annotated[str, typer.Option(help="A hub id, a folder, a .gguf file, or 'embedded'.")] = "embedded",
    policy: Annotated[str, typer.Option(help="For example snapkv:budget=96,window=8.")] = "none",
    system: Annotated[str | None, typer.Option(help="A system prompt.", show_default=False)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto.")] = "float32",
    plugin: Plugins = None,
) -> None:
    """Answer one question with a compressed cache, and show what was kept."""
    with user_errors():
        from audit.commands.generate import Question, answer

        asked = Question(text, system, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        answer(asked, model=model, dtype=dtype, policy=policy, plugins=plugin or [])


@app.command()
def show(
    policy: Annotated[str, typer.Argument(help="For example snapkv:budget=24,window=8.", show_default=False)],
    *,
    length: Annotated[int, typer.Option(min=2, help="Tokens of the prompt; a quarter more is decoded.")] = 64,
    layer: Annotated[
        int | None, typer.Option(min=0, help="Default: the first that the policy governs.", show_default=False)
    ] = None,
    head: Annotated[int, typer.Option(min=0, help="The KV head.")] = 0,
    svg: Annotated[Path | None, typer.Option(help="Also draw it into this file.", show_default=False)] = None,
    plugin: Plugins = None,
) -> None:
    """Draw what a policy keeps: which keys every query of a short text still sees."""
    with user_errors():
        from audit.commands.show import Asked, show_policy

        show_policy(Asked(policy, length, layer, head, svg, tuple(plugin or ())))


@app.command()
def verify(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="The folder of a finished checkpoint.", show_default=False)
    ] = None,
    *,
    rollouts: Annotated[
        str | None,
        typer.Option(help="How many of its rollouts, default all; or a file of rollouts.", show_default=False),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model that sampled a file.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto, as it was sampled.")] = "auto",
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="Nats on the worst token; default: the dtype's.", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Of the log-probs; default: the recorded one, or 1.", show_default=False),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Replay recorded rollouts; exits with 3 where their policy does not explain their log-probs."""
    with user_errors():
        from audit.commands.verify import Asked, verify_recorded

        asked = Asked(checkpoint, rollouts, model, dtype, tolerance, temperature, tuple(plugin or ()))
        raise typer.Exit(verify_recorded(asked))


@app.command()
def pretrain(
    out: Annotated[Path, typer.Option(help="The folder for the model.", show_default=False)],
    seed: Annotated[int, typer.Option(min=0, help="0 gave the model that ships.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop the recipe early.", show_default=False)] = None,
) -> None:
    """Train the small model that ships with the package, from procedural text."""
    with user_errors(f"kvaudit pretrain --out {out}"):
        from audit.commands.pretrain import pretrain_model

        pretrain_model(out, seed=seed, steps=steps)


@listing.command("policies")
def list_policies(plugin: Plugins = None) -> None:
    """Compression policies: what each keeps, its fields, its paper."""
    with user_errors():
        from audit.commands.listing import policies

        policies(plugin or [])


@listing.command("suites")
def list_suites(plugin: Plugins = None) -> None:
    """Suites: what is asked, and where it comes from."""
    with user_errors():
        from audit.commands.listing import suites

        suites(plugin or [])


@listing.command("arms")
def list_arms() -> None:
    """Training arms: how rollouts are sampled and what the learner makes of them."""
    with user_errors():
        from audit.commands.listing import arms

        arms()


def main() -> None:
    """Entry point of the ``kvaudit`` command."""
    end_on_sigterm()
    try:
        app()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()


if __name__ == "__main__":
    main()
