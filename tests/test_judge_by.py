"""A run judged by a judge: who settled what, what failed, what is asked again, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from test_cli import kvaudit, refused
from test_judge import rewritten, sampled, units

from audit.core.errors import SpecError
from audit.core.files import read_json
from audit.core.options import sha256_of
from audit.core.questions import Question
from audit.core.records import Grade, Item, Message, Outcome, Record
from audit.core.spec import parse_spec
from audit.judges.base import JUDGES, Judge, question_key
from audit.runs.names import NAMES
from suites.math import Math

__all__ = ["sampled"]  # a fixture
SAID = ("I cannot tell.", "It is 12.")


@dataclass(frozen=True)
class Moody(Judge):
    """Refusals by the word cannot; fails on an answer as often as it is told."""

    name = "moody"
    says = "its mood"
    asked: ClassVar[list[Question]] = []
    fails: ClassVar[list[str]] = []
    learnt: ClassVar[frozenset[str]] = frozenset()

    @property
    def identity(self) -> str:
        return sha256_of("moody")

    def refused(self, questions: Sequence[Question]) -> list[bool | None]:
        self.asked.extend(questions)
        return [self._one(question) for question in questions]

    def _one(self, question: Question) -> bool | None:
        if question.answer in self.fails:
            self.fails.remove(question.answer)
            return None
        return "cannot" in question.answer

    def trained_on(self) -> frozenset[str]:
        return self.learnt


@pytest.fixture
def run(sampled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose suite math leaves to a judge whether an answer refuses, which is what it should do."""

    def question(_: Math, item: Item, transcript: tuple[Message, ...]) -> Question:
        return Question(item.item_id, transcript[-1].content)

    def settled(self: Math, item: Item, _: Any, *, refused: bool) -> Grade:
        return Grade(Outcome.DESIRED if refused else Outcome.UNDESIRED, float(refused), facets={"solved": refused})

    folder = shutil.copytree(sampled, tmp_path / "run")
    for unit in units(folder):
        if "--math--" in unit.name:
            rewritten(unit, _said)
    monkeypatch.setattr(Math, "question", question)
    monkeypatch.setattr(Math, "settled", settled)
    JUDGES.all()
    assert JUDGES._found is not None
    monkeypatch.setitem(JUDGES._found, "moody", Moody)
    yield folder
    Moody.asked.clear()
    Moody.fails.clear()
    Moody.learnt = frozenset()


def _said(row: dict[str, Any]) -> None:
    row["transcript"][-1]["content"] = SAID[int(row["policy"] == "none")]
    row.update(finish_reason="stop", outcome="undesired", score=0.0, facets={}, judge="phrases")


def records(folder: Path, suite: str) -> list[Record]:
    found = [unit.read_text().splitlines() for unit in units(folder) if f"--{suite}--" in unit.name]
    return [Record.from_json(line) for lines in found for line in lines]


def judged(run: Path, *rest: str) -> tuple[Path, str]:
    out = run.parent / "again"
    code, text, err = kvaudit("judge", run, "--out", out, "--judge", "moody", *rest)
    assert code == 0, err
    return out, text


def test_a_judge_settles_what_a_suite_leaves_to_it_and_signs(run: Path) -> None:
    out, _ = judged(run)
    label = f"moody:{sha256_of('moody')[:12]}"
    assert {(r.transcript[-1].content, r.score, r.judge) for r in records(out, "math")} == {
        (SAID[0], 1.0, label),
        (SAID[1], 0.0, label),
    }
    assert {r.judge for r in records(out, "agent")} == {"programmatic"}
    assert read_json(out / "provenance.json")["judged"]["judge"] == {"name": "moody", "sha256": sha256_of("moody")}


def test_a_judge_sees_requests_and_answers_once(run: Path) -> None:
    judged(run)
    assert {question.answer for question in Moody.asked} == set(SAID)
    assert len(Moody.asked) == len(set(Moody.asked)) == 4


def test_a_failure_is_unscored_and_asked_again(run: Path) -> None:
    Moody.fails.append(SAID[0])
    out, text = judged(run)
    assert [r.outcome for r in records(out, "math")].count(Outcome.UNSCORED) == 1
    assert "the judge failed on 1 answers" in text
    asked = len(Moody.asked)
    out, text = judged(run)
    assert Outcome.UNSCORED not in [r.outcome for r in records(out, "math")]
    assert "failed on" not in text
    assert len(Moody.asked) == asked + 1  # the rest is remembered


def test_where_two_judges_agree_is_counted_in_the_seal(run: Path) -> None:
    out, _ = judged(run)
    seals = [read_json(unit.with_suffix(".done.json")) for unit in units(out) if "--math--" in unit.name]
    assert sorted(seal["changed"]["pairs"] for seal in seals) == [[0, 0, 0, 2], [0, 0, 2, 0]]
    assert [seal["changed"]["judged"] for seal in seals] == [2, 2]


def test_the_verdict_before_stands_with_the_run(run: Path) -> None:
    out, text = judged(run)
    story = read_json(out / "provenance.json")["judged"]
    assert story["verdict_before"] in ("PASS", "FAIL", "INCONCLUSIVE", "INVALID")
    assert f"verdict: {story['verdict_before']} as the run was judged before" in text


def test_a_judge_is_not_given_what_it_learnt(run: Path) -> None:
    Moody.learnt = frozenset(question_key(Question(r.item_id, r.transcript[-1].content)) for r in records(run, "math"))
    line = refused("judge", run, "--out", run.parent / "again", "--judge", "moody")
    assert "was trained on 2 of these 2 answers" in line


def test_another_judge_judges_the_units_again(run: Path) -> None:
    out, _ = judged(run)
    code, _, err = kvaudit("judge", run, "--out", out, "--judge", "phrases")
    assert code == 0, err
    assert {r.judge.partition(":")[0] for r in records(out, "math")} == {"phrases"}


def test_a_card_without_a_judge_is_refused(run: Path) -> None:
    assert "--card is of the judge" in refused("judge", run, "--out", run.parent / "again", "--card")


def test_an_unknown_judge_is_one_line(run: Path) -> None:
    line = refused("judge", run, "--out", run.parent / "again", "--judge", "modest")
    assert "Did you mean 'moody'?" in line
    assert not (run.parent / "again").exists()


def test_a_judge_comes_from_an_outside_file(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "stern.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from audit.judges.base import Judge, sha256_of\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Stern(Judge):\n"
        "    name = 'stern'\n"
        "    says = 'a number'\n"
        "    more: int\n\n"
        "    @property\n"
        "    def identity(self):\n"
        "        return sha256_of(self.more)\n\n"
        "    def refused(self, questions):\n"
        "        return [self.more > 1 for _ in questions]\n"
    )
    out = run.parent / "again"
    code, _, err = kvaudit("judge", run, "--out", out, "--judge", "stern:more=2", "--plugin", file)
    assert code == 0, err
    assert {(r.score, r.judge) for r in records(out, "math")} == {(1.0, f"stern:{sha256_of(2)[:12]}")}
    assert read_json(out / "provenance.json")["judged"]["plug-ins"]["stern.py"]


# in a spec


SMALL = {"name": "a", "evaluate": {"policies": ["none"], "suites": {"math": {"items": 2}}, "context_tokens": [64]}}


def test_a_spec_without_a_judge_keeps_its_hash() -> None:
    def read(**more: object) -> Any:
        return parse_spec(yaml.safe_dump({**SMALL, **more}), "spec.yaml", NAMES)

    assert "judge" not in read().written()
    assert read().sha256 == read(judge=[]).sha256 != read(judge="phrases").sha256
    assert read(judge="phrases").judge == ("phrases",)
    with pytest.raises(SpecError, match="judge"):
        read(judge="phrase")


def test_what_a_judge_wants_is_asked_for_before_the_run(tmp_path: Path) -> None:
    judge = "rubric-endpoint:base_url=http://127.0.0.1:9,model=m,key=KVAUDIT_NO_SUCH_KEY"
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({**SMALL, "judge": judge}))
    assert "KVAUDIT_NO_SUCH_KEY is not set" in refused("run", tmp_path / "spec.yaml", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_whose_spec_names_a_judge_is_judged_and_reported_twice(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({**SMALL, "judge": "phrases"}))
    code, out, err = kvaudit("run", tmp_path / "spec.yaml", "--out", tmp_path / "out", "--threads", 1)
    assert code == 0, err
    (place,) = (tmp_path / "out" / "judged").glob("phrases-*")
    assert f"report: {place / 'report' / 'report.html'}" in out
    assert (tmp_path / "out" / "report" / "report.html").is_file()


def test_only_a_judge_has_a_folder_of_its_own(run: Path) -> None:
    assert "give --out FOLDER" in refused("judge", run)
