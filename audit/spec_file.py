"""Read a spec from YAML; every mistake is one line that names the file, the line and what was wanted."""

from __future__ import annotations

import reprlib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from audit.errors import AuditError, DataError, SpecError, UnknownName
from audit.spec import RunSpec

# pydantic's words for what YAML users call otherwise, by its type of mistake
_WORDS = {
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "too_short": "at least one entry",
    "string_pattern_mismatch": "up to 100 letters, digits, '.', '_' or '-', the first a letter or digit",
}
_shown = reprlib.Repr()  # aliases can make a value of any size
_shown.maxstring = _shown.maxother = _shown.maxlong = 100

Place = tuple[str | int, ...]


def load_spec(path: Path) -> RunSpec:
    """The spec in ``path``; raises DataError when it cannot be read and SpecError when it is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise DataError(f"spec {str(path)!r} cannot be read ({reason}); give the path of a YAML file") from None
    return parse_spec(text, str(path))


def parse_spec(text: str, source: str) -> RunSpec:
    """The spec written in ``text``; ``source`` names it in errors."""
    lines: dict[Place, int] = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _number_lines(node, (), lines, {})
        table = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        where = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SpecError(f"{source}{where}: not YAML: {error.problem}") from None
    except RecursionError:
        raise SpecError(f"{source}: nested too deeply; a spec needs five levels") from None
    except yaml.YAMLError as error:
        raise SpecError(f"{source}: not YAML: {str(error).partition(chr(10))[0]}") from None
    if not isinstance(table, dict):
        raise SpecError(f"{source}: wanted a mapping with name, evaluate, ..., got {type(table).__name__}")
    try:
        return RunSpec.model_validate(table)
    except ValidationError as error:
        place, message = _first(error)
        raise SpecError(f"{_where(source, place, lines)}: {message}") from None
    except AuditError as error:
        raise SpecError(f"{source}: {error}") from error


def dump_spec(spec: RunSpec) -> str:
    """The complete spec as YAML, every default written out; reads back to an equal spec."""
    return yaml.safe_dump(spec.written(), sort_keys=False, allow_unicode=True, width=120)


def _number_lines(node: Any, place: Place, lines: dict[Place, int], left: dict[int, bool]) -> None:
    """Remember the line of every key and element; raise for a key given twice, which YAML would silently drop.

    ``left`` tells of every node met whether it is done: an aliased one is numbered once, or raises where it holds
    itself.
    """
    if not isinstance(node, yaml.CollectionNode) or left.get(id(node)):
        return
    if id(node) in left:
        raise yaml.MarkedYAMLError(problem="an alias holds itself", problem_mark=node.start_mark)
    left[id(node)] = False
    for name, line, value in _children(node):
        lines[(*place, name)] = line
        _number_lines(value, (*place, name), lines, left)
    left[id(node)] = True


def _children(node: Any) -> Iterator[tuple[str | int, int, Any]]:
    """Name, line and node of everything in a mapping or sequence; raises for a key given twice."""
    if isinstance(node, yaml.SequenceNode):
        yield from ((index, value.start_mark.line + 1, value) for index, value in enumerate(node.value))
        return
    seen: set[str] = set()
    for key, value in node.value:
        name = str(key.value)
        if name in seen:
            raise yaml.MarkedYAMLError(problem=f"key {name!r} is given twice", problem_mark=key.start_mark)
        seen.add(name)
        yield name, key.start_mark.line + 1, value


def _first(error: ValidationError) -> tuple[Place, str]:
    """Place and message of the first mistake; an unknown key goes first, it often explains the others."""
    mistakes = sorted(error.errors(include_url=False), key=lambda mistake: mistake["type"] != "extra_forbidden")
    place = tuple(part for part in mistakes[0]["loc"] if part != "[key]")
    return place, _message(mistakes[0], place)


def _message(mistake: ErrorDetails, place: Place) -> str:
    *parents, last = place or ("spec",)
    inside = ".".join(str(part) for part in parents)
    if mistake["type"] == "extra_forbidden":
        unknown = str(UnknownName("key", str(last), _known_keys(parents)))
        return unknown.replace(f"{str(last)!r}.", f"{str(last)!r} in {inside}.", 1) if inside else unknown
    name = f"{inside}.{last}" if inside else str(last)
    if mistake["type"] == "missing":
        return f"{name} is missing"
    problem = _WORDS.get(mistake["type"], mistake["msg"].removeprefix("Input should be "))
    return f"{name} is {_shown.repr(mistake['input'])}, wanted {problem}"


def _known_keys(parents: Sequence[str | int]) -> list[str]:
    model: Any = RunSpec
    for part in parents:
        if part in model.model_fields:  # otherwise a name of the user's own, as under evaluate.suites
            model = _model_in(model.model_fields[str(part)].annotation)
    return list(model.model_fields)


def _model_in(annotation: Any) -> Any:
    """The spec part inside an annotation such as ``TrainSpec | None`` or ``dict[str, SuiteSpec]``."""
    if get_origin(annotation) in (Union, types.UnionType, dict):
        return next(part for part in get_args(annotation) if isinstance(part, type) and issubclass(part, BaseModel))
    return annotation


def _where(source: str, place: Place, lines: dict[Place, int]) -> str:
    for end in range(len(place), 0, -1):
        if place[:end] in lines:
            return f"{source} line {lines[place[:end]]}"
    return source
