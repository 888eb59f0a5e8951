"""The commands of ``kvaudit``: each file declares its commands, which ``kvaudit.audit.cli`` collects."""
