"""A task of Inspect: its samples, its plan of solvers and its scorer. The package is imported on first use.

A plan runs with kvaudit's ``generate``: up to ``generate`` to get the prompt, and again with the answer in place to get
the score. So solvers that edit messages and ask once are supported. A task is a program with this process's rights.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from kvaudit.core.errors import AuditError, DataError, SpecError, did_you_mean
from kvaudit.core.facets import FACETS
from kvaudit.core.records import Message, Role
from kvaudit.core.text import install_command, one_line, reason
from kvaudit.suites import task_family

T = TypeVar("T")
INSPECT = "inspect:"
_DEFAULT_ANSWER = 2048  # tokens, if a task sets none; Inspect's default for local models
_OPTIONS = ("cluster", "facet", "scorer")
_LIMITS = ("time_limit", "working_limit", "token_limit", "cost_limit", "early_stopping")
_UNSUPPORTED = (
    *("frequency_penalty", "presence_penalty", "logit_bias", "top_k", "response_schema", "logprobs", "top_logprobs"),
    *("reasoning_effort", "reasoning_tokens"),
)
_COUNTS = ("num_choices", "best_of")  # supported only with 1
_COMPARED_SAMPLES = 20  # whose prompts must not change when they are made again
_INSTALL = f"inspect suites need another package: {install_command('inspect')}"
_TRUTH = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}  # as in Inspect
_SUPPORTED = "only solvers that edit messages and ask once are supported"


def unsupported_settings(config: Any) -> list[str]:
    """Return the names of the settings in a ``GenerateConfig`` that kvaudit's sampler does not support."""
    settings = config.model_dump()
    # 0 and False are off, but 1 is a penalty, and True asks for log-probs
    names = [name for name in _UNSUPPORTED if settings.get(name) not in (None, False)]
    return names + [name for name in _COUNTS if settings.get(name) not in (None, 1)]


class InspectName(NamedTuple):
    """A name inspect:TASK, then :OPTION=VALUE,...; options other than _OPTIONS are arguments of the task."""

    task: str
    arguments: tuple[tuple[str, Any], ...]
    cluster: str | None
    facet: str
    scorer: str | None

    @classmethod
    def of(cls, text: str) -> InspectName:
        """Parse the part of a name after ``inspect:``."""
        task, colon, rest = text.partition(":")
        pairs = [part.partition("=") for part in rest.split(",")] if colon else []
        if not task or any(not (name and equals and value) for name, equals, value in pairs):
            raise SpecError(
                f"suite {INSPECT + text!r} names no task; write {INSPECT}PACKAGE/TASK or {INSPECT}FILE.py@TASK, "
                "optionally followed by :OPTION=VALUE,OPTION=VALUE"
            )
        options = {name: value for name, _, value in pairs}
        facet = options.get("facet", "solved")
        if facet not in FACETS:
            raise SpecError(
                f"suite {INSPECT + text!r}: unknown facet {facet!r}.{did_you_mean(facet, FACETS)} "
                f"Known: {', '.join(FACETS)}"
            )
        arguments = tuple((name, _parse(text, name, value)) for name, value in options.items() if name not in _OPTIONS)
        return cls(task, arguments, options.get("cluster"), facet, options.get("scorer"))

    @property
    def label(self) -> str:
        """The task in error messages."""
        return f"inspect task {self.task!r}"


class Prompt(NamedTuple):
    """The conversation of a sample, and the limits that its plan sets for the answer."""

    messages: tuple[Message, ...]
    longest_answer: int | None
    until: tuple[str, ...]


class ScorerResult(NamedTuple):
    """A score from 0 to 1, where 1 means that the answer is what the scorer looks for.

    ``value`` is None if there is no score; ``why`` then names the reason.
    """

    value: float | None
    why: str = ""


class _PromptReady(BaseException):
    """Raised where a plan asks the model; a BaseException, so that no ``except Exception`` of a solver catches it."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__()
        self.prompt = prompt


class _AsksAgain(BaseException):
    """Raised where a plan asks the model a second time."""


class _SolverFailed(Exception):
    """The error of a solver, with its name, or a changed prompt on the second run."""


def _parse(suite: str, name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise SpecError(
            f"suite {INSPECT + suite!r}: option {name} is {text[:60]!r}, expected text, a number, a boolean or a list"
        ) from None


@dataclass(frozen=True, eq=False)
class InspectTask:
    """A task whose samples are asked once each and scored one by one; ``task`` is the package's object."""

    name: InspectName
    task: Any
    scorer: Any
    to_float: Callable[[Any], float]

    @cached_property
    def samples(self) -> list[Any]:
        """The samples in the task's order."""
        return list(self.task.dataset)

    @cached_property
    def ids(self) -> list[str]:
        """The id of each sample; numbers from 1 if no sample has one, as in Inspect."""
        ids = [sample.id for sample in self.samples]
        if all(sample_id is None for sample_id in ids):
            return [str(number + 1) for number in range(len(ids))]
        if None in ids:
            raise DataError(
                f"{self.name.label}: sample {ids.index(None) + 1} has no id, but others do; set all or none"
            )
        ids = list(map(str, ids))
        if len(set(ids)) < len(ids):
            duplicate = next(sample_id for number, sample_id in enumerate(ids) if sample_id in ids[:number])
            raise DataError(f"{self.name.label}: two samples have the id {duplicate!r}; make the ids unique")
        return ids

    @property
    def scorer_name(self) -> str:
        """The name of the scorer, with the key of its value if it gives several."""
        return self.name.scorer or _registered_name(self.scorer)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The prompt of each sample, in the task's order."""
        return [self._prompt(sample) for sample in self.samples]

    @property
    def until(self) -> tuple[str, ...]:
        """The stop strings, the same for all samples."""
        return self._common("until", [prompt.until for prompt in self.prompts])

    @property
    def longest_answer(self) -> int:
        """The maximum number of tokens of an answer, the same for all samples."""
        return self._common("max_tokens", [prompt.longest_answer for prompt in self.prompts]) or _DEFAULT_ANSWER

    @cached_property
    def clusters(self) -> list[str]:
        """The cluster of each sample: its value of the cluster column, or its id; equal prompts share a cluster."""
        column, clusters = self.name.cluster, self.ids
        if column is not None:
            for sample in self.samples:
                if column not in (sample.metadata or {}):
                    columns = ", ".join(sample.metadata or {}) or "none"
                    raise SpecError(
                        f"{self.name.label} has no column {column!r} in the metadata of every sample; it has {columns}"
                    )
            clusters = [str(sample.metadata[column]) for sample in self.samples]
        return task_family.merge_clusters(clusters, [prompt.messages for prompt in self.prompts])

    @cached_property
    def digest(self) -> str:
        """12 hex digits of the prompts, the targets, and the scorer with its file."""
        from inspect_ai._util.registry import registry_params

        prompts = [[[(m.role, m.content) for m in prompt.messages], *prompt[1:]] for prompt in self.prompts]
        rows = [[sample.target, sample.choices, sample.metadata] for sample in self.samples]
        name, parameters = _registered_name(self.scorer), dict(registry_params(self.scorer))
        scorer = [name, parameters, _sha256_of_file(self.scorer), self.name.scorer]
        parts = [prompts, rows, self.ids, scorer, self.name.facet]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]

    def target(self, number: int) -> str:
        """Return the right answer of a sample."""
        target = self.samples[number].target
        return target if isinstance(target, str) else str(next(iter(target), ""))

    def score(self, number: int, messages: tuple[Message, ...], answer: str) -> ScorerResult:
        """Score an answer; raises DataError for a value that is no number from 0 to 1.

        Errors of the task's code, and a plan that asks again or changes its prompt, give no score.
        """
        try:
            with task_family.time_limit():
                score = _run(self._scored(self.samples[number], messages, answer))
        except AuditError:
            raise
        except task_family.TaskTimeout:
            return ScorerResult(None, f"the scorer took over {task_family.GRADING_SECONDS:g} s")
        except _AsksAgain:
            return ScorerResult(None, "the solver asks again after this answer")
        except _SolverFailed as error:
            return ScorerResult(None, one_line(error))
        except task_family.TASK_ERRORS as error:
            return ScorerResult(None, f"the scorer raised {type(error).__name__}")
        return ScorerResult(None, "the scorer gave no score") if score is None else self._result(score)

    def check_served(self) -> None:
        """Raise AuditError if a trial shows that the plan or the scorer is not supported."""
        prompts = [self._prompt(sample) for sample in self.samples[:_COMPARED_SAMPLES]]
        if prompts != self.prompts[:_COMPARED_SAMPLES]:
            raise SpecError(
                f"{self.name.label}: prompts change on every run; set a seed where the task shuffles or draws"
            )
        for answer in (self.target(0) or "x", "x"):  # a right answer and a meaningless one
            try:
                score = _run(self._scored(self.samples[0], self.prompts[0].messages, answer))
            except AuditError:
                raise
            except _AsksAgain as error:
                raise SpecError(
                    f"{self.name.label}: {self._plan} asks the model more than once; {_SUPPORTED}"
                ) from error
            except _SolverFailed as error:
                raise SpecError(f"{self.name.label}: {error}; {_SUPPORTED}") from error
            except task_family.TASK_ERRORS as error:
                raise SpecError(
                    f"{self.name.label}: scorer {_registered_name(self.scorer)} cannot score here ({reason(error)}); "
                    "scorers that need a model or a sandbox are not supported (`judge:` in a spec is for our suites)"
                ) from error
            if score is not None:
                self._result(score)

    async def _scored(self, sample: Any, messages: tuple[Message, ...], answer: str) -> Any:
        from inspect_ai.scorer import Target

        state = await self._play(sample, answer)
        if _messages(state.messages[: len(messages)], self.name.label) != messages:
            raise _SolverFailed("the solver asks otherwise than it did")
        with _without_models():
            return await self.scorer(state, Target(sample.target))

    def _prompt(self, sample: Any) -> Prompt:
        try:
            _run(self._play(sample, None))
        except _PromptReady as ready:
            return ready.prompt
        except AuditError:
            raise
        except (_SolverFailed, BaseExceptionGroup) as error:  # a group comes from solvers that ask in parallel
            fault = str(error) if isinstance(error, _SolverFailed) else f"{self._plan} asks the model more than once"
            raise SpecError(f"{self.name.label}: {fault}; {_SUPPORTED}") from error
        raise SpecError(f"{self.name.label}: {self._solvers[-1][0]} never asks the model; {_SUPPORTED}")

    async def _play(self, sample: Any, answer: str | None) -> Any:
        """Run the plan and return its state after this answer; raises _PromptReady if there is no answer yet."""
        state = _state(sample)
        generate = _Generate(self, answer)
        with _without_models():
            for name, solver in self._solvers:
                try:
                    state = await solver(state, generate)
                except AuditError:
                    raise
                except task_family.TASK_ERRORS as error:
                    raise _SolverFailed(f"solver {name} cannot be served ({reason(error)})") from error
                if state.tools:
                    raise SpecError(f"{self.name.label}: solver {name} gives the model tools; {_SUPPORTED}")
                if state.completed:
                    break
        return state

    @cached_property
    def _solvers(self) -> list[tuple[str, Any]]:
        from inspect_ai.solver._chain import unroll

        plan = [*(unroll(self.task.setup) if self.task.setup else ()), *unroll(self.task.solver)]
        return [(_registered_name(solver), solver) for solver in plan]

    @property
    def _plan(self) -> str:
        return "solver " + ", ".join(name for name, _ in self._solvers)

    def _result(self, score: Any) -> ScorerResult:
        name = _registered_name(self.scorer)
        label = f"{self.name.label}: scorer {name}"
        value, key = score.value, (self.name.scorer or "").partition(".")[2]
        if isinstance(value, Mapping):
            if key not in value:
                raise SpecError(f"{label} gives several values; name one: scorer={name}.KEY of {', '.join(value)}")
            value = value[key]
        if isinstance(value, float) and math.isnan(value):
            return ScorerResult(None, "the scorer gave no score")
        number = _number(value, self.to_float)
        if number is None or not 0.0 <= number <= 1.0:
            raise DataError(f"{label} gives {repr(value)[:40]}, expected a number from 0 to 1 or C, P, I or N")
        return ScorerResult(number)

    def _common(self, setting: str, values: Sequence[T]) -> T:
        other = next((value for value in values if value != values[0]), values[0])
        if other != values[0]:
            raise SpecError(f"{self.name.label}: samples differ in {setting} ({values[0]} and {other}); use one value")
        return values[0]


@dataclass(frozen=True)
class _Generate:
    """Inspect's ``generate``: raises _PromptReady, or inserts the answer once."""

    task: InspectTask
    answer: str | None

    async def __call__(self, state: Any, tool_calls: str = "loop", cache: Any = None, **options: Any) -> Any:  # noqa: ARG002
        from inspect_ai.model import ChatCompletionChoice, ChatMessageAssistant, GenerateConfig, ModelOutput

        config = self.task.task.config.merge(GenerateConfig(**options))
        if self.answer is None:
            raise _PromptReady(self._prompt(state, config))
        if state.output.choices:  # the answer is already there
            raise _AsksAgain
        message = ChatMessageAssistant(content=self.answer, model=str(state.model), source="generate")
        state.messages.append(message)
        choice = ChatCompletionChoice(message=message, stop_reason="stop")
        state.output = ModelOutput(model=str(state.model), choices=[choice])
        return state

    def _prompt(self, state: Any, config: Any) -> Prompt:
        label = self.task.name.label
        if names := unsupported_settings(config):
            raise SpecError(f"{label} sets {names[0]}, which this sampler cannot do; remove it")
        if config.system_message:
            raise SpecError(f"{label} sets system_message in its config; use the solver system_message instead")
        messages = _messages(state.messages, label)
        if not messages or messages[-1].role is not Role.USER:
            raise SpecError(
                f"{label}: sample {state.sample_id!r} begins the answer for the model; end with a user message"
            )
        return Prompt(messages, config.max_tokens, tuple(text for text in config.stop_seqs or () if text))


def inspect_task(name: InspectName) -> InspectTask:
    """Load a task and its samples; raises AuditError if it is missing or not supported."""

    def message(error: BaseException) -> str:
        return f"{name.label} cannot be loaded: {reason(error)}; its data must be cached, or the hub reachable"

    with task_family.load_quietly("inspect_ai", _INSTALL, "inspect_ai", message):
        task = _load(name)
        _check(task, name.label)
        scorer = _scorer(task, name)
        loaded = InspectTask(name, task, scorer, _to_float(scorer))
        assert loaded.ids
        assert loaded.clusters
        loaded.check_served()
    return loaded


def _load(name: InspectName) -> Any:
    from inspect_ai._eval.loader import load_task_spec
    from inspect_ai._util.registry import registry_find, registry_info, registry_lookup

    path, _, task = name.task.rpartition("@")
    if (path or task).endswith(".py"):
        return _load_file(name, Path(path or task), task if path else "")
    if name.task.startswith("hf/"):
        raise SpecError(f"{name.label} is defined by a data set's page; write it into a file and name that")
    if (function := registry_lookup("task", name.task)) is None:
        names = [registry_info(entry).name for entry in registry_find(lambda info: info.type == "task")]
        raise _unknown_task(name, name.task, names)
    _check_arguments(name, function)
    return load_task_spec(name.task, dict(name.arguments))[0]


def _load_file(name: InspectName, file: Path, task: str) -> Any:
    from inspect_ai._eval.loader import create_file_tasks, load_file_tasks
    from inspect_ai._util.decorator import parse_decorators
    from inspect_ai._util.registry import registry_lookup

    if not file.is_file():
        raise DataError(f"{name.label}: no file {str(file)!r} in {Path.cwd()}; give its path from there")
    names = [entry[0] for entry in parse_decorators(file, "task")]
    if not task and len(names) != 1:
        raise SpecError(f"{name.label} is a file of {len(names)} tasks ({', '.join(names)}); name one: FILE.py@TASK")
    task = task or names[0]
    if task not in names:
        raise _unknown_task(name, task, names)
    load_file_tasks(file.absolute())
    _check_arguments(name, registry_lookup("task", task))
    return create_file_tasks(file, [task], dict(name.arguments))[0]


def _unknown_task(name: InspectName, task: str, names: Sequence[str]) -> SpecError:
    hint = did_you_mean(task, names)
    package = task.partition("/")[0]
    if "/" in task and not any(entry.startswith(package + "/") for entry in names):
        hint = f" No package {package!r} with tasks is installed."
    return SpecError(f"unknown {name.label}.{hint} Name PACKAGE/TASK of an installed package, or FILE.py@TASK")


def _check_arguments(name: InspectName, function: Any) -> None:
    """Raise SpecError for an argument that the task does not take, which Inspect would ignore."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for argument, _ in name.arguments:
        if argument not in parameters and not takes_any:
            raise SpecError(f"{name.label} has no option {argument!r}; it has {', '.join((*_OPTIONS, *parameters))}")


def _check(task: Any, label: str) -> None:
    """Raise AuditError for a task that is not one prompt, one answer and one score per sample."""
    samples = list(task.dataset or ())
    if task.sample_source is None and not samples:
        raise DataError(f"{label} has no samples; its data set is empty")
    reasons = {
        "makes its samples while it runs": task.sample_source is not None,
        "needs a sandbox": task.sandbox or any(sample.sandbox or sample.files or sample.setup for sample in samples),
        "has no scorer": not task.scorer,
    }
    for name in _LIMITS:
        reasons[f"sets {name}, which batched generation cannot enforce"] = getattr(task, name, None) is not None
    task_family.refuse_task(label, reasons, "tasks of one prompt, one answer and one score")


def _scorer(task: Any, name: InspectName) -> Any:
    scorers = {_registered_name(scorer): scorer for scorer in task.scorer}
    choice = (name.scorer or next(iter(scorers))).partition(".")[0]
    if choice not in scorers:
        raise SpecError(f"{name.label} has no scorer {choice!r}; it has {', '.join(scorers)}")
    if choice.startswith("model_graded"):
        others = [scorer for scorer in scorers if not scorer.startswith("model_graded")]
        advice = f"name another (scorer={others[0]})" if others else "`judge:` in a spec grades our suites only"
        raise SpecError(f"{name.label}: scorer {choice} asks a model to grade, which is not supported; {advice}")
    return scorers[choice]


def _to_float(scorer: Any) -> Callable[[Any], float]:
    """Return how the scorer's metrics convert its values to numbers, Inspect's default if they do not define it."""
    from inspect_ai._util.registry import registry_info
    from inspect_ai.scorer import value_to_float

    metrics = registry_info(scorer).metadata["metrics"]
    flat = metrics if isinstance(metrics, Sequence) else [metric for group in metrics.values() for metric in group]
    for metric in flat:
        if inspect.isfunction(metric) and (to_float := inspect.getclosurevars(metric).nonlocals.get("to_float")):
            return to_float  # type: ignore[no-any-return]
    return value_to_float()  # type: ignore[no-any-return]


def _number(value: Any, to_float: Callable[[Any], float]) -> float | None:
    """Return a value as a number; None for other texts and lists, which Inspect would count as 0."""
    if not isinstance(value, bool | int | float | str):
        return None
    variables = inspect.getclosurevars(to_float).nonlocals if inspect.isfunction(to_float) else {}
    if isinstance(value, str) and "noanswer" in variables and value not in variables.values():
        try:
            return _TRUTH[value.lower()] if value.lower() in _TRUTH else float(value)
        except ValueError:
            return None
    return float(to_float(value))


def _state(sample: Any) -> Any:
    """Return the state that Inspect would give to the first solver."""
    from inspect_ai._eval.task.util import sample_messages
    from inspect_ai.model import ModelName
    from inspect_ai.scorer import Target
    from inspect_ai.solver import TaskState
    from inspect_ai.solver._task_state import set_sample_state
    from inspect_ai.util._store import init_subtask_store

    sample = copy.deepcopy(sample)
    state = TaskState(
        model=ModelName("kvaudit/served"),
        sample_id=sample.id or 0,
        epoch=1,
        input=sample.input,
        messages=sample_messages(sample),
        target=Target(sample.target),
        choices=sample.choices,
        metadata=sample.metadata or {},
    )
    set_sample_state(state)
    init_subtask_store(state.store)
    return state


def _messages(messages: Sequence[Any], label: str) -> tuple[Message, ...]:
    converted = []
    for message in messages:
        if not isinstance(message.content, str) and any(part.type != "text" for part in message.content):
            raise SpecError(f"{label} has messages that are not text, which is not supported")
        if message.role == "tool" or getattr(message, "tool_calls", None):
            raise SpecError(f"{label} has tool calls in its messages; {_SUPPORTED}")
        converted.append(Message(Role(message.role), message.text))
    return tuple(converted)


@contextmanager
def _without_models() -> Iterator[None]:
    """Let every model call of a solver or scorer fail."""
    from inspect_ai.util import token_limit

    with token_limit(0):
        yield


def _run(work: Awaitable[T]) -> T:
    async def with_transcript() -> T:
        from inspect_ai.log._transcript import Transcript, init_transcript

        init_transcript(Transcript())  # the shared transcript would grow with every answer
        return await work

    return asyncio.run(with_transcript())


def _registered_name(thing: Any) -> str:
    """Return the name of a solver or scorer without its package."""
    from inspect_ai._util.registry import is_registry_object, registry_unqualified_name

    return str(registry_unqualified_name(thing)) if is_registry_object(thing) else type(thing).__name__


def _sha256_of_file(scorer: Any) -> str:
    """Return the hash of the file that defines a scorer, so that a changed rule is another version."""
    source = inspect.getsourcefile(inspect.unwrap(scorer))
    return hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else ""
