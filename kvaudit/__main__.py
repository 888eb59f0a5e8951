"""Run the command line when called as ``python -m kvaudit``."""

from kvaudit.audit.cli import main

if __name__ == "__main__":
    main()
