"""``kvaudit replay``: holds the commands whose group it is."""

from kvaudit.audit.commands.base import Command

COMMAND = Command("replay", group="Go again", order=1, help="Serve recorded answers again, and measure what changed.")
