"""``kvaudit harness``: holds the commands whose group it is."""

from kvaudit.audit.commands.base import Command

COMMAND = Command("harness", group="Extend", order=3, help="Work with Inspect and lm-evaluation-harness.")
