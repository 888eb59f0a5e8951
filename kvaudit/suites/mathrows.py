"""Mathematics from public rows: one loader, a suite for each of eight benchmarks, and one that pools five of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from kvaudit.core.errors import DataError
from kvaudit.core.records import Grade, Item, Message, Outcome, Role
from kvaudit.suites.answers import equal_by_algebra, final_answer, has_algebra, same_answer
from kvaudit.suites.base import ItemMaker, Published, Split, formless, graded, rows_of_split
from kvaudit.suites.sources import data_file, has_file, json_lines

_TRAINING = 5  # of a file without training rows every fifth row is for training
# possessive, each optional part with the space after it: a run of blanks or digits has one reading, or a long one would
# take hours; the number of a heading, with its text on the same line, is excluded
_MARKED = re.compile(r"####\s*+(?:\$\s*+)?+(-?+(?:\d[\d,]*+(?:\.\d++)?+|\.\d++))(?![.):][^\S\n]*+[*A-Za-z])")
_BOXED = re.compile(r"\\boxed\s*+\{[^{}\d-]*+((?>-?[\d,]*\.?\d+))[^{}]*+\}")
# of a worked sum the result
_STATED = re.compile(
    r"answer\s*+(?:is|:|=)\s*+(?:\*++\s*+)?(?:[\d,.\s$()+*/x-]{1,120}=|(?<=\s)=)?\s*+(?:\$\s*+)?(-?[\d,]*\.?\d+)",
    re.IGNORECASE,
)
_MINUS_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-"})
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\[,!])(?=\d{3})")  # thousands separators in LaTeX
_NUMBER = re.compile(r"-?(?:\d[\d,]*\.?\d*|\.\d+)")


class MathRows(Published):
    """The base of suites of mathematics: the problem is the whole prompt, and a right answer may have any form.

    A row has a ``problem`` or ``question``. Its right answer is in ``answer``, in ``final_answer``, or in the last
    LaTeX box of ``solution``.
    """

    version = "3"  # accepts formulas in other delimiters than dollars
    kind = "capability"
    endpoints = ("solved",)
    max_new_tokens = 1024
    files: ClassVar[Mapping[Split, str]]

    def groups(self, split: Split, seed: int) -> list[list[ItemMaker]]:
        return [[partial(self._item, split, seed, row)] for row in self.rows_of(split)]

    def rows_of(self, split: Split) -> list[int]:
        """Return the indices of a split's rows in its file."""
        path = data_file(self.name, self.files[split])
        rows = list(range(len(json_lines(path))))
        # splits that share one file share its rows
        return rows_of_split(rows, split, every=_TRAINING) if len(set(self.files.values())) == 1 else rows

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:
        answer, right = final_answer(transcript[-1].content), item.payload["answer"]
        if answer is None:
            return formless("no answer", self.facets(item), Outcome.UNDESIRED)
        # name one judge for all rows, whichever check decided: records with two judges are not one measurement
        judge = "math-verify" if has_algebra() else "programmatic"
        solved = same_answer(answer, right) or bool(equal_by_algebra(answer, right))
        return graded(solved, {"solved": solved}, "" if solved else "wrong answer", judge)

    def gold(self, item: Item) -> tuple[str, ...]:
        return (f"The answer is \\boxed{{{item.payload['answer']}}}.",)

    def read(self, row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Return a row's question, and the payload of its item with the right answer.

        Raises KeyError or ValueError for an invalid row.
        """
        answer = row["answer"] if "answer" in row else row.get("final_answer")
        if isinstance(answer, list):
            answer = ", ".join(str(part) for part in answer)
        if answer is None:
            answer = final_answer(row["solution"][row["solution"].rindex("\\boxed") :])
        if not isinstance(answer, str | int | float) or isinstance(answer, bool):
            raise ValueError(answer)
        is_whole = isinstance(answer, float) and answer.is_integer()
        text = str(int(answer) if is_whole else answer).strip("$ \n")
        if not text:
            raise ValueError(answer)
        return str(row["problem"] if "problem" in row else row["question"]).strip(), {"answer": text}

    def _item(self, split: Split, seed: int, row: int) -> Item:
        path = data_file(self.name, self.files[split])
        try:
            question, payload = self.read(json_lines(path)[row])
        except (KeyError, IndexError, ValueError, TypeError, AttributeError):
            raise DataError(f"{str(path)!r} line {row + 1} has no question or no readable answer") from None
        return self.row_item(f"{split}-{row}", f"s{seed}", [Message(Role.USER, question)], payload, question=question)


def _rows(file: str) -> dict[Split, str]:
    return {"train": f"math_eval/{file}.jsonl", "eval": f"math_eval/{file}.jsonl"}


class Gsm8k(MathRows):
    """Word problems whose answer is one number (Cobbe et al. 2021, arXiv:2110.14168)."""

    name = "gsm8k"
    version = "5"  # reads "#### 5.55," whole, and "#### 5." before another line
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
    """AMC 12 of 2023; its 32 problems for evaluation are too few to show that a drop is below 5 points."""

    name = "amc23"
    source = "public rows: AMC 2023 in hkust-nlp/simpleRL-reason"
    licence = "problems (c) MAA"
    clusters = 32
    files = _rows("amc23")


class Aime24(MathRows):
    """AIME of 2024; its 24 problems for evaluation are too few to show that a drop is below 5 points."""

    name = "aime24"
    source = "public rows: AIME 2024 in hkust-nlp/simpleRL-reason"
    licence = "problems (c) MAA"
    clusters = 24
    files = _rows("aime24")


class Minerva(MathRows):
    """Undergraduate physics, chemistry and mathematics (Lewkowycz et al. 2022, arXiv:2206.14858)."""

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
    """The problems of several competitions, pooled, since AIME or AMC alone has too few to exclude a drop of 5 points.

    The pool has those files of ``parts`` that are present; each problem is a cluster. A run records which files it
    read, since it can be resumed, or compared with another run, only with the same files.
    """

    name = "competition"
    version = "2"
    source = "public rows: AIME 2024, AMC 12 2023, OlympiadBench, Minerva, Gaokao 2023 in hkust-nlp/simpleRL-reason"
    licence = "as published"
    parts: ClassVar[tuple[type[MathRows], ...]] = (Aime24, Amc23, OlympiadBench, Minerva, Gaokao)

    def groups(self, split: Split, seed: int) -> list[list[ItemMaker]]:
        present = [part() for part in self.parts if has_file(part.files[split])]
        if not present:
            data_file(self.name, self.parts[0].files[split])  # raises the error that names the folder
        return [[partial(self._rename, *group)] for part in present for group in part.groups(split, seed)]

    def _rename(self, make_item: ItemMaker) -> Item:
        return replace(make_item(), suite=self.name)


def extract_number(text: str) -> float | None:
    """Return the final number of an answer; None if there is none.

    It is sought after ####, else in a box, else after "answer is", else anywhere; of several numbers the last counts.
    """
    text = _THOUSANDS.sub(",", text.translate(_MINUS_SIGNS))
    patterns = (_MARKED, _BOXED, _STATED, _NUMBER)
    numbers = next(filter(None, (pattern.findall(text) for pattern in patterns)), None)
    return _to_number(numbers[-1]) if numbers else None


def _to_number(text: str) -> float:
    return float(text.replace(",", "").rstrip("."))
