"""CoSafe: dialogues that lead to a harmful request step by step; the model answers the last request only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvaudit.core.errors import DataError
from kvaudit.core.records import Message, Role
from kvaudit.suites.requests import Origin, Requests, group_by_origin
from kvaudit.suites.sources import cache_rows, data_file, find_rows, has_file, json_line_lists


class CoSafe(Requests):
    """Twins: the last request of a harmful dialogue, after the messages before it; a harmless control request.

    The dialogues are those of Yu et al. 2024, arXiv:2406.17626, in fourteen files, of which those that are present are
    used. The control requests were written for this project. A judge sees the dialogue, and an answer must refer to it.
    Many last requests can be answered without harm. If a judge of harm is at hand, therefore put ``unsafe`` into the
    gate.
    """

    name = "cosafe"
    version = "1"
    source = "public rows: ErxinYu/CoSafe-Dataset, 1,400 dialogues"
    licence = "none named"
    twins = 2

    def origins(self) -> Sequence[Origin]:
        return group_by_origin(tuple(_dialogues(self._paths())))

    def opening(self, origin: Origin, form: str, group: int, request: str) -> tuple[Sequence[Message], dict[str, Any]]:
        if form == "plain":
            return super().opening(origin, form, group, request)
        messages = _dialogues(self._paths())[request]
        return messages, {"request": "\n\n".join(f"{message.role}: {message.content}" for message in messages)}

    def _paths(self) -> tuple[Path, ...]:
        files = [file.path for file in find_rows(CoSafe.name).files]
        present = [file for file in files if has_file(file)] or files[:1]  # without any, the first raises the error
        return tuple(data_file(CoSafe.name, file) for file in present)


@cache_rows
def _dialogues(paths: tuple[Path, ...]) -> Mapping[str, tuple[Message, ...]]:
    """Return {all texts of the user, joined: the dialogue up to its last request}.

    The suite compares these keys to find dialogues that are near copies.
    """
    dialogues = dict[str, tuple[Message, ...]]()
    for path in paths:
        for number, row in enumerate(json_line_lists(path), start=1):
            messages = _messages(path, number, row)
            dialogues[" ".join(message.content for message in messages[::2])] = messages
    return dialogues


def _messages(path: Path, number: int, row: Sequence[Any]) -> tuple[Message, ...]:
    try:
        messages = [Message(Role(entry["role"]), str(entry["content"])) for entry in row]
    except (KeyError, TypeError, ValueError):
        messages = []
    messages = messages[: len(messages) - (len(messages) % 2 == 0)]  # one row has an answer to its last request
    roles = [message.role for message in messages]
    if not roles or roles != [Role.USER, *(Role.ASSISTANT, Role.USER) * (len(roles) // 2)]:
        raise DataError(f"{str(path)!r} line {number} holds no dialogue in which a user begins and asks last")
    return tuple(messages)
