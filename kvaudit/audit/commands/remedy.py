"""``kvaudit replay remedy``: serve what fails again under other policies; which is the cheapest that passes?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from kvaudit.audit.commands.base import Command, option
from kvaudit.audit.commands.command_line import (
    Plugins,
    Run,
    Takeover,
    Threads,
    print_table,
    say,
    user_errors,
    wide_console,
)
from kvaudit.core.errors import RunError, SpecError

if TYPE_CHECKING:
    from kvaudit.reports.page.findings import Findings

Policies = Annotated[
    list[str] | None,
    option(
        "--policy",
        help="What to serve instead: fields of the policy that fails, such as pin=system,budget=128, or a whole "
        "policy, such as int8; again for more. Tested in this order, behind those of the spec.",
    ),
]


def remedy(
    run: Run, *, policy: Policies = None, threads: Threads = None, plugin: Plugins = None, takeover: Takeover = False
) -> None:
    """Find the cheapest setting under which what fails passes.

    What fails under a gated policy is served again under others, each with what it costs.
    """
    words = [word for text in policy or () for word in ("--policy", text)]
    with user_errors("kvaudit", "replay", "remedy", run, *words):
        from kvaudit.audit.commands.run import Options, reopened, served_again
        from kvaudit.audit.policies.remedy import parse_remedy
        from kvaudit.audit.runs.folder import begun_run
        from kvaudit.audit.runs.names import load_plugins
        from kvaudit.audit.runs.remedy import check_suites
        from kvaudit.reports.gate.verdict import Status
        from kvaudit.reports.records.remedies import read_tried
        from kvaudit.reports.run import write_decided

        load_plugins(plugin or ())
        known = begun_run(run)
        if not (policy or known.spec.remedies or read_tried(run)):
            raise SpecError("the run's spec names no remedies; give --policy pin=system, --policy budget=N or a policy")
        for text in policy or ():
            parse_remedy(text)
        check_suites(known)
        options = Options(threads=threads, plugins=tuple(plugin or ()), takeover=takeover)
        data, found = served_again(*reopened(run, options), policy or ())
        if found.verdict.status is Status.INVALID:
            why = "; ".join(reason.text for reason in found.verdict.reasons) or "see kvaudit gate"
            raise RunError(f"the verdict is INVALID, so nothing says what fails ({why}); mend that, then try remedies")
        print_remedies(write_decided(data, found))
        say(wide_console(), f"report: {run / 'report' / 'report.html'}")


def print_remedies(findings: Findings) -> None:
    """The tables of what was tried, and the lines of the banner."""
    from kvaudit.reports.sections.remedies import RemediesSection

    console, section = wide_console(), RemediesSection()
    found = findings.values.get(section.name)
    if found is None:
        return
    for table in section.tables(found, findings):
        print_table(console, table)
    for line in section.remarks(found, findings):
        say(console, line)


COMMAND = Command("remedy", group="replay", order=4, call=remedy, old={"remedy": "replay remedy"})
