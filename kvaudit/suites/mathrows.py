"""Mathematics from public rows: one loader for eight files, a suite for each, and a family."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from kvaudit.core.errors import DataError
from kvaudit.core.records import Grade, Item, Message, Outcome, Role
from kvaudit.suites.answers import final_answer, has_algebra, same_answer, equal_by_algebra
from kvaudit.suites.base import Split, formless, graded
from kvaudit.suites.published import ItemMaker, Published, rows_of_split
from kvaudit.suites.sources import data_file, has_file, json_lines

_TRAINING = 5  # every fifth row of a file that has no training rows of its own
# optional parts bring the space behind them along: two runs of spaces in a row take squares of time
# but not a heading that is numbered
_MARKED = re.compile(r"####\s*(?:\$\s*)?(-?[\d,]*\.?\d+)(?![\d,]|[.):]\s*[*A-Za-z])")
_BOXED = re.compile(r"\\boxed\s*\{[^{}\d-]*(-?[\d,]*\.?\d+)[^{}]*\}")
# of a sum that is worked out its result
_STATED = re.compile(
    r"answer\s*(?:is|:|=)\s*(?:\*+\s*)?(?:[\d,.\s$()+*/x-]{1,120}=)?\s*(?:\$\s*)?(-?[\d,]*\.?\d+)", re.IGNORECASE
)
_WRITTEN = str.maketrans({"\u2212": "-", "\u2013": "-"})
_THIN = re.compile(r"(?<=\d)(?:\{,\}|\\[,!])(?=\d{3})")  # between thousands
_NUMBER = re.compile(r"-?(?:\d[\d,]*\.?\d*|\.\d+)")


class MathRows(Published):
    """The capability control on a real model: the problem alone, whatever form the answer ends in.

    Rows hold a ``problem`` or ``question`` and an ``answer``, a ``final_answer``, or a ``solution`` that ends in a box.
    """

    version = "3"  # formulas between other marks than dollars
    kind = "capability"
    endpoints = ("solved",)
    max_new_tokens = 1024
    files: ClassVar[Mapping[Split, str]]

    def groups(self, split: Split, seed: int) -> list[list[ItemMaker]]:
        return [[partial(self._item, split, seed, row)] for row in self.rows_of(split)]

    def rows_of(self, split: Split) -> list[int]:
        """The numbers of a split's rows in its file."""
        path = data_file(self.name, self.files[split])
        rows = list(range(len(json_lines(path))))
        # one file for both splits is shared out
        return rows_of_split(rows, split, every=_TRAINING) if len(set(self.files.values())) == 1 else rows

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        found, wanted = final_answer(transcript[-1].content), item.payload["answer"]
        if found is None:
            return formless("no answer", self.facets(item), Outcome.UNDESIRED)
        # one judge for every row, whichever decided it: records that name two are no one measurement
        solved, judge = same_answer(found, wanted), "math-verify" if has_algebra() else "programmatic"
        if not solved and (told := equal_by_algebra(found, wanted)) is not None:
            solved = told
        return graded(solved, {"solved": solved}, "" if solved else "wrong answer", judge)

    def gold(self, item: Item) -> tuple[str, ...]:
        return (f"The answer is \\boxed{{{item.payload['answer']}}}.",)

    def read(self, row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """The question of a row, and what an item keeps of its answer; raises what a broken row raises."""
        answer = row["answer"] if "answer" in row else row.get("final_answer")
        if isinstance(answer, list):
            answer = ", ".join(str(part) for part in answer)
        if answer is None:  # a row without any
            answer = final_answer(row["solution"][row["solution"].rindex("\\boxed") :])
        if not isinstance(answer, str | int | float) or isinstance(answer, bool):
            raise ValueError(answer)
        whole = isinstance(answer, float) and answer.is_integer()
        text = str(int(answer) if whole else answer).strip("$ \n")
        if not text:
            raise ValueError(answer)
        return str(row["problem"] if "problem" in row else row["question"]).strip(), {"answer": text}

    def _item(self, split: Split, seed: int, row: int) -> Item:
        path = data_file(self.name, self.files[split])
        try:
            question, payload = self.read(json_lines(path)[row])
        except (KeyError, IndexError, ValueError, TypeError, AttributeError):
            raise DataError(f"{str(path)!r} line {row + 1} lacks a question, or an answer that can be read") from None
        return self.row_item(f"{split}-{row}", f"s{seed}", [Message(Role.USER, question)], payload, question=question)


def _rows(file: str) -> dict[Split, str]:
    return {"train": f"math_eval/{file}.jsonl", "eval": f"math_eval/{file}.jsonl"}


class Gsm8k(MathRows):
    """Word problems whose answer is one number (Cobbe et al. 2021, arXiv:2110.14168)."""

    name = "gsm8k"
    version = "4"  # boxes, sums that are worked out, and minus signs
    source = "public rows: openai/grade-school-math, test and first 2000 training rows"
    licence = "MIT"
    max_new_tokens = 512
    files: ClassVar[Mapping[Split, str]] = {"train": "gsm8k/train_first2000.jsonl", "eval": "gsm8k/test.jsonl"}

    def read(self, row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        question, solution = (str(row[key]).strip() for key in ("question", "answer"))
        return question, {"answer": _to_number(_MARKED.findall(solution)[-1]), "solution": solution}

    def gold(self, item: Item) -> tuple[str, ...]:
        return (str(item.payload["solution"]),)

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        answer = extract_number(transcript[-1].content)
        if answer is None:
            return formless("no number", self.facets(item), Outcome.UNDESIRED)
        solved = answer == float(item.payload["answer"])
        return graded(solved, {"solved": solved}, "" if solved else "wrong number")


class Math500(MathRows):
    """Competition problems of five levels (Hendrycks et al. 2021, arXiv:2103.03874; Lightman et al. 2023)."""

    name = "math500"
    source = "public rows: MATH-500 in hkust-nlp/simpleRL-reason"
    licence = "MIT"
    files = _rows("math500")


class Amc23(MathRows):
    """AMC 12 of 2023. 32 problems to evaluate cannot decide 5 points."""

    name = "amc23"
    source = "public rows: AMC 2023 in hkust-nlp/simpleRL-reason"
    licence = "problems (c) MAA"
    clusters = 32
    files = _rows("amc23")


class Aime24(MathRows):
    """AIME of 2024. 24 problems to evaluate cannot decide 5 points."""

    name = "aime24"
    source = "public rows: AIME 2024 in hkust-nlp/simpleRL-reason"
    licence = "problems (c) MAA"
    clusters = 24
    files = _rows("aime24")


class Minerva(MathRows):
    """Physics, chemistry and mathematics of undergraduates (Lewkowycz et al. 2022, arXiv:2206.14858)."""

    name = "minerva"
    source = "public rows: Minerva's OCW problems in hkust-nlp/simpleRL-reason"
    licence = "as published"
    files = _rows("minerva_math")


class OlympiadBench(MathRows):
    """Olympiad problems in English without pictures (He et al. 2024, arXiv:2402.14008)."""

    name = "olympiadbench"
    source = "public rows: OlympiadBench in hkust-nlp/simpleRL-reason"
    licence = "Apache-2.0"
    files = _rows("olympiadbench")


class Gaokao(MathRows):
    """The Chinese university entrance examination of 2023, in English."""

    name = "gaokao"
    source = "public rows: Gaokao 2023 EN in hkust-nlp/simpleRL-reason"
    licence = "as published"
    files = _rows("gaokao2023en")


class Competition(MathRows):
    """Competitions pooled, of which AIME and AMC alone cannot decide 5 points: every file of ``parts`` that is there.

    Problems of all files are mixed, each a cluster of its own. A run notes the files that it read, and goes on, or is
    compared, with the same ones only.
    """

    name = "competition"
    version = "2"
    source = "public rows: AIME 2024, AMC 12 2023, OlympiadBench, Minerva, Gaokao 2023 in hkust-nlp/simpleRL-reason"
    licence = "as published"
    parts: ClassVar[tuple[type[MathRows], ...]] = (Aime24, Amc23, OlympiadBench, Minerva, Gaokao)

    def groups(self, split: Split, seed: int) -> list[list[ItemMaker]]:
        there = [part() for part in self.parts if has_file(part.files[split])]
        if not there:
            data_file(self.name, self.parts[0].files[split])  # says where it is looked for
        return [[partial(self._own, *group)] for part in there for group in part.groups(split, seed)]

    def _own(self, made: ItemMaker) -> Item:
        return replace(made(), suite=self.name)


def extract_number(text: str) -> float | None:
    """The number an answer ends on: after the last ####, in a box, else after "answer is", else the last number."""
    text = _THIN.sub(",", text.translate(_WRITTEN))
    found = next(filter(None, (pattern.findall(text) for pattern in (_MARKED, _BOXED, _STATED, _NUMBER))), None)
    return _to_number(found[-1]) if found else None


def _to_number(text: str) -> float:
    return float(text.replace(",", "").rstrip("."))
