"""Folders and files that were edited, damaged, linked or made by somebody else, and specs that no one would write.

Every command says in one line what is wrong and where (exit code 2), or reads the run as it is where nothing of the
evidence changed; nothing hangs, and nothing of what is there is written over.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from typer.testing import CliRunner

from bench.attack.trial import Trial, expect
from kvaudit.audit.cli import app

SPEC = """
name: small
evaluate:
  policies: [none, "streaming:budget=48,sink=4,window=8"]
  suites: {refusal: {items: 4}}
  context_tokens: [96]
  pilot: 0
"""
Edit = Callable[[Path], object]
SAME = (0, 2, 3, 4, 5, 6)  # whatever a verdict may be
REFUSED = (2,)


def _records(run: Path) -> Path:
    return sorted((run / "records").glob("*.jsonl"))[0]


def _seal(run: Path) -> Path:
    return sorted((run / "records").glob("*.done.json"))[0]


def _lines(change: Callable[[list[bytes]], list[bytes]]) -> Edit:
    """An edit of the lines of a record file."""

    def edit(run: Path) -> None:
        path = _records(run)
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return edit


def _text(name: str, raw: bytes) -> Edit:
    return lambda run: (run / name).write_bytes(raw)


def _key(key: str, value: object = None) -> Edit:
    """An edit of provenance.json: a key with another value, or without it."""

    def edit(run: Path) -> None:
        path = run / "provenance.json"
        table = {name: one for name, one in json.loads(path.read_bytes()).items() if name != key}
        path.write_text(json.dumps(table if value is None else table | {key: value}), encoding="utf-8")

    return edit


def _spec(add: str) -> Edit:
    def edit(run: Path) -> None:
        path = run / "spec.yaml"
        path.write_text(path.read_text(encoding="utf-8") + add, encoding="utf-8")

    return edit


def _instead(name: str, make: Callable[[Path], object]) -> Edit:
    """An edit that puts something else in the place of a file."""

    def edit(run: Path) -> None:
        path = _records(run) if name == "records" else run / name
        path.unlink()
        make(path)

    return edit


def _beside(name: str, make: Callable[[Path], object]) -> Edit:
    return lambda run: make(run / name)


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
EDITS: dict[str, tuple[Edit, tuple[int, ...]]] = {
    "nothing": (lambda _: None, SAME),
    "a byte of a record": (_lines(lambda rows: [rows[0].replace(b"refusal", b"refusaL"), *rows[1:]]), REFUSED),
    "a record less": (_lines(lambda rows: rows[1:]), REFUSED),
    "a record twice": (_lines(lambda rows: [*rows, rows[0]]), REFUSED),
    "records in another order": (_lines(lambda rows: rows[::-1]), REFUSED),
    "half a record": (_lines(lambda rows: [*rows[:-1], rows[-1][:50]]), REFUSED),
    "no record": (_lines(lambda _: []), REFUSED),
    "records of no JSON": (_lines(lambda _: [b"{\n"]), REFUSED),
    "records that are no text": (_lines(lambda _: [b"\xff\xfe\x00\n"]), REFUSED),
    "a record of a megabyte": (_lines(lambda rows: [*rows, b"x" * (1 << 20)]), REFUSED),
    "no records file": (lambda run: _records(run).unlink(), REFUSED),
    "no seal": (lambda run: _seal(run).unlink(), SAME),
    "a seal of no JSON": (lambda run: _seal(run).write_text("{", encoding="utf-8"), REFUSED),
    "a seal that is a list": (lambda run: _seal(run).write_text("[]", encoding="utf-8"), REFUSED),
    "an empty seal": (lambda run: _seal(run).write_text("{}", encoding="utf-8"), REFUSED),
    "a folder as records": (_instead("records", Path.mkdir), REFUSED),
    "a pipe as records": (_instead("records", os.mkfifo), REFUSED),
    "a link to nowhere as records": (_instead("records", lambda path: path.symlink_to("nowhere")), REFUSED),
    "a link to itself as records": (_instead("records", lambda path: path.symlink_to(path.name)), REFUSED),
    "a pipe beside records": (_beside("records/x.jsonl", os.mkfifo), REFUSED),
    "a folder beside records": (_beside("records/x.jsonl", Path.mkdir), REFUSED),
    "what macOS leaves": (_beside("records/._x.jsonl", lambda path: path.write_bytes(b"\0\5\x16\7")), SAME),
    "what an editor leaves": (_beside("records/x.jsonl~", lambda path: path.write_bytes(b"x")), SAME),
    "records without a seal of another": (_beside("records/x.jsonl", lambda path: path.write_bytes(b"{}\n")), SAME),
    "no provenance": (lambda run: (run / "provenance.json").unlink(), REFUSED),
    "a provenance of no JSON": (_text("provenance.json", b"{"), REFUSED),
    "a provenance that is a list": (_text("provenance.json", b"[]"), REFUSED),
    "a provenance of nothing": (_text("provenance.json", b"{}"), REFUSED),
    "a provenance of NaN": (_key("started", float("nan")), REFUSED),
    "a provenance of a pipe": (_instead("provenance.json", os.mkfifo), REFUSED),
    "no base_sha256": (_key("base_sha256"), SAME),
    "another base_sha256": (_key("base_sha256", "0" * 64), SAME),
    "no policies": (_key("policies"), SAME),
    "policies that are text": (_key("policies", "none"), REFUSED),
    "no inputs": (_key("inputs"), SAME),
    "inputs that are a list": (_key("inputs", []), SAME),
    "threads that are text": (_key("threads", "many"), REFUSED),
    "a format of the future": (_key("format", 99), SAME),
    "a spec that was changed": (_spec("\n# changed\n"), REFUSED),
    "a spec with a key twice": (_spec("\nname: other\n"), REFUSED),
    "no spec": (lambda run: (run / "spec.yaml").unlink(), REFUSED),
    "a spec of a bomb": (_text("spec.yaml", BOMB.encode()), REFUSED),
    "a spec of tags": (_text("spec.yaml", b"!!python/object/apply:os.system [id]"), REFUSED),
    "a spec of a megabyte": (_text("spec.yaml", b"# " + b"x" * (1 << 20)), REFUSED),
    "a spec of a hundred levels": (_text("spec.yaml", b"a: " + b"[" * 100 + b"]" * 100), REFUSED),
    "a spec that is no text": (_text("spec.yaml", b"\xff\xfe\x00"), REFUSED),
    "a spec that is a folder": (_instead("spec.yaml", Path.mkdir), REFUSED),
}
# names of run folders
NAMES = ("a b", "a\nb", "\x1b[31mred", "\u202egnp.exe", "-rf", "~", "a'b\"c", "\u00e9\U0001f600", "x" * 200)
GRID = "evaluate: {policies: [none, int8], suites: {refusal: {items: 4}}, context_tokens: [96]}"
# specs that are refused before a folder is made
SPECS: dict[str, str] = {
    "1e9 items": "name: a\n" + GRID.replace("items: 4", "items: 1000000000"),
    "1e30 items": "name: a\n" + GRID.replace("items: 4", f"items: {10**30}"),
    "items of base 8": "name: a\n" + GRID.replace("items: 4", "items: 0110"),
    "items of base 60": "name: a\n" + GRID.replace("items: 4", "items: 1:12"),
    "items that are NaN": "name: a\n" + GRID.replace("items: 4", "items: .nan"),
    "a context of 1e9 tokens": "name: a\n" + GRID.replace("[96]", "[1000000000]"),
    "1,500 policies": "name: a\n"
    + GRID.replace("int8", ", ".join(f"'streaming:budget={n},sink=4'" for n in range(64, 1564))),
    "a name that leads out": "name: ../../x\n" + GRID,
    "a name of control characters": 'name: "a\\e[31m"\n' + GRID,
    "half an emoji": 'name: a\nnote: "\\ud83d"\n' + GRID,
    "a model that leads out": "name: a\nmodel: ../../../etc\n" + GRID,
    "a suite that is a path": "name: a\n" + GRID.replace("refusal", "../../etc/passwd"),
    "a policy that is a path": "name: a\n" + GRID.replace("int8", "../x"),
}


def trials(folder: Path) -> Iterator[Trial]:
    """A small run, every edit of a copy of it, odd names, and specs that cannot be."""
    spec = folder / "small.yaml"
    spec.write_text(SPEC, encoding="utf-8")
    words = [
        sys.executable,
        "-m",
        "kvaudit",
        "run",
        str(spec),
        "--out",
        str(folder / "run"),
        "--workers",
        "1",
        "--anyway",
    ]
    yield Trial(
        "a run", lambda: expect(subprocess.run(words, capture_output=True, check=False).returncode == 0, "fails")
    )
    for name, (edit, codes) in EDITS.items():
        yield Trial(name, partial(_edited, folder, name, edit, codes))
    for number, name in enumerate(NAMES):
        yield Trial(f"a folder of name {number}", partial(_named, folder, name))
    for name, text in SPECS.items():
        yield Trial(name, partial(_unmade, folder, text))


def said(*words: str) -> tuple[int, str]:
    """Exit code and stderr of a command; raises what it lets through."""
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    for line in done.stderr.splitlines():
        expect(line.isprintable(), f"it is obeyed by a terminal: {line!r}")
    return done.exit_code, done.stderr


def _edited(folder: Path, name: str, edit: Edit, codes: tuple[int, ...]) -> None:
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "run", copy)
    edit(copy)
    for words in (("gate", str(copy)), ("report", str(copy)), ("card", str(copy))):
        code, stderr = said(*words)
        allowed = codes if words[0] == "gate" else (0, *codes)
        expect(code in (allowed if codes == SAME else codes), f"{name}: {words[0]} ends with {code}: {stderr[:200]}")
        expect(code != 2 or stderr.startswith(("error: ", "this run")), f"{stderr[:200]!r}")


def _named(folder: Path, name: str) -> None:
    place = folder / name
    shutil.copytree(folder / "run", place)
    code, stderr = said("gate", str(place))
    expect(code in SAME, f"exit code {code}: {stderr[:200]}")


def _unmade(folder: Path, text: str) -> None:
    path, out = folder / "bad.yaml", folder / "unmade"
    path.write_text(text, encoding="utf-8")
    code, stderr = said("run", str(path), "--out", str(out), "--workers", "1")
    expect(code == 2 and stderr.count("error: ") == 1, f"exit code {code}: {stderr[:200]}")
    expect(not out.exists(), "a folder was made")
