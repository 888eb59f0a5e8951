"""Rendered prompts have a hash: a template that writes the date is told, and units of two days are not one question."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import CHATML, byte_tokenizer
from test_cli import kvaudit

from kvaudit.audit.runs.evaluate import Evaluator, grid, prompts_sha256
from kvaudit.audit.runs.folder import open_run
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.sampling.chat import Chat
from kvaudit.audit.sampling.model import load_model
from kvaudit.audit.sampling.rendering import renderer, unstable_names
from kvaudit.core.provenance import merge_prompt_digests, prompts_by_question
from kvaudit.core.records import Item, Message, Role
from kvaudit.core.spec import parse_spec
from kvaudit.reports.page.run_page import page_of
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run, with_report_sections

DATED = "{{ '<|im_start|>system\nToday is ' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}" + CHATML
SPEC = """
name: dated
model: {model}
evaluate:
  policies: [none, "streaming:budget=64,sink=4,window=8"]
  suites: {{math: {{items: 2, max_new_tokens: 2}}}}
  context_tokens: [400]
"""
WEST, EAST = "Etc/GMT+12", "Pacific/Kiritimati"  # whose clocks never show the same day


def at(zone: str, patch: pytest.MonkeyPatch) -> None:
    """Have templates written where it is another day."""
    renderer.end()
    patch.setenv("TZ", zone)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Any:
    yield monkeypatch
    renderer.end()


def evaluated(tmp_path: Path, tiny: Path, patch: pytest.MonkeyPatch, zones: tuple[str, str], template: str) -> Path:
    """A run whose two policies are asked in two places."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    spec = parse_spec(SPEC.format(model=folder), "spec", NAMES)
    run = open_run(tmp_path / "run", spec, resume=False)
    at(zones[0], patch)
    evaluator = Evaluator(model := load_model(str(folder)), spec)
    first, second = grid(spec)
    evaluator.answer_units([first], run, lambda *_: None)
    if zones[1] != zones[0]:
        at(zones[1], patch)
    evaluator.answer_units([second], run, lambda *_: None)
    run.note(base_sha256=model.sha256)
    return run.path


def remarks_of(run: Path) -> list[str]:
    data = load_run(run)
    return [
        line for line in page_of(with_report_sections(data, decide_run(data))).remarks if line.startswith("PROMPTS")
    ]


@pytest.fixture(scope="module")
def of_two_days(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A run whose template writes the date, its second policy asked on another day than its first."""
    with pytest.MonkeyPatch.context() as patch:
        run = evaluated(tmp_path_factory.mktemp("days"), tiny_folder, patch, (WEST, EAST), DATED)
    renderer.end()
    return run


def test_two_days_are_a_remark_with_the_cell_and_what_the_template_names(of_two_days: Path) -> None:
    (line,) = remarks_of(of_two_days)
    assert line.startswith("PROMPTS differ between policies in base/0 math at 400: the chat template uses strftime_now")


def test_one_day_is_told_to_be_one_day_only(tmp_path: Path, tiny_folder: Path, home: pytest.MonkeyPatch) -> None:
    run = evaluated(tmp_path, tiny_folder, home, (WEST, WEST), DATED)
    (line,) = remarks_of(run)
    assert line.startswith("PROMPTS may differ on another day: the chat template uses strftime_now")


def test_a_template_that_is_always_the_same_is_no_remark(
    tmp_path: Path, tiny_folder: Path, home: pytest.MonkeyPatch
) -> None:
    run = evaluated(tmp_path, tiny_folder, home, (WEST, EAST), CHATML)
    assert remarks_of(run) == []
    ((_, own),) = prompts_by_question(load_run(run).provenance).items()
    assert len(own) == 2
    assert len(set(own.values())) == 1


def test_two_runs_of_two_days_are_told_apart_when_they_are_compared(of_two_days: Path) -> None:
    policies = ("none", "streaming:budget=64,sink=4,window=8")
    chosen = [word for n, policy in zip("ab", policies, strict=True) for word in (f"--select-{n}", f"policy={policy}")]
    _, told, _ = kvaudit("compare", of_two_days, of_two_days, *chosen)
    assert "The rendered prompts of math at 400 tokens differ between the sides" in " ".join(told.split())


def item(name: str, text: str) -> Item:
    return Item("refusal", name, "c", (Message(Role.USER, text),), 64, "none")


def test_the_hash_is_of_the_texts_in_whatever_order_they_are_asked() -> None:
    chat, one, two = Chat(byte_tokenizer()), item("a", "x"), item("b", "y")
    assert prompts_sha256(chat, [[one], [two]]) == prompts_sha256(chat, [[two, one]])
    assert prompts_sha256(chat, [[one]]) != prompts_sha256(chat, [[item("a", "z")]])


@pytest.mark.parametrize(
    ("template", "names"),
    [
        (DATED, ["strftime_now"]),
        ("{{ strftime_now('%Y') if strftime_now is defined else '2024' }}", ["strftime_now"]),
        ("{{ ['a', 'b'] | random }}", ["random"]),
        ("{{ lipsum() }}", ["lipsum"]),
        ("{{ 'a random word' }}", []),
        (CHATML, []),
    ],
)
def test_what_a_template_may_write_anew_is_known_by_its_names(template: str, names: list[str]) -> None:
    assert unstable_names(template) == names


@pytest.mark.parametrize("name", ["joiner() | string", "cycler('a').next", "messages | map('upper')"])
def test_a_template_that_writes_the_address_of_an_object_is_known_by_what_it_writes(name: str) -> None:
    assert Chat(byte_tokenizer("{{ " + name + " }}" + CHATML)).unstable_names == ["an object's address"]
    assert Chat(byte_tokenizer()).unstable_names == []


def test_a_second_ctrl_c_as_the_process_exits_prints_nothing() -> None:
    program = """
from kvaudit.audit.sampling.rendering import renderer

class Interrupted:
    def kill(self): pass
    def communicate(self): raise KeyboardInterrupt

renderer._process = Interrupted()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_unit_that_went_on_another_day_stands_for_both() -> None:
    assert [merge_prompt_digests(None, "b"), merge_prompt_digests("a", "a"), merge_prompt_digests("a", "b")] == [
        "b",
        "a",
        "a and b",
    ]
    assert merge_prompt_digests("a and b", "a") == "a and b"
