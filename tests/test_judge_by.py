"""A run judged by a judge: who settled what, what failed, what is asked again, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from judge_world import endpoint, labels, says
from suite_world import write_rows
from test_cli import kvaudit, refused
from test_judge import bytes_of, rewritten, sampled, units

from kvaudit.audit.judges.base import JUDGES, Judge
from kvaudit.audit.runs.judge import Judging
from kvaudit.audit.runs.names import NAMES
from kvaudit.core.errors import RunError, SpecError
from kvaudit.core.files import read_json
from kvaudit.core.judge_answers import Judgement, Question
from kvaudit.core.plugins import sha256_of
from kvaudit.core.records import Grade, Item, Message, Outcome, Record
from kvaudit.core.spec import parse_spec
from kvaudit.reports.page.run_page import page_of
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run, with_report_sections
from kvaudit.suites.math import Math

__all__ = ["labels", "sampled"]  # fixtures
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
    assert JUDGES._classes is not None
    monkeypatch.setitem(JUDGES._classes, "moody", Moody)
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
    code, text, err = kvaudit("grade", "judge", run, "--out", out, "--judge", "moody", *rest)
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
    assert f"verdict: {story['verdict_before']} before this judge" in text


def test_a_judge_is_not_given_what_it_learnt(run: Path) -> None:
    Moody.learnt = frozenset(Judge.key_of(Question(r.item_id, r.transcript[-1].content)) for r in records(run, "math"))
    line = refused("grade", "judge", run, "--out", run.parent / "again", "--judge", "moody")
    assert "was trained on 2 of these 2 answers" in line


def test_another_judge_judges_the_units_again(run: Path) -> None:
    out, _ = judged(run)
    code, _, err = kvaudit("grade", "judge", run, "--out", out, "--judge", "phrases")
    assert code == 0, err
    assert {r.judge.partition(":")[0] for r in records(out, "math")} == {"phrases"}


def test_a_judge_that_fails_on_its_first_answers_leaves_the_former_ones_grades_and_name(run: Path) -> None:
    out = run.parent / "again"
    assert kvaudit("grade", "judge", run, "--out", out, "--judge", "phrases")[0] == 0
    before = bytes_of(out)
    Moody.learnt = frozenset(Judge.key_of(Question(r.item_id, r.transcript[-1].content)) for r in records(run, "math"))
    assert "was trained on" in refused("grade", "judge", run, "--out", out, "--judge", "moody")
    after = bytes_of(out)
    assert {name for name in before if before[name] != after[name]} <= {".provenance.lock"}


def test_a_judge_that_fails_later_has_no_units_of_the_former_one_beside_its_own(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = run.parent / "again"
    assert kvaudit("grade", "judge", run, "--out", out, "--judge", "phrases")[0] == 0
    judge_unit, done = Judging._judge_unit, list[object]()

    def fail_on_the_second(self: Judging, unit: Any, claim: Any) -> None:
        if done:
            raise RunError("the judge is gone")
        done.append(unit)
        judge_unit(self, unit, claim)

    monkeypatch.setattr(Judging, "_judge_unit", fail_on_the_second)
    assert "the judge is gone" in refused("grade", "judge", run, "--out", out, "--judge", "moody")
    assert read_json(out / "provenance.json")["judged"]["judge"]["name"] == "moody"
    assert len(list((out / "records").glob("*.done.json"))) == 1
    code, _, err = kvaudit("gate", out)
    assert code == 5
    told = f"this run is not finished; finish it first: kvaudit grade judge run --out {out} --judge moody, with the"
    assert told in " ".join(err.split())


def test_a_card_without_a_judge_is_refused(run: Path) -> None:
    assert "--card needs the judge" in refused("grade", "judge", run, "--out", run.parent / "again", "--card")


def test_an_unknown_judge_is_one_line(run: Path) -> None:
    line = refused("grade", "judge", run, "--out", run.parent / "again", "--judge", "modest")
    assert "Did you mean 'moody'?" in line
    assert not (run.parent / "again").exists()


def test_a_judge_comes_from_an_outside_file(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "stern.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from kvaudit.audit.judges.base import Judge, sha256_of\n\n\n"
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
    code, _, err = kvaudit("grade", "judge", run, "--out", out, "--judge", "stern:more=2", "--plugin", file)
    assert code == 0, err
    assert {(r.score, r.judge) for r in records(out, "math")} == {(1.0, f"stern:{sha256_of(2)[:12]}")}
    assert read_json(out / "provenance.json")["judged"]["plug-ins"]["stern.py"]


def test_what_a_judge_is_unsure_of_stands_in_the_record_the_seal_and_what_is_printed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Moody, "read", lambda self, asked: [Judgement(q.answer == SAID[0], sure="12" in q.answer) for q in asked]
    )
    out, text = judged(run)
    found = records(out, "math")
    assert {(r.transcript[-1].content, r.score, r.unsure) for r in found} == {
        (SAID[0], 1.0, True),
        (SAID[1], 0.0, False),
    }
    assert {r.unsure for r in records(out, "agent")} == {False}
    lines = [line for unit in units(out) for line in unit.read_text().splitlines()]
    assert sum('"unsure": true' in line for line in lines) == 2
    assert sum("unsure" in line for line in lines) == 2  # of the others nothing is written
    seals = [read_json(unit.with_suffix(".done.json"))["changed"]["unsure"] for unit in units(out)]
    assert sorted(seals) == [0, 0, 0, 2]
    assert "unsure" in text
    cells = {(c.suite, c.policy != "none"): c.unsure for c in decide_run(load_run(out)).drift.cells}
    assert cells == {("math", False): 0, ("math", True): 2, ("agent", False): 0, ("agent", True): 0}


# harm


@pytest.fixture(scope="module")
def on_xstest(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A run of the three forms of one group of XSTest, its spec and its rows."""
    folder = tmp_path_factory.mktemp("xstest")
    (folder / "rows").mkdir()
    suites = {"xstest": {"items": 3}}
    spec = {"name": "x", "model": str(tiny_folder), "evaluate": {"policies": ["none"], "suites": suites}}
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVAUDIT_DATA", str(write_rows(folder / "rows")))
        code, text, err = kvaudit("run", folder / "spec.yaml", "--out", folder / "run", "--threads", 1)
    assert code == 0, err
    assert "graded by phrase rules only: xstest" in text
    return folder


@pytest.fixture
def xstest(on_xstest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, whose unsafe and plain requests are answered, not refused."""
    monkeypatch.setenv("KVAUDIT_DATA", str(on_xstest / "rows"))
    shutil.copytree(on_xstest, tmp_path, ignore=shutil.ignore_patterns("rows"), dirs_exist_ok=True)
    (unit,) = units(tmp_path / "run")
    rewritten(unit, _answered)
    return tmp_path / "run"


def _answered(row: dict[str, Any]) -> None:
    request = row["transcript"][-2]["content"].partition("\n")[0]
    row["transcript"][-1]["content"] = f"About that: {request[:-1]} early, and take the ladder with you."
    row["finish_reason"] = "stop"


def facets_by_form(folder: Path) -> dict[str, dict[str, bool | None]]:
    return {record.item_id.rpartition("-")[2]: dict(record.facets) for record in records(folder, "xstest")}


def test_a_grader_of_harm_says_what_is_unsafe_and_nobody_else(xstest: Path, tmp_path: Path) -> None:
    code, _, err = kvaudit("grade", "judge", xstest, "--out", tmp_path / "phrases", "--judge", "phrases")
    assert code == 0, err
    plain = facets_by_form(tmp_path / "phrases")
    assert plain["unsafe"] == {"refused": False, "coherent": True, "well_formed": True}
    with endpoint(says("0 4 4")) as server:
        judge = f"rubric-endpoint:base_url={server.url},model=m,asks=harm"
        code, _, err = kvaudit("grade", "judge", xstest, "--out", tmp_path / "harm", "--judge", judge)
        assert code == 0, err
    found = facets_by_form(tmp_path / "harm")
    assert found == {**plain, "unsafe": {**plain["unsafe"], "unsafe": True}}
    assert {r.judge.partition(":")[0] for r in records(tmp_path / "harm", "xstest")} == {"rubric-endpoint"}


def test_the_page_says_which_grader_of_harm_spoke(xstest: Path, tmp_path: Path) -> None:
    def notes(folder: Path) -> str:
        data = load_run(folder)
        page = page_of(with_report_sections(data, decide_run(data)))
        return " ".join(note for section in page.sections for note in section.notes)

    kvaudit("grade", "judge", xstest, "--out", tmp_path / "phrases", "--judge", "phrases")
    assert "No judge of harm graded xstest: unsafe answers are unknown there." in notes(tmp_path / "phrases")
    with endpoint(says("1 1 1")) as server:
        judge = f"rubric-endpoint:base_url={server.url},model=m,asks=harm"
        kvaudit("grade", "judge", xstest, "--out", tmp_path / "harm", "--judge", judge)
    assert "Unsafe in xstest: by rubric-endpoint:" in notes(tmp_path / "harm")
    assert facets_by_form(tmp_path / "harm")["unsafe"]["unsafe"] is False


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


def test_a_run_that_leaves_answers_to_a_judge_is_judged_by_the_default_one(
    xstest: Path, tmp_path: Path, labels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(labels)
    monkeypatch.setenv("KVAUDIT_DATA", str(labels))
    code, out, err = kvaudit("run", tmp_path / "spec.yaml", "--out", tmp_path / "again", "--threads", 1)
    assert code == 0, err
    (place,) = (tmp_path / "again" / "judged").glob("logistic-*")
    assert f"report: {place / 'report' / 'report.html'}" in out
    assert "alone graded" not in out
    code, _, err = kvaudit("run", tmp_path / "spec.yaml", "--out", tmp_path / "again", "--threads", 1, "--resume")
    assert code == 0, err
    assert len(list((tmp_path / "again" / "judged").iterdir())) == 1


def test_a_run_whose_spec_names_a_judge_is_judged_and_reported_twice(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({**SMALL, "judge": "phrases"}))
    code, out, err = kvaudit("run", tmp_path / "spec.yaml", "--out", tmp_path / "out", "--threads", 1)
    assert code == 0, err
    (place,) = (tmp_path / "out" / "judged").glob("phrases-*")
    assert f"report: {place / 'report' / 'report.html'}" in out
    assert (tmp_path / "out" / "report" / "report.html").is_file()


def test_only_a_judge_has_a_folder_of_its_own(run: Path) -> None:
    assert "--out is missing: give the folder" in refused("grade", "judge", run)


@pytest.mark.parametrize(
    ("reply", "quoted"), [("perhaps", "it replied 'perhaps'"), ("", "it replied ''"), ("0 3 3", "it replied '0 3 3'")]
)
def test_a_judge_that_failed_on_every_answer_is_refused_with_its_reply(run: Path, reply: str, quoted: str) -> None:
    with endpoint(says(reply)) as server:
        judge = f"rubric-endpoint:base_url={server.url},model=m,tries=1"
        code, _, err = kvaudit("grade", "judge", run, "--judge", judge)
    assert code == 2
    assert f"failed on all 4 answers, replying {quoted}" in err.strip().splitlines()[-1]
