"""What a run wrote of itself, and holding the run to it: keys of provenance.json, sha256 of what it read and finished.

    provenance.json    inputs: {"rows": {"gsm8k/test.jsonl": sha256}, "model files": {...}, "plug-ins": {...}}
    <unit>.done.json   inputs: sha256 of that table, as it was when the unit was evaluated

Inputs are noted when a run starts, and held by every process that goes on with it and by the gate. Weights and spec
have hashes of their own. What a plug-in opens by itself is not known here. A provenance.json is checked whenever it is
read, by a run and by its reports, which need no torch for that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from kvaudit.core.errors import DataError, RunError
from kvaudit.core.files import read_json
from kvaudit.core.text import is_text

PROVENANCE = "provenance.json"
ORIGIN = "origin.json"  # in a judged run: the provenance of a checkpoint that lies with the run it was judged from
CHECKPOINTS = "checkpoints"  # "arm/seed" -> sha256 of the weights
JUDGED = "judged"  # what a run was judged from, where its answers were graded again elsewhere
SERVED_BY = "engines"  # an engine's condition -> what it said it is when it first answered under it
ENDPOINT = "endpoint"  # of a probe: its address, and the model as it names it itself
ASKED = "asked"  # of an endpoint: items of a suite at a length -> sha256, and decoding
REWARD_JUDGES = "reward_judges"  # who graded each suite that was trained on: itself (programmatic), or phrases
INPUTS = "inputs"  # what a run reads: kind -> name -> sha256
ROWS, MODEL, PLUGINS, REWARD = "rows", "model files", "plug-ins", "reward"  # the kinds
WORKED_WITH = "worked_with"  # versions, in one line -> when a process first worked with them; other ones are a remark
DEFAULT_MARGINS = "default_margins"  # suite -> kind, where nobody declared a margin and the default of its kind holds
PROMPTS = "prompts"  # a unit ("arm/seed suite at length @ policy") -> sha256 of its prompts as the template wrote them
UNSTEADY = "template_names"  # what the chat template names that may write something else another day
TOOL_FORMS_USED = "tool_forms"  # suite -> form in which tools were offered (``core.tool_forms``) -> items
TOOL_SYSTEM_MOVED = "tool_system_moved"  # true where tools put the system prompt into the user's message
STOPPED = "stopped"  # seed -> in words, at which step all its arms ended before their last, and whose alarm that was
PILOT = "pilot"  # what the reference answered first: controls, and items in place of ``auto`` and ``all``
FOUND = "found"  # the one entry of it
LOOKS = "looks"  # of rounds: what was planned before the first, then every look with its items, and why it ended
PLANNED, ENDED = "planned", "ended"  # keys of it, beside the numbers of the looks from "1" on
TIME_SPENT = "the time is spent"  # one of the reasons why rounds end
ANYWAY = "anyway"  # when somebody let a run go on that cannot pass, or that has nothing to measure
MOST_THREADS = 1024  # of one process
Digests = Mapping[str, str]
_MOST_ITEMS = 1_000_000  # of a suite
_NAMED = 3  # changes that a refusal spells out
_TEXTS = (
    *("name", "spec_sha256", "spec_file_sha256", "started", "finished", "model", "base_sha256", "device", "dtype"),
    *(ANYWAY, UNSTEADY),
)
_TABLES = (
    *("versions", "host", "policies", "suite_kinds", "suite_versions", "checkpoints", "reference_sha256"),
    *(REWARD_JUDGES, ASKED, ENDPOINT, STOPPED, DEFAULT_MARGINS, PROMPTS),
)
_FINISHED = {"files": "", "ledgers": "ledgers"}  # key of provenance.json -> folder of the files it names


# --- what it read: inputs --------------------------------------------------------------------------------------------


def inputs_sha256(table: Any) -> str:
    """What stands for a whole table, kind by kind, in the seals of units."""
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def check_same(kind: str, then: Any, now: Digests) -> None:
    """Raise RunError, naming what changed, where a run would go on with other inputs than it was started with.

    ``then`` is what provenance.json holds of the kind; DataError where that is no table.
    """
    if not isinstance(then, dict):
        raise DataError(f"provenance.json: {INPUTS}.{kind} holds a {type(then).__name__}, wanted names and sha256")
    changes = [
        f"{name} had sha256 {_digest_start(then.get(name))}, now {_digest_start(now.get(name))}"
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    ]
    if changes:
        more = f"; and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
        raise RunError(
            f"the run was started with other {kind}: {'; '.join(changes[:_NAMED])}{more}; put back what it was started "
            "with, or start another run"
        )


def _digest_start(digest: Any) -> str:
    return "none (it was not read)" if digest is None else str(digest)[:12]


# --- its keys --------------------------------------------------------------------------------------------------------


def table_of(provenance: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A table of a provenance, empty where it has none: files of strangers may hold anything."""
    value = provenance.get(key)
    return value if isinstance(value, Mapping) else {}


_OF_POLICY, _SEVERAL = " @ ", " and "


def unit_of_prompts(arm: str, seed: int, suite: str, context: int, policy: str) -> str:
    """What a unit is called under PROMPTS: what all units of one question share, then its policy."""
    return f"{arm}/{seed} {suite} at {context}{_OF_POLICY}{policy}"


def prompts_by_question(provenance: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The sha256 of rendered prompts: what was asked -> policy -> sha256; several of a unit that asked by two."""
    found: dict[str, dict[str, str]] = {}
    for unit, digest in table_of(provenance, PROMPTS).items():
        question, _, policy = str(unit).rpartition(_OF_POLICY)
        found.setdefault(question, {})[policy] = str(digest)
    return found


def both_prompts(then: str | None, now: str) -> str:
    """What stands for a unit that went on by ``now`` where it had begun by ``then``."""
    if then is None:
        return now
    return then if now in then.split(_SEVERAL) else f"{then}{_SEVERAL}{now}"


NOT_SHOWN = "not shown"  # what an engine said nothing of that could be checked, under SERVED_BY


def said_by(provenance: Mapping[str, Any], condition: str) -> dict[str, str]:
    """What an engine said of itself when it first answered under a condition: engine, version, what it resolved."""
    return {str(name): str(text) for name, text in table_of(table_of(provenance, SERVED_BY), condition).items()}


def items_in(provenance: Mapping[str, Any]) -> Mapping[str, int]:
    """Suite -> number of items in place of ``auto`` and ``all``: what the pilot gave, or what the last look had."""
    last = last_look(provenance)
    if last is not None:
        return {**dict.fromkeys(pilot_items(provenance), 0), **table_of(last, "items")}
    return pilot_items(provenance)


def pilot_items(provenance: Mapping[str, Any]) -> Mapping[str, int]:
    """Suite -> number of items that a run's pilot gave."""
    items: Mapping[str, int] = table_of(table_of(table_of(provenance, PILOT), FOUND), "items")
    return items


def looks_in(provenance: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The looks that a run in rounds has had, in order."""
    looks = table_of(provenance, LOOKS)
    return [table_of(looks, name) for name in sorted((name for name in looks if name.isdigit()), key=int)]


def last_look(provenance: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The last of the looks, None where there was none."""
    return next(reversed(looks_in(provenance)), None)


def read_provenance(run: Path) -> dict[str, Any]:
    """What is known of the run in a folder; raises DataError where that is of another kind than a run writes."""
    return check_provenance(read_json(run / PROVENANCE), run / PROVENANCE)


def check_provenance(provenance: dict[str, Any], path: Path) -> dict[str, Any]:
    """The same object; raises DataError naming the first key whose value is of another kind. Any key may be absent."""
    wrong = [f"{key} holds {_shown_value(provenance[key])}, wanted {wanted}" for key, wanted in _wrong(provenance)]
    if not wrong and not _writable(provenance):
        wrong = ["it holds text or a number that JSON in UTF-8 cannot spell"]
    if wrong:
        raise DataError(f"{str(path)!r}: {wrong[0]}; put it back as it was, or start another run with --out")
    return provenance


def _wrong(provenance: dict[str, Any]) -> list[tuple[str, str]]:
    """Keys and what they should hold."""
    wanted = [(key, "text", provenance.get(key) is None or isinstance(provenance[key], str)) for key in _TEXTS]
    wanted += [(key, "names and texts", _texts(provenance.get(key, {}))) for key in (*_TABLES, WORKED_WITH)]
    inputs = provenance.get(INPUTS, {})
    wanted += [(INPUTS, "names and sha256 by kind", isinstance(inputs, dict) and all(map(_texts, inputs.values())))]
    wanted += [(PILOT, "what a pilot found", _pilot(provenance.get(PILOT, {})))]
    wanted += [(LOOKS, "the looks of a run in rounds", _looks(provenance.get(LOOKS, {})))]
    threads = provenance.get("threads")
    usable = threads is None or (type(threads) is int and 1 <= threads <= MOST_THREADS)
    wanted += [("threads", f"a whole number from 1 to {MOST_THREADS}", usable)]
    return [(key, kind) for key, kind, right in wanted if not right]


def _pilot(table: Any) -> bool:
    """Whether readers of the pilot find what they look for."""
    if table == {}:
        return True
    found = table.get("found") if isinstance(table, dict) else None
    if not isinstance(found, dict) or not all(isinstance(found.get(key), dict) for key in ("items", "sizes")):
        return False
    controls = found.get("controls")
    rows = isinstance(controls, list) and all(isinstance(row, dict) for row in controls)
    return rows and all(type(number) is int and 1 <= number <= _MOST_ITEMS for number in found["items"].values())


def _looks(table: Any) -> bool:
    """Whether readers of the looks find what they look for."""
    if not isinstance(table, dict):
        return False
    planned = table.get(PLANNED, {})
    looks = [table[name] for name in table if name.isdigit()]
    items = [planned.get("items", {}) if isinstance(planned, dict) else None]
    items += [look.get("items") if isinstance(look, dict) else None for look in looks]
    return all(
        isinstance(own, dict) and all(type(number) is int and 0 <= number <= _MOST_ITEMS for number in own.values())
        for own in items
    )


def _texts(table: Any) -> bool:
    return isinstance(table, dict) and all(isinstance(value, str) for value in table.values())


def _writable(provenance: dict[str, Any]) -> bool:
    """Whether the next note can be written back beside what is there."""
    try:
        return is_text(json.dumps(provenance, ensure_ascii=False, allow_nan=False))
    except ValueError:
        return False


def _shown_value(value: Any) -> str:
    plain = isinstance(value, str | int | float)
    return json.dumps(value)[:40] if plain else f"a {type(value).__name__} that does not fit"


# --- what it finished: checkpoints and records -----------------------------------------------------------------------


def check_checkpoints(run: Path) -> None:
    """Raise DataError, naming the file, where a finished checkpoint of the run lost or changed a file or a ledger."""
    for provenance in sorted((run / CHECKPOINTS).glob(f"*/seed-*/{PROVENANCE}")):
        check_checkpoint(provenance.parent)


def check_checkpoint(folder: Path) -> None:
    """The same for one finished checkpoint; a folder that is none is refused too."""
    remedy = "put it back, or delete its checkpoint folder to train it again"
    for path, wanted in _finished_files(folder / PROVENANCE):
        if not path.is_file():
            raise DataError(f"{str(path)!r} is missing, its checkpoint's provenance lists it; {remedy}")
        with path.open("rb") as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
        if got != wanted:
            raise DataError(
                f"{str(path)!r} has sha256 {got[:12]}, its checkpoint's provenance says {wanted[:12]}; {remedy}"
            )


def _finished_files(path: Path) -> Iterator[tuple[Path, str]]:
    """Every file that the checkpoint was finished with, and its sha256."""
    provenance = read_json(path)
    if not set(_FINISHED) & set(provenance):  # as a run's, which has one of the same name
        raise DataError(
            f"{str(path.parent)!r} is no finished checkpoint; give the folder of one, such as "
            "RUN/checkpoints/ARM/seed-N (a run that trained nothing, as a probe, has none)"
        )
    for key, folder in _FINISHED.items():
        table = own_files(provenance.get(key), path)
        yield from ((path.parent / folder / name, digest) for name, digest in sorted(table.items()))


def own_files(table: Any, source: Path) -> dict[str, str]:
    """A table of file names and sha256 that stands in ``source``; DataError where a name leaves its folder."""
    if not isinstance(table, dict):
        raise DataError(f"{str(source)!r} has no table of files and sha256; make its folder again")
    for name, digest in table.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or not isinstance(digest, str):
            raise DataError(f"{str(source)!r} lists {name!r}, no file of that folder with its sha256; make it again")
    return table


def seal_of(records: Path) -> Path:
    """Where the seal of a unit's record file stands; without one the unit is not finished."""
    return records.with_suffix(".done.json")


def check_sealed(records: Path, got: str, seal: Mapping[str, Any]) -> None:
    """Raise DataError where a record file, whose bytes have the sha256 ``got``, is not the one that was sealed."""
    wanted = seal.get("sha256")
    if got != wanted:
        raise DataError(
            f"record file {str(records)!r} has sha256 {got[:12]}, its seal says {str(wanted)[:12]}; "
            "delete both and resume to evaluate the unit again"
        )
