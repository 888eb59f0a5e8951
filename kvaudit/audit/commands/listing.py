"""``kvaudit list``: what can be named in a spec."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvaudit.audit.commands.base import Command
from kvaudit.audit.commands.base import Plugins, print_line, user_errors, wide_console

if TYPE_CHECKING:
    from kvaudit.audit.policies import Policy

listing = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show what can be named in a spec.")


@listing.command("policies")
def list_policies(plugin: Plugins = None) -> None:
    """Compression policies: what each keeps, and its options."""
    with _knowing(plugin):
        from kvaudit.audit.policies import POLICIES

        rows = [_policy(name, cls) for name, cls in POLICIES.all().items()]
        _print(["policy", "keeps", "fields and defaults", "phase", "replay", "paper"], rows)
        _say(
            "int8, fp8, kivi and q4_0 imitate codes of serving engines in our own cache; engines themselves: kvaudit "
            "list engines"
        )
        _say(
            "a+b evicts by a and quantises by b; a|b lets every request draw one; pin=system never lets a role's "
            "tokens go"
        )


@listing.command("engines")
def list_engines(plugin: Plugins = None) -> None:
    """Serving engines: what their settings are called.

    With what each is compared with, and what installs it.
    """
    with _knowing(plugin):
        from kvaudit.audit.engines import ENGINES
        from kvaudit.core.errors import SpecError
        from kvaudit.core.spec_evaluate import EngineSpec

        def there(name: str) -> str:
            try:
                ENGINES.get(name).check({}, EngineSpec())
            except SpecError:
                return "no"
            return "yes"

        rows = []
        for name, cls in ENGINES.all().items():
            reference = ", ".join(f"{setting} {value}" for setting, value in cls.uncompressed.items())
            by = (there(name), cls.install) if cls.install else ("yes", "it runs already")
            rows.append([name, cls.says, reference or "named beside it", *by])
        _print(["engine", "and its settings", "reference", "here", "comes by"], rows)
        _say("in a spec: {engine: openvino, KV_CACHE_PRECISION: u4}; at once: kvaudit check --help")


@listing.command("suites")
def list_suites(plugin: Plugins = None) -> None:
    """Suites: what is asked, and where it comes from."""
    with _knowing(plugin):
        from kvaudit.suites.base import SUITES

        rows = []
        for name, cls in SUITES.all().items():
            # what a reader must know before a margin is set: few clusters cannot decide one of five points
            clusters = "enough" if cls.clusters is None else f"{cls.clusters}: too few for 5 points"
            sizes = (str(cls.max_turns), str(cls.max_new_tokens), clusters)
            rows.append([name, cls.kind, cls.version, *sizes, cls.source, cls.licence])
        _print(["suite", "kind", "version", "turns", "new tokens", "clusters", "source", "licence"], rows)
        _say("rows of public suites are asked as published; SUITE@CONTEXT: kvaudit list contexts")
        _say("lm-eval:TASK is any generate_until or multiple_choice task of lm-evaluation-harness")
        _say("inspect:PACKAGE/TASK or inspect:FILE.py@TASK is any task of Inspect that asks once")


@listing.command("judges")
def list_judges(
    card: Annotated[
        str | None, typer.Option(help="How often this judge is right where people labelled: NAME or NAME:option=value.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="The folder of public rows, instead of KVAUDIT_DATA.")] = None,
) -> None:
    """Judges of answers: what each goes by, and its options.

    With --card: how often one is right where people labelled, by source.
    """
    with user_errors():
        if card is not None:
            _print_card(card, data)
            return
        from kvaudit.audit.judges.base import JUDGES

        _print(["judge", "goes by", "options and defaults"], _with_options(JUDGES.all()))


@listing.command("launchers")
def list_launchers(plugin: Plugins = None) -> None:
    """Launchers: where the workers of a run are, and their options."""
    with _knowing(plugin):
        from kvaudit.audit.runs.launchers.base import LAUNCHERS

        rows = [[*row, LAUNCHERS.get(row[0]).trial] for row in _with_options(LAUNCHERS.all())]
        _print(["launcher", "workers are", "options and defaults", "tried on one machine with"], rows)


@listing.command("rewards")
def list_rewards(plugin: Plugins = None) -> None:
    """Rewards of training: what each pays by, and its options.

    The first option is the value of the reward's name in a spec.
    """
    with _knowing(plugin):
        from kvaudit.audit.training.rewards.base import REWARDS

        _print(["reward", "pays by", "options and defaults"], _with_options(REWARDS.all()))


@listing.command("contexts")
def list_contexts() -> None:
    """Contexts: what rows of public suites may be put into.

    A context does something to a model by itself, which the page of a run says.
    """
    with user_errors():
        from kvaudit.suites.contexts import CONTEXTS

        rows = [[name, one.says, "tokens" if one.fills else "-"] for name, one in CONTEXTS.items()]
        _print(["context", "the row stands", "length"], rows)
        _say(
            "none is ever on by itself: suites: {xstest: {context: [published, book], context_tokens: 2048}}; the page "
            "of a run says what each did to the uncompressed model"
        )


@listing.command("arms")
def list_arms() -> None:
    """Training arms: how each samples and learns."""
    with user_errors():
        from kvaudit.audit.training.arms import ARMS

        rows = [
            [arm.name, arm.rollout, arm.learner, arm.correction, "yes" if arm.distill else "no", arm.summary]
            for arm in ARMS.values()
        ]
        _print(["arm", "rollouts", "learner", "correction", "distil", "what it is"], rows)


@contextmanager
def _knowing(plugins: Sequence[Path] | None) -> Iterator[None]:
    """List what plug-ins bring too."""
    with user_errors():
        from kvaudit.audit.runs.names import load_plugins

        load_plugins(plugins or ())
        yield


def _with_options(found: Any) -> list[list[str]]:
    """Of every plug-in its name, what it says of itself, and its options with their defaults."""
    from kvaudit.core.plugins import option_texts

    return [[name, cls.says, ", ".join(getattr(cls, "takes", ()) or option_texts(cls))] for name, cls in found.items()]


def _print_card(text: str, data: Path | None) -> None:
    from kvaudit.audit.judges.base import JUDGES
    from kvaudit.audit.judges.labels import HEADINGS, card_rows, sources
    from kvaudit.core.plugins import parse_plugin
    from kvaudit.suites.sources import DATA_VARIABLE

    if data is not None:
        os.environ[DATA_VARIABLE] = str(data)
    judge = parse_plugin(JUDGES, text)
    _print(HEADINGS, card_rows(judge, sources()))
    _say(f"{judge.label}; 95 % intervals; a judge that learns is taught anew without the source of a line")


def _policy(name: str, cls: type[Policy]) -> list[str]:
    from kvaudit.audit.policies import Evictor
    from kvaudit.audit.policies.base import OPTIONAL

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


def _say(text: str) -> None:
    print_line(wide_console(), text)


def _print(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")  # nothing is cut off
    for row in rows:
        table.add_row(*row)
    wide_console().print(table, markup=False)


COMMAND = Command("list", group="Extend", order=1, call=listing, help="Show what can be named in a spec.")
