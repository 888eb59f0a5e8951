"""What kvaudit no longer has is refused in one line that says what to do instead."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from test_cli import refused

import kvaudit
from kvaudit.audit.runs.folder import open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.core.errors import SpecError
from kvaudit.core.moved import REMOVED
from kvaudit.core.spec import dump_spec, load_spec, parse_spec

SPEC_KEYS = [(key, removed.instead) for removed in REMOVED for key in removed.spec_keys]
IMPORTS = [(name, removed.instead) for removed in REMOVED for name in removed.imports]


@pytest.mark.parametrize(("key", "instead"), SPEC_KEYS)
def test_a_removed_key_of_a_spec_says_what_to_do_instead(key: str, instead: str, tmp_path: Path) -> None:
    text = f"{{name: a, {key}: [x], evaluate: {{policies: [none], suites: [math], context_tokens: [96]}}}}"
    with pytest.raises(SpecError, match=f"{key} is no longer a key of a spec; "):
        parse_spec(text, "spec", NAMES)
    (tmp_path / "spec.yaml").write_text(text)
    assert instead in refused("run", tmp_path / "spec.yaml")


@pytest.mark.parametrize(
    ("name", "instead"), [(name, removed.instead) for removed in REMOVED for name in removed.suites]
)
def test_a_spec_with_a_removed_suite_says_what_to_do_instead(name: str, instead: str) -> None:
    text = f"{{name: a, evaluate: {{policies: [none], suites: [{name}], context_tokens: [96]}}}}"
    with pytest.raises(SpecError, match=f"{name} is no longer a suite of kvaudit; {instead.partition('(')[0]}"):
        parse_spec(text, "spec", NAMES)


@pytest.mark.parametrize(("name", "instead"), IMPORTS)
def test_a_plug_in_with_a_removed_import_says_what_to_do_instead(name: str, instead: str, tmp_path: Path) -> None:
    package, _, last = f"kvaudit.{name}".rpartition(".")
    line = f"import kvaudit.{name}" if "." in name else f"from {package} import {last}"
    (tmp_path / "mine.py").write_text(line)
    assert f"kvaudit.{name} is no longer part of kvaudit; {instead}" in refused(
        "list", "policies", "--plugin", tmp_path / "mine.py"
    )


@pytest.mark.parametrize("name", [name for name, _ in IMPORTS])
def test_no_removed_import_is_there(name: str) -> None:
    with pytest.raises(ImportError):
        importlib.import_module(f"kvaudit.{name}") if "." in name else getattr(kvaudit, name)


RANKS = """\
name: a
model: embedded
train: {arms: [dense], seeds: [1], policy: none, suites: [math], steps: 1, ranks: RANKS}
evaluate: {policies: [none], suites: {math: {items: 2}}, context_tokens: [96]}
"""


def test_a_spec_that_asks_for_several_processes_per_training_says_what_to_do_instead(tmp_path: Path) -> None:
    spec, out = tmp_path / "spec.yaml", tmp_path / "run"
    spec.write_text(RANKS.replace("RANKS", "2"))
    message = "train.ranks is 2, but one process trains each unit now; leave it out"
    assert message in refused("run", spec, "--out", out, "--anyway")
    assert not out.exists()
    run = open_run(out, load_spec(spec, NAMES), resume=False)  # as an earlier version began it
    assert message in refused("run", spec, "--out", run.path, "--anyway", "--resume")


def test_a_run_that_was_trained_by_several_processes_keeps_its_hash() -> None:
    plain, one, two = (
        parse_spec(RANKS.replace(", ranks: RANKS", text), "spec") for text in ("", ", ranks: 1", ", ranks: 2")
    )
    assert plain.sha256 == one.sha256 != two.sha256
    assert "ranks" not in dump_spec(one)
    assert parse_spec(dump_spec(two), "spec").sha256 == two.sha256
