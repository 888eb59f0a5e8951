"""Read a spec from YAML; every mistake is one line that names the file, the line and what was wanted."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from audit.core.errors import AuditError, SpecError, UnknownName
from audit.core.spec import CONTRASTS, RunSpec
from audit.core.spec_parts import Names
from audit.core.yaml_file import KeyPath, YamlFile, parse_yaml, read_text, shown

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


def load_spec(path: Path, names: Names | None = None) -> RunSpec:
    """The spec in ``path``; raises DataError when it cannot be read and SpecError when it is wrong.

    ``names`` check what plug-ins answer to, and fill in what follows from them; without, the spec is read as it stands.
    """
    return parse_spec(read_text(path, "spec"), str(path), names)


def parse_spec(text: str, source: str, names: Names | None = None) -> RunSpec:
    """The spec written in ``text``; ``source`` names it in errors, ``names`` are as for ``load_spec``."""
    file = parse_yaml(text, source, "spec")
    return _validated(file.table, source, file.lines, names)


def with_gate(spec: RunSpec, file: YamlFile, names: Names | None = None) -> RunSpec:
    """The spec with what a gate file says in place of its gate section; margins are replaced suite by suite.

    Raises SpecError as ``parse_spec`` does, with the lines of the gate file.
    """
    row = spec.written()
    row["gate"] = _overlaid(row["gate"], file.table)
    return _validated(row, file.name, {("gate", *place): line for place, line in file.lines.items()}, names)


def _overlaid(section: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    kept = dict(section)
    if "profile" in table or "alpha" in table:  # a level stands in one place
        for key in ("profile", "alpha", "on_inconclusive"):
            kept.pop(key, None)
    merged = {**kept, **{key: value for key, value in table.items() if key != "format"}}
    for key in ("margins", "estimand_margins"):
        old, new = kept.get(key), table.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            merged[key] = {**old, **new}
    return merged


def _validated(table: Mapping[str, Any], source: str, lines: Mapping[KeyPath, int], names: Names | None) -> RunSpec:
    try:
        return RunSpec.model_validate(table, context=names)
    except ValidationError as error:
        place, message = _first(error)
        raise SpecError(f"{_where(source, place, lines)}: {message}") from None
    except AuditError as error:
        raise SpecError(f"{source}: {error}") from error


def dump_spec(spec: RunSpec) -> str:
    """The complete spec as YAML, every default written out; reads back to an equal spec."""
    row, words = spec.written(), {code: word for word, code in CONTRASTS.items()}
    row["gate"]["estimands"] = [words.get(code, code) for code in row["gate"]["estimands"]]
    return yaml.safe_dump(row, sort_keys=False, allow_unicode=True, width=120)


def _first(error: ValidationError) -> tuple[KeyPath, str]:
    """Place and message of the first mistake; an unknown key goes first, it often explains the others."""
    mistakes = sorted(error.errors(include_url=False), key=lambda mistake: mistake["type"] != "extra_forbidden")
    place = tuple(part for part in mistakes[0]["loc"] if part != "[key]")  # pydantic's mark of a bad key
    return place, _message(mistakes[0], place)


def _message(mistake: ErrorDetails, place: KeyPath) -> str:
    *parents, last = place or ("spec",)
    inside = ".".join(str(part) for part in parents)
    if mistake["type"] == "extra_forbidden":
        unknown = str(UnknownName("key", str(last), _known_keys(parents)))
        return unknown.replace(f"{str(last)!r}.", f"{str(last)!r} in {inside}.", 1) if inside else unknown
    name = f"{inside}.{last}" if inside else str(last)
    if mistake["type"] == "missing":
        return f"{name} is missing"
    problem = _WORDS.get(mistake["type"], mistake["msg"].removeprefix("Input should be "))
    return f"{name} is {shown(mistake['input'])}, wanted {problem}"


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


def _where(source: str, place: KeyPath, lines: Mapping[KeyPath, int]) -> str:
    for end in range(len(place), 0, -1):
        if place[:end] in lines:
            return f"{source} line {lines[place[:end]]}"
    return source
