"""A test engine for ``audit/engines/inside/worker.py``, which behaves, well or badly, as its setup says."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def start(setup: dict[str, Any]) -> tuple[Any, Any]:
    print("loaded, says the engine on stdout")
    behaviour = setup["behaviour"]
    if behaviour == "start fails":
        raise ValueError("no property \x1b[31mKV_CACHE\x1b[0m\nand another line")
    if behaviour == "description is a list":
        return ["about"], None
    child = subprocess.Popen(["sleep", "300"]) if behaviour == "has a child" else None
    description = {"pid": os.getpid(), "child": child.pid if child else "", "threads": setup["threads"]}
    return description, lambda rows: _answer(behaviour, rows)


def _answer(behaviour: str, rows: list[Row]) -> Any:
    print("thinking, says the engine on stdout")
    if behaviour in ACTIONS:
        return ACTIONS[behaviour](rows)
    return [{**_valid(row), **INVALID_FIELDS.get(behaviour, {})} for row in rows]


def _valid(row: Row) -> Row:
    return {"ids": list(range(row["max_tokens"])), "finish": "length", "logprob": -0.5 * row["max_tokens"]}


def _die(_: list[Row]) -> None:
    print("out of memory\x07", file=sys.stderr, flush=True)
    os._exit(3)


def _write_raw(raw: bytes) -> None:
    """Write into the worker's pipe for answers: of its descriptors above 2 the one that is a pipe."""
    pipe = next(n for n in range(3, 64) if os.path.exists(f"/proc/self/fd/{n}") and stat.S_ISFIFO(os.fstat(n).st_mode))
    os.write(pipe, raw)


def _write_and_hang(raw: bytes) -> Callable[[list[Row]], Any]:
    def action(_: list[Row]) -> None:
        _write_raw(raw)
        time.sleep(300)

    return action


def _answer_twice(rows: list[Row]) -> list[Row]:
    _write_raw(b'{"replies": [{"ids": [1], "finish": "length", "logprob": -1}]}\n')
    return list(map(_valid, rows))


def _stop_reading(rows: list[Row]) -> list[Row]:
    if os.fork() == 0:
        time.sleep(0.3)
        os.kill(os.getppid(), signal.SIGSTOP)
        os._exit(0)
    return list(map(_valid, rows))


def _raise(_: list[Row]) -> None:
    raise RuntimeError("new_scores_size >= num_snapkv_scores")


ACTIONS: dict[str, Callable[[list[Row]], Any]] = {
    "dies": _die,
    "hangs": lambda _: time.sleep(300),
    "writes garbage": _write_and_hang(b"\xff\x00 no JSON\n"),
    "writes a number": _write_and_hang(b"7\n"),
    "writes deeply nested JSON": _write_and_hang(b"[" * 50_000 + b"\n"),
    "answers twice": _answer_twice,
    "stops reading": _stop_reading,
    "raises": _raise,
    "drops a row": lambda rows: list(map(_valid, rows[1:])),
    "replies are no list": lambda _: {"7": 7},
    "rows are lists": lambda rows: [[] for _ in rows],
}
INVALID_FIELDS: dict[str, Row] = {
    "too many tokens": {"ids": list(range(9))},
    "a negative token": {"ids": [-1]},
    "a token beyond the vocabulary": {"ids": [100]},
    "a fractional token": {"ids": [1.5]},
    "tokens as text": {"ids": "12"},
    "tokens as booleans": {"ids": [True]},
    "logprob NaN": {"logprob": float("nan")},
    "logprob infinite": {"logprob": float("-inf")},
    "logprob as text": {"logprob": "-1.5"},
    "logprob beyond a float": {"logprob": 10**400},
    "an unknown finish": {"finish": "tool_calls"},
    "finish as a list": {"finish": []},
}
