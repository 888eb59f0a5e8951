"""``kvaudit list``: show the names that a spec can use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvaudit.audit.commands.base import Command, Plugins, print_line, print_rows, user_errors, wide_console

if TYPE_CHECKING:
    from kvaudit.audit.policies import Policy

listing = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@listing.command("policies")
def list_policies(plugin: Plugins = None) -> None:
    """Compression policies: what each keeps, and its options."""
    with _with_plugins(plugin):
        from kvaudit.audit.policies import POLICIES

        rows = [_policy_row(name, cls) for name, cls in POLICIES.all().items()]
        _print_rows(["policy", "keeps", "fields and defaults", "phase", "replay", "paper"], rows)
        _print(
            "int8, fp8, kivi and q4_0 imitate the formats of serving engines in kvaudit's own cache; the engines "
            "themselves: kvaudit list engines"
        )
        _print(
            "a+b evicts with a and quantises with b; a|b draws one policy per request; pin=system never evicts the "
            "tokens of that role; - means not set; phase: while the prompt is read, while decoding, or both"
        )


@listing.command("engines")
def list_engines(plugin: Plugins = None) -> None:
    """Serving engines: what their settings are called.

    With the uncompressed reference of each, and the command that installs it.
    """
    with _with_plugins(plugin):
        from kvaudit.audit.engines import ENGINES
        from kvaudit.core.errors import SpecError
        from kvaudit.core.spec_evaluate import EngineSpec

        rows = []
        for name, cls in ENGINES.all().items():
            reference = ", ".join(f"{setting} {value}" for setting, value in cls.uncompressed.items())
            installed, install = "yes", cls.install or "none: your own server"
            if cls.install:
                try:
                    cls.check({}, EngineSpec())
                except SpecError:
                    installed = "no"
            rows.append([name, cls.says, reference or "named in the spec", installed, install])
        _print_rows(["engine", "and its settings", "reference", "here", "install"], rows)
        _print("in a spec: {engine: openvino, KV_CACHE_PRECISION: u4}; without a spec: kvaudit check --help")


@listing.command("suites")
def list_suites(plugin: Plugins = None) -> None:
    """Suites: what is asked, and where it comes from."""
    with _with_plugins(plugin):
        from kvaudit.suites.base import SUITES

        rows = []
        for name, cls in SUITES.all().items():
            clusters = "enough" if cls.clusters is None else f"{cls.clusters}: too few for a margin of 5 points"
            sizes = (str(cls.max_turns), str(cls.max_new_tokens), clusters)
            rows.append([name, cls.kind, cls.version, *sizes, cls.source, cls.licence])
        _print_rows(["suite", "kind", "version", "turns", "new tokens", "clusters", "source", "licence"], rows)
        _print("rows of public suites are asked as published, or in a context as SUITE@CONTEXT: kvaudit list contexts")
        _print("lm-eval:TASK is any generate_until or multiple_choice task of lm-evaluation-harness")
        _print("inspect:PACKAGE/TASK or inspect:FILE.py@TASK is any task of Inspect with a single turn")


@listing.command("judges")
def list_judges(
    card: Annotated[
        str | None,
        typer.Option(help="Print how often this judge agrees with human labels: NAME or NAME:option=value,..."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of public rows, instead of KVAUDIT_DATA.")] = None,
) -> None:
    """Judges of answers: what each judges by, and its options.

    With --card: how often one agrees with human labels, by source.
    """
    with user_errors():
        if card is not None:
            _print_card(card, data)
            return
        from kvaudit.audit.judges.base import JUDGES

        _print_rows(["judge", "judges by", "options and defaults"], _option_rows(JUDGES.all()))


@listing.command("launchers")
def list_launchers(plugin: Plugins = None) -> None:
    """Launchers: where the workers of a run are, and their options."""
    with _with_plugins(plugin):
        from kvaudit.audit.runs.launchers.base import LAUNCHERS

        rows = [[*row, LAUNCHERS.get(row[0]).trial] for row in _option_rows(LAUNCHERS.all())]
        _print_rows(["launcher", "workers are", "options and defaults", "to try it on one machine"], rows)


@listing.command("rewards")
def list_rewards(plugin: Plugins = None) -> None:
    """Rewards of training: what each rewards, and its options.

    In a spec, NAME: VALUE gives the reward NAME its first option.
    """
    with _with_plugins(plugin):
        from kvaudit.audit.training.rewards.base import REWARDS

        _print_rows(["reward", "rewards", "options and defaults"], _option_rows(REWARDS.all()))


@listing.command("contexts")
def list_contexts() -> None:
    """Contexts: long texts that rows of public suites are put into.

    A context alone changes a model's answers; the report of a run shows by how much.
    """
    with user_errors():
        from kvaudit.suites.contexts import CONTEXTS

        rows = [
            [name, context.says, "tokens" if context.fills else "at most tokens" if context.suite else "-"]
            for name, context in CONTEXTS.items()
        ]
        _print_rows(["context", "the row is", "length"], rows)
        _print(
            "no context is used unless a spec names it: suites: {xstest: {context: [published, book], context_tokens: "
            "2048}}; the report of a run shows what each did to the uncompressed model"
        )


@listing.command("arms")
def list_arms() -> None:
    """Training arms: how each samples and learns."""
    with user_errors():
        from kvaudit.audit.training.config import ARMS

        rows = [
            [arm.name, arm.rollout, arm.learner, arm.correction, "yes" if arm.distill else "no", arm.summary]
            for arm in ARMS.values()
        ]
        _print_rows(["arm", "rollouts", "learner", "correction", "distil", "summary"], rows)


@contextmanager
def _with_plugins(plugins: Sequence[Path] | None) -> Iterator[None]:
    """Load plug-ins, then run the body of the with statement; print an error that the user can fix, as one line."""
    with user_errors():
        from kvaudit.audit.runs.names import load_plugins

        load_plugins(plugins or ())
        yield


def _option_rows(classes: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each plug-in: its name, its description, and its options with their defaults."""
    from kvaudit.core.plugins import option_texts

    return [
        [name, cls.says, ", ".join(getattr(cls, "takes", ()) or option_texts(cls))] for name, cls in classes.items()
    ]


def _print_card(text: str, data: Path | None) -> None:
    from kvaudit.audit.judges.base import JUDGES
    from kvaudit.audit.judges.labels import HEADINGS, card_rows, sources
    from kvaudit.core.plugins import parse_plugin
    from kvaudit.suites.sources import DATA_VARIABLE

    if data is not None:
        os.environ[DATA_VARIABLE] = str(data)
    judge = parse_plugin(JUDGES, text)
    _print_rows(HEADINGS, card_rows(judge, sources()))
    _print(f"{judge.label}; 95 % intervals; a judge that learns is trained for each line without that line's source")


def _policy_row(name: str, cls: type[Policy]) -> list[str]:
    from kvaudit.audit.policies import Evictor
    from kvaudit.audit.policies.base import OPTIONAL

    policy = cls()
    optional = [f"{field}={getattr(policy, field) or '-'}" for field in OPTIONAL if field in cls.field_names()]
    fields = [text for text in (policy.canonical.partition(":")[2], *optional) if text]
    phase = policy.phase if isinstance(policy, Evictor) and policy.evicts else "-"
    if cls.quantises or cls.selects:
        phase = "both" if cls.quantises else "decode"
    replay = "yes" if policy.replayable else "no"
    if policy.replayable and "reposition" in cls.field_names():
        replay = "yes, unless repositioned"
    return [name, cls.keeps, ", ".join(",".join(fields).lower().split(",")), phase, replay, cls.paper]


def _print(text: str) -> None:
    print_line(wide_console(), text)


def _print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print_rows(wide_console(), headings, rows, fold=True)


COMMAND = Command("list", group="Extend", order=1, call=listing, help="Show what can be named in a spec.")
