"""``kvaudit probe``: ask an endpoint the same items every quarter (each time is a probe), and print each result."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvaudit.audit.commands.base import (
    Command,
    Limit,
    Plugins,
    Resume,
    RunOut,
    argument,
    option,
    print_line,
    print_table,
    set_data_folder,
    typed_command,
    user_errors,
    wide_console,
)
from kvaudit.core.errors import SpecError
from kvaudit.core.files import write_output
from kvaudit.core.text import inline

if TYPE_CHECKING:
    from rich.console import Console

    from kvaudit.audit.runs.endpoint_probe import Plan

_Plan = Annotated[Path, argument(help="A spec with a probe section; or the folder of a probe, to see it again.")]
_Url = Annotated[str | None, option("--base-url", help="Of the endpoint, up to /v1; the key is the plan's.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print requests, tokens and cost; ask nothing.")]
_Baseline = Annotated[Path | None, option(help="The folder of an earlier probe, for the change with length.")]


def probe(
    plan: _Plan,
    *,
    base_url: _Url = None,
    out: RunOut = None,
    resume: Resume = False,
    dry_run: _DryRun = False,
    baseline: _Baseline = None,
    limit: Limit = None,
    plugin: Plugins = None,
) -> None:
    """Ask an endpoint a fixed set of items, to ask again later.

    The items are those of a plan, in long and short contexts. `compare` compares a probe with a later one.
    """
    with user_errors(*typed_command(resume=not plan.is_dir())):
        folder = plan
        if not plan.is_dir():
            loaded = _load_plan(plan, limit, tuple(plugin or ()))
            folder = out or Path("runs") / loaded.spec.name
            if baseline is not None:
                _check_baseline(loaded, baseline)
            if not _ask(loaded, folder, base_url, resume=resume, dry_run=dry_run):
                return
        elif base_url is not None or out is not None or limit is not None or resume or dry_run:
            raise SpecError(f"{str(plan)!r} is a folder, which is only shown; give the plan to ask an endpoint")
        _show(folder, baseline)


def _load_plan(path: Path, limit: int | None, plugins: Sequence[Path]) -> Plan:
    """Return the plan of a probe with its items; raise an error for anything wrong with it before a folder is made."""
    from kvaudit.audit.runs.endpoint_probe import make_plan
    from kvaudit.audit.runs.names import NAMES, load_plugins
    from kvaudit.core.spec import load_spec

    load_plugins(plugins)
    spec = load_spec(path, NAMES)
    set_data_folder(spec)
    return make_plan(spec if limit is None else spec.limited(limit))


def _check_baseline(plan: Plan, baseline: Path) -> None:
    """Raise DataError for a baseline (earlier probe) that asked other items, before a request costs anything."""
    from kvaudit.reports.page.probe import check_same_requests
    from kvaudit.reports.records.load import load_run

    check_same_requests(plan.asked, load_run(baseline))


def _ask(plan: Plan, folder: Path, base_url: str | None, *, resume: bool, dry_run: bool) -> bool:
    """Print the plan's size and ask its items; return False if only the size was wanted (``dry_run``)."""
    from rich.console import Console

    from kvaudit.audit.runs.endpoint_probe import Probe
    from kvaudit.audit.runs.folder import check_folder, open_run
    from kvaudit.core.endpoint import Endpoint

    console, section = Console(), plan.spec.probe
    assert section is not None
    for line in plan.lines():
        print_line(console, inline(line))
    if dry_run:
        return False
    if base_url is None:
        raise SpecError("--base-url is missing: the address of the endpoint, up to /v1; --dry-run asks nothing")
    endpoint = Endpoint(base_url, section.key or "", section.timeout, section.tries, section.per_minute)
    endpoint.check("probe")
    client = endpoint.client("probe")
    check_folder(folder, plan.spec, resume=resume)
    run = open_run(folder, plan.spec, resume=resume)
    print_line(console, f"probe {plan.spec.name} ({plan.spec.sha256[:12]}) in {run.path}")
    for line in Probe(run, plan, client, Console(stderr=True)).work():
        print_line(console, inline(line))
    return True


def _show(folder: Path, baseline: Path | None) -> None:
    """Print the findings of a probe, and write them into its folder ``report``."""
    from kvaudit.reports.page.probe import first_lines, lines, probe_files, probe_findings, probe_tables
    from kvaudit.reports.records.load import load_run

    findings = probe_findings(load_run(folder), None if baseline is None else load_run(baseline))
    console: Console = wide_console()
    for line in first_lines(findings):
        print_line(console, inline(line))
    for table in probe_tables(findings).values():
        print_table(console, table)
    for line in lines(findings):
        print_line(console, inline(line))
    for name, text in probe_files(findings).items():
        write_output(folder / "report" / name, text)
    print_line(console, f"report: {folder / 'report' / 'probe.md'}")
    # printed with a baseline too: a loss at every length is no loss with length
    command = shlex.join(["kvaudit", "compare", "EARLIER" if baseline is None else str(baseline), str(folder)])
    print_line(console, f"whether answers changed at any length: {command}")


COMMAND = Command("probe", group="Serve and ask", order=3, call=probe)
