"""What happens to run folders that were edited, damaged, linked or made by others, and to impossible specs?

    python -m bench.attack folders

Takes a minute; results: docs/results/attack.md. Every command must say in one line what is wrong and where, with
exit code 2, or read the run if none of its evidence changed; nothing may hang or be overwritten.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
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
ANY_VERDICT = (0, 2, 3, 4, 5, 6)  # exit codes
REFUSED = (2,)


def _records(run: Path) -> Path:
    return sorted((run / "records").glob("*.jsonl"))[0]


def _seal(run: Path) -> Path:
    return sorted((run / "records").glob("*.done.json"))[0]


def _edit_lines(change: Callable[[list[bytes]], list[bytes]]) -> Edit:
    """Return an edit of the lines of a record file."""

    def edit(run: Path) -> None:
        path = _records(run)
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return edit


def _write(name: str, raw: bytes) -> Edit:
    return lambda run: (run / name).write_bytes(raw)


def _set_provenance(key: str, value: object = None) -> Edit:
    """Return an edit of provenance.json that sets a key, or removes it for None."""

    def edit(run: Path) -> None:
        path = run / "provenance.json"
        table = {name: old for name, old in json.loads(path.read_bytes()).items() if name != key}
        path.write_text(json.dumps(table if value is None else table | {key: value}), encoding="utf-8")

    return edit


def _append_to_spec(add: str) -> Edit:
    def edit(run: Path) -> None:
        path = run / "spec.yaml"
        path.write_text(path.read_text(encoding="utf-8") + add, encoding="utf-8")

    return edit


def _replace(name: str, make: Callable[[Path], object]) -> Edit:
    """Return an edit that replaces a file by what ``make`` makes."""

    def edit(run: Path) -> None:
        path = _records(run) if name == "records" else run / name
        path.unlink()
        make(path)

    return edit


def _add(name: str, make: Callable[[Path], object]) -> Edit:
    return lambda run: make(run / name)


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
EDITS: dict[str, tuple[Edit, tuple[int, ...]]] = {
    "nothing": (lambda _: None, ANY_VERDICT),
    "a byte of a record": (_edit_lines(lambda rows: [rows[0].replace(b"refusal", b"refusaL"), *rows[1:]]), REFUSED),
    "a record less": (_edit_lines(lambda rows: rows[1:]), REFUSED),
    "a record twice": (_edit_lines(lambda rows: [*rows, rows[0]]), REFUSED),
    "records in another order": (_edit_lines(lambda rows: rows[::-1]), REFUSED),
    "half a record": (_edit_lines(lambda rows: [*rows[:-1], rows[-1][:50]]), REFUSED),
    "no record": (_edit_lines(lambda _: []), REFUSED),
    "records of no JSON": (_edit_lines(lambda _: [b"{\n"]), REFUSED),
    "records that are no text": (_edit_lines(lambda _: [b"\xff\xfe\x00\n"]), REFUSED),
    "a record of a megabyte": (_edit_lines(lambda rows: [*rows, b"x" * (1 << 20)]), REFUSED),
    "no records file": (lambda run: _records(run).unlink(), REFUSED),
    "no seal": (lambda run: _seal(run).unlink(), ANY_VERDICT),
    "a seal of no JSON": (lambda run: _seal(run).write_text("{", encoding="utf-8"), REFUSED),
    "a seal that is a list": (lambda run: _seal(run).write_text("[]", encoding="utf-8"), REFUSED),
    "an empty seal": (lambda run: _seal(run).write_text("{}", encoding="utf-8"), REFUSED),
    "a folder as records": (_replace("records", Path.mkdir), REFUSED),
    "a pipe as records": (_replace("records", os.mkfifo), REFUSED),
    "a link to nowhere as records": (_replace("records", lambda path: path.symlink_to("nowhere")), REFUSED),
    "a link to itself as records": (_replace("records", lambda path: path.symlink_to(path.name)), REFUSED),
    "a pipe beside records": (_add("records/x.jsonl", os.mkfifo), REFUSED),
    "a folder beside records": (_add("records/x.jsonl", Path.mkdir), REFUSED),
    "what macOS leaves": (_add("records/._x.jsonl", lambda path: path.write_bytes(b"\0\5\x16\7")), ANY_VERDICT),
    "what an editor leaves": (_add("records/x.jsonl~", lambda path: path.write_bytes(b"x")), ANY_VERDICT),
    "records without a seal of another": (_add("records/x.jsonl", lambda path: path.write_bytes(b"{}\n")), ANY_VERDICT),
    "no provenance": (lambda run: (run / "provenance.json").unlink(), REFUSED),
    "a provenance of no JSON": (_write("provenance.json", b"{"), REFUSED),
    "a provenance that is a list": (_write("provenance.json", b"[]"), REFUSED),
    "a provenance of nothing": (_write("provenance.json", b"{}"), REFUSED),
    "a provenance of NaN": (_set_provenance("started", float("nan")), REFUSED),
    "a provenance of a pipe": (_replace("provenance.json", os.mkfifo), REFUSED),
    "no base_sha256": (_set_provenance("base_sha256"), ANY_VERDICT),
    "another base_sha256": (_set_provenance("base_sha256", "0" * 64), ANY_VERDICT),
    "no policies": (_set_provenance("policies"), ANY_VERDICT),
    "policies that are text": (_set_provenance("policies", "none"), REFUSED),
    "no inputs": (_set_provenance("inputs"), ANY_VERDICT),
    "inputs that are a list": (_set_provenance("inputs", []), ANY_VERDICT),
    "threads that are text": (_set_provenance("threads", "many"), REFUSED),
    "a format of the future": (_set_provenance("format", 99), ANY_VERDICT),
    "a spec that was changed": (_append_to_spec("\n# changed\n"), REFUSED),
    "a spec with a key twice": (_append_to_spec("\nname: other\n"), REFUSED),
    "no spec": (lambda run: (run / "spec.yaml").unlink(), REFUSED),
    "a spec of a bomb": (_write("spec.yaml", BOMB.encode()), REFUSED),
    "a spec of tags": (_write("spec.yaml", b"!!python/object/apply:os.system [id]"), REFUSED),
    "a spec of a megabyte": (_write("spec.yaml", b"# " + b"x" * (1 << 20)), REFUSED),
    "a spec of a hundred levels": (_write("spec.yaml", b"a: " + b"[" * 100 + b"]" * 100), REFUSED),
    "a spec that is no text": (_write("spec.yaml", b"\xff\xfe\x00"), REFUSED),
    "a spec that is a folder": (_replace("spec.yaml", Path.mkdir), REFUSED),
}
# unusual names of run folders
NAMES = ("a b", "a\nb", "\x1b[31mred", "\u202egnp.exe", "-rf", "~", "a'b\"c", "\u00e9\U0001f600", "x" * 200)
GRID = "evaluate: {policies: [none, int8], suites: {refusal: {items: 4}}, context_tokens: [96]}"
# specs that must be refused before a folder is made
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
    """Yield a small run, every edit of a copy of it, odd folder names, and impossible specs."""
    spec = folder / "small.yaml"
    spec.write_text(SPEC, encoding="utf-8")
    command = [sys.executable, "-m", "kvaudit", "run", spec, "--out", folder / "run", "--workers", "1", "--anyway"]
    yield Trial("a run", partial(_check_exit_0, command))
    for name, (edit, codes) in EDITS.items():
        yield Trial(name, partial(_check_edit, folder, name, edit, codes))
    for number, name in enumerate(NAMES):
        yield Trial(f"a folder of name {number}", partial(_check_name, folder, name))
    for name, text in SPECS.items():
        yield Trial(name, partial(_check_spec_refused, folder, text))


def _check_exit_0(command: Sequence[object]) -> None:
    expect(subprocess.run(list(map(str, command)), capture_output=True, check=False).returncode == 0, "the run fails")


def run_command(*words: str) -> tuple[int, str]:
    """Run a kvaudit command in this process; returns its exit code and stderr, and raises its exceptions."""
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    for line in result.stderr.splitlines():
        expect(line.isprintable(), f"control characters in the message: {line!r}")
    return result.exit_code, result.stderr


def _check_edit(folder: Path, name: str, edit: Edit, codes: tuple[int, ...]) -> None:
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "run", copy)
    edit(copy)
    for words in (("gate", str(copy)), ("report", str(copy)), ("card", str(copy))):
        code, stderr = run_command(*words)
        allowed = (0, *codes) if codes == ANY_VERDICT and words[0] != "gate" else codes
        expect(code in allowed, f"{name}: {words[0]} ends with {code}: {stderr[:200]}")
        expect(code != 2 or stderr.startswith(("error: ", "this run")), f"{stderr[:200]!r}")


def _check_name(folder: Path, name: str) -> None:
    copy = folder / name
    shutil.copytree(folder / "run", copy)
    code, stderr = run_command("gate", str(copy))
    expect(code in ANY_VERDICT, f"exit code {code}: {stderr[:200]}")


def _check_spec_refused(folder: Path, text: str) -> None:
    path, out = folder / "bad.yaml", folder / "refused"
    path.write_text(text, encoding="utf-8")
    code, stderr = run_command("run", str(path), "--out", str(out), "--workers", "1")
    expect(code == 2 and stderr.count("error: ") == 1, f"exit code {code}: {stderr[:200]}")
    expect(not out.exists(), "a folder was made")
