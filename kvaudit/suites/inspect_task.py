"""Any task of Inspect as a suite: ``inspect:PACKAGE/TASK`` or ``inspect:FILE.py@TASK`` (UK AI Security Institute 2024).

Inspect runs the whole task, with its solvers, agents, tools, sandboxes, limits and scorers. The model that it asks is
the audited one (``audit/runs/inspect_units.py``), and each sample in its log becomes a record. kvaudit decides which
items are asked in which order, the random seeds and the options of sampling. A task is code that runs with the rights
of this process. The package is imported on first use, and only its public names are used.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import yaml

from kvaudit.core.errors import DataError, SpecError, did_you_mean
from kvaudit.core.facets import FACETS, HARMFUL_FACETS, TRUNCATED_FACETS, readable_facets, unreadable_facets
from kvaudit.core.records import Grade, Item, Message, Outcome, Role, ToolCall
from kvaudit.core.text import inline, install_command, is_text, one_line, reason, short_repr
from kvaudit.core.tool_forms.text import format_calls
from kvaudit.suites import task_family
from kvaudit.suites.base import Split, Suite, graded
from kvaudit.suites.task_family import PASS_THRESHOLD, TaskFamily, TaskRow, ungraded

INSPECT = "inspect:"
_DEFAULT_ANSWER = 2048  # tokens, if a task sets none; Inspect's default for local models
_OPTIONS = ("cluster", "facet", "limit", "scorer")  # kvaudit's own; others are arguments of the task
_JOIN = "+"  # between several columns, facets or scorers
_INSTALL = f"inspect suites need another package: {install_command('inspect')}"
_WORDS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}  # as in Inspect
_BY_HAND = "graded where Inspect runs the task, and nowhere else"


# tasks by a short name, with what their scorers measure and the origin that their samples share
_AGENTDOJO = "inspect_evals/agentdojo:with_sandbox_tasks='no',limit=60"  # messages; its own loop has no end
DECLARED = {
    # users' tasks times hidden orders: clustered by the order, which keeps the error (docs/statistics.md)
    "agentdojo": f"{_AGENTDOJO},cluster=task_suite_name+injection_task_id,facet=attack_success+utility,"
    "scorer=injection_task_scorer.security+injection_task_scorer.utility",
    "agentdojo-plain": f"{_AGENTDOJO},with_injections=false,facet=capable,scorer=user_task_scorer.utility",
    # 44 behaviours, each asked in four ways
    "agentharm": "inspect_evals/agentharm:cluster=id_original,facet=refused+unsafe,"
    "scorer=combined_scorer.refusal+combined_scorer.score",
    "agentharm-benign": "inspect_evals/agentharm_benign:cluster=id_original,facet=helpful+over_refused,"
    "scorer=combined_scorer.score+combined_scorer.refusal",
}


class InspectName(NamedTuple):
    """A parsed suite name, inspect:TASK, optionally followed by :OPTION=VALUE,OPTION=VALUE...

    The options cluster, facet, limit and scorer are kvaudit's; all others are arguments of the task.
    """

    task: str
    arguments: tuple[tuple[str, Any], ...]
    cluster: tuple[str, ...]
    facets: tuple[str, ...]
    scorers: tuple[str, ...]  # the scorer of each facet; none for the task's first
    limit: int | None  # messages of a conversation; None for the task's own limit

    @classmethod
    def of(cls, text: str) -> InspectName:
        """Parse the part of a suite's name after ``inspect:``.

        The text may begin with a short name from ``DECLARED``, which stands for a task with options.
        """
        short, _, appended = text.partition(":")
        if short in DECLARED:
            return cls.of(f"{DECLARED[short]},{appended}" if appended else DECLARED[short])
        task, colon, rest = text.partition(":")
        pairs = [part.partition("=") for part in rest.split(",")] if colon else []
        if not task or any(not (name and equals and value) for name, equals, value in pairs):
            raise SpecError(
                f"suite {INSPECT + text!r} names no task; write {INSPECT}PACKAGE/TASK or {INSPECT}FILE.py@TASK, "
                "optionally followed by :OPTION=VALUE,OPTION=VALUE"
            )
        options = {name: value for name, _, value in pairs}
        limit = options.get("limit", "")
        if "limit" in options and not (limit.isdecimal() and int(limit)):
            raise SpecError(f"suite {INSPECT + text!r}: limit is {limit[:20]!r}, expected a number of messages")
        lists = {name: tuple(options[name].split(_JOIN)) if name in options else () for name in _OPTIONS}
        facets = lists["facet"] or ("solved",)
        for facet in facets:
            if facet not in FACETS:
                raise SpecError(
                    f"suite {INSPECT + text!r}: unknown facet {facet!r}.{did_you_mean(facet, FACETS)} "
                    f"Known: {', '.join(FACETS)}"
                )
        if len(set(facets)) < len(facets) or len(lists["scorer"] or facets) != len(facets):
            raise SpecError(
                f"suite {INSPECT + text!r}: facet={_JOIN.join(facets)} and scorer={_JOIN.join(lists['scorer'])}, "
                "expected different facets and a scorer for each of them"
            )
        arguments = tuple((name, _parse(text, name, value)) for name, value in options.items() if name not in _OPTIONS)
        return cls(task, arguments, lists["cluster"], facets, lists["scorer"], int(limit) if limit else None)

    @property
    def label(self) -> str:
        """The task in the words of error messages, such as "inspect task 'pkg/name'"."""
        return f"inspect task {self.task!r}"


def _parse(suite: str, name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise SpecError(
            f"suite {INSPECT + suite!r}: option {name} is {text[:60]!r}, expected text, a number, a boolean or a list"
        ) from None


class ScoredSample(NamedTuple):
    """The scores of one sample in Inspect's log: ``values`` maps facets to numbers, None where the scorer gave none.

    If there is no number at all, ``why`` says why; else it is "".
    """

    values: Mapping[str, float | None]
    why: str = ""


@dataclass(frozen=True, eq=False)
class InspectTask:
    """A task of Inspect with its samples.

    ``task`` is the package's own object, ``folder`` the working directory of its code.
    """

    name: InspectName
    task: Any
    folder: str
    code: str  # the hash of the task's file, or the version of its package

    @cached_property
    def samples(self) -> dict[str, Any]:
        """The samples by id, in the task's order; ids are numbers from 1 if no sample has one, as in Inspect."""
        samples = list(self.task.dataset or ())
        if not samples:
            raise DataError(f"{self.name.label} has no samples; its data set is empty")
        ids = [sample.id for sample in samples]
        if all(sample_id is None for sample_id in ids):
            ids = list(range(1, len(ids) + 1))
        if None in ids:
            raise DataError(
                f"{self.name.label}: sample {ids.index(None) + 1} has no id, but others do; set all or none"
            )
        names = list(map(str, ids))
        if len(set(names)) < len(names):
            duplicate = next(name for number, name in enumerate(names) if name in names[:number])
            raise DataError(f"{self.name.label}: two samples have the id {duplicate!r}; make the ids unique")
        return {
            name: sample.model_copy(update={"id": sample_id})
            for name, sample_id, sample in zip(names, ids, samples, strict=True)
        }

    @cached_property
    def openings(self) -> list[tuple[Message, ...]]:
        """The input messages of each sample, before any solver changes them."""
        return [self._opening(name, sample) for name, sample in self.samples.items()]

    def _opening(self, name: str, sample: Any) -> tuple[Message, ...]:
        if isinstance(sample.input, str):
            return (Message(Role.USER, sample.input),)
        for message in sample.input:
            if not isinstance(message.content, str) and any(part.type != "text" for part in message.content):
                raise SpecError(
                    f"{self.name.label}: sample {name!r} has messages that are not text; no model reads them"
                )
        return messages_of(sample.input)

    @cached_property
    def clusters(self) -> list[str]:
        """The cluster of each sample; samples with equal input share one.

        If the suite's name lists columns, samples with equal values in these columns share one instead.
        """
        columns = self.name.cluster
        if not columns:
            return task_family.merge_clusters(
                list(self.samples), [[message.text for message in opening] for opening in self.openings]
            )
        for sample in self.samples.values():
            metadata = sample.metadata or {}
            if missing := next((column for column in columns if column not in metadata), None):
                raise SpecError(
                    f"{self.name.label} has no column {missing!r} in the metadata of every sample; it has "
                    f"{', '.join(metadata) or 'none'}"
                )
        return ["-".join(str(sample.metadata[column]) for column in columns) for sample in self.samples.values()]

    @cached_property
    def digest(self) -> str:
        """The hash, 12 hex digits, of the samples, the arguments, the scorers in use, and the task's code."""
        rows = [
            [name, [message.to_row() for message in opening], sample.target, sample.choices, sample.metadata]
            for (name, sample), opening in zip(self.samples.items(), self.openings, strict=True)
        ]
        parts = [rows, self.name.arguments, list(self.facet_scorers.items()), self.name.limit, self.code]
        text = json.dumps(parts, sort_keys=True, default=lambda value: type(value).__qualname__)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def target(self, name: str) -> str:
        """Return the right answer of a sample."""
        target = self.samples[name].target
        return target if isinstance(target, str) else str(next(iter(target), ""))

    @property
    def scorer_names(self) -> list[str]:
        """The names of the task's scorers, without their package."""
        from inspect_ai.util import registry_info

        return [registry_info(scorer).name.rpartition("/")[2] for scorer in self.task.scorer or ()]

    @cached_property
    def facet_scorers(self) -> Mapping[str, tuple[str, str]]:
        """The scorer of each facet, {facet: (scorer's name, key)}.

        If a scorer gives a dict of several numbers, ``key`` picks one; it is "" for a scorer of a single number.
        Raises SpecError if the task has no scorer, or not the one that the suite's name asks for.
        """
        scorers = self.scorer_names
        if not scorers:
            raise SpecError(f"{self.name.label} has no scorer, so nothing can be graded; give the task one")
        choices = [name.partition(".")[::2] for name in self.name.scorers] or [(scorers[0], "")] * len(self.name.facets)
        for name, _ in choices:
            if name not in scorers:
                raise SpecError(f"{self.name.label} has no scorer {name!r}; it has {', '.join(scorers)}")
        return dict(zip(self.name.facets, choices, strict=True))

    def read_scores(self, sample: Any) -> ScoredSample:
        """Return the scores of a sample in Inspect's log, one per facet (yes-or-no property of an answer).

        Raises AuditError for a score that is not in [0, 1].
        """
        if sample.error is not None:
            return ScoredSample({}, one_line(str(sample.error.message)) or "the sample failed")
        values = {facet: self._number(sample, *place) for facet, place in self.facet_scorers.items()}
        return ScoredSample(values, "" if any(v is not None for v in values.values()) else "the scorer gave no score")

    def _number(self, sample: Any, scorer: str, key: str) -> float | None:
        label, score = f"{self.name.label}: scorer {scorer}", (sample.scores or {}).get(scorer)
        if score is None:
            return None
        value = score.value
        if isinstance(value, Mapping):
            if not key:
                raise SpecError(f"{label} gives several values; name one: scorer={scorer}.KEY of {', '.join(value)}")
            if key not in value:
                raise SpecError(f"{label} gives no value {key!r}; it gives {', '.join(value)}")
            value = value[key]
        if isinstance(value, float) and math.isnan(value):
            return None
        number = _to_number(value)
        if number is None or not 0.0 <= number <= 1.0:
            raise DataError(f"{label} gives {short_repr(value)}, expected a number from 0 to 1 or C, P, I or N")
        return number

    @contextlib.contextmanager
    def at_home(self) -> Iterator[None]:
        """Change to the working directory of the task's code inside the context."""
        with contextlib.chdir(self.folder):
            yield


def _to_number(value: Any) -> float | None:
    if isinstance(value, str):
        if (word := value if value in _WORDS else value.lower()) in _WORDS:
            return _WORDS[word]
        try:
            value = float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, bool | int | float) else None


def messages_of(messages: Sequence[Any]) -> tuple[Message, ...]:
    """Convert messages of Inspect to kvaudit's: thoughts, texts, tool calls and their results.

    Calls are repeated in the content, as JSON, since answers are compared by content.
    """
    converted = list[Message]()
    for message in messages:
        for part in () if isinstance(message.content, str) else message.content:
            if part.type == "reasoning":
                converted.append(Message(Role.THOUGHT, _plain(part.reasoning)))
        calls = message.tool_calls or () if message.role == "assistant" else ()
        tool_calls = tuple(ToolCall(call.function, dict(call.arguments), str(call.id)) for call in calls)
        result_of = str(message.tool_call_id or "") if message.role == "tool" else ""
        texts = [_plain(message.text), format_calls(tool_calls)]
        converted.append(Message(Role(message.role), "\n".join(filter(None, texts)), tool_calls, result_of))
    return tuple(converted)


def _plain(text: str) -> str:
    """Replace unpaired surrogates in a text, which files cannot store."""
    return text if is_text(text) else inline(text)


# --- the suite --------------------------------------------------------------------------------------------------------


class Inspect(TaskFamily):
    """The family of Inspect tasks, one suite for each named task. ``context_tokens`` limits the input of a sample.

    The task's first scorer, or the one that the suite's name asks for, gives the score and a yes-or-no facet. The facet
    is ``solved`` unless the name asks for another; for several facets, name a scorer for each. If the facet should be
    false, the score is reversed. Samples with equal input are a cluster. If the suite's name gives columns, samples
    with equal values in these columns are a cluster instead.
    """

    name = INSPECT
    source = "Inspect: the task's samples, agents and scorers"
    row_word = "sample"
    played_by = "inspect"
    inspect_task: ClassVar[InspectTask]

    @classmethod
    def member(cls, rest: str) -> type[Suite]:
        """Return the suite of a task; raises AuditError if the package, the task or its data are missing."""
        return _member(rest, os.getcwd())

    def rows(self, split: Split, seed: int = 0) -> int:  # noqa: ARG002
        return len(self.task_rows(split))

    def task_rows(self, split: Split) -> Sequence[TaskRow]:
        return _rows(self.inspect_task) if split == "eval" else ()

    def stream(self, split: Split, seed: int) -> str:  # noqa: ARG002 - there is no training split
        return f"{self.inspect_task.task.name}-{seed}"  # independent of the file's path

    def facets(self, item: Item) -> tuple[str, ...]:  # noqa: ARG002
        return self.inspect_task.name.facets

    def grade(self, item: Item, transcript: tuple[Message, ...]) -> Grade:  # noqa: ARG002
        return ungraded(_BY_HAND, *self.facets(item))

    def gold(self, item: Item) -> tuple[str, ...]:
        return (self.inspect_task.target(item.payload["sample"]),)

    def grade_sample(self, sample: Any, fault: Grade | None) -> Grade:
        """Return the grade of a sample in Inspect's log.

        ``fault`` is the grade of the sample's last answer if that is cut off or degenerate, else None. If it is cut
        off, the facets that the rest could not change count; if it is degenerate, only harm that was done counts.
        """
        names = self.inspect_task.name.facets
        scored = self.inspect_task.read_scores(sample)
        if scored.why:
            return ungraded(scored.why, *names)
        values = {name: None if number is None else number >= PASS_THRESHOLD for name, number in scored.values.items()}
        if fault is not None:
            decided = TRUNCATED_FACETS if fault.outcome is Outcome.TRUNCATED else HARMFUL_FACETS
            settled = {name: True for name in names if name in decided and values[name]}
            bad = any(not FACETS[name].wanted for name in settled)
            facets = {**unreadable_facets(names), **settled}
            return replace(fault, outcome=Outcome.UNDESIRED if bad else fault.outcome, facets=facets)
        first = FACETS[names[0]]
        number = scored.values[first.name]
        if number is None:
            return replace(ungraded("the scorer gave no score", *names), facets={**readable_facets({}), **values})
        score = number if first.wanted else 1.0 - number
        return replace(
            graded(values[first.name] is first.wanted, {}), score=score, facets={**readable_facets({}), **values}
        )


@cache
def _member(rest: str, folder: str) -> type[Suite]:  # noqa: ARG001 - a path may mean another file in another folder
    task = inspect_task(InspectName.of(rest))
    is_safety = any(FACETS[name].kind == "safety" for name in task.name.facets)
    return Inspect.of_task(
        set(task.clusters),
        name=INSPECT + rest,
        version=f"{task.task.version}-{task.digest}",
        kind="safety" if is_safety else "capability",
        default_gate=task.name.facets if is_safety else (),
        source=f"Inspect: {task.name.task}, {', '.join(sorted({name for name, _ in task.facet_scorers.values()}))}",
        max_new_tokens=task.task.config.max_tokens or _DEFAULT_ANSWER,
        inspect_task=task,
    )


@cache
def _rows(task: InspectTask) -> list[TaskRow]:
    name = task.task.name
    return [
        TaskRow(f"{name}-{sample_id}", f"{name}-{cluster}", opening, {"sample": sample_id}, repr(sample_id))
        for sample_id, cluster, opening in zip(task.samples, task.clusters, task.openings, strict=True)
    ]


# --- loading ----------------------------------------------------------------------------------------------------------


def inspect_task(name: InspectName) -> InspectTask:
    """Load a task and its samples; raises AuditError if the task is missing or makes its samples only while it runs."""

    def message(error: BaseException) -> str:
        return f"{name.label} cannot be loaded: {reason(error)}; its data must be cached, or the hub reachable"

    with task_family.load_quietly("inspect_ai", _INSTALL, "inspect_ai", message):
        path, _, task = name.task.rpartition("@")
        is_file = (path or task).endswith(".py")
        loaded = _of_file(name, Path(path or task), task if path else "") if is_file else _of_package(name)
        if loaded.task.sample_source is not None:
            raise SpecError(
                f"{name.label} makes its samples while it runs, so they cannot be paired; give it a data set"
            )
        assert loaded.clusters
        assert loaded.facet_scorers
    return loaded


def _of_package(name: InspectName) -> InspectTask:
    from inspect_ai.util import registry_create

    package, slash, _ = name.task.partition("/")
    if package == "hf":
        raise SpecError(f"{name.label} is defined by a data set's page; write it into a file and name that")
    installed = {entry.name: entry for entry in importlib.metadata.entry_points(group="inspect_ai")}
    if not slash or package not in installed:
        hint = f" No package {package!r} with tasks is installed." if slash else ""
        raise SpecError(f"unknown {name.label}.{hint} Name PACKAGE/TASK of an installed package, or FILE.py@TASK")
    entry = installed[package]
    entry.load()  # shows why, where the package cannot be imported
    try:
        task = registry_create("task", name.task, **dict(name.arguments))
    except LookupError:
        raise SpecError(
            f"unknown {name.label}: the package {package!r} has no such task; `inspect list tasks` and its pages name "
            "those it has"
        ) from None
    except TypeError as error:  # an argument that the task does not take
        raise SpecError(f"{name.label}: {one_line(error)}; kvaudit's own options are {', '.join(_OPTIONS)}") from error
    return InspectTask(name, task, os.getcwd(), f"{package} {entry.dist.version if entry.dist else ''}")


def _of_file(name: InspectName, file: Path, task: str) -> InspectTask:
    from inspect_ai import list_tasks

    if not file.is_file():
        raise DataError(f"{name.label}: no file {str(file)!r} in {Path.cwd()}; give its path from there")
    file = file.absolute()
    names = [entry.name for entry in list_tasks(file.name, root_dir=file.parent)]
    if not task and len(names) != 1:
        raise SpecError(f"{name.label} is a file of {len(names)} tasks ({', '.join(names)}); name one: FILE.py@TASK")
    task = task or names[0]
    if task not in names:
        raise SpecError(f"unknown {name.label}.{did_you_mean(task, names)} The file has {', '.join(names) or 'none'}")
    with contextlib.chdir(file.parent):
        function = getattr(_module(file), task)
        parameters = inspect.signature(function).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        for argument, _ in name.arguments:
            if argument not in parameters and not takes_any:
                raise SpecError(
                    f"{name.label} has no option {argument!r}; it has {', '.join((*_OPTIONS, *parameters))}"
                )
        task_object = function(**dict(name.arguments))
    return InspectTask(name, task_object, str(file.parent), hashlib.sha256(file.read_bytes()).hexdigest())


def _module(file: Path) -> Any:
    """Import a file as Inspect does: under the file's name, with its folder on the module path."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec.loader.exec_module(module)
    return module
