"""Where the commands print."""

from __future__ import annotations

from rich.console import Console

from audit.core.errors import SpecError

_WIDTH_OF_A_PIPE = 200
_MOST_SEED = 2**63 - 1  # what torch takes


def check_seed(seed: int) -> None:
    """Raise SpecError for a seed beyond 63 bits."""
    if not 0 <= seed <= _MOST_SEED:
        raise SpecError(f"--seed is {seed}, wanted 0 to {_MOST_SEED}")


def wide_console() -> Console:
    """As wide as the terminal; a pipe or a log has no width, and whole lines can be searched there."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_OF_A_PIPE)


def say(console: Console, text: str) -> None:
    """Print a line as it is: no markup, no colours, no breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
