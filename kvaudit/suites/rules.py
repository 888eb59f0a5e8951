"""Rules of IFEval (Zhou et al. 2023, arXiv:2311.07911) that a program can check, and writers that follow them.

``check`` takes the answer and the arguments of the public row. ``write`` changes a draft to satisfy the rule, which
proves that the rules of a row can be followed together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Arguments = Mapping[str, Any]

_SCRIPTS = {  # letters of the languages that can be checked, by their script alone
    "kn": r"[\u0c80-\u0cff]", "pa": r"[\u0a00-\u0a7f]", "mr": r"[\u0900-\u097f]", "hi": r"[\u0900-\u097f]",
    "fa": r"[\u0600-\u06ff]", "ko": r"[\uac00-\ud7af]", "ru": r"[\u0400-\u04ff]", "bg": r"[\u0400-\u04ff]",
}  # fmt: skip
_SAMPLES = {
    "kn": "ಇದು ನನ್ನ ಉತ್ತರ", "pa": "ਇਹ ਮੇਰਾ ਜਵਾਬ ਹੈ", "mr": "हे माझे उत्तर आहे", "hi": "यह मेरा उत्तर है",
    "fa": "این پاسخ من است", "ko": "이것이 나의 대답이다", "ru": "это мой ответ", "bg": "това е моят отговор",
}  # fmt: skip
_CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_BREAK = "\n\n"
_HIGHLIGHT = re.compile(r"\*\*[^*\n]+\*\*|\*[^*\n]+\*")
_FILLER = "here is a short and calm reply on this"  # without words that hold a forbidden letter


@dataclass
class Draft:
    """An answer under construction; ``text`` puts its parts in an order in which all rules can be satisfied."""

    topic: list[str]  # words of the request
    blocks: list[str] = field(default_factory=list)
    between: str = _BREAK
    before: str = ""
    title: str = ""
    extra: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    shape: Callable[[str], str] = str
    banned: str = ""
    wraps: list[Callable[[str], str]] = field(default_factory=list)

    def text(self) -> str:
        """Return the whole answer."""
        words = [word for word in (*_FILLER.split(), *self.topic) if not set(word) & set(self.banned)]
        first, *rest = self.blocks or [""]
        line = " ".join(filter(None, (first, self.title, *words, *self.extra)))
        body = self.between.join(["\n".join([line, *self.lines]), *(f"{part} {' '.join(words)}" for part in rest)])
        text = self.shape("\n".join(filter(None, (self.before, body, *self.after))))
        for wrap in self.wraps:
            text = wrap(text)
        return text


Writer = Callable[[Draft, Arguments], None]


class Rule(NamedTuple):
    """A kind of rule: ``check`` says whether an answer keeps it, ``write`` changes a draft so that it does."""

    check: Callable[[str, Arguments], bool]
    write: Writer


def _holds(count: int, relation: str, bound: int) -> bool:
    if relation not in ("at least", "less than"):
        raise ValueError(relation)
    return count >= bound if relation == "at least" else count < bound


def _sentences(text: str) -> int:
    """Count sentences; line breaks do not end one, as in IFEval's own grader."""
    return len([part for part in re.split(r"(?<=[.!?])[\"')\]]*\s+", text) if re.search(r"\w", part)])


def _parts(text: str, divider: str) -> list[str]:
    return [part.strip() for part in re.split(divider, text) if part.strip()]


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def _is_json(text: str) -> bool:
    fenced = re.fullmatch(r"\s*```(?:json)?(.*?)```\s*", text, re.DOTALL | re.IGNORECASE)
    try:
        return isinstance(json.loads(fenced[1] if fenced else text), dict | list)
    except (ValueError, RecursionError):
        return False


def _paragraph_starts(text: str, arguments: Arguments) -> bool:
    parts, place = _parts(text, r"\n\s*\n"), int(arguments["nth_paragraph"])
    if len(parts) != arguments["num_paragraphs"] or place > len(parts):
        return False
    word = re.match(r"\W*(\w+)", parts[place - 1])
    return word is not None and word[1].casefold() == str(arguments["first_word"]).casefold()


def _marker(text: str) -> str:
    """Return a regular expression for a marker such as "P.S."; its dots are required (no match in "help. So")."""
    return r"\s?".join(map(re.escape, re.findall(r"[^.]+\.?", text)))


def _in_script(text: str, code: str) -> bool:
    letters = [mark for mark in text if mark.isalpha()]
    return bool(letters) and sum(bool(re.match(_SCRIPTS[code], mark)) for mark in letters) > 0.5 * len(letters)


def _write_letters(draft: Draft, arguments: Arguments) -> None:
    if arguments["let_relation"] == "at least":
        draft.extra += [arguments["letter"]] * arguments["let_frequency"]
    else:
        draft.banned += arguments["letter"].lower()


def _write_first_word(draft: Draft, arguments: Arguments) -> None:
    draft.blocks = ["well"] * arguments["num_paragraphs"]
    draft.blocks[arguments["nth_paragraph"] - 1] = arguments["first_word"]


def _adder(part: str, wording: Callable[[Arguments], list[str]]) -> Writer:
    return lambda draft, arguments: getattr(draft, part).extend(wording(arguments))


def _repeater(part: str, words: str, number: str, relation: str = "relation") -> Writer:
    """Return a writer that adds ``words`` to a part of the draft, as often as the rule requires.

    The rule's arguments are filled into ``words``; ``number`` and ``relation`` name the arguments that say how often.
    """
    return _adder(part, lambda a: [words.format(**a)] * (a[number] if a[relation] == "at least" else 0))


def _divider(mark: str, blocks: Callable[[Arguments], list[str]]) -> Writer:
    def write(draft: Draft, arguments: Arguments) -> None:
        draft.between, draft.blocks = f"{_BREAK}{mark}{_BREAK}", blocks(arguments)

    return write


def _wrapper(wrap: Callable[[str], str], *, outermost: bool = False) -> Writer:
    return lambda draft, _: draft.wraps.insert(len(draft.wraps) if outermost else 0, wrap)  # the first is innermost


def _no_change(draft: Draft, arguments: Arguments) -> None:
    """Do nothing to the draft: the writer of rules that ban something, which no draft contains."""


def _number(words: str, key: str) -> Callable[[Arguments], list[str]]:
    return lambda arguments: [words.format(n=n + 1, **arguments) for n in range(arguments[key])]


RULES: Mapping[str, Rule] = {
    "punctuation:no_comma": Rule(lambda text, _: "," not in text, _no_change),
    "length_constraints:number_words": Rule(
        lambda text, a: _holds(len(re.findall(r"\w+", text)), a["relation"], a["num_words"]),
        _repeater("extra", "well", "num_words"),
    ),
    "length_constraints:number_sentences": Rule(
        lambda text, a: _holds(_sentences(text), a["relation"], a["num_sentences"]),
        _repeater("lines", "so it is.", "num_sentences"),
    ),
    "length_constraints:number_paragraphs": Rule(
        lambda text, a: len(_parts(text, r"(?<!\*)\*{3}(?!\*)")) == a["num_paragraphs"],
        _divider("***", lambda a: [""] * a["num_paragraphs"]),
    ),
    "length_constraints:nth_paragraph_first_word": Rule(_paragraph_starts, _write_first_word),
    "keywords:existence": Rule(
        lambda text, a: all(re.search(re.escape(word), text, re.IGNORECASE) for word in a["keywords"]),
        _adder("extra", lambda a: list(a["keywords"])),
    ),
    "keywords:forbidden_words": Rule(
        lambda text, a: not any(_has_word(text, word) for word in a["forbidden_words"]),
        lambda draft, a: draft.topic.__setitem__(
            slice(None), [word for word in draft.topic if not any(word in ban.lower() for ban in a["forbidden_words"])]
        ),
    ),
    "keywords:frequency": Rule(
        lambda text, a: _holds(text.lower().count(a["keyword"].lower()), a["relation"], a["frequency"]),
        _repeater("extra", "{keyword}", "frequency"),
    ),
    "keywords:letter_frequency": Rule(
        lambda text, a: _holds(text.lower().count(a["letter"].lower()), a["let_relation"], a["let_frequency"]),
        _write_letters,
    ),
    "change_case:english_capital": Rule(lambda text, _: text.isupper(), _wrapper(str.upper)),
    "change_case:english_lowercase": Rule(lambda text, _: text.islower(), _wrapper(str.lower)),
    "change_case:capital_word_frequency": Rule(
        lambda text, a: _holds(
            sum(word.isupper() for word in re.findall(r"\w+(?:-\w+)*", text)),
            a["capital_relation"],
            a["capital_frequency"],
        ),
        _repeater("extra", "WELL", "capital_frequency", "capital_relation"),
    ),
    "detectable_format:number_highlighted_sections": Rule(
        lambda text, a: len([part for part in _HIGHLIGHT.findall(text) if part.strip("* ")]) >= a["num_highlights"],
        _adder("extra", _number("*part {n}*", "num_highlights")),
    ),
    "detectable_format:number_bullet_lists": Rule(
        lambda text, a: len(re.findall(r"^[^\S\n]*(?:\*(?!\*)|-(?!-))\s*\S", text, re.MULTILINE)) == a["num_bullets"],
        _adder("lines", _number("* point {n}", "num_bullets")),
    ),
    "detectable_format:multiple_sections": Rule(
        lambda text, a: len(re.findall(rf"{re.escape(a['section_spliter'])}\s?\d+", text)) >= a["num_sections"],
        _adder("lines", _number("{section_spliter} {n}", "num_sections")),
    ),
    "detectable_format:title": Rule(
        lambda text, _: re.search(r"<<[^\w<>\n]*\w[^<>\n]*>>", text) is not None,
        lambda draft, _: setattr(draft, "title", "<<a reply>>"),
    ),
    "detectable_format:json_format": Rule(
        lambda text, _: _is_json(text), _wrapper(lambda text: json.dumps({"reply": text}, ensure_ascii=False))
    ),
    "detectable_format:constrained_response": Rule(
        lambda text, _: any(choice in text for choice in _CHOICES), _adder("after", lambda _: ["My answer is no."])
    ),
    "detectable_content:number_placeholders": Rule(
        lambda text, a: len(re.findall(r"\[[^\[\]\n]+\]", text)) >= a["num_placeholders"],
        _adder("extra", _number("[name {n}]", "num_placeholders")),
    ),
    "detectable_content:postscript": Rule(
        lambda text, a: re.search(_marker(a["postscript_marker"]), text, re.IGNORECASE) is not None,
        _adder("after", lambda a: [f"{a['postscript_marker']} so it is"]),
    ),
    "combination:two_responses": Rule(
        lambda text, _: len(parts := _parts(text, r"\*{6}")) == 2 and parts[0] != parts[1],
        _divider("******", lambda _: ["one", "two"]),
    ),
    "combination:repeat_prompt": Rule(
        lambda text, a: text.strip().lower().startswith(a["prompt_to_repeat"].strip().lower()),
        lambda draft, a: setattr(draft, "before", a["prompt_to_repeat"].strip()),
    ),
    "startend:quotation": Rule(
        lambda text, _: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
        _wrapper(lambda text: f'"{text}"', outermost=True),
    ),
    "startend:end_checker": Rule(
        lambda text, a: text.strip().strip('"').lower().endswith(a["end_phrase"].strip().lower()),
        _adder("after", lambda a: [a["end_phrase"].strip()]),
    ),
    "language:response_language": Rule(
        lambda text, a: _in_script(text, a["language"]),
        lambda draft, a: setattr(draft, "shape", lambda _: " ".join([_SAMPLES[a["language"]]] * 2)),
    ),
}


def is_checkable(kind: str, arguments: Arguments) -> bool:
    """Return whether a program can check a rule; a rule on language only if the language has a script of its own."""
    return kind in RULES and (kind != "language:response_language" or arguments.get("language") in _SCRIPTS)


def keeps(text: str, rules: list[tuple[str, Arguments]]) -> bool:
    """Return whether an answer follows every rule."""
    return all(RULES[kind].check(text, arguments) for kind, arguments in rules)


def write_answer(topic: list[str], rules: list[tuple[str, Arguments]]) -> str:
    """Return an answer that follows the rules, unless they exclude each other; ``topic`` are words of the request."""
    draft = Draft(list(topic))
    for kind, arguments in rules:
        RULES[kind].write(draft, arguments)
    return draft.text()
