"""Engines that die, hang or lie: an endpoint of the loopback, another misdeed each trial, and runs that are ended.

An endpoint that gives no answer that counts is told in one line within its time limit, or one request is refused; what
it says is kept only where it answers what was asked. Runs whose endpoint hangs end when they are told to, and those
that are killed go on to the records of one that nobody disturbed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from bench.attack.hostile import Act, Heard, Hostile, completion, drips, in_turn, say, says, sends
from bench.attack.trial import PATIENCE, Broken, Trial, expect, timeless
from kvaudit.audit.engines import ENGINES, GenerationRequest, Reply, parse_condition
from kvaudit.audit.engines.base import EngineContext, EngineFailed
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.core.records import Message, Role
from kvaudit.core.spec_evaluate import EngineSpec

KEY, VARIABLE = "k-0123456789abcdef", "ATTACK_API_KEY"
ANSWER = 4.0  # seconds that the endpoint has for a batch
SLACK = 6.0
FULL, GONE, REFUSED = "answered", "gone", "refused"  # what may come of a batch
KILLS = 40
OK = b"HTTP/1.1 200 OK\r\n"
PACKED = says(b"\x1f\x8b\x08junk", "200 OK", "Content-Encoding: gzip")
LATER = says(b"{}", "429 Too Many Requests", "Retry-After: 1")
SPEC = """
name: hostile
evaluate:
  policies:
  - {{engine: endpoint, base_url: "{0}", model: standin, reference: {{base_url: "{0}", model: other}}}}
  - {{engine: endpoint, base_url: "{0}", model: other}}
  suites: {{refusal: {{items: 24}}}}
  context_tokens: [96]
  floor: 0
  pilot: 0
engines: {{endpoint: {{at_once: 4, answer: 600}}}}
"""
PROBE = """
name: hostile
model: standin
probe: {tries: 4, timeout: 600}
evaluate: {suites: {refusal: {items: 8}}, context_tokens: [200, 400]}
"""


def chunked(*parts: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    """A reply in chunks."""
    rows = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return OK + b"Transfer-Encoding: chunked\r\n\r\n" + rows + end


def hangs(line: socket.socket, _: Heard) -> None:
    """Say nothing until the other end has had enough."""
    line.recv(1)


def dies(*_: Any) -> None:
    """Close the line without a word."""


WHOLE = completion()
LENGTH = b"Content-Length: %d\r\n\r\n" % len(WHOLE)
CHOICE = json.loads(WHOLE)["choices"][0]
# what it does, and what may come of it
ACTS: dict[str, tuple[Act, tuple[str, ...]]] = {
    "dies without a word": (dies, (GONE,)),
    "dies in its headers": (sends(b"HTTP/1.1 200 OK\r\nContent-Le"), (GONE,)),
    "dies in its body": (sends(OK + LENGTH + WHOLE[:20]), (GONE,)),
    "hangs without closing": (hangs, (GONE,)),
    "hangs in its body": (drips(OK + LENGTH + WHOLE[:20], b"", 1), (GONE,)),
    "hangs every other time": (in_turn(hangs, says(WHOLE)), (GONE,)),
    "answers 500 from now on": (says(b'{"error": {"message": "a\\u001b[31m b\\nc"}}', "500 Oops"), (GONE,)),
    "answers 503 from now on": (says(b"busy", "503 Busy"), (GONE,)),
    "answers 501": (says(b"{}", "501 Not Implemented"), (GONE, REFUSED)),
    "answers 529": (says(b"{}", "529 Overloaded"), (GONE, REFUSED)),
    "answers 999": (says(b"{}", "999 Beyond"), (GONE, REFUSED)),
    "answers 429 once": (in_turn(says(b"{}", "429 Later"), says(WHOLE)), (FULL, GONE)),
    "answers 429 with a second to wait": (in_turn(LATER, says(WHOLE)), (FULL, GONE)),
    "answers 429 for ever": (says(b"{}", "429 Later", "Retry-After: 1"), (GONE,)),
    "asks for 0 seconds": (says(b"{}", "429 Later", "Retry-After: 0"), (GONE,)),
    "asks for -1 seconds": (says(b"{}", "429 Later", "Retry-After: -1"), (GONE,)),
    "asks for 1e300 seconds": (says(b"{}", "429 Later", "Retry-After: 1e300"), (GONE,)),
    "asks for nan seconds": (says(b"{}", "429 Later", "Retry-After: nan"), (GONE,)),
    "asks to wait until a date": (says(b"{}", "429 Later", "Retry-After: Fri, 31 Dec 1999 23:59:59 GMT"), (GONE,)),
    "asks to wait until no date": (says(b"{}", "429 Later", "Retry-After: tomorrow"), (GONE,)),
    "refuses one in two": (in_turn(says(b'{"error": {"message": "no"}}', "400 Bad"), says(WHOLE)), (REFUSED, GONE)),
    "gives HTML": (says(b"<html>\xff\xfe"), (GONE, REFUSED)),
    "gives nothing": (says(b""), (GONE, REFUSED)),
    "gives null": (says(b"null"), (GONE, REFUSED)),
    "gives 10 MB": (says(completion("a" * 10_000_000)), (GONE,)),
    "gives 900 KB and no usage": (says(completion("four " * 180_000)), (GONE,)),
    "gives 300 words as 3 tokens": (says(completion("four " * 300, usage={"completion_tokens": 3})), (GONE, REFUSED)),
    "gives no end": (drips(OK + b"\r\n", b" " * 65536, 0.001), (GONE,)),
    "drips its body": (drips(OK + LENGTH, b" ", 1), (GONE,)),
    "drips its headers": (drips(OK + b"X: ", b"x", 1), (GONE,)),
    "has no choices": (says(completion(choices=[])), (GONE, REFUSED)),
    "has no choices at all": (says(completion(choices=...)), (GONE, REFUSED)),
    "has choices that are text": (says(completion(choices="four")), (GONE, REFUSED)),
    "has choices that are null": (says(completion(choices=[None])), (GONE, REFUSED)),
    "has two choices in a wrong order": (says(completion(choices=[{**CHOICE, "index": 1}, CHOICE])), (GONE, REFUSED)),
    "is another model": (says(completion(model="fallback-mini")), (GONE,)),
    "is another model now and then": (in_turn(says(WHOLE), says(completion(model="fallback-mini"))), (GONE,)),
    "is no model any more": (says(completion(model=...)), (GONE,)),
    "is a model that is a number": (says(completion(model=7)), (GONE,)),
    "says a number": (says(completion(7)), (GONE, REFUSED)),
    "says a list": (says(completion(["four"])), (GONE, REFUSED)),
    "says half a character": (says(completion("\ud800")), (GONE, REFUSED)),
    "says control characters": (says(completion("\x1b]0;x\x07\u202e")), (FULL,)),
    "says nothing": (says(completion(None)), (FULL,)),
    "ends by nothing": (says(completion(finish=None)), (FULL,)),
    "ends by a filter": (says(completion(finish="content_filter")), (REFUSED, GONE)),
    "ends by a call": (says(completion(finish="tool_calls")), (GONE, REFUSED)),
    "claims to have read nothing": (says(completion(usage={"prompt_tokens": 0})), (FULL,)),
    "claims to have read a million": (says(completion(usage={"prompt_tokens": 10**6})), (GONE,)),
    "claims a million new tokens": (says(completion(usage={"completion_tokens": 10**6})), (GONE,)),
    "claims -1 tokens": (says(completion(usage={"completion_tokens": -1})), (FULL,)),
    "claims nan tokens": (says(completion(usage={"completion_tokens": float("nan")})), (FULL,)),
    "claims true tokens": (says(completion(usage={"completion_tokens": True})), (FULL,)),
    "claims a huge number": (says(completion(usage=...)[:-1] + b', "usage": %b}' % (b"9" * 5000)), (GONE, REFUSED)),
    "speaks HTTP/1.0 without a length": (sends(b"HTTP/1.0 200 OK\r\n\r\n" + WHOLE), (FULL,)),
    "speaks in chunks": (sends(chunked(WHOLE[:9], WHOLE[9:])), (FULL,)),
    "has junk behind its chunks": (sends(chunked(WHOLE) + b"junk" * 1000), (FULL,)),
    "has chunks of no length": (sends(OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + WHOLE), (GONE,)),
    "has a chunk that lies": (sends(chunked(WHOLE, end=b"ffffff\r\nx")), (GONE,)),
    "has a length that lies": (sends(OK + b"Content-Length: 999999\r\n\r\n" + WHOLE), (GONE,)),
    "has a length below zero": (sends(OK + b"Content-Length: -5\r\n\r\n" + WHOLE), (FULL, GONE, REFUSED)),
    "has a hundred thousand headers": (sends(OK + b"X: y\r\n" * 100_000 + LENGTH + WHOLE), (GONE,)),
    "has a header of a megabyte": (sends(OK + b"X: " + b"y" * (1 << 20) + b"\r\n" + LENGTH + WHOLE), (GONE,)),
    "speaks no HTTP": (sends(b"SSH-2.0-OpenSSH_9\r\n"), (GONE,)),
    "speaks HTTP/9": (sends(b"HTTP/9.9 200 OK\r\n" + LENGTH + WHOLE), (GONE,)),
    "says continue without end": (drips(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.001), (GONE,)),
    "answers 204": (sends(b"HTTP/1.1 204 No Content\r\n\r\n"), (GONE, REFUSED)),
    "answers 206": (says(WHOLE, "206 Partial Content"), (GONE, REFUSED)),
    "packs what nobody asked to be packed": (PACKED, (GONE, REFUSED)),
    "nests ten thousand deep": (says(b"[" * 10_000 + b"]" * 10_000), (GONE, REFUSED)),
    "speaks UTF-16": (says(WHOLE.decode().encode("utf-16")), (FULL, GONE, REFUSED)),
    "has an error with status 200": (says(b'{"error": {"message": "no"}}'), (GONE, REFUSED)),
}  # fmt: skip


def trials(folder: Path) -> Iterator[Trial]:
    """Every way of misbehaving, redirects, and the ends of runs."""
    os.environ[VARIABLE] = KEY
    for name, (act, may) in ACTS.items():
        yield Trial(name, partial(_misbehaves, act, may))
    for status in (301, 302, 303, 307, 308):
        yield Trial(f"redirects by {status}", partial(_redirects, status))
    for sign in (signal.SIGINT, signal.SIGTERM):
        for what in ("run", "probe"):
            yield Trial(f"{sign.name} of a {what} whose endpoint hangs", partial(_ends, folder, what, sign))
    yield from _kills(folder)


@cache
def _model() -> LoadedModel:
    return load_model()


def _came_of(url: str) -> tuple[str, list[Reply], str]:
    """What came of two questions to a server: how it ended, the replies, and its words."""
    question = (Message(Role.USER, "What is 2 + 2?"),)
    asked = GenerationRequest(_model().chat.prompt(question).ids, 8, (), 0.0, 1.0, 7, question)
    condition = parse_condition({"engine": "endpoint", "base_url": url, "model": "standin", "key": VARIABLE})
    work = EngineContext(_model(), EngineSpec(at_once=2, start=ANSWER, answer=ANSWER), Path("log"), 1)
    try:
        with ENGINES.get("endpoint").start(dict(condition.settings), work) as session:
            replies = session.answer([asked] * 2)
    except EngineFailed as error:
        return GONE, [], str(error)
    words = " ".join(reply.refused or "" for reply in replies)
    return (REFUSED if any(reply.refused for reply in replies) else FULL), replies, words


def _misbehaves(act: Act, may: tuple[str, ...]) -> None:
    began = time.monotonic()
    with Hostile(act) as server:
        ended, replies, words = _came_of(server.url)
    seconds = time.monotonic() - began
    expect(ended in may, f"it was {ended} ({words}), which is none of {', '.join(may)}")
    expect(seconds < ANSWER + SLACK * PATIENCE, f"it took {seconds:.0f} s where {ANSWER:.0f} were declared")
    expect(words.isprintable() and "\n" not in words, f"its words are obeyed: {words!r}")
    expect(KEY not in words + repr(replies), "the key is shown")
    if ended == FULL:
        expect(all(reply.finish == "stop" for reply in replies), f"{replies}")


def _redirects(status: int) -> None:
    """The key never follows to another host."""
    with Hostile(says(WHOLE), calm=0) as other:
        to = f"Location: {other.url}/chat/completions"
        with Hostile(says(b"", f"{status} Moved", to)) as server:
            ended, _, words = _came_of(server.url)
    expect(ended == GONE, f"it was {ended} ({words})")
    expect(not other.heard, "the other host was asked")


def _started(folder: Path, words: list[str], out: str) -> subprocess.Popen[bytes]:
    log = (folder / f"{out}.log").open("ab")
    command = [sys.executable, "-m", "kvaudit", *words, "--out", str(folder / out), "--resume"]
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def _words(folder: Path, what: str, url: str) -> list[str]:
    text = SPEC.format(url) if what == "run" else PROBE
    path = folder / f"{what}.yaml"
    path.write_text(text, encoding="utf-8")
    more = ["--workers", "1", "--threads", "1", "--anyway"] if what == "run" else ["--base-url", url]
    return [what, str(path), *more]


def _ends(folder: Path, what: str, sign: signal.Signals) -> None:
    """Ended within seconds, with how to go on, though its endpoint would hang for ten minutes."""
    out = f"{what}-{sign.name}"
    with Hostile(hangs, calm=4 if what == "run" else 0) as server:
        process = _started(folder, _words(folder, what, server.url), out)
        wanted = 5 if what == "run" else 1  # the calm ones, and one that hangs
        _until(lambda: sum("chat/completions" in one.path for one in server.heard) >= wanted, process)
        process.send_signal(sign)
        try:
            process.wait(30)
        finally:
            process.kill()
    said = (folder / f"{out}.log").read_text(encoding="utf-8")
    expect(process.returncode in (130, 143), f"exit code {process.returncode}: {said[-300:]}")
    expect("continue with: kvaudit" in said, said[-300:])


def _until(holds: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 90.0) -> None:
    until = time.monotonic() + seconds * PATIENCE
    while not holds():
        expect(process.poll() is None and time.monotonic() < until, "it never came to hang")
        time.sleep(0.05)


def _slowly(line: socket.socket, _: Heard) -> None:
    time.sleep(0.2)
    say(line, WHOLE)


def _kills(folder: Path) -> Iterator[Trial]:
    """Kill -9 of runs at drawn instants, every other one stopped first; each goes on to the records of a whole one."""
    draws = random.Random(66)
    with Hostile(_slowly, calm=0) as server:
        chain = _Chain(folder, server, draws)
        yield Trial("a run that nobody disturbs", chain.whole)
        for number in range(KILLS):
            yield Trial(f"kill {number + 1}", partial(chain.kill, stopped=number % 2 == 1))
        yield Trial("the end of the last run that was killed", chain.finish)


class _Chain:
    """Runs on one server, killed and gone on with."""

    def __init__(self, folder: Path, server: Hostile, draws: random.Random) -> None:
        self._folder, self._server, self._draws, self._number = folder, server, draws, 0
        self._words = _words(folder, "run", server.url)

    def whole(self) -> None:
        process = _started(self._folder, self._words, "whole")
        expect(process.wait(100) == 0, (self._folder / "whole.log").read_text(encoding="utf-8")[-300:])

    def kill(self, *, stopped: bool) -> None:
        """One kill; a run that comes through before is compared, and another one is begun."""
        before = len(self._server.heard)
        process = _started(self._folder, self._words, self._out)
        while len(self._server.heard) == before and process.poll() is None:
            time.sleep(0.02)
        time.sleep(self._draws.uniform(0.0, 2.5))
        if process.poll() is not None:
            self._compare(process)
            return
        if stopped:
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.3)
        process.kill()
        process.wait(30)
        self._check_nothing_is_left(process.pid)

    def finish(self) -> None:
        process = _started(self._folder, self._words, self._out)
        process.wait(100)
        self._compare(process)

    @property
    def _out(self) -> str:
        return f"killed-{self._number}"

    def _compare(self, process: subprocess.Popen[bytes]) -> None:
        said = (self._folder / f"{self._out}.log").read_text(encoding="utf-8")[-300:]
        expect(process.returncode == 0, f"exit code {process.returncode}: {said}")
        run = self._folder / self._out
        expect(timeless(run) == timeless(self._folder / "whole"), "other records than those of the whole run")
        left = [path.name for path in run.rglob("*") if path.suffix in (".partial", ".lock") and path.name[0] != "."]
        expect(not left, f"left behind: {left}")
        self._number += 1

    @staticmethod
    def _check_nothing_is_left(group: int) -> None:
        """No process of the run's group lives on."""
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)
        raise Broken("a process of the run lives on")
