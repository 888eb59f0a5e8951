"""kvaudit as a model of the real lm-evaluation-harness: its answers and scores are those of the sampler."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lm_eval_world import row, settle, write_tasks
from test_cli import refused
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.sampling.conversations import score_answers
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import load_model, locate
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.core.errors import SpecError
from kvaudit.core.records import Message, Role
from kvaudit.core.text import install_command

SNAPKV = "snapkv:budget=48,window=8,interval=1,chunk=8"


@pytest.fixture(scope="module", autouse=True)
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    settle(tmp_path_factory.mktemp("data"))
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@cache
def served(policy: str | None = None, **options: Any) -> Any:
    from kvaudit.audit.serving.harness.model import KvauditLM

    return KvauditLM(policy=policy, **options)


def evaluated(model: Any, folder: Path, task: str, *, chat: bool = True, **settings: Any) -> list[dict[str, Any]]:
    """Run a task in the harness and return its logged samples in document order."""
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    found = TaskManager(include_path=[str(folder)], include_defaults=False).load(task)
    limit = settings.pop("limit", None)
    for loaded in found["tasks"].values():
        loaded.set_fewshot_seed(1234)
        if settings:
            loaded.config.generation_kwargs.update(settings)
    done = evaluate(model, found, limit=limit, bootstrap_iters=0, apply_chat_template=chat, fewshot_as_multiturn=chat)
    assert done is not None
    return sorted(done["samples"][task], key=lambda sample: sample["doc_id"])


@cache
def harness_own() -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(locate("embedded")), device="cpu", dtype="float32")


def answers(samples: list[dict[str, Any]]) -> list[str]:
    return [sample["resps"][0][0] for sample in samples]


def scores(samples: list[dict[str, Any]]) -> list[float]:
    return [response[0][0] for sample in samples for response in sample["resps"]]


@pytest.mark.parametrize(
    ("task", "chat"), [("door", True), ("door_shots", True), ("door_shots", False), ("door_stop", False)]
)
def test_uncompressed_answers_equal_those_of_the_harness(tasks: Path, task: str, chat: bool) -> None:
    ours, theirs = (
        evaluated(model, tasks, task, chat=chat, limit=5) for model in (served(batch_size=4), harness_own())
    )
    assert answers(ours) == answers(theirs)
    assert [sample["exact_match"] for sample in ours] == [sample["exact_match"] for sample in theirs]
    assert [sample["prompt_hash"] for sample in ours] == [sample["prompt_hash"] for sample in theirs]


@pytest.mark.parametrize("chat", [True, False])
def test_uncompressed_scores_equal_those_of_the_harness(tasks: Path, chat: bool) -> None:
    ours, theirs = (evaluated(m, tasks, "door_choice", chat=chat, limit=5) for m in (served(), harness_own()))
    assert scores(ours) == pytest.approx(scores(theirs), abs=1e-4)
    assert [sample["acc"] for sample in ours] == [sample["acc"] for sample in theirs]
    assert [sample["resps"][0][0][1] for sample in ours] == [sample["resps"][0][0][1] for sample in theirs]


def test_compressed_answers_equal_those_of_the_sampler(tasks: Path) -> None:
    model, decoding = load_model(), Decoding(12, temperature=0.0)
    sampler, wanted = Sampler(model, parse_policy(SNAPKV)), []
    for number in range(6):
        written = row(number)
        prompt = model.chat.prompt([Message(Role.SYSTEM, written["system"]), Message(Role.USER, written["user"])])
        (direct,) = sampler.open([prompt.ids], [0], roles=[prompt.roles]).decode(decoding)
        assert direct is not None
        wanted.append(model.chat.text(direct.ids).split("\n\n")[0])
    found = answers(evaluated(served(SNAPKV, batch_size=4), tasks, "door", limit=6))
    assert found == wanted
    assert found != answers(evaluated(served(), tasks, "door", limit=6))


def test_compressed_scores_are_read_token_by_token(tasks: Path) -> None:
    model = served(SNAPKV.replace(",", ";"))
    context, options = row(1)["user"], [" The code: wolf island.", " I must refuse.", " I"]
    pairs = [model._encode_pair(context, option) for option in options]
    found = model._loglikelihood_tokens([((context, "x"), *pair) for pair in pairs], disable_tqdm=True)
    prompt = model._prompt(context, tuple(pairs[0][0]))
    (wanted,) = score_answers(model._sampler, [prompt], [[ids for _, ids in pairs]], [7])
    assert [value for value, _ in found] == pytest.approx([sum(own.logprobs) for own, _ in wanted], abs=1e-6)
    assert [greedy for _, greedy in found] == [own.greedy for own, _ in wanted]


def test_a_pinned_role_needs_a_chat(tasks: Path) -> None:
    policy = "streaming:budget=48,sink=0,window=8,pin=system"
    assert len(evaluated(served(policy), tasks, "door", limit=2)) == 2
    assert len(evaluated(served(policy), tasks, "door_choice", limit=2)) == 2
    with pytest.raises(
        SpecError, match="the policy pins roles, which plain text does not have; add --apply_chat_template"
    ):
        evaluated(served(policy), tasks, "door", limit=2, chat=False)


def test_an_answer_continues_its_given_beginning(tasks: Path) -> None:
    ours, theirs = (evaluated(model, tasks, "door_begun", limit=5) for model in (served(), harness_own()))
    assert answers(ours) == answers(theirs)


def test_repeated_draws_differ_within_a_run_and_not_between_runs(tasks: Path) -> None:
    asked = {"do_sample": True, "temperature": 1.5, "limit": 3}
    once, again = (
        [sample["resps"][0] for sample in evaluated(served(seed=3), tasks, "door_often", **asked)] for _ in range(2)
    )
    assert once == again
    assert len(set(once[0])) > 1


def test_the_results_name_the_policy() -> None:
    told = served("h2o:budget=64").get_model_info()
    assert told["policy"] == parse_policy("h2o:budget=64").canonical
    assert told["policy_hash"] == parse_policy("h2o:budget=64").hash


def test_whole_texts_are_an_error(tasks: Path) -> None:
    with pytest.raises(SpecError, match="loglikelihood_rolling asks how probable a whole text is: read in one prefill"):
        evaluated(served(), tasks, "door_rolling", chat=False)


def test_the_answer_cache_of_the_harness_is_an_error(tmp_path: Path) -> None:
    from lm_eval.api.model import CachingLM

    with pytest.raises(SpecError, match="--use_cache would give one policy's answers to another"):
        CachingLM(served(), str(tmp_path / "cache.db"))


def test_unsupported_arguments_are_errors(tasks: Path) -> None:
    with pytest.raises(SpecError, match=r"model_args has window, known are .* policy=snapkv:budget=96;window=8"):
        served("snapkv:budget=48", window=8)
    with pytest.raises(SpecError, match="batch_size is 'auto', expected a number of rows"):
        served(batch_size="auto")
    with pytest.raises(SpecError, match="the task asks for num_beams; kvaudit supports only temperature and top_p"):
        evaluated(served(), tasks, "door", num_beams=2)
    with pytest.raises(SpecError, match=r"a prompt of \d+ tokens and an answer of 90000 exceed the model's"):
        evaluated(served(), tasks, "door", max_gen_toks=90000)
    with pytest.raises(SpecError, match="answers of max_gen_toks 0, expected 1 or more"):
        evaluated(served(), tasks, "door", max_gen_toks=0)


def test_a_missing_harness_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "kvaudit.audit.serving.harness.model", raising=False)
    assert install_command("lm-eval") in refused("harness", "lm-eval", "ls", "tasks")


def test_an_error_of_the_harness_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval.__main__

    def refuse() -> None:
        raise ValueError("Tasks not found:\nnothing")

    monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", refuse)
    assert refused("harness", "lm-eval", "run", "--tasks", "nothing") == "error: lm-eval: Tasks not found: nothing"


@pytest.mark.parametrize(("words", "code"), [([], 0), (["--help"], 0), (["run", "--no-such-option"], 2)])
def test_what_the_harness_says_of_its_own_options_is_no_error_of_ours(words: list[str], code: int) -> None:
    done = CliRunner().invoke(app, ["harness", "lm-eval", *words])
    assert done.exit_code == code
    assert "code outside kvaudit" not in done.stderr
