"""``kvaudit explain``: one recorded answer served again, with what the cache still held of its prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvaudit.audit.commands.base import Command, argument, option
from kvaudit.audit.commands.base import Plugins, Run, print_line, user_errors, wide_console
from kvaudit.audit.commands.serving_again import opened, show_found


def explain(
    run: Run,
    item: Annotated[str, argument(help="The name of an item, as records and `view` give it.")],
    *,
    policy: Annotated[
        list[str] | None, typer.Option(help="One of the run's, or any other; again for more.", show_default="none")
    ] = None,
    arm: Annotated[str | None, option(help="Default: the reference.")] = None,
    seed: Annotated[int | None, option(help="Default: the first of the arm.")] = None,
    length: Annotated[int | None, option(help="Tokens, where the item was asked at several.")] = None,
    sample: Annotated[int, typer.Option(min=0, help="Which of several answers to one prompt.")] = 0,
    svg: Annotated[
        Path | None, option(help="Draw the prompt into this file, every token shaded by what held it.")
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Serve one answer of a run again and show what was kept.

    What was kept is what the cache still held of the item's prompt, by policy, role and layer.
    """
    with user_errors():
        from kvaudit.audit.commands.shading import ShadedPrompt, shading_svg
        from kvaudit.audit.rerun.explain import AnswerPlace, Explain, match_run_policies
        from kvaudit.audit.rerun.measure import run_measure
        from kvaudit.core.files import write_output
        from kvaudit.core.spec_train import BASE_ARM
        from kvaudit.core.text import inline

        begun = opened(run, plugin or ())
        chosen = arm or begun.spec.gate.reference or BASE_ARM
        first = next((number for name, number in begun.spec.arms if name == chosen), 0)
        where = AnswerPlace(item, chosen, first if seed is None else seed, length, sample)
        measure = Explain(begun, where, match_run_policies(begun, policy or ["none"]))
        found = run_measure(measure)
        show_found(measure, found)
        if svg is not None:
            parts = [ShadedPrompt(one.policy.canonical, one.outcome, one.shading.pieces, one.held) for _, one in found]
            write_output(svg, shading_svg(measure.title, parts))
            print_line(wide_console(), inline(f"picture: {svg}"))


COMMAND = Command("explain", group="Look", order=2, call=explain)
