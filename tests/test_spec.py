"""Specs: what is filled in, what the hash depends on, and that every mistake is one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvaudit.audit.policies import parse_policy
from kvaudit.audit.runs.folder import check_folder
from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.training.config import TrainConfig
from kvaudit.core.endpoint import check_no_address
from kvaudit.core.errors import AuditError, DataError, SpecError
from kvaudit.core.files import parse_yaml
from kvaudit.core.spec import RunSpec, dump_spec, load_spec, parse_spec

SPEC = """\
format: 1
name: quick
train:
  arms: [dense, naive]
  seeds: [1, 2]
  policy: "snapkv:budget=48,window=8"
  suites: [refusal, math]
evaluate:
  policies: [none, "streaming:budget=96"]
  suites: [refusal, math]
  context_tokens: [192]
"""
STREAMING = parse_policy("streaming:budget=96").canonical


def parsed(old: str = "", new: str = "") -> RunSpec:
    assert old in SPEC
    return parse_spec(SPEC.replace(old, new, 1), "q.yaml", NAMES)


def test_what_is_left_open_is_filled_in() -> None:
    spec = parsed()
    assert spec.evaluate.suites["math"].items == "auto"
    assert spec.gate.reference == "dense"
    assert spec.gate.primary == (STREAMING,)
    assert spec.gate.margins == {"refusal.unsafe": 5.0, "refusal.helpful": 5.0, "refusal.well_formed": 5.0, "math": 5.0}
    assert spec.gate.estimands == ("alike", "deployed")
    assert spec.arms == (("dense", 1), ("naive", 1), ("dense", 2), ("naive", 2))  # cut short, a run holds whole seeds


def test_without_training_the_base_model_is_its_own_reference() -> None:
    start, end = SPEC.index("train:"), SPEC.index("evaluate:")
    spec = parse_spec(SPEC[:start] + SPEC[end:], "q.yaml", NAMES)
    assert (spec.arms, spec.gate.reference) == ((("base", 0),), "base")


def test_the_base_model_joins_when_asked() -> None:
    assert parsed("  context_tokens: [192]", "  context_tokens: [192]\n  base: true").arms[0] == ("base", 0)


def test_the_dumped_spec_reads_back_equal() -> None:
    spec = parsed()
    again = parse_spec(dump_spec(spec), "copy", NAMES)
    assert (again, again.sha256) == (spec, spec.sha256)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"snapkv:budget=48,window=8"', "{name: snapkv, budget: 48, window: 8}"),
        ('"snapkv:budget=48,window=8"', '"snapkv: window=8, budget=48"'),
        ("[refusal, math]\n  context", "{refusal: {items: auto}, math: {}}\n  context"),
        ("[192]", "[192]\n  samples: 1"),
        ("format: 1", "data: /somewhere/else"),
    ],
)
def test_the_hash_knows_meaning_not_spelling(old: str, new: str) -> None:
    assert parsed(old, new).sha256 == parsed().sha256


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("budget=48", "budget=49"),
        ("[1, 2]", "[1, 3]"),
        ("[192]", "[193]"),
        ("name: quick", "name: quicker"),
        ("[192]", "[192]\n  seed: 1"),
        ("format: 1", "gate: {alpha: 0.01}"),
    ],
)
def test_the_hash_changes_with_what_is_measured(old: str, new: str) -> None:
    assert parsed(old, new).sha256 != parsed().sha256


def test_a_limited_spec_asks_for_no_pilot_that_its_items_cannot_give() -> None:
    evaluate = parsed().evaluate.model_copy(update={"pilot": 24})
    piloted = parsed().model_copy(update={"evaluate": evaluate})
    assert piloted.limited(24).evaluate.pilot == 24
    limited = piloted.limited(6)
    assert limited.evaluate.pilot is None
    assert parse_spec(json.dumps(limited.written()), "SPEC").sha256 == limited.sha256  # what is written can be read


def test_a_limited_spec_is_another_spec_unless_nothing_is_cut() -> None:
    spec = parsed()
    assert {part.items for part in spec.limited(3).evaluate.suites.values()} == {3}
    assert spec.limited(3).sha256 != spec.sha256
    sized = parsed("suites: [refusal, math]\n  c", "suites: {refusal: {items: 9}, math: {items: 7}}\n  c")
    assert sized.limited(1000).sha256 == sized.sha256
    assert {part.items for part in spec.limited(1000).evaluate.suites.values()} == {1000}  # of auto: that number


def test_two_training_runs_differ_in_arm_and_seed_only() -> None:
    train = parsed().train
    assert train is not None
    one, other = TrainConfig.of(train, "dense", 1).to_json(), TrainConfig.of(train, "naive", 2).to_json()
    assert {key for key in one if one[key] != other[key]} == {"arm", "seed"}


def test_variables_are_filled_in_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parsed("name: quick", "name: quick\nmodel: ${SOME_MODEL}/x")
    monkeypatch.setenv("SOME_MODEL", "/models")
    assert spec.model_path == "/models/x"
    monkeypatch.delenv("SOME_MODEL")
    with pytest.raises(AuditError, match="variable SOME_MODEL is not set"):
        _ = spec.model_path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "  policies: [none",
            "  polices: [none",
            "q.yaml line 9: unknown key 'polices' in evaluate. Did you mean 'policies'? Known: base, batch_tokens, ",
        ),
        ("format: 1", "trian: {}", "q.yaml line 1: unknown key 'trian'. Did you mean 'train'?"),
        ("[refusal, math]\n  c", "{math: {itms: 3}}\n  c", "line 10: unknown key 'itms' in evaluate.suites.math. Did"),
        ("format: 1", "format: 2", "q.yaml line 1: format is 2, wanted 1"),
        ("name: quick\n", "", "q.yaml: name is missing"),
        ("name: quick", "name: ../up", "name is '../up', wanted up to 100 letters, digits, '.', '_' or '-'"),
        ("[1, 2]", "[1, 1]", "train.seeds names 1 twice"),
        ("[1, 2]", "[1, 2.5]", "q.yaml line 5: train.seeds.1 is 2.5, wanted a whole number"),
        ("dense, naive", "dense, nave", "unknown arm 'nave'. Did you mean 'naive'?"),
        ("snapkv", "snapk", "unknown policy or engine 'snapk'. Did you mean 'snapkv'?"),
        ("budget=48", "budgt=48", "'budgt'. Did you mean 'budget'?"),
        ("budget=48", "budget=7", "budget=7 is below sink + window"),
        ("budget=48", "budget=some", "budget='some', wanted int"),
        ("[none, ", "[", "evaluate.policies lacks 'none'"),
        ("[none, ", "[none, none, ", "evaluate.policies names none twice"),
        ("suites: [refusal, math]\n  c", "suites: [refusl]\n  c", "unknown suite 'refusl'. Did you mean 'refusal'?"),
        ("[192]", "[0]", "evaluate.suites.refusal.context_tokens is missing: the suite's items are made to a length"),
        ("[192]", "192", "evaluate.context_tokens is 192, wanted a list"),
        ("[192]", "[192]\n  samples: 4", "evaluate.samples is 4 at temperature 0"),
        ("format: 1", "gate: {reference: smd}", "unknown gate.reference 'smd'. Known: dense, naive"),
        ("dense, naive", "naive", "nothing to compare with: no arm is dense and the base is not evaluated; set"),
        ("format: 1", "gate: {arms: [dense]}", "unknown arm in gate.arms 'dense'. Known: naive"),
        ("format: 1", "gate: {margins: {agent: 5}}", "unknown suite in gate.margins 'agent'. Known: math, refusal"),
        ("format: 1", "gate: {margins: {math: 0}}", "gate.margins.math is 0, wanted greater than 0"),
        ("format: 1", "gate: {margins: {math: 0.001}}", "gate.margins.math is 0.001, wanted at least 0.01 (percentage"),
        ("format: 1", "gate: {estimand_margins: {parity: 1e-3}}", "gate.estimand_margins.parity is "),
        ("format: 1", "gate: {estimands: []}", "gate.estimands is [], wanted"),
        (
            "format: 1",
            "gate: {estimands: [interaction]}",
            "gate.estimands.0 is 'interaction', wanted serving, alike, deployed, worst, selectivity or parity",
        ),
        ("format: 1", "gate: {alpha: .nan}", "gate.alpha is nan, wanted"),
        ("format: 1", "gate: {primary: ['h2o:budget=96']}", "unknown policy in gate.primary 'h2o:budget=96"),
        ("name: quick", "name: quick\nname: b", "q.yaml line 3: not a usable spec: key 'name' is given twice"),
        ("name: quick", "name: [", "q.yaml line 4: not a usable spec: expected"),
        ("[refusal, math]\nevaluate", "[refusal, math]\n  group: 1\nevaluate", "'group' is 1, wanted 2 or more"),
        ("[refusal, math]\nevaluate", "[refusal, math]\n  loss: grp\nevaluate", "unknown loss 'grp'"),
        ("[192]", "[]", "evaluate.suites.refusal.context_tokens is missing"),
        ("suites: [refusal, math]\n  c", "suites: {math: 3}\n  c", "evaluate.suites.math is 3, wanted a mapping"),
        ("suites: [refusal, math]\n  c", "suites: [[math]]\n  c", "evaluate.suites is [['math']], wanted a mapping"),
        ("[192]", "[192]\n  base: maybe", "evaluate.base is 'maybe', wanted true or false"),
        ("[192]", "[192]\n  temperature: hot", "evaluate.temperature is 'hot', wanted a number"),
        ("[192]", "[10000001]", "context_tokens.0 is 10000001, wanted less than or equal to 10000000"),
        ("[refusal, math]\nevaluate", "[refusal, math]\n  group: 1025\nevaluate", "wanted less than or equal to 1024"),
        ("[refusal, math]\nevaluate", "[refusal, math]\n  steps: 1000001\nevaluate", "train.steps is 1000001, wanted"),
        ("suites: [refusal, math]\n  c", "suites: {math: {items: 1000001}}\n  c", "math.items is 1000001, wanted"),
        ("suites: [refusal, math]\n  c", "suites: &a [*a]\n  c", "q.yaml line 10: aliases are not allowed"),
        ("evaluate:", "evaluate: &a\n  gate: *a", "q.yaml line 9: aliases are not allowed"),
        ("[192]", "[192]\n  temperature: true", "evaluate.temperature is True, wanted a number"),
        ("[192]", "[192]\n  temperature: 1e-320", "evaluate.temperature is '1e-320', wanted 0, or 0.001 to 100"),
        ("format: 1", "gate: {margins: {math: true}}", "gate.margins.math is True, wanted a number"),
        (
            "[refusal, math]\nevaluate",
            "[refusal, math]\n  learning_rate: 1.0e30\nevaluate",
            "train.learning_rate is '1.0e30', wanted less",
        ),
        ("[refusal, math]\nevaluate", "[refusal, math]\n  weights: [true, 1]\nevaluate", "train.weights.0 is True"),
        ("[refusal, math]\nevaluate", "[refusal, math]\n  temperature: 0\nevaluate", "train.temperature is 0, wanted"),
        ("[refusal, math]\nevaluate", "[refusal, math]\n  steps: 0\nevaluate", "train.steps is 0, wanted"),
        (
            "[refusal, math]\nevaluate",
            "[refusal, math]\n  learning_rate: 0.0\nevaluate",
            "train.learning_rate is 0.0, wanted",
        ),
        (
            "[refusal, math]\nevaluate",
            "[refusal, math]\n  learning_rate: .nan\nevaluate",
            "train.learning_rate is nan, wanted",
        ),
        (
            "[refusal, math]\nevaluate",
            "[refusal, math]\n  max_grad_norm: .inf\nevaluate",
            "train.max_grad_norm is inf, wanted",
        ),
        ("[refusal, math]\nevaluate", "[refusal, math]\n  beta: -0.1\nevaluate", "train.beta is -0.1, wanted"),
        (
            "[refusal, math]\nevaluate",
            "[refusal, math]\n  epsilon_low: 1\nevaluate",
            "'epsilon_low' is 1.0, wanted less than 1",
        ),
        ("name: quick", "name: 2026-13-45", "q.yaml: not a usable spec: month must be in 1..12"),
        (
            "name: quick",
            "name: !!timestamp x",
            "q.yaml line 2: tags are not allowed, got 'tag:yaml.org,2002:timestamp'",
        ),
        ("[192]", "[192]\n  base: !!bool x", "q.yaml line 12: tags are not allowed"),
        ("[192]", f"[{'9' * 5000}]", "q.yaml line 11: a value of 5000 characters, wanted at most 2000"),
        ("[192]", f"[0x{'f' * 1990}]", "evaluate.context_tokens.0 is 1580394411519677820251512"),
        ("name: quick", 'name: quick\nmodel: "a\\0b"', "q.yaml line 3: a value holds the character U+0000"),
        ("name: quick", 'name: quick\ndata: "a\\ud800b"', "q.yaml line 3: a value holds the character U+D800"),
        ("format: 1", f"gate: {'[' * 2000}{']' * 2000}", "q.yaml line 1: nested more than 20 levels deep"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_is_wrong(old: str, new: str, message: str) -> None:
    with pytest.raises(AuditError) as caught:
        parsed(old, new)
    assert message in str(caught.value)
    assert str(caught.value).startswith("q.yaml")
    assert "\n" not in str(caught.value)


def test_what_a_run_wrote_reads_back_equal_where_its_plug_ins_are_not() -> None:
    spec = parsed("format: 1", "gate: {profile: release, margins: {math: 2}, primary: ['streaming:budget=96']}")
    again = parse_spec(dump_spec(spec), "copy")
    assert (again, again.sha256) == (spec, spec.sha256)


OUTSIDE = """\
name: o
train: {arms: [mine], seeds: [1], policy: {name: mypolicy, budget: 4}, suites: [mysuite], loss: myloss}
evaluate: {policies: [none, {compose: ["mypolicy:budget=4", {name: kivi, bits: 2}]}], suites: [mysuite, x],
  context_tokens: [8]}
gate: {reference: mine, primary: [{compose: [{name: kivi}, {name: mypolicy}]}], margins: {x: 3}}
"""


def test_without_names_a_spec_is_read_as_it_stands() -> None:
    spec = parse_spec(OUTSIDE, "o.yaml")
    assert spec.train is not None
    assert spec.train.policy == "mypolicy:budget=4"
    assert spec.evaluate.policies == ("none", "mypolicy:budget=4+kivi:bits=2")
    assert spec.gate.primary == ("mypolicy:budget=4+kivi:bits=2",)  # however it is spelled there
    assert spec.gate.margins == {"x": 3.0}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[{compose: [{name: kivi}, {name: mypolicy}]}]", "[other]", "o.yaml: unknown policy in gate.primary 'other'"),
        ("margins: {x: 3}", "margins: {y: 3}", "o.yaml: unknown suite in gate.margins 'y'"),
        ("policies: [none, ", "policies: [3, none, ", "o.yaml line 3: evaluate.policies.0 is 3, wanted text"),
    ],
)
def test_without_names_what_a_spec_says_of_itself_is_checked(old: str, new: str, message: str) -> None:
    assert old in OUTSIDE
    with pytest.raises(AuditError) as caught:
        parse_spec(OUTSIDE.replace(old, new), "o.yaml")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "- a", "just text", "3"])
def test_a_spec_that_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(AuditError, match="wanted a spec, a mapping"):
        parse_spec(text, "q.yaml", NAMES)


def test_a_spec_file_that_is_missing_or_binary_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        load_spec(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00name")
    with pytest.raises(DataError, match="not UTF-8"):
        load_spec(tmp_path / "binary.yaml")
    with pytest.raises(DataError, match="Is a directory"):
        load_spec(tmp_path)


def test_contrasts_are_written_by_name_and_read_by_name_or_code() -> None:
    by_code, by_name = (
        parsed("format: 1", f"format: 1\ngate: {{estimands: [{words}]}}")
        for words in ("E1, E2, E3", "alike, deployed, worst")
    )
    assert by_code == by_name
    assert by_code.sha256 == by_name.sha256
    assert "estimands:\n  - alike\n  - deployed\n  - worst" in dump_spec(by_name)


def asked(part: str, more: str = "") -> dict[str, tuple[int, ...]]:
    """The lengths of every suite of a grid, as a run that is to be made reads them."""
    text = f"format: 1\nname: q\nevaluate:\n  policies: [none]\n  suites: {part}\n{more}"
    grid = parse_spec(text, "q.yaml", NAMES).evaluate
    return {suite: grid.contexts_of(suite) for suite in grid.suites}


def test_public_rows_are_asked_as_published_beside_suites_that_have_lengths() -> None:
    assert asked("[xstest, gsm8k]") == {"xstest": (0,), "gsm8k": (0,)}
    assert asked("[refusal, xstest]", "  context_tokens: [192, 384]\n") == {"refusal": (192, 384), "xstest": (0,)}
    assert asked("{xstest: {context_tokens: published}}") == {"xstest": (0,)}


def test_a_context_is_a_suite_of_its_own_beside_the_bare_rows() -> None:
    part = "{xstest: {items: 8, context: [published, brief, book], context_tokens: [512, 1024]}}"
    assert asked(part) == {"xstest": (0,), "xstest@brief": (0,), "xstest@book": (512, 1024)}
    assert asked("{xstest: {}, xstest@book: {}}", "  context_tokens: [512]\n") == {
        "xstest": (0,),
        "xstest@book": (512,),
    }


def test_a_spec_that_was_written_reads_back_with_its_contexts() -> None:
    text = "format: 1\nname: q\nevaluate:\n  policies: [none]\n  suites: {xstest: {context: [published, brief]}}\n"
    spec = parse_spec(text, "q.yaml", NAMES)
    again = parse_spec(dump_spec(spec), "q.yaml")
    assert (again, again.sha256) == (spec, spec.sha256)
    assert again.evaluate.contexts_of("xstest@brief") == (0,)


@pytest.mark.parametrize(
    ("part", "more", "told"),
    [
        ("{xstest: {context_tokens: 512}}", "", "context_tokens is 512, but its rows are asked as published; put them"),
        ("[xstest]", "  context_tokens: [512]\n", "is 512, but every suite asks its rows as published; leave it out"),
        ("{xstest@book: {context_tokens: 512}}", "", "holds xstest@book without xstest: the effect of a context is"),
        ("{xstest: {context: [published, book]}}", "", "xstest@book.context_tokens is missing: the suite's items are"),
        ("{xstest: {context: [published, bok]}}", "", "unknown context of suite xstest 'bok'. Did you mean 'book'"),
        ("{xstest: {context: []}}", "", "evaluate.suites.xstest.context is [], wanted published or names of contexts"),
        ("{xstest: {context: 3}}", "", "evaluate.suites.xstest.context is 3, wanted published or names of contexts"),
        ("{xstest: {context: [book, book]}}", "", "evaluate.suites.xstest.context names book twice; give each once"),
        (
            "{refusal: {context: book}}",
            "",
            "refusal builds its own contexts; only suites of public rows take @CONTEXT",
        ),
    ],
)
def test_a_context_that_cannot_be_is_one_line(part: str, more: str, told: str) -> None:
    with pytest.raises(SpecError) as caught:
        asked(part, more)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_probe_of_rows_as_published_needs_no_lengths() -> None:
    text = "format: 1\nname: p\nmodel: m\nprobe: {}\nevaluate: {suites: {xstest: {items: 24}}}\n"
    grid = parse_spec(text, "q.yaml", NAMES).evaluate
    assert (grid.context_tokens, grid.contexts_of("xstest")) == ((), (0,))


def test_an_old_run_of_public_rows_is_read_as_it_stands() -> None:
    """Before, a suite without a length of its own had the grid's; read back without names it still has."""
    text = (
        "format: 1\nname: q\nevaluate:\n  policies: [none]\n  suites: {xstest: {items: 8}}\n  context_tokens: [160]\n"
    )
    assert parse_spec(text, "spec.yaml").evaluate.contexts_of("xstest") == (160,)


# --- a server where weights are wanted -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", ["http://127.0.0.1:8000/v1", "HTTPS://host/v1", "localhost:8000", "10.0.0.7:8000/v1", " http://host"]
)
@pytest.mark.parametrize(
    "part", ["model: '{}'", "checkpoints: {{tuned: '{}'}}", "checkpoints: {{tuned: {{seeds: {{0: '{}', 1: here}}}}}}"]
)
def test_a_server_as_model_leads_to_the_command_and_the_guide(model: str, part: str) -> None:
    text = "name: a\nevaluate: {policies: [none], suites: {math: {items: 2}}, context_tokens: [192]}\n"
    with pytest.raises(SpecError) as error:
        parse_spec(text + part.format(model), "spec.yaml", NAMES)
    said = str(error.value)
    assert "\n" not in said
    assert f"{part.partition(':')[0]}{'.tuned' if 'tuned' in part else ''} is" in said
    assert "kvaudit check MODEL --reference URL#NAME --candidate URL#NAME" in said
    assert "engine: endpoint" in said
    assert Path(said.rpartition("(")[2].rstrip(")")).is_file()  # the guide of this installation


def test_a_password_in_an_address_is_not_shown() -> None:
    with pytest.raises(SpecError) as error:
        check_no_address("model", "https://me:hidden@host/v1?key=hidden", "a folder")
    assert "model is 'https://host/v1', a server's address" in str(error.value)
    assert "hidden" not in str(error.value)


def test_a_server_as_spec_file_is_told_apart_from_a_file_that_is_missing() -> None:
    with pytest.raises(SpecError, match="the spec is 'http://host:8000/v1', a server's address"):
        load_spec(Path("http://host:8000/v1"), NAMES)  # a path keeps one slash of two


@pytest.mark.parametrize("name", ["./http", "org/http-model", "qwen:7", "localhost-model", "embedded", "1.5B/model"])
def test_a_name_that_is_no_address_is_none(name: str) -> None:
    check_no_address("model", name, "a folder")


def test_a_probe_names_its_model_as_the_endpoint_does() -> None:
    spec = parse_spec("name: q\nmodel: 'http://inside/name'\nprobe: {}\n", "probe.yaml", NAMES)
    assert spec.model == "http://inside/name"


def test_a_character_that_json_escapes_as_a_pair_is_that_character() -> None:
    written = json.dumps({"name": "ok", "note 😀": "😀"})
    assert "\\ud83d\\ude00" in written
    assert parse_yaml(written, "spec", "spec").table == {"name": "ok", "note 😀": "😀"}
    with pytest.raises(SpecError, match="holds the character U\\+D83D"):
        parse_yaml(r'{"a": "\ud83d"}', "spec", "spec")


@pytest.mark.parametrize("text", ["0110", "-010", "1:12", "190:20:30"])
def test_a_number_that_only_yaml_1_1_reads_so_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=f"line 2: {text} is a number of base 8 or 60 to YAML 1.1; write it without"):
        parse_yaml(f"a: 1\nitems: {text}", "spec", "spec")
    assert parse_yaml(f"items: '{text}'", "spec", "spec").table == {"items": text}


def test_zero_a_decimal_and_an_address_are_what_they_were() -> None:
    found = parse_yaml("{a: 0, b: 0.5, c: 0x10, d: 'http://h:80', e: 0o7, f: 089}", "spec", "spec").table
    assert found == {"a": 0, "b": 0.5, "c": 16, "d": "http://h:80", "e": "0o7", "f": "089"}


def test_a_spec_that_no_run_could_read_again_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    policies = ["none", *(f"snapkv:budget={n},window=8" for n in range(64, 1564))]
    grid = {"policies": policies, "suites": {"math": {"items": 8}}, "context_tokens": [192]}
    spec = parse_spec(json.dumps({"name": "many", "evaluate": grid}), "spec", NAMES)
    with pytest.raises(SpecError, match="with its defaults written out, but may have at most 100000; use fewer"):
        check_folder(tmp_path / "run", spec, resume=False)
    assert not (tmp_path / "run").exists()
