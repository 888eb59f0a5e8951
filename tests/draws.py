"""A test of one random draw, run for many in one go."""

from __future__ import annotations

from collections.abc import Callable


def draws(count: int) -> Callable[[Callable[[int], None]], Callable[[], None]]:
    """Run a test for every seed below ``count``; a failure says which. A parameter each costs more than the test."""

    def over(test: Callable[[int], None]) -> Callable[[], None]:
        def every() -> None:
            for seed in range(count):
                try:
                    test(seed)
                except AssertionError as error:
                    error.add_note(f"draw {seed}")
                    raise

        every.__doc__ = test.__doc__
        return every

    return over
