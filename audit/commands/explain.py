"""``kvaudit explain``: one recorded answer served again, with what the cache still held of its prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import Command
from kvaudit.audit.commands.command_line import Plugins, Run, say, user_errors, wide_console
from kvaudit.audit.commands.displace import opened, threads_of
from kvaudit.core.errors import SpecError
from kvaudit.core.files import write_output
from kvaudit.core.text import inline, visible

if TYPE_CHECKING:
    from kvaudit.audit.policies import Policy
    from kvaudit.audit.runs.explain import ServedAgain, Where
    from kvaudit.audit.runs.folder import RunFolder

_INDENT = "\n" + " " * 12


@dataclass(frozen=True)
class ExplainOptions:
    """The command's options."""

    item: str
    policies: Sequence[str]
    arm: str | None
    seed: int | None
    length: int | None
    sample: int
    svg: Path | None
    plugins: Sequence[Path]


def explain(
    run: Run,
    item: Annotated[
        str, typer.Argument(help="The name of an item, as records and `view` give it.", show_default=False)
    ],
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="One of the run's, or any other; again for more.", show_default="none"),
    ] = None,
    arm: Annotated[str | None, typer.Option(help="Default: the reference.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Default: the first of the arm.", show_default=False)] = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens, where the item was asked at several.", show_default=False)
    ] = None,
    sample: Annotated[int, typer.Option(min=0, help="Which of several answers to one prompt.")] = 0,
    svg: Annotated[
        Path | None,
        typer.Option(help="Draw the prompt into this file, every token shaded by what held it.", show_default=False),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Serve one answer of a run again and show what was kept.

    What was kept is what the cache still held of the item's prompt, by policy, role and layer.
    """
    with user_errors():
        _explain(run, ExplainOptions(item, policy or ["none"], arm, seed, length, sample, svg, plugin or ()))


def _explain(path: Path, asked: ExplainOptions) -> None:
    """Print every policy's answer, and draw the prompts where asked."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from kvaudit.audit.commands.shading import Shaded, shading_svg
    from kvaudit.audit.runs.explain import explain as served

    run = opened(path, asked.plugins)
    torch.set_num_threads(threads_of(run))
    disable_progress_bar()
    where = _where(run, asked)
    found = served(run, where, _policies(run, asked.policies))
    console = wide_console()
    title = f"{where.item}, {where.arm} seed {where.seed}, sample {where.sample}"
    say(console, inline(title))
    for one in found:
        say(console, "")
        for line in _lines(one):
            say(console, line)
    if asked.svg is not None:
        parts = [Shaded(one.policy.canonical, _outcome(one), one.pieces, one.held) for one in found]
        write_output(asked.svg, shading_svg(title, parts))
        say(console, inline(f"picture: {asked.svg}"))


def _where(run: RunFolder, asked: ExplainOptions) -> Where:
    from kvaudit.audit.runs.explain import Where
    from kvaudit.core.spec_train import BASE_ARM

    arm = asked.arm or run.spec.gate.reference or BASE_ARM
    seed = next((seed for name, seed in run.spec.arms if name == arm), 0) if asked.seed is None else asked.seed
    return Where(asked.item, arm, seed, asked.length, asked.sample)


def _policies(run: RunFolder, texts: Sequence[str]) -> list[Policy]:
    """Of the run's policies those that are meant, as elsewhere; what it did not serve is taken as it is written."""
    from kvaudit.audit.engines.base import is_engine
    from kvaudit.audit.policies import parse_policy
    from kvaudit.audit.runs.evaluate import served_by_us
    from kvaudit.core.conditions import engine_in
    from kvaudit.core.policy_names import match_policies

    for engine in filter(is_engine, map(engine_in, texts)):
        raise SpecError(f"--policy names engine {engine}, which shows nobody its cache; name a policy of our own cache")
    known = [policy.canonical for policy in served_by_us(run.spec)]
    return [parse_policy(text) for text in match_policies(texts, known)]


def _lines(one: ServedAgain) -> Iterator[str]:
    from kvaudit.core.records import Role

    begun = len(one.played.item.messages)
    yield f"policy      {one.policy.canonical}"
    for message in one.played.transcript[begun:]:
        who = "answer" if message.role is Role.ASSISTANT else message.role.value
        yield f"{who:<11} {visible(message.content)}".replace("\n", _INDENT)
    yield f"recorded    {_recorded(one)}"
    yield f"graded      {_outcome(one)}"
    shares = ", ".join(f"{role} {share:.1%}" for role, share in one.played.survival.items())
    yield f"kept        {one.played.rollout.retention:.1%} of the cache when the answer began: {shares}"
    if one.played.spans:
        yield f"by span     {', '.join(f'{name} {kept.share:.1%}' for name, kept in one.played.spans.items())}"
    yield f"by layer    {' '.join(f'{share:.0%}' for share in one.depth)}"


def _recorded(one: ServedAgain) -> str:
    """Whether the run has this answer on record."""
    if one.record is None:
        return "no: the run did not serve this policy"
    if one.same:
        return "yes: the same answer, text for text"
    said = one.record.transcript[len(one.played.item.messages) :]
    return f"ANOTHER ANSWER ({one.record.new_tokens} tokens): {inline(' | '.join(message.content for message in said))}"


def _outcome(one: ServedAgain) -> str:
    grade = one.played.grade
    words = {True: "yes", False: "no", None: "could not be read"}
    facets = [f"{name} {words[value]}" for name, value in grade.facets.items()]
    return ", ".join([grade.outcome.value, *facets])


COMMAND = Command("explain", group="Look", order=2, call=explain)
