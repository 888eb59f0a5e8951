"""The metadata of a run (provenance.json, recipe.json, seals of files), and checks that nothing changed since.

    provenance.json    inputs: {"rows": {"gsm8k/test.jsonl": sha256}, "model files": {...}, "plug-ins": {...}}
    <unit>.done.json   the seal of a finished unit: sha256 of its records, inputs: sha256 of the table of inputs
    recipe.json        what the checkpoints were made of, in sections with a sha256 each; written before training

Inputs are hashed when a run starts and checked by every process that resumes it and by the gate. Weights and spec have
hashes of their own. Files that a plug-in opens are not hashed. Torch is not needed to check any of this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from kvaudit.core.errors import DataError, RunError
from kvaudit.core.files import read_json, read_text
from kvaudit.core.plugins import sha256_of
from kvaudit.core.text import is_text

PROVENANCE = "provenance.json"
ORIGIN = "origin.json"  # in a judged run: the provenance of a checkpoint of the original run
RECIPE, RECIPE_FORMAT, RECIPE_VERSION = "recipe.json", "kvaudit.recipe", 1
# keys of provenance.json
CHECKPOINTS = "checkpoints"  # "arm/seed" -> sha256 of the weights
CHECKPOINT_FILES = "checkpoint_files"  # "arm/seed" trained elsewhere -> name of a file besides weights -> sha256
LOADED = "loaded_weights"  # "arm/seed" trained elsewhere, or base/0 -> sha256 of the tensors as loaded or merged
JUDGED = "judged"  # of a run whose answers were graded again: the original run
SERVED_BY = "engines"  # an engine's condition -> what the engine reported when it first answered under it
ENDPOINT = "endpoint"  # of a probe: its address, and the model's name there
ENDPOINT_REQUESTS = "asked"  # of an endpoint: items of a suite at a length -> sha256, and decoding
REWARD_JUDGES = "reward_judges"  # who graded each suite of training: itself (programmatic), or phrases
INPUTS = "inputs"  # kind -> name -> sha256
ROWS, MODEL, PLUGINS, REWARD, SPEC = "rows", "model files", "plug-ins", "reward", "spec"  # the kinds of inputs
MADE_UP = "made_up"  # of a check that asked no public rows: its suites
LABELLED = "labelled"  # when people's labels were last read, of how many cells, and the sha256 of their file
TOOL_FORMS_USED = "tool_forms"  # suite -> form in which tools were offered (``core.tool_forms``) -> items
TOOL_SYSTEM_MOVED = "tool_system_moved"  # true where tools put the system prompt into the user's message
VERSIONS_USED = "worked_with"  # versions, in one line -> when a process first used them; a change is a remark
DEFAULT_MARGINS = "default_margins"  # suite or facet -> kind of suite, if its margin is a default
PROMPTS = "prompts"  # a unit ("arm/seed suite at length @ policy") -> sha256 of its rendered prompts
UNSTABLE_NAMES = "template_names"  # names in the chat template that may render differently another day, such as a date
STOPPED = "stopped"  # seed -> in words: the step at which all its arms stopped early, and the alarm
PILOT = "pilot"  # answers of the reference before the grid: controls, and numbers of items for ``auto`` and ``all``
PILOT_RESULT = "found"  # the one key of PILOT
LOOKS = "looks"  # of rounds: the plan, then every look with its items, and why the rounds ended
PLANNED, ENDED, MINUTES = "planned", "ended", "minutes"  # keys of LOOKS, besides the numbers of the looks from "1" on
SEAL = "sha256"  # another key of LOOKS: the hash of all others, since rows and bounds follow from them
NOISE = "noise"  # engine settings that noise hides -> the sentence that says so; judged copies keep it
TIME_SPENT = "the time is spent"  # one of the reasons why rounds end
ANYWAY = "anyway"  # when --anyway let a run continue that cannot pass, or that has nothing to measure
NOT_SHOWN = "not shown"  # under SERVED_BY: the engine reported nothing that could be checked
MAX_THREADS = 1024  # of one process
Digests = Mapping[str, str]
RECIPE_SECTIONS = (
    "model",  # what training begins from
    "reward",  # as the spec writes it, its sha256 and who graded which suite
    "constitution",  # the text that answers are graded by, null without one
    "data",  # the training questions: suites, their versions, lengths, seeds, and the items by sha256
    "policy",  # the cache policy of every arm's rollouts
    "refusal_set",  # the safety suites of the evaluation: versions, and the items by sha256
    "training",  # loss, rates, sizes, and the rest of the train section
)
LARGEST_RECIPE = 1_000_000  # bytes
_MAX_ITEMS = 1_000_000  # of a suite
_MOST_SECONDS = 1e9  # of a round
_MAX_CHANGES = 3  # that an error message lists
_TEXTS = (
    *("name", "spec_sha256", "spec_file_sha256", "started", "finished", "model", "base_sha256", "device", "dtype"),
    *(ANYWAY, UNSTABLE_NAMES, LABELLED, MADE_UP),
)
_TABLES = (
    *("versions", "host", "policies", "suite_kinds", "suite_versions", "checkpoints", "reference_sha256"),
    *(REWARD_JUDGES, ENDPOINT_REQUESTS, ENDPOINT, STOPPED, DEFAULT_MARGINS, PROMPTS, LOADED, NOISE),
)
_FINISHED = {"files": "", "ledgers": "ledgers"}  # key of a checkpoint's provenance -> folder of the files it lists


# --- inputs ----------------------------------------------------------------------------------------------------------


def inputs_sha256(table: Any) -> str:
    """Return the sha256 of the table of a run's inputs (hashes of rows, model files, plug-ins), as seals store it."""
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def check_inputs(kind: str, recorded: Any, current: Digests) -> None:
    """Raise RunError, naming the changes, if inputs of one ``kind`` differ from those that the run was started with.

    ``recorded``, the entry of provenance.json, and ``current``, the inputs as they are now, map names to sha256.
    Raises DataError if ``recorded`` is no table.
    """
    if not isinstance(recorded, dict):
        raise DataError(f"provenance.json: {INPUTS}.{kind} holds a {type(recorded).__name__}, wanted names and sha256")
    changes = [
        f"{name} had sha256 {_digest_start(recorded.get(name))}, now {_digest_start(current.get(name))}"
        for name in sorted({*recorded, *current})
        if recorded.get(name) != current.get(name)
    ]
    if changes:
        rest = f"; and {len(changes) - _MAX_CHANGES} more" if len(changes) > _MAX_CHANGES else ""
        raise RunError(
            f"the run was started with other {kind}: {'; '.join(changes[:_MAX_CHANGES])}{rest}; put back what it was "
            "started with, or start another run"
        )


def _digest_start(digest: Any) -> str:
    return "none (it was not read)" if digest is None else str(digest)[:12]


# --- entries of provenance.json --------------------------------------------------------------------------------------


def table_of(provenance: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the table under a key of a provenance, which is untrusted; {} if the table is missing or malformed."""
    value = provenance.get(key)
    return value if isinstance(value, Mapping) else {}


_POLICY_MARK, _AND = " @ ", " and "


def prompt_unit(arm: str, seed: int, suite: str, context: int, policy: str) -> str:
    """Return the key of a unit in PROMPTS, the table of prompt hashes; the policy is its last part."""
    return f"{arm}/{seed} {suite} at {context}{_POLICY_MARK}{policy}"


def prompts_by_question(provenance: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the hashes of the rendered prompts as {unit without its policy: {policy: sha256}}.

    The hashes of one unit should be equal under all policies. If a unit was resumed with other prompts, its text holds
    several sha256 (``merge_prompt_digests``).
    """
    table: dict[str, dict[str, str]] = {}
    for unit, digest in table_of(provenance, PROMPTS).items():
        question, _, policy = str(unit).rpartition(_POLICY_MARK)
        table.setdefault(question, {})[policy] = str(digest)
    return table


def merge_prompt_digests(recorded: str | None, current: str) -> str:
    """Return a unit's new entry in PROMPTS, the table of prompt hashes: one sha256, or several joined by "and".

    It has the ``recorded`` hashes (None for a unit without any) and the hash ``current``, if that is not among them.
    """
    if recorded is None:
        return current
    return recorded if current in recorded.split(_AND) else f"{recorded}{_AND}{current}"


def engine_facts(provenance: Mapping[str, Any], condition: str) -> dict[str, str]:
    """Return what an engine reported about itself, such as its version, when it first answered under ``condition``.

    The result is {name of a fact: text}, empty if none is recorded; ``condition`` is the engine with its settings.
    """
    return {str(name): str(text) for name, text in table_of(table_of(provenance, SERVED_BY), condition).items()}


def item_counts(provenance: Mapping[str, Any]) -> Mapping[str, int]:
    """Return how many items to ask of each suite for which the spec gives no number.

    Without a look (an interim test of a run in rounds) it is the number that the pilot (some trial answers) chose. Else
    it is the number of the last look, 0 for a suite that this look does not list.
    """
    look = last_look(provenance)
    if look is not None:
        return {**dict.fromkeys(pilot_items(provenance), 0), **table_of(look, "items")}
    return pilot_items(provenance)


def pilot_items(provenance: Mapping[str, Any]) -> Mapping[str, int]:
    """Return the number of items that the pilot (some trial answers) chose for each suite."""
    items: Mapping[str, int] = table_of(table_of(table_of(provenance, PILOT), PILOT_RESULT), "items")
    return items


def all_looks(provenance: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the looks (tests between the rounds of a run) in order, each as a mapping.

    Its ``items`` are the numbers of rows asked so far, by suite. ``seconds`` is the time that the round before the look
    took. ``words`` has the status of each gated metric.
    """
    looks = table_of(provenance, LOOKS)
    return [table_of(looks, name) for name in sorted((name for name in looks if name.isdigit()), key=int)]


def seconds_of(looks: Iterable[Mapping[str, Any]]) -> float:
    """Return the time, in seconds, of all rounds that ended with one of these looks."""
    return sum(float(look.get("seconds", 0.0)) for look in looks)


def seal_looks(provenance: dict[str, Any]) -> dict[str, Any]:
    """Return the provenance with the sha256 of its looks added to their table; unchanged if the run has no looks."""
    looks = table_of(provenance, LOOKS)
    return {**provenance, LOOKS: {**looks, SEAL: _looks_sha256(looks)}} if looks else provenance


def _looks_sha256(looks: Mapping[str, Any]) -> str:
    entries = {name: entry for name, entry in looks.items() if name != SEAL}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def last_look(provenance: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the last look (test between the rounds of a run) as stored, None if there is none."""
    return next(reversed(all_looks(provenance)), None)


def read_provenance(run: Path) -> dict[str, Any]:
    """Return the provenance of a run folder; raises DataError if its values have wrong types."""
    return check_provenance(read_json(run / PROVENANCE), run / PROVENANCE)


def check_provenance(provenance: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the provenance unchanged; raise DataError for the first value of a wrong type. Keys may be absent."""
    errors = [f"{key} holds {_value_text(provenance[key])}, wanted {kind}" for key, kind in _wrong_keys(provenance)]
    if not errors and not _is_writable(provenance):
        errors = ["it holds text or a number that JSON in UTF-8 cannot spell"]
    if errors:
        raise DataError(f"{str(path)!r}: {errors[0]}; put it back as it was, or start another run with --out")
    return provenance


def _wrong_keys(provenance: dict[str, Any]) -> list[tuple[str, str]]:
    """Return, for every value of a wrong type and for looks that were changed, (key, what was wanted, in words)."""
    checks = [(key, "text", provenance.get(key) is None or isinstance(provenance[key], str)) for key in _TEXTS]
    checks += [(key, "names and texts", _holds_texts(provenance.get(key, {}))) for key in (*_TABLES, VERSIONS_USED)]
    files = provenance.get(CHECKPOINT_FILES, {})
    checks += [
        (CHECKPOINT_FILES, "files and sha256", isinstance(files, dict) and all(map(_holds_texts, files.values())))
    ]
    inputs = provenance.get(INPUTS, {})
    are_inputs = isinstance(inputs, dict) and all(map(_holds_texts, inputs.values()))
    checks += [(INPUTS, "names and sha256 by kind", are_inputs)]
    lists = [(key, provenance.get(key, [])) for key in ("known_policies", "selecting_policies")]
    checks += [
        (key, "a list of texts", isinstance(value, list) and all(isinstance(text, str) for text in value))
        for key, value in lists
    ]
    checks += [(PILOT, "what a pilot found", _is_pilot(provenance.get(PILOT, {})))]
    looks = provenance.get(LOOKS, {})
    checks += [(LOOKS, "the looks of a run in rounds", _are_looks(looks))]
    is_sealed = not looks or (isinstance(looks, dict) and looks.get(SEAL) == _looks_sha256(looks))
    checks += [(LOOKS, "the looks as the run sealed them", is_sealed)]
    threads = provenance.get("threads")
    is_number = threads is None or (type(threads) is int and 1 <= threads <= MAX_THREADS)
    checks += [("threads", f"a whole number from 1 to {MAX_THREADS}", is_number)]
    return [(key, kind) for key, kind, is_right in checks if not is_right]


def _is_pilot(table: Any) -> bool:
    if table == {}:
        return True
    result = table.get(PILOT_RESULT) if isinstance(table, dict) else None
    if not isinstance(result, dict) or not all(isinstance(result.get(key), dict) for key in ("items", "sizes")):
        return False
    controls = result.get("controls")
    if not isinstance(controls, list) or not all(isinstance(row, dict) for row in controls):
        return False
    return all(type(number) is int and 1 <= number <= _MAX_ITEMS for number in result["items"].values())


def _are_looks(table: Any) -> bool:
    if not isinstance(table, dict) or not isinstance(table.get(ENDED, ""), str):
        return False
    planned, numbers = table.get(PLANNED, {}), table.keys() - {PLANNED, ENDED, MINUTES, SEAL}
    return (
        isinstance(planned, dict)
        and _is_duration(table.get(MINUTES, 0.0))
        and _are_counts(planned.get("items", {}))
        and _are_counts(planned.get("at_hand", {}))
        and _are_counts(planned.get("first_items", {}))
        and _holds_texts(planned.get("left_out", {}))
        and isinstance(planned.get("seconds", {}), dict)
        and all(map(_is_duration, planned.get("seconds", {}).values()))
        and numbers == {str(number) for number in range(1, len(numbers) + 1)}
        and all(_is_look(table[number]) for number in numbers)
    )


def _is_look(look: Any) -> bool:
    return (
        isinstance(look, dict)
        and _are_counts(look.get("items"))
        and _is_duration(look.get("seconds", 0.0))
        and _holds_texts(look.get("words", {}))
    )


def _are_counts(table: Any) -> bool:
    return isinstance(table, dict) and all(type(n) is int and 0 <= n <= _MAX_ITEMS for n in table.values())


def _is_duration(seconds: Any) -> bool:
    return type(seconds) in (int, float) and 0 <= seconds <= _MOST_SECONDS


def _holds_texts(table: Any) -> bool:
    return isinstance(table, dict) and all(isinstance(value, str) for value in table.values())


def _is_writable(provenance: dict[str, Any]) -> bool:
    """Return whether the provenance can be written as JSON again."""
    try:
        return is_text(json.dumps(provenance, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return False


def _value_text(value: Any) -> str:
    is_plain = isinstance(value, str | int | float)
    return json.dumps(value)[:40] if is_plain else f"a {type(value).__name__} that does not fit"


# --- finished checkpoints and records --------------------------------------------------------------------------------


def check_checkpoints(run: Path) -> None:
    """Raise DataError, naming the file, if a file of a run's finished checkpoints is missing or changed."""
    for provenance in sorted((run / CHECKPOINTS).glob(f"*/seed-*/{PROVENANCE}")):
        check_checkpoint(provenance.parent)


def check_checkpoint(folder: Path) -> None:
    """Raise DataError, naming the file, if a checkpoint is unfinished, or one of its files is missing or changed.

    Ledgers (which cache entries each rollout kept) count as its files.
    """
    remedy = "put it back, or delete its checkpoint folder to train it again"
    for path, digest in _finished_files(folder / PROVENANCE):
        if not path.is_file():
            raise DataError(f"{str(path)!r} is missing, its checkpoint's provenance lists it; {remedy}")
        with path.open("rb") as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
        if actual != digest:
            raise DataError(
                f"{str(path)!r} has sha256 {actual[:12]}, its checkpoint's provenance says {digest[:12]}; {remedy}"
            )


def _finished_files(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield the path of every file of a finished checkpoint and the sha256 that its provenance, at ``path``, states."""
    provenance = read_json(path)
    if not set(_FINISHED) & set(provenance):  # such as a run's own provenance
        raise DataError(
            f"{str(path.parent)!r} is no finished checkpoint; give the folder of one, such as "
            "RUN/checkpoints/ARM/seed-N (a run that trained nothing, as a probe, has none)"
        )
    for key, folder in _FINISHED.items():
        table = listed_files(provenance.get(key), path)
        yield from ((path.parent / folder / name, digest) for name, digest in sorted(table.items()))


def listed_files(table: Any, source: Path) -> dict[str, str]:
    """Return ``table``, which maps file names to sha256, after checking it; raise DataError if it is not valid.

    No name may point outside the folder of ``source``, the file that has the table.
    """
    if not isinstance(table, dict):
        raise DataError(f"{str(source)!r} has no table of files and sha256; make its folder again")
    for name, digest in table.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or not isinstance(digest, str):
            raise DataError(f"{str(source)!r} lists {name!r}, no file of that folder with its sha256; make it again")
    return table


def seal_path(records: Path) -> Path:
    """Return the path of a record file's seal, which marks it as finished and states its sha256."""
    return records.with_suffix(".done.json")


def check_sealed(
    records: Path,
    digest: str,
    seal: Mapping[str, Any],
    remedy: str = "delete both and resume to evaluate the unit again",
) -> None:
    """Raise DataError if ``digest``, the sha256 of a record file, differs from that in its seal.

    The error ends with the ``remedy``.
    """
    sealed = seal.get("sha256")
    if digest != sealed:
        raise DataError(
            f"record file {str(records)!r} has sha256 {digest[:12]}, its seal says {str(sealed)[:12]}; {remedy}"
        )


# --- recipe.json: what the checkpoints were made of ------------------------------------------------------------------


class RecipeChange(NamedTuple):
    """An entry that differs between two recipes (records of how checkpoints were trained).

    ``before`` or ``after`` is None if the entry is missing there.
    """

    section: str
    entry: str
    before: Any
    after: Any


def seal_recipe(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of recipe.json, the record of how checkpoints were trained.

    It holds ``sections``, {name: content}, each with its sha256, and one sha256 over all of them.
    """
    table = {name: {"sha256": sha256_of(sections[name]), "holds": sections[name]} for name in RECIPE_SECTIONS}
    return {"format": RECIPE_FORMAT, "version": RECIPE_VERSION, "sha256": _recipe_sha256(table), "sections": table}


def read_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe (record of how checkpoints were trained) from a file or a run folder.

    Raises DataError if it is invalid or does not match its hashes.
    """
    if path.is_dir() and not (path / RECIPE).is_file():
        raise DataError(f"{str(path)!r} holds no {RECIPE}; give the folder of a run that trained, or its file")
    path = path / RECIPE if path.is_dir() else path
    is_intact = False
    try:
        recipe: dict[str, Any] = json.loads(read_text(path, "recipe", LARGEST_RECIPE))
        table = recipe["sections"]
        is_recipe = recipe["format"] == RECIPE_FORMAT and recipe["version"] == RECIPE_VERSION
        is_recipe = is_recipe and set(table) == set(RECIPE_SECTIONS)
        if is_recipe:
            are_sections = all(row["sha256"] == sha256_of(row["holds"]) for row in table.values())
            is_intact = are_sections and recipe["sha256"] == _recipe_sha256(table)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        is_recipe = False
    if not is_recipe:
        raise DataError(
            f"{str(path)!r} is not of format {RECIPE_FORMAT} version {RECIPE_VERSION}; "
            "give a run that trained, or its file"
        )
    if not is_intact:
        raise DataError(f"{str(path)!r} does not match its sha256; put it back as the run wrote it")
    return recipe


def recipe_digests(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Return the sha256 of every section of a recipe (record of how checkpoints were trained), by section name."""
    return {name: str(recipe["sections"][name]["sha256"]) for name in RECIPE_SECTIONS}


def recipe_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[RecipeChange]:
    """Yield the entries that differ between two recipes (records of how checkpoints were trained), by section."""
    for section in RECIPE_SECTIONS:
        old, new = (dict(_entries("", recipe["sections"][section]["holds"])) for recipe in (before, after))
        for entry in dict.fromkeys([*old, *new]):
            if old.get(entry) != new.get(entry):
                yield RecipeChange(section, entry, old.get(entry), new.get(entry))


def _recipe_sha256(table: Mapping[str, Any]) -> str:
    return sha256_of({name: table[name]["sha256"] for name in RECIPE_SECTIONS})


def _entries(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (its keys joined by dots, the value) for every value in nested mappings; ``name`` begins all keys."""
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, inner in value.items():
        yield from _entries(f"{name}.{key}" if name else str(key), inner)
