"""Do hostile words in items and answers run anywhere in what a run writes, and does a bad mirror harm a download?

    python -m bench.attack rows

Takes some minutes; results: docs/results/attack.md. Markup must not run, spreadsheets must compute nothing, terminals
must get no control characters, and XML and JSON must stay valid.
"""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from bench.attack.hostile import Behaviour, Hostile, drip, reply, send_reply
from bench.attack.trial import Trial, expect
from kvaudit.core.errors import AuditError
from kvaudit.core.network import download

PAYLOADS = {
    "a script": "<script>alert(66)</script>",
    "the end of a script": "</script><img src=x onerror=alert(66)>",
    "the end of a cell": '"></td><svg onload=alert(66)>',
    "a template": "{{ 6 * 11 }} {% raw %} ${6*11}",
    "a link of Markdown": "[a](javascript:alert(66)) ![b](http://127.0.0.1:9/x.png)",
    "a table of Markdown": "| a | b |\n|---|---|\n# c",
    "a formula": "=cmd|' /C calc'!A0",
    "another formula": "@SUM(1)+HYPERLINK(0)",
    "an escape code": "\x1b[31m\x1b]0;title\x07",
    "right to left": "\u202etxt.exe\u2066",
    "an end of XML": "]]><!ENTITY x SYSTEM 'file:///etc/passwd'>&x;",
    "nothing to see": "\u200b\u2060\ufeff\x00",
}
PLUGIN = """
from dataclasses import replace
from kvaudit.core.records import Message, Role
from kvaudit.suites.base import SUITES
PAYLOADS = {payloads!r}
Refusal = SUITES.get("refusal")
class Hostile(Refusal):
    '''Words that somebody else chose: <script>alert(66)</script>.'''
    name = "hostile"
    def items(self, *given, **more):
        found = super().items(*given, **more)
        return [replace(one, messages=(*one.messages[:-1], Message(Role.USER, PAYLOADS[n % len(PAYLOADS)] + " "
                + one.messages[-1].content)), spans={{}}) for n, one in enumerate(found)]
"""
SPEC = """
name: "hostile"
evaluate:
  policies: [none, "streaming:budget=16,sink=4,window=4"]
  suites: {hostile: {items: 24}}
  context_tokens: [160]
  pilot: 0
"""
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069]")
MARKUP = re.compile(r"<script>alert|<img src=x|<svg onload|javascript:alert\(66\)\)", re.I)
OPENED = (".html", ".md", ".txt", ".xml", ".csv")  # endings of files that people open
ROW = b'{"prompt": "a"}\n'
MIRRORS: dict[str, Behaviour] = {
    "a mirror of an error": reply(b"no", "500 Oops\x1b[31m"),
    "a mirror of HTML": reply(b"<html>" * 100),
    "a mirror that redirects to itself": lambda c, request: send_reply(
        c, b"", "302 Found", f"Location: {request.path}"
    ),
    "a mirror that redirects to a file": reply(b"", "302 Found", "Location: file:///etc/passwd"),
    "a mirror that redirects to another scheme": reply(b"", "302 Found", "Location: ftp://127.0.0.1/x"),
    "a mirror that dies": lambda *_: None,
    "a mirror that hangs": lambda connection, _: connection.recv(1),
    "a mirror that drips its headers": drip(b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.2),
    "a mirror that drips its body": drip(b"HTTP/1.1 200 OK\r\n\r\n", b"x", 0.2),
    "a mirror without end": drip(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536, 0.0),
    "a mirror of a part": reply(ROW, "206 Partial Content"),
    "a mirror whose length lies": lambda c, _: c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n" + ROW),
}


def trials(folder: Path) -> Iterator[Trial]:
    """Yield a trial for each mirror, a run with every payload in its items, and each payload in each of its files."""
    for name, behaviour in MIRRORS.items():
        yield Trial(name, partial(_check_mirror, behaviour))
    yield Trial("a run of hostile words", partial(_run, folder))
    outputs = [path for part in ("report", "view") for path in sorted((folder / "run" / part).rglob("*"))]
    for path in [*(path for path in outputs if path.is_file()), folder / "output.txt"]:
        yield Trial(f"{path.relative_to(folder)}", partial(_check_inert, path))
        for name, payload in PAYLOADS.items() if path.suffix in OPENED else ():
            yield Trial(f"{name} in {path.relative_to(folder)}", partial(_check_escaped, path, payload))


def _check_mirror(behaviour: Behaviour) -> None:
    """Check that a download returns the reply's bytes or fails with one line."""
    with Hostile(behaviour, calm=0) as server:
        try:
            raw = download(f"{server.url}/chat/completions", seconds=3)
        except AuditError as error:
            expect("\n" not in str(error) and len(str(error)) < 600, f"{error!r}")
        else:
            expect(b"root:" not in raw, "it returned a local file")


def _run(folder: Path) -> None:
    (folder / "hostile.py").write_text(PLUGIN.format(payloads=list(PAYLOADS.values())), encoding="utf-8")
    (folder / "hostile.yaml").write_text(SPEC, encoding="utf-8")
    run, plugin = str(folder / "run"), str(folder / "hostile.py")
    output = ""
    for words in (
        ("run", str(folder / "hostile.yaml"), "--plugin", plugin, "--out", run, "--workers", "1", "--anyway"),
        ("view", run, "--out", str(folder / "run" / "view")),
        ("gate", run),
        ("card", run),
    ):
        result = subprocess.run([sys.executable, "-m", "kvaudit", *words], capture_output=True, text=True, check=False)
        expect(result.returncode != 1 and "Traceback" not in result.stderr, f"{words[0]}: {result.stderr[-300:]}")
        output += result.stdout + result.stderr
    (folder / "output.txt").write_text(output, encoding="utf-8")


def _check_inert(path: Path) -> None:
    """Check that a file is valid for its ending and has no active content."""
    if path.suffix in (".png", ".parquet"):
        return
    text = path.read_text(encoding="utf-8")
    expect(CONTROL.search(text) is None, f"it has {CONTROL.search(text)!r}")
    if path.suffix in (".html", ".md"):
        expect(MARKUP.search(text) is None, f"it has {MARKUP.search(text)!r}")
    if path.suffix in (".json", ".sarif"):
        json.loads(text)
    if path.suffix == ".xml":
        ElementTree.fromstring(text)
    if path.suffix == ".csv":
        cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
        formulas = [cell for cell in cells if cell[:1] in "=+@\t\r" and cell[:1]]
        expect(not formulas, f"a spreadsheet computes {formulas[:1]}")


def _check_escaped(path: Path, payload: str) -> None:
    """Check that an active payload is escaped in a page or card."""
    is_active = re.search(r"<|\x1b|\u202e|^=|^@", payload)
    text = path.read_text(encoding="utf-8")
    expect(not is_active or payload not in text or path.suffix == ".txt", "the payload is not escaped")
