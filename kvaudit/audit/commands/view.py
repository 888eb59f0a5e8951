"""``kvaudit view``: the answers behind a run's losses and gains, as pages to look at, their prompts shaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import Command, option
from kvaudit.audit.commands.base import Plugins, Run, print_line, user_errors, wide_console
from kvaudit.audit.commands.serving_again import opened
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from kvaudit.core.shading import AnswerKey

ViewOut = Annotated[Path | None, option(help="The folder to write; by default RUN/view.")]
Shade = Annotated[
    int,
    typer.Option(min=0, help="Serve the answers of at most so many flips again, to shade prompts; 0 loads no model."),
]


def view(run: Run, *, out: ViewOut = None, shade: Shade = 1000, plugin: Plugins = None) -> None:
    """Write pages of the answers that a run lost or gained.

    They stand side by side, each with what the cache still held of its prompt.
    """
    with user_errors("kvaudit", "view", run, "--shade", shade):
        from kvaudit.reports.page.view.folder import RunView
        from kvaudit.reports.records.load import load_run
        from kvaudit.reports.verdict.comparison import comparison_of

        data, folder, console = load_run(run), out or run / "view", wide_console()
        pages = RunView(data, comparison_of(data.spec, data.records, data.provenance))
        pages.write(folder)
        print_line(console, inline(f"view: {folder / 'index.html'}"))
        print_line(console, f"{len(pages.flips)} flips of {len({flip.item for flip in pages.flips})} items")
        if pages.is_servable and (wanted := pages.missing_shades(shade)):
            try:
                _shade(run, wanted, plugin or ())
            finally:
                # also what was served before it was interrupted
                pages.write_shades(folder)
        shown, lost = pages.shaded_counts()
        more = f"; the others with --shade {lost}" if shown < lost else ""
        if lost:
            print_line(console, f"{shown} of the {lost} flips whose caches lost something are shaded{more}")


def _shade(path: Path, wanted: Mapping[str, set[AnswerKey]], plugins: Sequence[Path]) -> None:
    from rich.console import Console

    from kvaudit.audit.rerun.measure import run_measure
    from kvaudit.audit.rerun.shade import Shade

    run_measure(Shade(opened(path, plugins), wanted), Console(stderr=True))


COMMAND = Command("view", group="Look", order=1, call=view)
