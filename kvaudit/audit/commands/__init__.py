"""The commands of ``kvaudit``. Each file declares some, and ``kvaudit.audit.cli`` collects all."""
