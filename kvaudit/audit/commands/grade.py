"""``kvaudit grade``: holds the commands whose group it is."""

from kvaudit.audit.commands.base import Command

COMMAND = Command("grade", group="Go again", order=2, help="Grade stored answers again: by a judge or people.")
