"""An engine for tests, as ``audit/engines/inside/worker.py`` holds one: it does what it is told, well or badly."""

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


def start(told: dict[str, Any]) -> tuple[Any, Any]:
    print("loaded, says the engine on stdout")
    does = told["does"]
    if does == "refuses to start":
        raise ValueError("no property \x1b[31mKV_CACHE\x1b[0m\nand another line")
    if does == "says no about":
        return ["about"], None
    child = subprocess.Popen(["sleep", "300"]) if does == "has a child" else None
    about = {"pid": os.getpid(), "child": child.pid if child else "", "threads": told["threads"]}
    return about, lambda rows: _answered(does, rows)


def _answered(does: str, rows: list[Row]) -> Any:
    print("thinking, says the engine on stdout")
    if does in ACTS:
        return ACTS[does](rows)
    return [{**_good(row), **CHANGES.get(does, {})} for row in rows]


def _good(row: Row) -> Row:
    return {"ids": list(range(row["max_tokens"])), "finish": "length", "logprob": -0.5 * row["max_tokens"]}


def _dies(_: list[Row]) -> None:
    print("out of memory\x07", file=sys.stderr, flush=True)
    os._exit(3)


def _hangs(_: list[Row]) -> None:
    time.sleep(300)


def _pipe() -> int:
    """The pipe in which answers go: of what the worker holds beside its three, the one that can be written."""
    return next(n for n in range(3, 64) if os.path.exists(f"/proc/self/fd/{n}") and stat.S_ISFIFO(os.fstat(n).st_mode))


def _says_garbage(_: list[Row]) -> None:
    os.write(_pipe(), b"\xff\x00 no JSON\n")
    time.sleep(300)


def _says_a_number(_: list[Row]) -> None:
    os.write(_pipe(), b"7\n")
    time.sleep(300)


def _nests(_: list[Row]) -> None:
    os.write(_pipe(), b"[" * 50_000 + b"\n")
    time.sleep(300)


def _speaks_twice(rows: list[Row]) -> list[Row]:
    os.write(_pipe(), b'{"replies": [{"ids": [1], "finish": "length", "logprob": -1}]}\n')
    return list(map(_good, rows))


def _reads_no_more(rows: list[Row]) -> list[Row]:
    if os.fork() == 0:
        time.sleep(0.3)
        os.kill(os.getppid(), signal.SIGSTOP)
        os._exit(0)
    return list(map(_good, rows))


def _refuses(_: list[Row]) -> None:
    raise RuntimeError("new_scores_size >= num_snapkv_scores")


ACTS: dict[str, Callable[[list[Row]], Any]] = {
    "dies": _dies,
    "hangs": _hangs,
    "says garbage": _says_garbage,
    "says a number": _says_a_number,
    "nests": _nests,
    "speaks twice": _speaks_twice,
    "reads no more": _reads_no_more,
    "refuses": _refuses,
    "forgets a row": lambda rows: list(map(_good, rows[1:])),
    "says no replies": lambda _: {"7": 7},
    "says rows of another form": lambda rows: [[] for _ in rows],
}
CHANGES: dict[str, Row] = {
    "says too many": {"ids": list(range(9))},
    "says negative tokens": {"ids": [-1]},
    "says tokens that the model has not": {"ids": [100]},
    "says halves": {"ids": [1.5]},
    "says words": {"ids": "12"},
    "says truths": {"ids": [True]},
    "is not a number": {"logprob": float("nan")},
    "is without end": {"logprob": float("-inf")},
    "weighs in words": {"logprob": "-1.5"},
    "weighs beyond a float": {"logprob": 10**400},
    "ends otherwise": {"finish": "tool_calls"},
    "ends by a list": {"finish": []},
}
