"""Hostile words in items and answers, through everything that a run writes; and mirrors that are no mirrors.

Markup runs nowhere, a spreadsheet computes nothing, a terminal obeys nothing, and what is XML or JSON stays that.
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

from bench.attack.hostile import Act, Hostile, drips, say, says
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
RAW = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069]")
MARKUP = re.compile(r"<script>alert|<img src=x|<svg onload|javascript:alert\(66\)\)", re.I)
OBEYED = (".html", ".md", ".txt", ".xml", ".csv")  # endings of what somebody opens
ROW = b'{"prompt": "a"}\n'
MIRRORS: dict[str, Act] = {
    "a mirror of an error": says(b"no", "500 Oops\x1b[31m"),
    "a mirror of HTML": says(b"<html>" * 100),
    "a mirror that redirects to itself": lambda line, heard: say(line, b"", "302 Found", f"Location: {heard.path}"),
    "a mirror that redirects to a file": says(b"", "302 Found", "Location: file:///etc/passwd"),
    "a mirror that redirects to another scheme": says(b"", "302 Found", "Location: ftp://127.0.0.1/x"),
    "a mirror that dies": lambda *_: None,
    "a mirror that hangs": lambda line, _: line.recv(1),
    "a mirror that drips its headers": drips(b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.2),
    "a mirror that drips its body": drips(b"HTTP/1.1 200 OK\r\n\r\n", b"x", 0.2),
    "a mirror without end": drips(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536, 0.0),
    "a mirror of a part": says(ROW, "206 Partial Content"),
    "a mirror whose length lies": lambda line, _: line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n" + ROW),
}


def trials(folder: Path) -> Iterator[Trial]:
    """The mirrors, then one run with every payload in its items, and each of them in each file that it wrote."""
    for name, act in MIRRORS.items():
        yield Trial(name, partial(_mirror, act))
    yield Trial("a run of hostile words", partial(_run, folder))
    outputs = [path for part in ("report", "view") for path in sorted((folder / "run" / part).rglob("*"))]
    for path in [*(path for path in outputs if path.is_file()), folder / "said.txt"]:
        yield Trial(f"{path.relative_to(folder)}", partial(_inert, path))
        for name, payload in PAYLOADS.items() if path.suffix in OBEYED else ():
            yield Trial(f"{name} in {path.relative_to(folder)}", partial(_not_raw, path, payload))


def _mirror(act: Act) -> None:
    """What comes is the reply's own bytes, or one line says why not; a hash decides what is kept."""
    with Hostile(act, calm=0) as server:
        try:
            raw = download(f"{server.url}/chat/completions", seconds=3)
        except AuditError as error:
            expect("\n" not in str(error) and len(str(error)) < 600, f"{error!r}")
        else:
            expect(b"root:" not in raw, "a file of this machine came")


def _run(folder: Path) -> None:
    (folder / "hostile.py").write_text(PLUGIN.format(payloads=list(PAYLOADS.values())), encoding="utf-8")
    (folder / "hostile.yaml").write_text(SPEC, encoding="utf-8")
    run, plugin = str(folder / "run"), str(folder / "hostile.py")
    said = ""
    for words in (
        ("run", str(folder / "hostile.yaml"), "--plugin", plugin, "--out", run, "--workers", "1", "--anyway"),
        ("view", run, "--out", str(folder / "run" / "view")),
        ("gate", run),
        ("card", run),
    ):
        done = subprocess.run([sys.executable, "-m", "kvaudit", *words], capture_output=True, text=True, check=False)
        expect(done.returncode != 1 and "Traceback" not in done.stderr, f"{words[0]}: {done.stderr[-300:]}")
        said += done.stdout + done.stderr
    (folder / "said.txt").write_text(said, encoding="utf-8")


def _inert(path: Path) -> None:
    """The file is what its ending says, and nothing in it is obeyed."""
    if path.suffix in (".png", ".parquet"):
        return
    text = path.read_text(encoding="utf-8")
    expect(RAW.search(text) is None, f"it holds {RAW.search(text)!r}")
    if path.suffix in (".html", ".md"):
        expect(MARKUP.search(text) is None, f"it holds {MARKUP.search(text)!r}")
    if path.suffix in (".json", ".sarif"):
        json.loads(text)
    if path.suffix == ".xml":
        ElementTree.fromstring(text)
    if path.suffix == ".csv":
        cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
        formulas = [cell for cell in cells if cell[:1] in "=+@\t\r" and cell[:1]]
        expect(not formulas, f"a spreadsheet computes {formulas[:1]}")


def _not_raw(path: Path, payload: str) -> None:
    """A page, a card or a terminal never shows it as it was written, where that would be obeyed."""
    obeyed = re.search(r"<|\x1b|\u202e|^=|^@", payload)
    text = path.read_text(encoding="utf-8")
    expect(not obeyed or payload not in text or path.suffix == ".txt", "it stands there as it was written")
