"""``python -m kvaudit`` is the command ``kvaudit``."""

from kvaudit.audit.cli import main

if __name__ == "__main__":
    main()
