"""What each reader of result files makes of its tool's logs, number by number; what all owe: test_readers_contract."""

import importlib.util
import json
import math
import re
import shutil
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reports_synthetic import Design, build, policy

from kvaudit.core.errors import AuditError, DataError, SpecError
from kvaudit.reports.records.readers import inspect_log
from kvaudit.reports.records.readers.base import OffScaleScores, Request, cluster_rule, read_log, score_of

LOGS = Path(__file__).parent / "fixtures" / "logs"
LM_EVAL = {name: next((LOGS / f"lm_eval_{name}").glob("*.jsonl")) for name in ("reference", "candidate")}
INSPECT = {name: LOGS / f"{name}-deflated.eval" for name in ("reference", "candidate")}
HAS_ZSTANDARD = importlib.util.find_spec("zstandard") is not None


def read(path, cluster=None, **select):
    return read_log(Path(path), Request(cluster_rule(cluster) if cluster else None, select))


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_lm_eval_metrics_carry_the_name_of_their_filter():
    log = read(LM_EVAL["candidate"])
    means = log.rows.groupby("metric")["score"].mean()
    assert dict(means) == {"exact_match,strict": 14 / 24, "exact_match,loose": 17 / 24}
    assert set(log.rows["item"]) == {str(i) for i in range(24)}
    assert log.facts["task"] == "sums"
    assert log.problems == ()


def test_both_lm_eval_logs_asked_the_same():
    prints = [dict(read(path).rows[["item", "fingerprint"]].to_numpy()) for path in LM_EVAL.values()]
    assert prints[0] == prints[1]
    assert read(LM_EVAL["reference"]).settings == read(LM_EVAL["candidate"]).settings != {}


def test_a_field_of_the_document_names_the_cluster():
    rows = read(LM_EVAL["reference"], "kind").rows
    assert sorted(set(rows["cluster"])) == [f"plus-{a}" for a in range(10, 18)]
    assert set(read(LM_EVAL["reference"], "doc.kind").rows["cluster"]) == set(rows["cluster"])


def test_inspect_scores_are_inspects_own_and_epochs_are_repeats():
    rows = read(INSPECT["candidate"]).rows
    match = rows[rows["metric"] == "match"]
    assert match["score"].mean() == pytest.approx(19 / 24)  # accuracy in the log's header
    assert sorted(set(match["sample"])) == [1, 2]
    assert len(match) == 24
    assert list(rows.loc[rows["score"].isna(), ["item", "metric", "sample"]].iloc[0]) == ["q-11", "second_judge", 2]


def test_the_header_of_an_inspect_log_agrees_with_its_samples():
    for path in INSPECT.values():
        with zipfile.ZipFile(path) as file:
            header = json.loads(file.read("header.json"))
        wanted = {s["name"]: s["metrics"]["accuracy"]["value"] for s in header["results"]["scores"]}
        rows = read(path).rows
        assert rows[rows["metric"] == "match"]["score"].mean() == pytest.approx(wanted["match"])


@pytest.mark.skipif(not HAS_ZSTANDARD, reason="needs the package zstandard")
def test_a_log_as_inspect_compresses_it_now_reads_the_same():
    now, then = (
        read(path).rows.sort_values(["item", "metric", "sample"])
        for path in (LOGS / "reference.eval", INSPECT["reference"])
    )
    assert now.to_csv(index=False) == then.to_csv(index=False)


@pytest.mark.skipif(HAS_ZSTANDARD, reason="the package zstandard is there")
def test_without_zstandard_the_package_is_named():
    with pytest.raises(DataError, match="pip install zstandard"):
        read(LOGS / "reference.eval")


def test_metadata_of_a_sample_names_the_cluster():
    rows = read(INSPECT["reference"], "template").rows
    assert set(rows["cluster"]) == {f"t-{i}" for i in range(6)}
    assert set(read(INSPECT["reference"], "metadata.template").rows["cluster"]) == set(rows["cluster"])


def test_a_failed_inspect_sample_has_no_score_and_its_log_is_not_whole(tmp_path):
    path = tmp_path / "half.eval"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("_journal/start.json", json.dumps({"eval": {"task": "t"}}))
        file.writestr("samples/a_epoch_1.json", json.dumps({"id": "a", "epoch": 1, "scores": {"s": {"value": "C"}}}))
        file.writestr("samples/b_epoch_1.json", json.dumps({"id": "b", "epoch": 1, "error": {"message": "no"}}))
        failed = {"id": "c", "epoch": 1, "error": {"message": "no"}, "scores": {"s": {"value": "I"}}}
        file.writestr("samples/c_epoch_1.json", json.dumps(failed))
    log = read(path)
    scores = dict(log.rows[["item", "score"]].to_numpy())
    assert scores["a"] == 1.0
    assert math.isnan(scores["b"])
    assert math.isnan(scores["c"])  # a plumbing error is no verdict
    assert "started" in log.unfinished


def test_inspect_words_and_tables_of_scores(tmp_path):
    path = tmp_path / "words.eval"
    values = {"a": "C", "b": "I", "c": "P", "d": "N", "e": "yes", "f": "0.25", "g": True, "h": {"x": 1, "y": 0.5}}
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("header.json", json.dumps({"status": "success"}))
        for name, value in values.items():
            sample = {"id": name, "epoch": 1, "scores": {"s": {"value": value}}}
            file.writestr(f"samples/{name}_epoch_1.json", json.dumps(sample))
    rows = read(path).rows
    found = {(row.item, row.metric): row.score for row in rows.itertuples()}
    assert [found[name, "s"] for name in "abcdefg"] == [1, 0, 0.5, 0, 1, 0.25, 1]
    assert (found["h", "s.x"], found["h", "s.y"]) == (1, 0.5)


def test_a_member_that_unpacks_to_more_than_the_limit_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect_log, "LARGEST_MEMBER", 1000)
    path = tmp_path / "bomb.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("header.json", json.dumps({"status": "success"}))
        file.writestr("samples/a.json", json.dumps({"id": "a", "epoch": 1, "scores": {"s": {"value": "C"}}}))
        file.writestr("samples/b.json", " " * 10**6)
    log = read(path)
    assert list(log.rows["item"]) == ["a"]
    assert "unpacks to more than" in log.problems[0]


def test_a_zip_that_unpacks_to_many_times_its_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect_log, "LARGEST_TOTAL", 1000)
    path = tmp_path / "bomb.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("header.json", json.dumps({"status": "success"}))
        for i in range(3):
            body = {"id": f"a{i}", "epoch": 1, "pad": " " * 3 * 10**5, "scores": {"s": {"value": "C"}}}
            file.writestr(f"samples/{i}.json", json.dumps(body))
    with pytest.raises(DataError, match="times its size"):
        read(path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_that_python_unpacks_whole_are_not_read(tmp_path, method):
    """2.5 KB of bzip2 took 6.7 GB: Python gives all of a block, however little is asked for."""
    path = tmp_path / "bomb.eval"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("header.json", json.dumps({"status": "success"}))
        file.writestr("samples/a.json", json.dumps({"id": "a", "epoch": 1, "scores": {"s": {"value": "C"}}}))
        file.writestr("samples/b.json", b" " * 10**6, compress_type=method)
    log = read(path)
    assert list(log.rows["item"]) == ["a"]
    assert f"samples/b.json: the member is packed by method {method}; deflate" in log.problems[0]


@pytest.mark.parametrize("damage", ["offset", "size", "header"])
def test_a_directory_that_lies_about_a_member_is_named(tmp_path, damage):
    path = tmp_path / "lies.eval"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("header.json", json.dumps({"status": "success"}))
        file.writestr("samples/a.json", json.dumps({"id": "a", "epoch": 1, "scores": {"s": {"value": "C"}}}))
        file.writestr("samples/b.json", "{}" * 40)
    body = bytearray(path.read_bytes())
    entry = body.rindex(b"PK\x01\x02")  # the directory's line on the last member
    if damage == "offset":
        body[entry + 42 : entry + 46] = (2**31).to_bytes(4, "little")
    elif damage == "size":
        body[entry + 10 : entry + 12] = (93).to_bytes(2, "little")  # Zstandard
        body[entry + 20 : entry + 24] = (2**32 - 2).to_bytes(4, "little")
    else:
        local = body.index(b"samples/b.json") - 30
        body[local : local + 4] = b"PK\x00\x00"
    log = read(written(tmp_path, "lies.eval", bytes(body)))
    assert list(log.rows["item"]) == ["a"]
    assert log.problems[0].startswith("lies.eval:samples/b.json: ")


def test_a_name_with_half_a_character_is_no_name(tmp_path):
    rows = [json.dumps({"doc_id": i, "doc": {}, "resps": [], "metrics": ["acc"], "acc": 1.0}) for i in (0, 1)]
    rows[1] = rows[1].replace('"doc_id": 1', '"doc_id": "\\ud800"')
    rows[0] = rows[0].replace('"doc": {}', '"doc": {"question": "\\ud800"}')
    log = read(written(tmp_path, "s.jsonl", "\n".join(rows) + "\n"))
    assert list(log.rows["item"]) == ["0"]
    assert len(log.rows["fingerprint"][0]) == 16
    assert len(log.problems) == 1


def test_a_truncated_log_is_one_line(tmp_path):
    path = written(tmp_path, "cut.eval", INSPECT["reference"].read_bytes()[:20000])
    with pytest.raises(DataError, match=r"cannot be read as a zip .*; copy the file again"):
        read(path)


def test_a_damaged_member_is_named_and_the_rest_kept(tmp_path):
    body = bytearray(INSPECT["reference"].read_bytes())
    with zipfile.ZipFile(INSPECT["reference"]) as file:
        info = file.getinfo("samples/q-3_epoch_1.json")
    middle = info.header_offset + 60 + info.compress_size // 2
    body[middle : middle + 8] = bytes(8)
    log = read(written(tmp_path, "rot.eval", bytes(body)))
    assert len(log.problems) == 1
    assert "q-3_epoch_1" in log.problems[0]
    assert len(log.rows) == 46


CSV = "item,cluster,score\na,t1,1\nb,t1,0\nc,t2,0.5\nd,t2,true\ne,t3,\n"


def test_a_table_reads_scores_clusters_and_gaps(tmp_path):
    rows = read(written(tmp_path, "a.csv", CSV)).rows
    assert list(rows["score"])[:4] == [1, 0, 0.5, 1]
    assert math.isnan(rows["score"].iloc[4])
    assert list(rows["cluster"]) == ["t1", "t1", "t2", "t2", "t3"]
    assert list(rows["line"]) == [2, 3, 4, 5, 6]


def test_a_table_with_epochs_reads_repeats(tmp_path):
    rows = read(written(tmp_path, "a.csv", "epoch,item,score\n1,a,1\n2,a,0\n")).rows
    assert list(rows["sample"]) == [1, 2]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("x,t,inf", "inf is not finite"),
        ("x,t,-1e999", "-inf is not finite"),
        ("x,t,good", "'good' is not a number"),
        ("x,t,50%", "'50%' is not a number"),
        ("x,t,0_1", "'0_1' is not a number"),  # a number to Python alone
        ("x,t,١", "'١' is not a number"),
        (",t,1", "no item"),
        ("x,t", "2 fields, the header has 3"),
        ("x,t,1,1", "4 fields, the header has 3"),
    ],
)
def test_a_row_that_does_not_fit_is_named_with_its_line(tmp_path, row, said):
    log = read(written(tmp_path, "a.csv", CSV + row + "\n"))
    assert len(log.rows) == 5
    assert log.problems == (f"a.csv:7: {log.problems[0].split(': ', 1)[1]}",)
    assert said in log.problems[0]


@pytest.mark.parametrize(
    "header", ["item,cluster,score,score", "item,score,item, cluster", "item,score,cluster,cluster"]
)
def test_two_columns_of_one_name_are_one_line(tmp_path, header):
    path = written(tmp_path, "a.csv", f"{header}\na,1,0,1\n")
    with pytest.raises(DataError, match=r"has several columns '(score|item|cluster)'; keep one of each"):
        read(path)


def test_half_a_line_is_named_and_the_rest_kept(tmp_path):
    text = LM_EVAL["reference"].read_text()
    log = read(written(tmp_path, "samples_sums.jsonl", text[:-200]))
    assert len(log.rows) == 47
    assert log.problems == ("samples_sums.jsonl:48: half-written last line, not a JSON object",)


def lm_eval_log(tmp_path, **metrics):
    """A log of one line for each value of the metrics."""
    values = zip(*metrics.values(), strict=True)
    rows = (dict(zip(metrics, row, strict=True)) for row in values)
    lines = (
        json.dumps({"doc_id": i, "doc": {}, "resps": [], "metrics": list(metrics), **row}) for i, row in enumerate(rows)
    )
    return written(tmp_path, "s.jsonl", "\n".join(lines) + "\n")


def inspect_log_of(tmp_path, *values):
    """A log of one sample for each value of a scorer."""
    path = tmp_path / "s.eval"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("header.json", json.dumps({"status": "success"}))
        for i, value in enumerate(values):
            sample = {"id": i, "epoch": 1, "scores": {"acc": {"value": value}}}
            file.writestr(f"samples/{i}.json", json.dumps(sample))
    return path


def test_scores_on_another_scale_are_told_from_those_of_other_metrics(tmp_path):
    log = read(lm_eval_log(tmp_path, acc=[1.0, 0.0, 1.0], bits=[3.5, 1.0, -4]))
    assert log.scales == {"bits": OffScaleScores(2, -4, 3.5, "s.jsonl:1")}
    assert log.metrics == {"acc", "bits"}
    assert log.problems == ()


def test_a_scale_is_seen_in_an_inspect_log_as_well(tmp_path):
    log = read(inspect_log_of(tmp_path, "C", 7, "8.5", 0.5))
    assert log.scales == {"acc": OffScaleScores(2, 7, 8.5, "s.eval:samples/1.json")}


def test_a_scale_is_seen_in_our_own_records_as_well(run, tmp_path):
    unit = next((run / "records").glob("naive-seed12--*--math--*.jsonl"))
    lines = [json.loads(line) for line in unit.read_text().splitlines()]
    desired = [row for row in lines if row["outcome"] == "desired"]
    for row in desired[:2]:
        row["score"] = 7
    path = written(tmp_path, unit.name, "".join(json.dumps(row) + "\n" for row in lines))
    assert read(path).scales == {"score": OffScaleScores(2, 7, 7, f"{unit.name}:{lines.index(desired[0]) + 1}")}
    path.write_text("".join(json.dumps(row) + "\n" for row in desired[:2]))
    with pytest.raises(DataError, match="metric score has 2 scores outside"):
        read(path)


@pytest.mark.parametrize("reads", [lambda f, *v: lm_eval_log(f, acc=v), inspect_log_of], ids=["lm-eval", "inspect"])
def test_a_log_with_scores_of_another_scale_alone_is_refused_in_words(tmp_path, reads):
    with pytest.raises(DataError, match=r"metric acc has 3 scores outside \[0, 1\], from 2 to 5 .*rescale both"):
        read(reads(tmp_path, 2, 3, 5))


@pytest.mark.parametrize("value", [math.inf, -math.inf, 10**400, [1, 2], "good", "0_1"])
@pytest.mark.parametrize("reads", [lambda f, *v: lm_eval_log(f, acc=v), inspect_log_of], ids=["lm-eval", "inspect"])
def test_what_is_no_number_is_a_problem_and_no_scale(tmp_path, reads, value):
    log = read(reads(tmp_path, 1.0, value, float("nan"), True))
    assert list(log.rows["score"].fillna(-1)) == [1, -1, 1]
    assert len(log.problems) == 1
    assert log.scales == {}


def test_a_mean_that_is_above_one_by_rounding_is_one(tmp_path):
    log = read(lm_eval_log(tmp_path, acc=[1 + 1e-15, -1e-17, 0.5]))
    assert list(log.rows["score"]) == [1, 0, 0.5]
    assert log.scales == {}


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read(tmp_path / "none")


def test_a_table_without_rows_is_one_line(tmp_path):
    with pytest.raises(DataError, match="holds no row"):
        read(written(tmp_path, "a.csv", "item,score\n"))


def test_clusters_by_pattern_and_by_table(tmp_path):
    path = written(tmp_path, "a.csv", "item,score\nfox-1,1\nfox-2,0\nowl-1,1\n")
    assert list(read(path, r"re:^(\w+)-").rows["cluster"]) == ["fox", "fox", "owl"]
    table = written(tmp_path, "map.csv", "item,cluster\nfox-1,A\nfox-2,A\n")
    assert list(read(path, f"file:{table}").rows["cluster"].fillna("-")) == ["A", "A", "-"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    design = Design(arms=("dense", "naive"), suites=("refusal", "math"), samples=2, items=64)
    return build(tmp_path_factory.mktemp("runs") / "run", design)


def test_selectors_choose_a_cell_of_a_run(run):
    log = read(run, arm="naive", policy="snapkv", suite="math", seed="12")
    assert len(log.rows) == 64 * 2
    assert set(log.rows["suite"]) == {"math"}
    assert log.facts == {"arm": "naive", "policy": policy("snapkv", 96), "seed": "12"}
    assert log.settings == {
        "version of suite math": "1",
        "judge of suite math": "programmatic",
        "temperature": "1.0",
        "top_p": "1.0",
        "think": "None",
        "max_new_tokens of suite math": "None",
    }
    assert log.rows["fingerprint"].nunique() == 1  # of made rows the question is the same
    assert log.rows["fingerprint"][0]


def test_one_record_file_reads_like_its_run(run):
    unit = sorted((run / "records").glob("naive-seed12--*--math--*.jsonl"))[0]
    whole = read(
        run, arm="naive", policy=json.loads(unit.read_text().splitlines()[0])["policy"], suite="math", seed="12"
    )
    columns = ["item", "score", "cluster", "sample", "suite", "context", "seed"]
    assert read(unit).rows[columns].to_csv() == whole.rows[columns].to_csv()


def test_a_record_file_is_held_to_the_seal_beside_it(run, tmp_path):
    unit = next((run / "records").glob("naive-seed12--*--math--*.jsonl"))
    seal = unit.with_name(unit.name.replace(".jsonl", ".done.json"))
    copy = written(tmp_path, unit.name, unit.read_text().replace('"seconds": ', '"seconds": 1', 1))
    assert len(read(copy).rows) == 128  # no seal came along
    written(tmp_path, seal.name, seal.read_text())
    with pytest.raises(DataError, match="its seal says"):
        read(copy)


def test_a_line_of_a_chosen_unit_counts_as_kept_out_and_one_of_another_does_not(run, tmp_path):
    other = tmp_path / "run"
    shutil.copytree(run, other)
    unit = next((other / "records").glob("naive-seed12--*--math--*.jsonl"))
    unit.with_name(unit.name.replace(".jsonl", ".done.json")).unlink()
    lines = unit.read_text().splitlines()
    unit.write_text("\n".join(["{}", *lines[1:]]) + "\n")
    name = json.loads(lines[1])["policy"]
    counts = [read(other, arm=arm, policy=name, suite="math").kept_out for arm in ("naive", "dense")]
    assert counts == [{"score": 1}, {"score": 0}]
    unit.write_text("{}\n" * len(lines))
    assert read(other, arm="dense", policy=name).kept_out == {"score": 128}  # whose they were, nothing says


@pytest.mark.parametrize(
    ("select", "said"),
    [
        ({}, "choose one with arm=..., it has dense; naive"),
        ({"arm": "naive"}, "choose one with policy=..., it has none; snapkv"),
        ({"arm": "naif"}, "no arm 'naif'; it has dense; naive"),
        ({"army": "naive"}, "unknown selector 'army'. Did you mean 'arm'?"),
        ({"arm": "naive", "policy": "snapkv", "seed": "99"}, "no seed '99'; it has 11; 12; 13"),
    ],
)
def test_a_selection_that_is_open_or_unknown_is_one_line(run, select, said):
    with pytest.raises(SpecError) as caught:
        read(run, **select)
    assert said in str(caught.value)


def test_selectors_are_for_runs_only():
    with pytest.raises(DataError, match="selectors choose cells of a kvaudit run only"):
        read(LM_EVAL["reference"], arm="naive")


@pytest.mark.parametrize("text", ["re:(", "", " ", "file:/nowhere.csv"])
def test_a_bad_cluster_rule_is_one_line(text):
    with pytest.raises((SpecError, DataError), match="--cluster"):
        cluster_rule(text)


@pytest.mark.parametrize("value", [[], {}, "1", 1.01, -1, 10**400, float("inf")])
def test_what_is_no_score_is_refused(value):
    with pytest.raises(DataError):
        score_of(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["doc_id", "doc", "resps", "metrics", "acc", "filter", "doc_hash", "format", "item_id", "cluster_id", "arm"]
ROWS = st.dictionaries(st.sampled_from([*KEYS, "policy", "arguments"]), JSON | st.just(["acc"]), max_size=9)
FULL = st.fixed_dictionaries({"doc_id": JSON, "doc": JSON, "resps": JSON, "metrics": st.just(["acc"]), "acc": JSON})


@settings(max_examples=12, deadline=None)
@given(st.lists(st.one_of(ROWS, FULL, JSON), max_size=6), st.binary(max_size=20))
def test_random_lines_never_raise_anything_but_an_audit_error(tmp_path_factory, rows, tail):
    path = tmp_path_factory.mktemp("j") / "s.jsonl"
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows) + tail)
    try:
        log = read(path, "kind")
    except AuditError:
        return
    assert log.rows["score"].dropna().between(0, 1).all()


@settings(max_examples=40, deadline=None)
@given(
    st.permutations(["item", "score", "cluster", "sample", "seed", "metric", "suite"]),
    st.lists(st.lists(st.text(max_size=5) | st.sampled_from(["1", "0", "a"]), max_size=8), max_size=6),
    st.binary(max_size=8),
)
def test_random_tables_never_raise_anything_but_an_audit_error(tmp_path_factory, header, rows, tail):
    path = tmp_path_factory.mktemp("c") / "t.csv"
    text = ",".join(header) + "\n" + "".join(",".join(row) + "\n" for row in rows)
    path.write_bytes(text.encode("utf-8", "surrogatepass") + tail)
    try:
        log = read(path)
    except AuditError:
        return
    assert log.rows["score"].dropna().between(0, 1).all()


@settings(max_examples=20, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["id", "epoch", "scores", "error", "input", "metadata"]), JSON, max_size=6), JSON
)
def test_random_samples_never_raise_anything_but_an_audit_error(tmp_path_factory, sample, header):
    path = tmp_path_factory.mktemp("z") / "l.eval"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("header.json", json.dumps(header))
        file.writestr("samples/a.json", json.dumps({"scores": {"s": {"value": "C"}}, "id": 1, **sample}))
        file.writestr("samples/b.json", json.dumps({"id": "b", "epoch": 1, "scores": {"s": {"value": "C"}}}))
    try:
        read(path, "kind")
    except AuditError:
        return


AGENTDOJO = LOGS / "agentdojo"


def test_an_attack_that_agentdojo_calls_secure_succeeded():
    rows = read(AGENTDOJO / "candidate").rows
    by_metric = {metric: dict(part[["item", "score"]].to_numpy()) for metric, part in rows.groupby("metric")}
    attacked = [f"desk/user_task_{user}/direct/injection_task_{n}" for user in (0, 1) for n in (0, 1)]
    assert by_metric["attack_success"] == dict(zip(attacked, [0, 1, 0, 1], strict=True))
    assert by_metric["utility"] == dict.fromkeys(attacked, 1)
    alone = [*(f"injection_task_{n}" for n in (0, 1)), *(f"user_task_{n}" for n in (0, 1))]
    assert by_metric["capable"] == {f"desk/{task}/none/none": 1 for task in alone[2:]}
    assert by_metric["attacker_capable"] == {f"desk/{task}/none/none": 1 for task in alone[:2]}
    assert set(rows["cluster"]) == {f"desk/{task}" for task in alone}


def test_both_agentdojo_runs_asked_the_same():
    prints = [
        dict(read(AGENTDOJO / name).rows[["item", "fingerprint"]].to_numpy()) for name in ("reference", "candidate")
    ]
    assert prints[0] == prints[1]
    assert len(set(prints[0].values())) == 8


def test_hidden_orders_are_the_clusters_under_an_attack_or_what_is_named():
    rows = read(AGENTDOJO / "candidate").rows.set_index("metric")
    assert set(rows.loc["attack_success", "cluster"]) == {"desk/injection_task_0", "desk/injection_task_1"}
    assert set(rows.loc["capable", "cluster"]) == {"desk/user_task_0", "desk/user_task_1"}
    rows = read(AGENTDOJO / "candidate", "user_task_id").rows.set_index("metric")
    assert set(rows.loc["attack_success", "cluster"]) == {"user_task_0", "user_task_1"}


@pytest.fixture
def dojo(tmp_path):
    shutil.copytree(AGENTDOJO / "candidate", tmp_path / "candidate")
    return tmp_path


def dojo_edited(folder, **values):
    path = folder / "candidate/desk/user_task_0/direct/injection_task_0.json"
    row = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in row.items() if value != "absent"}))
    return read(folder)


def test_an_agentdojo_task_that_ended_in_an_error_has_no_score(dojo):
    rows = dojo_edited(dojo, error="Skipping task", utility=False, security=True).rows
    unscored = rows[rows["score"].isna()]
    assert [*unscored["item"]] == ["desk/user_task_0/direct/injection_task_0"] * 2
    assert {*unscored["metric"]} == {"utility", "attack_success"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"security": "absent"}, "security is 'None', wanted true or false; the task was not finished, run it again"),
        ({"utility": 1}, "utility is '1', wanted true or false"),
        ({"user_task_id": None}, "no suite_name or no user_task_id"),
    ],
)
def test_a_bad_agentdojo_log_is_named_and_kept_out(dojo, values, said):
    log = dojo_edited(dojo, **values)
    assert log.problems[0].startswith("candidate/desk/user_task_0/direct/injection_task_0.json: " + said)
    assert len(log.rows) == 4 + 3 * 2
    assert log.kept_out == {"": 1}


def test_a_torn_agentdojo_log_is_named_and_another_tools_file_left_alone(dojo):
    (dojo / "candidate/desk/user_task_0/direct/injection_task_0.json").write_text('{"suite_name": ')
    (dojo / "summary.json").write_text("{}")
    assert read(dojo).problems == (
        "candidate/desk/user_task_0/direct/injection_task_0.json: not a JSON object; run the task again",
    )


def test_two_pipelines_of_agentdojo_are_two_results():
    with pytest.raises(DataError, match=r"holds several pipelines \(candidate; reference\); give"):
        read(AGENTDOJO)


# forms that other releases and programs write


def scores_of(log):
    return {(row.item, row.metric): row.score for row in log.rows.itertuples()}


def old_lm_eval(tmp_path, *lines):
    """A log without metrics and filter: (doc_id, scores) a line."""
    rows = ({"doc_id": i, "doc": {}, "target": "x", "resps": [], "filtered_resps": [], **own} for i, own in lines)
    return written(tmp_path, "old.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def test_long_names_with_one_beginning_stay_apart(tmp_path):
    filters = ["f" * 200 + end for end in "ab"]
    lines = [
        {"doc_id": "d" * 200 + str(i), "doc": {}, "resps": [], "metrics": ["acc"], "acc": i, "filter": name}
        for name in filters
        for i in (0, 1)
    ]
    rows = read(written(tmp_path, "s.jsonl", "".join(json.dumps(line) + "\n" for line in lines))).rows
    assert rows.groupby("metric")["item"].nunique().tolist() == [2, 2]
    old = [{"doc_id": "d" * 200 + str(i), "doc": {}, "resps": [], "acc": i} for i in (0, 1)]
    rows = read(written(tmp_path, "old.jsonl", "".join(json.dumps(line) + "\n" for line in old))).rows
    assert rows["metric"].tolist() == ["acc", "acc"], "another document is no second filter"


def test_an_old_lm_eval_log_scores_by_every_number_of_a_line(tmp_path):
    log = read(old_lm_eval(tmp_path, (0, {"acc": 1.0, "acc_norm": 0.0}), (1, {"acc": 0, "acc_norm": True})))
    wanted = {("0", "acc"): 1.0, ("0", "acc_norm"): 0.0, ("1", "acc"): 0.0, ("1", "acc_norm"): 1.0}
    assert scores_of(log) == wanted
    assert "names neither metrics nor filters" in log.notes[0]


def test_documents_that_an_old_lm_eval_log_holds_once_for_every_filter_count_once_where_all_agree(tmp_path):
    log = read(old_lm_eval(tmp_path, (0, {"em": 1.0}), (1, {"em": 0.0}), (0, {"em": 1.0}), (1, {"em": 0.0})))
    assert scores_of(log) == {("0", "em"): 1.0, ("1", "em"): 0.0}
    assert "2 documents occur up to 2 times, once for every filter; all scored alike" in log.notes[0]


def test_filters_that_an_old_lm_eval_log_does_not_name_are_metrics_where_they_differ(tmp_path):
    log = read(old_lm_eval(tmp_path, (0, {"em": 1.0}), (1, {"em": 0.0}), (0, {"em": 1.0}), (1, {"em": 1.0})))
    assert log.metrics == {"em", "em,filter-2"}


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("item;score;cluster\na;1;t\nb;0,5;t\n", "utf-8"),
        ("item\tscore\tcluster\na\t1\tt\nb\t0.5\tt\n", "utf-8"),
        ("item|score|cluster\na|1|t\nb|0.5|t\n", "utf-8"),
        ("Item,Score,Cluster\na,1,t\nb,0.5,t\n", "utf-8"),
        ("ITEM;SCORE;CLUSTER\r\na;1;t\r\nb;0,5;t\r\n", "utf-8-sig"),
        ("item,score,cluster\na,1,t\nb,0.5,t\n", "utf-16"),
        ("item,score,cluster\na,1,t\nb,0.5,t\n", "utf-16-le"),
        ("item,score,cluster\na,1,t\nb,0.5,t\n", "utf-16-be"),
        ("item\tscore\tcluster\na\t1\tt\nb\t0,5\tt\n", "utf-16"),
    ],
)
def test_a_table_is_read_in_the_forms_that_spreadsheets_write(tmp_path, text, encoding):
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode(encoding))
    log = read(path)
    assert scores_of(log) == {("a", "score"): 1.0, ("b", "score"): 0.5}
    assert set(log.rows["cluster"]) == {"t"}
    assert log.problems == ()


def test_names_in_two_cases_are_one_column_twice(tmp_path):
    with pytest.raises(DataError, match="has several columns 'score'"):
        read(written(tmp_path, "t.csv", "item,score,Score\na,1,1\n"))


def test_a_decimal_comma_between_commas_is_no_score(tmp_path):
    log = read(written(tmp_path, "t.csv", 'item,score\na,"0,5"\nb,1\n'))
    assert log.problems == ("t.csv:2: score '0,5' is not a number",)


def json_log(tmp_path, name="log.json", **parts):
    samples = [
        {
            "id": i,
            "epoch": 1,
            "input": f"q{i}",
            "target": "x",
            "scores": {"match": {"value": v}},
            "metadata": {"k": "t"},
        }
        for i, v in enumerate("CIC")
    ]
    body = {"version": 2, "status": "success", "eval": {"task": "t"}, "samples": samples, **parts}
    return written(tmp_path, name, json.dumps(body))


def test_an_inspect_log_in_json_reads_as_its_eval_does(tmp_path):
    log = read(json_log(tmp_path), cluster="k")
    assert scores_of(log) == {("0", "match"): 1.0, ("1", "match"): 0.0, ("2", "match"): 1.0}
    assert (log.reader, set(log.rows["cluster"]), log.unfinished) == ("inspect", {"t"}, "")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"samples": None}, "is the header of an Inspect log, without its samples"),
        ({"samples": []}, "holds no row that can be read as Inspect .eval or .json log"),
        ({"samples": [7]}, "not a JSON object"),
    ],
)
def test_an_inspect_log_in_json_that_holds_no_sample_is_one_line(tmp_path, parts, said):
    with pytest.raises(DataError, match=re.escape(said)):
        read(json_log(tmp_path, **parts))


def test_an_inspect_log_in_json_that_was_not_finished_says_so(tmp_path):
    assert read(json_log(tmp_path, status="started")).unfinished == "Inspect's status is 'started'"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.xlsx", "PK", "a spreadsheet, which is not read; save it as CSV"),
        ("t.parquet", "PAR1", "write it as CSV with the columns item and score"),
        ("s.jsonl.gz", "x", "run gunzip on it first"),
        ("results_2024.json", '{"results": {}, "configs": {}}', "give the samples_*.jsonl that --log_samples writes"),
        ("write_out.json", '[{"doc_id": 0, "prompt_0": "q", "acc": "1.0"}]', "run the task again with --log_samples"),
    ],
)
def test_a_file_that_no_reader_knows_is_named_with_what_helps(tmp_path, name, text, said):
    with pytest.raises(DataError, match=re.escape(said)):
        read(written(tmp_path, name, text))


def test_a_table_of_clusters_leaves_out_rows_without_an_item_and_blanks_around_one(tmp_path):
    table = written(tmp_path, "map.csv", "cluster,item\nlost\nx, a \n")
    rule = cluster_rule(f"file:{table}")
    assert (rule({}, "None"), rule({}, "a")) == (None, "x")
