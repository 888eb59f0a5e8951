"""Our suites as tasks of the real lm-evaluation-harness: asked, graded and compared as in a grid of our own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lm_eval_world import settle
from test_choices import Chosen, item
from test_cli import kvaudit, refused
from test_lm_eval_model import SNAPKV, evaluated, served

from kvaudit.audit.policies import parse_policy
from kvaudit.audit.sampling.conversations import play
from kvaudit.audit.sampling.model import load_model
from kvaudit.audit.sampling.sampler import Decoding, Sampler
from kvaudit.audit.serving.harness.tasks import read_rows, results, write_tasks
from kvaudit.core.errors import DataError, SpecError
from kvaudit.core.records import Item
from kvaudit.suites.base import SUITES, Suite

ITEMS = 12


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settle(tmp_path_factory.mktemp("data"))
    folder = tmp_path_factory.mktemp("tasks")
    code, out, err = kvaudit(
        "harness", "tasks", folder, "--suites=refusal,math", f"--items={ITEMS}", "--context-tokens=160", "--seed=3"
    )
    assert (code, out.splitlines(), err) == (0, ["kvaudit_refusal: 12 items", "kvaudit_math: 12 items"], "")
    return folder


@pytest.fixture(scope="module")
def samples(tasks: Path) -> dict[str, list[dict[str, Any]]]:
    """What the harness makes of the task under two policies."""
    return {policy: evaluated(served(policy, batch_size=4), tasks, "kvaudit_refusal") for policy in ("none", SNAPKV)}


def asked(name: str) -> tuple[Suite, list[Item]]:
    suite = SUITES.get(name)()
    return suite, suite.items("eval", ITEMS, 3, 160, load_model().chat.count_tokens)


def logged(folder: Path, samples: Sequence[dict[str, Any]]) -> Path:
    """The samples as the harness writes them with --log_samples."""
    from lm_eval.loggers import EvaluationTracker

    tracker = EvaluationTracker(output_path=str(folder))
    tracker.general_config_tracker.model_name_sanitized = "model"
    tracker.date_id = "2026-01-01T00-00-00.0"
    tracker.save_results_samples(task_name="kvaudit_refusal", samples=list(samples))
    (written,) = folder.rglob("samples_*.jsonl")
    return written


def test_a_written_task_asks_and_grades_as_the_grid_does(samples: dict[str, list[dict[str, Any]]]) -> None:
    suite, items = asked("refusal")
    for policy, found in samples.items():
        sampler = Sampler(load_model(), parse_policy(policy))
        wanted = play(sampler, [(suite, each) for each in items], Decoding(1, 0.0), [0] * ITEMS)
        for played, sample in zip(wanted, found, strict=True):
            assert sample["doc"]["item_id"] == played.item.item_id
            assert sample["arguments"][0][0] == load_model().chat.opening_text(played.item.messages)
            if played.finish_reason == "stop":  # that an answer was cut off is not known to the harness
                assert sample["resps"][0][0] == played.transcript[-1].content
                assert sample["score"] == played.grade.score
                known = {name: value for name, value in played.grade.facets.items() if value is not None}
                assert {name: sample[name] for name in sample["metrics"][1:]} == known


def test_two_logs_of_a_written_task_are_compared_by_their_clusters(
    samples: dict[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    logs = [logged(tmp_path / name, samples[policy]) for name, policy in (("dense", "none"), ("small", SNAPKV))]
    code, out, _ = kvaudit("compare", *logs, "--metric=score", "--cluster=doc.cluster_id", "--margin=5")
    assert code in (3, 4)  # twelve items may decide a loss, and never a pass
    assert "NOCLUSTERS" not in out


def test_options_become_multiple_choice_and_are_weighed_by_the_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SUITES.all()
    monkeypatch.setitem(SUITES._found, "chosen", Chosen)  # type: ignore[arg-type]
    monkeypatch.setattr(Chosen, "gold", lambda self, item: self.options(item)[:1])
    items = [replace(item(text=f"Question {number}."), item_id=str(number)) for number in range(3)]
    assert [tuple(task) for task in write_tasks(tmp_path, Chosen(), items)] == [("kvaudit_chosen_choice", 3, 0)]
    found = evaluated(served(), tmp_path, "kvaudit_chosen_choice")
    wanted = play(
        Sampler(load_model(), parse_policy("none")), [(Chosen(), i) for i in items], Decoding(1, 0.0), [0] * 3
    )
    assert [sample["score"] for sample in found] == [played.grade.score for played in wanted]


def test_what_several_turns_or_a_dialogue_make_stays_out(tmp_path: Path) -> None:
    wanted = "suite agent takes 3 turns, and a task of the harness is one question and one answer"
    assert wanted in refused("harness", "tasks", tmp_path / "x", "--suites=agent", "--items=2")
    suite, items = asked("refusal")
    opened = replace(items[0], messages=(*items[0].messages, *items[0].messages))
    with pytest.raises(SpecError, match="suite refusal opens in the middle of a dialogue"):
        write_tasks(tmp_path, suite, [opened])
    assert write_tasks(tmp_path, suite, [opened, *items[1:]])[0].left_out == 1


def test_a_row_may_hold_what_ends_lines_elsewhere(tmp_path: Path) -> None:
    suite, (first, *_) = asked("refusal")
    prose = (
        first.messages[0],
        replace(first.messages[1], content="One.\u2028Two.\x85Three.\n" + first.messages[1].content),
    )
    write_tasks(tmp_path, suite, [replace(first, messages=prose)])
    assert read_rows(tmp_path / "kvaudit_refusal.jsonl")["test"]["user"] == [prose[1].content]


def test_rows_of_another_version_are_refused(tasks: Path) -> None:
    row = json.loads((tasks / "kvaudit_refusal.jsonl").read_text().splitlines()[0])
    assert results(row, [row["gold"]])["score"] == 1.0
    with pytest.raises(DataError, match=r"rows of suite refusal are of version 0, this kvaudit has"):
        results({**row, "suite_version": "0"}, [row["gold"]])


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_tasks_that_have_no_folder_are_one_line(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "give another path" in refused("harness", "tasks", tmp_path / place, "--items=2", "--context-tokens=160")
