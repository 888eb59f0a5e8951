"""Rollouts of other stacks: read by the names they were written with, compared with the dense pass, or refused."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rerun_world import measure
from typer.testing import CliRunner, Result

from kvaudit.audit.cli import app
from kvaudit.audit.replay.stacks import import_rollouts
from kvaudit.audit.rerun import mismatch as command
from kvaudit.audit.rerun.mismatch import FilledLogprobs, PaddedRollouts, Survey, survey
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.training.mismatch import MismatchPanel, PercentileCounter, alarms, mismatch_panel
from kvaudit.core.alarms import MISMATCH_BOUNDS
from kvaudit.core.errors import DataError, SpecError

Line = dict[str, Any]


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> LoadedModel:
    return load_model(str(tiny_folder))


@pytest.fixture(scope="module")
def sampled(loaded: LoadedModel) -> list[Line]:
    """Six rollouts of our layout with the model's own log-probs, from one plain forward each."""
    draw, lines = torch.Generator().manual_seed(5), []
    for number in range(6):
        prompt, length = 3 + number, 4 + 5 * number
        ids = torch.randint(0, 256, (prompt + length,), generator=draw)
        with torch.no_grad():
            table = loaded.model(ids[None]).logits[0].double().log_softmax(-1)
        logprobs = table[prompt - 1 : -1].gather(1, ids[prompt:, None])[:, 0]
        lines.append({"prompt_ids": ids[:prompt].tolist(), "completion_ids": ids[prompt:].tolist()})
        lines[-1] |= {"logprobs": logprobs.tolist(), "reward": float(number % 2), "group": f"g{number // 3}"}
    return lines


def write_lines(path: Path, lines: list[Line]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run_mismatch(*words: object) -> Result:
    return CliRunner().invoke(app, ["replay", "mismatch", *map(str, words)])


def error_line(path: Path, model: Path) -> str:
    done = run_mismatch(path, "--model", model)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    (line,) = done.stderr.splitlines()
    return line


def shift_logprobs(lines: list[Line], by: float) -> list[Line]:
    return [line | {"logprobs": [value + by for value in line["logprobs"]]} for line in lines]


def test_rollouts_of_the_model_itself_ring_no_alarm(sampled: list[Line], tiny_folder: Path, tmp_path: Path) -> None:
    done = run_mismatch(
        write_lines(tmp_path / "own.jsonl", sampled), "--model", tiny_folder, "--json", tmp_path / "found.json"
    )
    assert done.exit_code == 0, done.output
    assert "rollouts    6 of " in done.stdout
    assert "(kvaudit), 99 sampled tokens" in done.stdout
    assert "no alarm" in done.stdout
    report = json.loads((tmp_path / "found.json").read_text())
    assert (report["format"], report["tokens"], report["alarms"]) == ("kvaudit.mismatch", 99, [])
    assert report["panel"]["max_abs_gap"] < 1e-5
    assert report["panel"]["overlap_p5"] == pytest.approx(1.0, abs=1e-5)


def test_a_sampler_that_was_surer_by_a_nat_rings_by_overlap(
    sampled: list[Line], tiny_folder: Path, tmp_path: Path
) -> None:
    done = run_mismatch(
        write_lines(tmp_path / "sure.jsonl", shift_logprobs(sampled, 1.0)),
        "--model",
        tiny_folder,
        "--json",
        tmp_path / "j",
    )
    assert done.exit_code == 3
    assert "alarm: overlap_p5 is 0.368, below 0.86" in done.stdout
    report = json.loads((tmp_path / "j").read_text())
    assert report["panel"]["kl"] == pytest.approx(1.0, abs=1e-5)
    assert report["panel"]["k3_kl"] == pytest.approx(math.exp(-1), abs=1e-5)
    assert [alarm["name"] for alarm in report["alarms"]] == ["overlap_p5"]


def test_numbers_are_those_of_the_trainer_whatever_the_handfuls(
    sampled: list[Line], loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_lines(tmp_path / "own.jsonl", shift_logprobs(sampled, -0.3))
    panel = measure(loaded, survey(file)).panel
    monkeypatch.setattr(command, "_AT_ONCE", 60)
    for name, value in measure(loaded, survey(file)).panel.items():
        assert value == (panel[name] if value is None else pytest.approx(panel[name], rel=1e-6, abs=1e-5)), name
    # rewards 0 and 1 of three rollouts a group: the mean is 1/3 and 2/3, so that no advantage is 0
    assert panel["k3_kl_zero"] is None
    assert panel["k3_kl_positive"] == pytest.approx(math.exp(0.3) - 1.3, abs=1e-5) == panel["k3_kl_negative"]


def test_the_temperature_of_a_line_is_the_learner_s(sampled: list[Line], loaded: LoadedModel, tmp_path: Path) -> None:
    ids = torch.tensor(sampled[0]["prompt_ids"] + sampled[0]["completion_ids"])
    with torch.no_grad():
        table = (loaded.model(ids[None]).logits[0].double() / 0.5).log_softmax(-1)
    logprobs = table[2:-1].gather(1, ids[3:, None])[:, 0].tolist()
    file = write_lines(tmp_path / "warm.jsonl", [sampled[0] | {"logprobs": logprobs, "temperature": 0.5}])
    assert measure(loaded, survey(file)).panel["max_abs_gap"] < 1e-5
    assert measure(loaded, survey(file), temperature=1.0).panel["max_abs_gap"] > 0.01


def slime(line: Line) -> Line:
    prompt, completion = line["prompt_ids"], line["completion_ids"]
    return {
        "tokens": prompt + completion, "response_length": len(completion), "rollout_log_probs": line["logprobs"],
        "loss_mask": [1] * len(completion), "reward": line["reward"], "group_index": 7, "status": "completed",
    }  # fmt: skip


def verl(line: Line) -> Line:
    prompt, completion = line["prompt_ids"], line["completion_ids"]
    real = [0, 0] + [1] * (len(prompt) + len(completion)) + [0]
    return {
        "prompts": [258, 258, *prompt], "responses": [*completion, 258], "attention_mask": real,
        "response_mask": [*[1] * len(completion), 0], "rollout_log_probs": [*line["logprobs"], 0.0],
        "advantages": [*[line["reward"] - 0.5] * len(completion), 0.0], "uid": line["group"],
    }  # fmt: skip


def vllm(line: Line) -> Line:
    logprobs = {"tokens": [], "token_logprobs": line["logprobs"]}
    choice = {"index": 0, "text": "", "prompt_token_ids": line["prompt_ids"], "token_ids": line["completion_ids"]}
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice | {"logprobs": logprobs}]}


def chat(line: Line) -> Line:
    logprobs = {"content": [{"token": "a", "logprob": value, "top_logprobs": []} for value in line["logprobs"]]}
    choice = {"index": 0, "message": {}, "token_ids": line["completion_ids"], "logprobs": logprobs}
    return {"prompt_token_ids": line["prompt_ids"], "choices": [choice, choice]}


def trl(line: Line) -> Line:
    return {name: line[name] for name in ("prompt_ids", "completion_ids", "logprobs")} | {
        "env_mask": [1] * len(line["logprobs"])
    }


def kvaudit_ids(line: Line) -> Line:
    start, completion = len(line["prompt_ids"]), line["completion_ids"]
    return {
        "ids": line["prompt_ids"] + completion, "mask": [0] * start + [1] * len(completion),
        "logprobs": line["logprobs"], "advantage": -1.0, "info": {"step": 3},
    }  # fmt: skip


def prime_rl(line: Line) -> Line:
    prompt, completion = line["prompt_ids"], line["completion_ids"]
    return {
        "prompt_ids": prompt, "prompt_mask": [0] * len(prompt), "completion_ids": completion, "is_truncated": False,
        "completion_mask": [1] * len(completion), "completion_logprobs": line["logprobs"], "reward": 1.0,
    }  # fmt: skip


def skyrl(line: Line) -> Line:
    return {
        "prompt_token_ids": line["prompt_ids"], "response_ids": line["completion_ids"], "stop_reason": "stop",
        "rollout_logprobs": line["logprobs"], "loss_masks": [1] * len(line["logprobs"]), "rewards": [0.0, 1.0],
    }  # fmt: skip


def nemo_rl(line: Line) -> Line:
    start, length = len(line["prompt_ids"]), len(line["completion_ids"])
    return {
        "token_ids": [*line["prompt_ids"], *line["completion_ids"], 0, 0], "input_lengths": start + length,
        "token_loss_mask": [0] * start + [1] * length + [0, 0], "rewards": 1.0, "idx": 0,
        "generation_logprobs": [0.0] * start + line["logprobs"] + [0.0, 0.0], "content": "x",
    }  # fmt: skip


def areal(line: Line) -> Line:
    start, length = len(line["prompt_ids"]), len(line["completion_ids"])
    return {
        "input_ids": [*line["prompt_ids"], *line["completion_ids"], 0], "loss_mask": [0] * start + [1] * length + [0],
        "logprobs": [0.0] * start + line["logprobs"] + [0.0], "attention_mask": [1] * (start + length) + [0],
        "versions": [-1] * (start + length + 1), "rewards": 0.0,
    }  # fmt: skip


def sglang(line: Line) -> Line:
    drawn = [[value, token, None] for value, token in zip(line["logprobs"], line["completion_ids"], strict=True)]
    meta = {
        "output_token_logprobs": drawn,
        "input_token_logprobs": [[None, token, None] for token in line["prompt_ids"]],
    }
    return {"text": "x", "output_ids": line["completion_ids"], "meta_info": {"id": "a", "prompt_tokens": 4, **meta}}


@pytest.mark.parametrize(
    ("rewrite", "stack"),
    [
        (slime, "slime"), (verl, "verl"), (vllm, "vLLM"), (chat, "vLLM"), (trl, "kvaudit"), (kvaudit_ids, "kvaudit"),
        (prime_rl, "prime-rl"), (skyrl, "SkyRL"), (nemo_rl, "NeMo-RL"), (areal, "AReaL"), (sglang, "SGLang"),
    ],
)  # fmt: skip
def test_every_stack_s_names_give_the_same_rollout(
    rewrite: Callable[[Line], Line], stack: str, sampled: list[Line], tmp_path: Path
) -> None:
    (expected,) = import_rollouts(write_lines(tmp_path / "own.jsonl", sampled[1:2]))
    for row in import_rollouts(write_lines(tmp_path / "theirs.jsonl", [rewrite(sampled[1])])):
        assert row.stack == stack
        assert torch.equal(row.rollout.ids, expected.rollout.ids)
        assert torch.equal(row.rollout.sampled, expected.rollout.sampled)
        assert torch.equal(row.rollout.sampler_logprobs, expected.rollout.sampler_logprobs)


def test_verl_s_advantages_lose_their_padding(sampled: list[Line], tmp_path: Path) -> None:
    (row,) = import_rollouts(write_lines(tmp_path / "verl.jsonl", [verl(sampled[1])]))
    assert row.advantages is not None
    assert row.advantages.tolist() == [0.5] * 9


def test_slime_s_own_file_is_read_and_objects_in_it_are_not_run(sampled: list[Line], tmp_path: Path) -> None:
    rows = [slime(line) for line in sampled]
    torch.save({"rollout_id": 3, "samples": rows}, tmp_path / "rollout_3.pt")
    assert (found := survey(tmp_path / "rollout_3.pt")).rollouts == 6
    assert (found.stacks, found.tokens) == ({"slime"}, 99)
    torch.save({"samples": [rows[0] | {"tokens": torch.ones(3).to_sparse()}]}, tmp_path / "sparse.pt")
    with pytest.raises(DataError, match=r"sample 0: tokens\.0 is"):
        survey(tmp_path / "sparse.pt")
    torch.save({"samples": [rows[0] | {"metadata": CliRunner()}]}, tmp_path / "objects.pt")
    with pytest.raises(DataError, match="or holds objects, which are not run"):
        survey(tmp_path / "objects.pt")


def test_masked_tokens_are_not_compared(sampled: list[Line], loaded: LoadedModel, tmp_path: Path) -> None:
    """A tool's answer in the middle, with log-probs that mean nothing, or none at all."""
    line, mask = sampled[2], [1, 1, 1, 0, 0, 0, 1] + [1] * 7
    filled = [value if drawn else 0.0 for value, drawn in zip(line["logprobs"], mask, strict=True)]
    drawn = [value for value, drawn in zip(line["logprobs"], mask, strict=True) if drawn]
    for number, logprobs in enumerate((filled, drawn)):
        file = write_lines(tmp_path / f"{number}.jsonl", [line | {"mask": mask, "logprobs": logprobs}])
        assert survey(file).tokens == 11
        assert measure(loaded, survey(file)).panel["max_abs_gap"] < 1e-5


GOOD: Line = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-1.0, -2.0]}
BAD: list[tuple[Any, str]] = [
    (GOOD | {"logprobs": [-1.0, 0.5]}, "line 2 has log-prob 0.5 at token 3, wanted a finite number of at most 0"),
    (GOOD | {"logprobs": [-1.0, -math.inf]}, "line 2 has log-prob -inf at token 3"),
    (GOOD | {"logprobs": [-1.0, math.nan]}, "line 2 has log-prob nan at token 3"),
    (GOOD | {"logprobs": [-1.0, None]}, "line 2: logprobs.1 is 'None'"),
    (GOOD | {"logprobs": [-1.0]}, "line 2 has 1 log-probs for 2 completion tokens, 2 of them sampled"),
    (GOOD | {"mask": [1]}, "line 2 has 1 values in mask for 2 tokens of its completion"),
    (GOOD | {"mask": [0, 0], "logprobs": [-1.0]}, "line 2 has 1 log-probs for 2 completion tokens, 0 of them sampled"),
    (GOOD | {"advantage": [1.0]}, "line 2 has 1 values in advantage for 2 tokens"),
    (GOOD | {"advantage": 1e301}, "line 2: advantage."),
    (GOOD | {"reward": 1e308, "group": 1}, "line 2: reward is '1e+308'"),
    (GOOD | {"temperature": 1e-320}, "line 2: temperature is '1e-320': 0, or 0.001 to 100"),
    (slime(GOOD | {"reward": math.nan}), "line 2 has a reward that is no number from -1e+300 to 1e+300"),
    (slime(GOOD | {"reward": 10**400}), "line 2 has a reward that is no number from -1e+300 to 1e+300"),
    (verl(GOOD | {"reward": 1e308, "group": 1}), "line 2: advantages.0 is '1e+308'"),
    (GOOD | {"completion_ids": []}, "line 2 has 2 tokens, 0 of them after the prompt"),
    (GOOD | {"completion_ids": [3, 9999]}, "line 2 has token ids outside the model's 259"),
    (GOOD | {"completion_ids": [3, -4]}, "line 2: completion_ids.1 is '-4'"),
    (GOOD | {"prompt_ids": [5] * 5000}, "line 2 has 5002 tokens, the model 4096 positions"),
    (GOOD | {"masks": [1, 1]}, "line 2: masks: Extra inputs are not permitted"),
    (GOOD | {"ids": [1]}, "give one pair"),
    (GOOD | {"tokenizer_sha256": "0" * 64}, "line 2 has tokens of a vocabulary of sha256 000000000000, that of model"),
    ({"ids": [1, 2], "logprobs": [-1.0]}, "line 2 has ids and does not say where the prompt ends"),
    ({"logprobs": [-1.0]}, "line 2 has no tokens"),
    ({"input": "a", "output": "b", "score": 1.0}, "line 2 holds texts and no token ids, as verl's rollout_data_dir"),
    (slime(GOOD | {"reward": 1.0}) | {"response_length": 9}, "line 2 has 4 tokens, 9 of them after the prompt"),
    (verl(GOOD | {"reward": 1.0, "group": 1}) | {"attention_mask": [1]}, "line 2 has 1 values in attention_mask for 7"),
    ({"trajectory": [], "task": "x"}, "line 2 has the keys of no supported stack: trajectory, task; supported are"),
    ({"messages": [], "loss_mask": [1]}, "line 2 has the keys of no supported stack: messages, loss_mask;"),
    ({"meta_info": {"output_token_logprobs": [[-1.0, 3, None]]}}, "line 2 has no ids of its prompt; ask the server"),
    (GOOD | {"logprobs": [-1.0, -9999.0]}, "line 2 has log-prob -9999 at token 3, a placeholder for -inf"),
    (GOOD | {"logprobs": [-100.0, -1.0]}, "line 2 has log-prob -100 at token 2, a placeholder for -inf"),
    (vllm(GOOD | {"logprobs": [-1e9, -1.0]}), "line 2 has log-prob -1e+09 at token 2, a placeholder for -inf"),
    (areal(GOOD | {"logprobs": [-1.0, -1e4]}), "line 2 has log-prob -10000 at token 3, a placeholder for -inf"),
    (
        areal(GOOD) | {"attention_mask": [0, 1, 1, 1, 1]},
        "line 2 has padding before its last token in attention_mask; pad on the right",
    ),
    (areal(GOOD) | {"attention_mask": [1, 1, 1]}, "line 2 has 3 values in attention_mask for 5 tokens"),
    (nemo_rl(GOOD) | {"input_lengths": 9}, "line 2 has 6 tokens, and says that it has 9"),
    (
        verl(GOOD | {"reward": 1.0, "group": 1}) | {"token_level_scores": [1e300] * 2},
        "line 2 has a reward that is no number from -1e+300 to 1e+300",
    ),
    ([1, 2], "line 2 holds a list, wanted an object"),
    ('{"prompt_ids": [1, 2], "compl', "line 2 is not JSON (Unterminated string"),
    ("[" * 100_000, "line 2 is not JSON ("),
]


@pytest.mark.parametrize(("bad", "words"), BAD, ids=[words[:60] for _, words in BAD])
def test_bad_input_is_told_with_file_and_line(bad: Any, words: str, loaded: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    file.write_text(json.dumps(GOOD) + "\n" + (bad if isinstance(bad, str) else json.dumps(bad)) + "\n")
    with pytest.raises(DataError) as caught:
        measure(loaded, survey(file))
    assert words in str(caught.value)
    assert "rollouts.jsonl'" in str(caught.value)


def zero_logprobs(line: Line, start: int, stop: int | None = None) -> Line:
    logprobs = list(line["logprobs"])
    logprobs[start:stop] = [0.0] * len(logprobs[start:stop])
    return line | {"logprobs": logprobs}


def test_log_probs_that_were_filled_in_are_named_with_line_and_token(
    sampled: list[Line], tiny_folder: Path, tmp_path: Path
) -> None:
    """All of one rollout, the tails of all, the tail of one, and a single one that nothing but filling explains."""
    files = {
        "one": (
            [sampled[0], zero_logprobs(sampled[1], 0), *sampled[2:]],
            "9 log-probs in 1 rollouts",
            "line 2 token 4",
        ),
        "tails": ([zero_logprobs(line, 2) for line in sampled], "87 log-probs in 6 rollouts", "line 1 token 5"),
        "tail": ([*sampled[:3], zero_logprobs(sampled[3], -3)], "3 log-probs in 1 rollouts", "line 4 token 22"),
        "single": ([*sampled[:3], zero_logprobs(sampled[3], 5, 6)], "1 log-probs in 1 rollouts", "line 4 token 11"),
    }
    for name, (lines, count, place) in files.items():
        done = run_mismatch(write_lines(tmp_path / f"{name}.jsonl", lines), "--model", tiny_folder)
        output = " ".join(done.stdout.split())
        assert done.exit_code == 3, output
        assert f"alarm: {count} are exactly 0, first {place}" in output
        assert "no alarm" not in output


def test_a_zero_of_a_masked_token_says_nothing(sampled: list[Line], loaded: LoadedModel, tmp_path: Path) -> None:
    mask = [0, 0, 0, 1] + [1] * (len(sampled[1]["logprobs"]) - 4)
    line = zero_logprobs(sampled[1], 0, 3) | {"mask": mask}
    assert measure(loaded, survey(write_lines(tmp_path / "masked.jsonl", [line]))).filled is None


def test_a_zero_of_a_token_that_the_learner_is_sure_of_is_no_filling() -> None:
    filled, sure = FilledLogprobs(), torch.tensor([[0.0, -1e-7, -0.04, -0.06]])
    ones = torch.ones(1, 4, dtype=torch.bool)
    filled.add(PaddedRollouts(torch.zeros(1, 4), sure, ones, torch.zeros(1, 4), ["line 1"], [2]))
    assert (filled.tokens, filled.doubted, filled.place) == (4, 1, "")


def test_what_is_refused_is_one_line_and_exit_code_2(tiny_folder: Path, tmp_path: Path) -> None:
    assert "do not exist; give a file of one rollout a line" in error_line(tmp_path / "missing.jsonl", tiny_folder)
    for name, text in (("empty.jsonl", ""), ("blank.jsonl", "\n\n")):
        (tmp_path / name).write_text(text)
        assert "holds no rollout" in error_line(tmp_path / name, tiny_folder)
    assert "unknown dtype" in run_mismatch(tmp_path, "--model", tiny_folder, "--dtype", "float33").stderr
    assert "--temperature is 1e-09" in run_mismatch(tmp_path, "--model", tiny_folder, "--temperature", "1e-9").stderr


def test_a_declared_vocabulary_that_fits_is_taken(loaded: LoadedModel, tmp_path: Path) -> None:
    vocabulary = json.dumps(sorted(loaded.chat.tokenizer.get_vocab().items())).encode()
    line = GOOD | {"tokenizer_sha256": hashlib.sha256(vocabulary).hexdigest()}
    assert measure(loaded, survey(write_lines(tmp_path / "own.jsonl", [line]))).panel["frac_not_finite"] == 0.0


def test_several_temperatures_need_one_to_be_said(loaded: LoadedModel, tmp_path: Path) -> None:
    lines = [GOOD | {"temperature": 0.7}, GOOD | {"temperature": 1.0}]
    with pytest.raises(SpecError, match=r"several temperatures \(0.7, 1\)"):
        measure(loaded, survey(write_lines(tmp_path / "two.jsonl", lines)))
    with pytest.raises(SpecError, match=r"2 of 3 rollouts have no temperature, the others 0.7"):
        measure(loaded, survey(write_lines(tmp_path / "some.jsonl", [lines[0], GOOD, GOOD])))


def test_lines_of_other_stacks_may_say_temperature_and_vocabulary(
    loaded: LoadedModel, sampled: list[Line], tmp_path: Path
) -> None:
    for other in (verl, slime):
        lines = [other(line) | {"temperature": 0.5} for line in sampled[:2]]
        assert measure(loaded, survey(write_lines(tmp_path / f"{other.__name__}.jsonl", lines))).temperature == 0.5
        wrong = survey(write_lines(tmp_path / "wrong.jsonl", [other(sampled[0]) | {"tokenizer_sha256": "0" * 64}]))
        with pytest.raises(DataError, match=r"vocabulary|tokenizer"):
            measure(loaded, wrong)


@pytest.mark.parametrize("extra", [{"advantage": 10**40}, {"reward": 1e300, "group": 1}, {"reward": 1.0}])
def test_advantages_may_be_of_any_size_or_unknown(extra: Line, loaded: LoadedModel, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "own.jsonl", [GOOD | extra, GOOD])
    panel = measure(loaded, survey(file)).panel
    signs = [name for name in ("positive", "zero", "negative") if panel[f"k3_kl_{name}"] is not None]
    assert signs == {"advantage": ["positive"], "reward": ["zero"] if "group" in extra else []}[next(iter(extra))]


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvaudit.audit.replay.stacks._LONGEST", 50)
    with pytest.raises(DataError, match="line 1 is longer than"):
        survey(write_lines(tmp_path / "long.jsonl", [GOOD]))


def test_a_survey_finds_the_longest_rollout_and_the_highest_id(tmp_path: Path) -> None:
    found: Survey = survey(write_lines(tmp_path / "a.jsonl", [GOOD, GOOD | {"prompt_ids": [90, 1, 2]}, GOOD]))
    assert (found.longest, found.highest) == ((5, "line 2"), (90, "line 2"))


UNDRAWN = (
    GOOD | {"mask": [0, 0]},
    GOOD | {"mask": [0, 0], "logprobs": []},
    GOOD | {"completion_ids": [], "logprobs": []},
)


@pytest.mark.parametrize("line", UNDRAWN)
def test_a_rollout_without_a_drawn_token_is_skipped_and_counted(line: Line, tiny_folder: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [GOOD, line, GOOD])
    counts = survey(file)
    assert (counts.rollouts, counts.tokens, counts.undrawn) == (2, 4, ["line 2"])
    done = run_mismatch(file, "--model", tiny_folder, "--json", tmp_path / "found.json")
    assert "skipped     1 without a sampled token, line 2 first" in done.stdout
    assert json.loads((tmp_path / "found.json").read_text())["skipped"] == 1


def test_a_file_of_which_most_rollouts_hold_no_drawn_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 of 3 rollouts have no sampled token, line 1 first"):
        survey(write_lines(tmp_path / "a.jsonl", [UNDRAWN[0], GOOD, UNDRAWN[1]]))


def test_alarms_are_rung_beyond_their_bounds_and_not_at_them() -> None:
    quiet = {"overlap_p5": 0.86, "ess": 0.3, "frac_sequences_vetoed": 0.2, "frac_not_finite": 0.0}
    assert alarms(quiet) == []
    for name, value in (("overlap_p5", 0.85), ("ess", 0.29), ("frac_sequences_vetoed", 0.21), ("frac_not_finite", 0.1)):
        assert [bound.name for bound in alarms(quiet | {name: value})] == [name]
    assert alarms(dict.fromkeys((bound.name for bound in MISMATCH_BOUNDS), None)) == []


def test_the_panel_counts_what_truncation_and_rejection_would_touch() -> None:
    learner = torch.tensor([[math.log(3), 0.0], [math.log(1e-5), 0.0]])
    mask, unknown = torch.ones(2, 2, dtype=torch.bool), torch.full((2, 1), math.nan)
    panel = mismatch_panel(torch.zeros(2, 2), learner, mask, unknown)
    assert panel["mismatch/frac_ratio_above_2"] == 0.25
    assert panel["mismatch/frac_ratio_below_1e-4"] == 0.25
    assert panel["mismatch/frac_sequences_vetoed"] == 0.5
    assert panel["mismatch/k3_kl_positive"] is panel["mismatch/k3_kl_zero"] is panel["mismatch/k3_kl_negative"] is None


def test_batches_add_up_to_the_panel_of_all() -> None:
    draw = torch.Generator().manual_seed(2)
    sampler, learner = (-torch.rand(8, 5, generator=draw, dtype=torch.float64) for _ in range(2))
    mask, signs = torch.rand(8, 5, generator=draw) < 0.8, torch.randn(8, 1, generator=draw)
    parts = MismatchPanel()
    for rows in (slice(0, 3), slice(3, 8)):
        parts.add(sampler[rows], learner[rows], mask[rows], signs[rows])
    panel = mismatch_panel(sampler, learner, mask, signs)
    for name, value in parts.numbers().items():
        assert value == (panel[f"mismatch/{name}"] if value is None else pytest.approx(panel[f"mismatch/{name}"])), name


def test_a_percentile_of_many_values_is_right_to_a_millionth(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.rand(5000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    few, many = PercentileCounter(), PercentileCounter()
    few.add(values)
    monkeypatch.setattr("kvaudit.audit.training.mismatch._MAX_EXACT", 900)
    for part in values.split(500):
        many.add(part)
    exact = values.sort().values
    assert few.percentile(0.05) == pytest.approx(float(exact[249] * 0.05 + exact[250] * 0.95))
    assert float(exact[249]) - 1e-6 <= many.percentile(0.05) <= float(exact[250]) + 1e-6


def test_a_panel_of_nothing_has_no_numbers():
    assert set(MismatchPanel().numbers().values()) == {None}
