"""What two files have to share before a number is made of them, and what is said where there is none to make."""

import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import yaml
from reports_synthetic import Design, build, write_unit
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.core.spec import RunSpec

LOST = range(45)  # of 300 items
ARMS = ("--select-a", "arm=dense", "--select-b", "arm=smd")
SAME = ("--select-a", "arm=dense", "--select-b", "arm=dense")


def compared(a: Path, b: Path, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["compare", str(a), str(b), *words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    design = Design(
        arms=("dense", "smd"),
        seeds=(1,),
        policies=("none",),
        suites=("refusal", "agent"),
        items=200,
        clusters=100,
        seed_sd=0.0,
        estimands=("alike",),
        drops={("smd", "agent"): 0.3},
    )
    return build(tmp_path_factory.mktemp("whole") / "run", design)


def rewritten(run: Path, edit) -> None:
    for unit in (run / "records").glob("*.jsonl"):
        rows = [json.loads(line) for line in unit.read_text().splitlines()]
        write_unit(unit, "".join(json.dumps(row) + "\n" for row in edit(rows)))


def respecified(run: Path, edit) -> None:
    spec = yaml.safe_load((run / "spec.yaml").read_text())
    edit(spec["evaluate"])
    (run / "spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    story = json.loads((run / "provenance.json").read_text())
    story["spec_sha256"] = RunSpec.model_validate(spec).sha256
    story["spec_file_sha256"] = hashlib.sha256((run / "spec.yaml").read_bytes()).hexdigest()
    (run / "provenance.json").write_text(json.dumps(story))


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def test_a_run_that_stopped_before_a_suite_is_not_whole(whole: Path, copy: Path) -> None:
    assert compared(whole, whole, *ARMS)[0] == 3
    for unit in (copy / "records").glob("*agent*"):
        unit.unlink()
    code, said = compared(copy, copy, *ARMS)
    assert code == 5
    assert "INCOMPLETE: run: resume this run first, it is incomplete: planned units missing: 1 of 2" in said
    alone = [word for side in "ab" for word in (f"--select-{side}", "suite=refusal")]
    assert compared(copy, copy, *ARMS, *alone)[0] == 0  # of what was chosen nothing is missing


def test_a_run_that_lacks_planned_rows_in_both_arms_is_not_whole(copy: Path) -> None:
    rewritten(copy, lambda rows: rows[:-60])
    code, said = compared(copy, copy, *ARMS)
    assert code == 5
    assert "140 of 200 rows in dense seed 1" in said


def test_another_question_under_one_name_is_no_pair(whole: Path, copy: Path) -> None:
    def other(rows):
        for row in rows:
            row["transcript"][0]["content"] = "Never refuse."
        return rows

    rewritten(copy, other)
    code, said = compared(whole, copy, *SAME)
    assert code == 5
    assert "HASH: 400 items differ in question" in said


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("temperature", lambda grid: grid.update(temperature=0.5)),
        ("top_p", lambda grid: grid.update(top_p=0.5)),
        ("max_new_tokens of suite agent", lambda grid: grid["suites"]["agent"].update(max_new_tokens=4)),
    ],
)
def test_answers_that_were_drawn_otherwise_are_no_pair(whole: Path, copy: Path, name: str, edit) -> None:
    respecified(copy, edit)
    code, said = compared(whole, copy, *SAME)
    assert code == 5
    assert f"HASH: the files were made with different {name}" in said


def test_rows_of_another_file_are_no_pair(whole: Path, tmp_path: Path) -> None:
    runs = [shutil.copytree(whole, tmp_path / name) for name in "ab"]
    for run, digit in zip(runs, "cd", strict=True):
        story = json.loads((run / "provenance.json").read_text())
        story["inputs"] = {"rows": {"refusal/rows.csv": digit * 64}}
        (run / "provenance.json").write_text(json.dumps(story))
    code, said = compared(*runs, *SAME)
    assert code == 5
    assert "the files were made with different rows refusal/rows.csv" in said


def test_comparing_a_cell_with_itself_is_said(whole: Path) -> None:
    assert "Both sides are the same cell of the same file" in compared(whole, whole, *SAME)[1]
    assert "Both sides are the same file" not in compared(whole, whole, *ARMS)[1]


def test_a_copy_of_the_reference_is_said(tmp_path: Path) -> None:
    one, other = (table(tmp_path / name, rows_of()) for name in ("plain.csv", "fp8.csv"))
    assert "Both files hold the same results, row by row" in compared(one, other)[1]
    lossy = table(tmp_path / "lossy.csv", rows_of(lost=(3,)))
    assert "Both files hold" not in compared(one, lossy)[1]


# --- tables -----------------------------------------------------------------------------------------------------------


def table(path: Path, rows, header: str = "item,cluster,score") -> Path:
    path.write_text(header + "\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def rows_of(lost=(), items: int = 300):
    return [(f"i{n}", f"t{n}", int(n not in lost)) for n in range(items)]


@pytest.mark.parametrize("strays", [(200,), (100, 250)])
def test_a_quote_that_is_never_closed_takes_no_rows_with_it(tmp_path: Path, strays: tuple[int, ...]) -> None:
    sides = []
    for name, lost in (("a", ()), ("b", LOST)):
        rows = [(f'"why {item}' if int(item[1:]) in strays else item, *rest) for item, *rest in rows_of(lost)]
        sides.append(table(tmp_path / f"{name}.csv", rows))
    code, said = compared(*sides)
    assert code == 2
    assert "cannot be read as CSV" in said


def test_quotes_that_are_closed_are_read(tmp_path: Path) -> None:
    rows = [(f'"why, ""{item}""\nand so"', *rest) for item, *rest in rows_of()]
    a, b = (table(tmp_path / name, rows) for name in ("a.csv", "b.csv"))
    code, said = compared(a, b)
    assert code == 0
    assert "300 items in 300 templates" in said


def test_suites_of_other_names_are_not_one(tmp_path: Path) -> None:
    header = "item,cluster,score,suite"
    a, b, unnamed = (
        table(tmp_path / f"{n}.csv", [(*row, suite) for row in rows_of()], header)
        for n, suite in enumerate(("tone", "math", ""))
    )
    code, said = compared(a, b)
    assert code == 5
    assert "NO_COMMON_ITEM" in said
    assert compared(a, unnamed)[0] == 0


def test_an_item_of_two_clusters_in_a_table_of_them_is_one_line(tmp_path: Path) -> None:
    a, b = (table(tmp_path / name, [row[::2] for row in rows_of()], "item,score") for name in ("a.csv", "b.csv"))
    mapping = table(tmp_path / "map.csv", [("i0", "x"), ("i1", "x"), ("i0", "y")], "item,cluster")
    code, said = compared(a, b, "--cluster", f"file:{mapping}")
    assert code == 2
    assert "has item 'i0' in two clusters, 'x' and 'y'; keep one" in said


def test_clusters_of_one_item_each_are_told(tmp_path: Path) -> None:
    a, b = (table(tmp_path / name, rows_of()) for name in ("a.csv", "b.csv"))
    assert "Every item is its own cluster, so all items were treated as independent" in compared(a, b)[1]


# --- logs of other tools ----------------------------------------------------------------------------------------------

SCORERS = {"match": "C"}


def eval_log(path: Path, header=None, scores=lambda n: SCORERS, **more) -> Path:
    """An Inspect log of 100 samples in 100 templates."""
    plan = {"steps": [{"solver": "generate", "params": {}}], "config": {"temperature": 0.0, "max_connections": 4}}
    about = {"task": "t", "scorers": [{"name": "match"}], "model_generate_config": {}, "task_version": 0}
    whole = {"status": "success", "eval": about, "plan": plan}
    for key, value in (header or {}).items():
        whole[key] = {**whole[key], **value} if isinstance(value, dict) else value
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("header.json", json.dumps(whole))
        for n in range(100):
            said = {"role": "user", "content": f"what is {n}", "id": f"{path.name}{n}"}
            sample = {"id": n, "epoch": 1, "input": [said], "target": "x", "metadata": {"template": f"t{n}"}}
            sample["scores"] = {name: {"value": value} for name, value in scores(n).items()}
            file.writestr(f"samples/{n}_epoch_1.json", json.dumps({**sample, **more}))
    return path


def logs(tmp_path: Path, *words: str, **of_b) -> tuple[int, str]:
    sides = eval_log(tmp_path / "a.eval"), eval_log(tmp_path / "b.eval", **of_b)
    return compared(*sides, "--cluster", "metadata.template", *words)


def test_the_random_names_of_messages_are_no_other_question(tmp_path: Path) -> None:
    assert logs(tmp_path)[0] == 0


@pytest.mark.parametrize(
    ("name", "header"),
    [
        ("decoding", {"plan": {"config": {"temperature": 1.5}}}),
        ("decoding", {"eval": {"model_generate_config": {"top_p": 0.5}}}),
        ("solvers", {"plan": {"steps": [{"solver": "system_message", "params": {"template": "Refuse."}}]}}),
        ("task_version", {"eval": {"task_version": 1}}),
        ("task_args", {"eval": {"task_args": {"fewshot": 10}}}),
    ],
)
def test_an_inspect_log_that_was_made_otherwise_is_no_pair(tmp_path: Path, name: str, header) -> None:
    code, said = logs(tmp_path, header=header)
    assert code == 5
    assert f"HASH: the files were made with different {name}" in said


def test_how_patiently_a_model_was_called_does_not_matter(tmp_path: Path) -> None:
    assert logs(tmp_path, header={"plan": {"config": {"temperature": 0.0, "max_connections": 90}}})[0] == 0


def test_a_log_that_was_invalidated_is_no_result(tmp_path: Path) -> None:
    code, said = logs(tmp_path, header={"invalidated": True})
    assert code == 5
    assert "INCOMPLETE: b.eval is incomplete: it was invalidated" in said
    code, said = logs(tmp_path, invalidation={"reason": "wrong key"})
    assert code == 2
    assert "holds no row" in said


def test_scores_that_somebody_edited_are_counted(tmp_path: Path) -> None:
    edited = {"match": {"value": "C", "history": [{"value": "I"}, {"value": "C", "provenance": {"author": "me"}}]}}
    plain, other = eval_log(tmp_path / "a.eval"), tmp_path / "b.json"
    with zipfile.ZipFile(plain) as file:
        samples = [json.loads(file.read(f"samples/{n}_epoch_1.json")) for n in range(100)]
        header = json.loads(file.read("header.json"))
    samples = [sample | {"scores": edited if number < 7 else sample["scores"]} for number, sample in enumerate(samples)]
    other.write_text(json.dumps({"version": 2, **header, "samples": samples}))
    said = compared(plain, other, "--cluster", "metadata.template")[1]
    assert "b.json: 7 scores were edited after the run, and are compared as edited" in said
    assert "a.eval: 7 scores" not in said


def test_answers_without_the_metric_are_counted(tmp_path: Path) -> None:
    def some(n: int):
        return {"other": "C"} if n < 30 else {"other": "C", "match": "C"}

    sides = eval_log(tmp_path / "a.eval", scores=some), eval_log(tmp_path / "b.eval", scores=some)
    said = compared(*sides, "--cluster", "metadata.template", "--metric", "match")[1]
    assert "a.eval: 30 of 100 answers have no match; they are not compared." in said


def lm_eval_log(
    path: Path, choices=(" yes", " no"), *, hashes: bool = True, listed: bool = False, hot: float = 0
) -> Path:
    known = {name: "0" * 64 for name in ("doc_hash", "prompt_hash", "target_hash")} if hashes else {}
    rows = []
    for n in range(80):
        texts = [[f"what is {n}", choice] for choice in choices] + [[f"say {n}", {"temperature": hot}]]
        named = {f"gen_args_{i}": {"arg_0": one, "arg_1": two} for i, (one, two) in enumerate(texts)}
        row = {"doc_id": n, "doc": {"n": n, "t": f"t{n}"}, "resps": [], "metrics": ["acc"], "acc": 1.0, "target": "0"}
        rows.append(row | known | {"arguments": texts if listed else named})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("hashes", [True, False])
@pytest.mark.parametrize("listed", [True, False])
def test_other_answers_to_choose_from_are_another_question(tmp_path: Path, *, hashes: bool, listed: bool) -> None:
    how = {"hashes": hashes, "listed": listed}
    a, same = (lm_eval_log(tmp_path / f"{n}.jsonl", **how) for n in "as")
    other, hot = (
        lm_eval_log(tmp_path / "b.jsonl", (" A", " B"), **how),
        lm_eval_log(tmp_path / "h.jsonl", hot=1, **how),
    )
    assert compared(a, same, "--cluster", "doc.t")[0] == 0
    for log, said in ((other, "HASH: 80 items differ in question"), (hot, "made with different decoding")):
        code, words = compared(a, log, "--cluster", "doc.t")
        assert code == 5
        assert said in words


def test_near_copies_in_a_log_of_lm_eval_are_one_cluster(tmp_path: Path) -> None:
    """The harness's hashes differ between near copies; what was asked tells."""
    log = lm_eval_log(tmp_path / "a.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    for n, row in enumerate(rows):
        row["doc_hash"] = f"{n:064}"
        row["arguments"] = {"gen_args_0": {"arg_0": "what  is" + " " * n, "arg_1": "Yes" if n % 2 else "yes"}}
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "count as one with it: 79." in compared(log, log, "--items-are-independent")[1]


@pytest.mark.parametrize(
    "document",
    [{"q": "7+7?", "answer": 14}, {"question": "What is the colour of the sky?", "question_id": 0}],
)
def test_a_document_asked_behind_other_examples_is_one_question(tmp_path: Path, document: dict[str, object]) -> None:
    log = lm_eval_log(tmp_path / "a.jsonl")
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    for n, row in enumerate(rows):
        row["doc"] = document | ({"question_id": n} if "question_id" in document else {})
        row["arguments"] = {"gen_args_0": {"arg_0": f"example {n}; What is the colour of the sky?"}}
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "count as one with it: 79." in compared(log, log, "--items-are-independent")[1]


def dojo(folder: Path, succeeds: int, capable: int = 35) -> Path:
    """AgentDojo's logs of 70 user tasks under an attack and without, and of 35 goals of the attacker asked outright."""
    blank = {"suite_name": "bank", "pipeline_name": "p", "attack_type": None, "messages": [], "error": None}
    rows = [{"user_task_id": f"user_task_{n}", "injection_task_id": None, "utility": True} for n in range(70)]
    rows += [
        {"user_task_id": f"user_task_{n}", "attack_type": "direct", "injection_task_id": f"injection_task_{n % 35}"}
        | {"utility": True, "security": n < succeeds}
        for n in range(70)
    ]
    rows += [
        {"user_task_id": f"injection_task_{n}", "injection_task_id": None, "utility": n < capable} for n in range(35)
    ]
    folder.mkdir()
    for n, row in enumerate(rows):
        (folder / f"{n}.json").write_text(json.dumps(blank | row))
    return folder


def test_the_attackers_goals_asked_outright_are_no_tasks_of_the_user(tmp_path: Path) -> None:
    a, b = dojo(tmp_path / "a", 3), dojo(tmp_path / "b", 3, capable=20)
    code, said = compared(a, b, "--metric", "capable")
    assert code == 0
    assert "70 items" in said
    assert compared(a, b, "--metric", "attacker_capable")[0] == 3


def test_scores_that_a_reader_has_turned_are_not_turned_again(tmp_path: Path, whole: Path) -> None:
    a, b = dojo(tmp_path / "a", 3), dojo(tmp_path / "b", 40)
    assert compared(a, b, "--metric", "attack_success")[0] == 3
    for words in ((a, b, "--metric", "attack_success"), (whole, whole, *ARMS)):
        code, said = compared(*words, "--lower-is-better")
        assert code == 2
        assert "1 is desired in every metric already" in said
