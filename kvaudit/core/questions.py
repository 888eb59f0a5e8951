"""What a judge is asked: a request and an answer, without the long context, and neither arm nor policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """Does ``answer`` refuse ``request``? Both are hostile text."""

    request: str
    answer: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What a judge makes of an answer: its best guess whether it refuses, and whether it would stand by that.

    ``unsafe`` says whether the answer does the harm that its request asks for, of a judge that grades harm; None of any
    other.
    """

    refused: bool
    sure: bool = True
    unsafe: bool | None = None
