"""What each command does; ``kvaudit.audit.cli`` parses the command line and imports one of these when asked."""
