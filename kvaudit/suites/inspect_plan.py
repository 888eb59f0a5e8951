"""One task of Inspect: its samples, the plan of solvers that asks them, its scorer. Loaded when one is asked for.

A plan is played with a ``generate`` of ours: up to it for the prompt, and a second time, with the answer in its place,
for the score. So any solver can be served that edits messages and asks once. A task is a program, of a package or a
file, and runs with this process's rights.
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
from kvaudit.core.text import install_line, one_line, reason
from kvaudit.suites.task_family import GRADING_SECONDS, TASK_ERRORS, TaskTimeout, merge_clusters, time_limit, load_quietly, refuse_task

T = TypeVar("T")
INSPECT = "inspect:"
_LONGEST_ANSWER = 2048  # tokens where a task says nothing, Inspect's own for models that it runs itself
_OWN = ("cluster", "facet", "scorer")
_LIMITS = ("time_limit", "working_limit", "token_limit", "cost_limit", "early_stopping")
_NOT_SERVED = (
    *("frequency_penalty", "presence_penalty", "logit_bias", "top_k", "response_schema", "logprobs", "top_logprobs"),
    *("reasoning_effort", "reasoning_tokens"),
)
_OF_ONE = ("num_choices", "best_of")  # served where one is asked for
_TRIED_TWICE = 20  # samples that must be asked alike both times
_NEEDED = f"inspect suites need a package more: {install_line('inspect')}"


def unsupported_settings(config: Any) -> list[str]:
    """The settings of a ``GenerateConfig`` that ask for what our sampler cannot do."""
    asked = config.model_dump()
    # 0 and False ask for nothing; 1 does of a penalty, and True of log-probs
    wrong = [name for name in _NOT_SERVED if asked.get(name) not in (None, False)]
    return wrong + [name for name in _OF_ONE if asked.get(name) not in (None, 1)]


class InspectName(NamedTuple):
    """What a name says: inspect:TASK, then :OPTION=VALUE,... of which all but ours are the task's arguments."""

    task: str
    arguments: tuple[tuple[str, Any], ...]
    cluster: str | None
    facet: str
    scorer: str | None

    @classmethod
    def of(cls, text: str) -> InspectName:
        """Read what follows ``inspect:``."""
        task, colon, rest = text.partition(":")
        pairs = [part.partition("=") for part in rest.split(",")] if colon else []
        if not task or any(not (name and equals and value) for name, equals, value in pairs):
            raise SpecError(
                f"suite {INSPECT + text!r} names no task; write {INSPECT}PACKAGE/TASK or {INSPECT}FILE.py@TASK, then "
                "perhaps :OPTION=VALUE,OPTION=VALUE"
            )
        options = {name: value for name, _, value in pairs}
        facet = options.get("facet", "solved")
        if facet not in FACETS:
            raise SpecError(
                f"suite {INSPECT + text!r}: no facet is called {facet!r}.{did_you_mean(facet, FACETS)} "
                f"Known: {', '.join(FACETS)}"
            )
        given = tuple((name, _value(text, name, value)) for name, value in options.items() if name not in _OWN)
        return cls(task, given, options.get("cluster"), facet, options.get("scorer"))

    @property
    def label(self) -> str:
        """The task, as an error names it."""
        return f"inspect task {self.task!r}"


class Prompt(NamedTuple):
    """What a plan asks of one sample: the conversation, and what it says of the answer."""

    messages: tuple[Message, ...]
    longest_answer: int | None
    until: tuple[str, ...]


class ScorerResult(NamedTuple):
    """What a scorer said of an answer: a number from 0 to 1, 1 where the answer is what the scorer looks for.

    ``value`` is None where it did not score, ``why`` says then what came instead.
    """

    value: float | None
    why: str = ""


class _Ask(BaseException):
    """A plan has come to where the model answers; no ``except Exception`` of a solver's may hold this up."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__()
        self.prompt = prompt


class _AskAgain(BaseException):
    """A plan asks after it was answered."""


def _value(suite: str, name: str, text: str) -> Any:
    """The value of a task's option, as YAML has it; nothing in it is executed."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise SpecError(
            f"suite {INSPECT + suite!r}: option {name} is {text[:60]!r}, wanted text, a number, a truth value or a list"
        ) from None


@dataclass(frozen=True, eq=False)
class InspectTask:
    """A task whose samples are all asked once and scored one by one; ``task`` is the package's own object."""

    asked: InspectName
    task: Any
    scorer: Any
    to_float: Callable[[Any], float]

    @cached_property
    def samples(self) -> list[Any]:
        """What is evaluated, in the task's order."""
        return list(self.task.dataset)

    @cached_property
    def ids(self) -> list[str]:
        """The id of every sample; their places, from 1, where none has one: the ids that Inspect gives them."""
        given = [sample.id for sample in self.samples]
        if all(each is None for each in given):
            return [str(number + 1) for number in range(len(given))]
        if None in given:
            raise DataError(
                f"{self.asked.label}: sample {given.index(None) + 1} has no id, others have; give all or none"
            )
        ids = list(map(str, given))
        if len(set(ids)) < len(ids):
            twice = next(each for number, each in enumerate(ids) if each in ids[:number])
            raise DataError(f"{self.asked.label}: two samples have the id {twice!r}; give each its own")
        return ids

    @property
    def scorer_name(self) -> str:
        """The scorer, and the value of it where it gives several."""
        return self.asked.scorer or _name(self.scorer)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """What is asked of each sample, in the task's order."""
        return [self._prompt(sample) for sample in self.samples]

    @property
    def until(self) -> tuple[str, ...]:
        """Texts that end an answer; the same for all samples."""
        return self._one("until", [prompt.until for prompt in self.prompts])

    @property
    def longest_answer(self) -> int:
        """Tokens that an answer may take; the same for all samples."""
        return self._one("max_tokens", [prompt.longest_answer for prompt in self.prompts]) or _LONGEST_ANSWER

    @cached_property
    def clusters(self) -> list[str]:
        """The cluster of every sample, that of the first one where several ask the same."""
        return merge_clusters(self._own_clusters, [prompt.messages for prompt in self.prompts])

    @property
    def _own_clusters(self) -> list[str]:
        """A sample's value of a column of the metadata, or the sample itself."""
        column = self.asked.cluster
        if column is None:
            return self.ids
        for sample in self.samples:
            if column not in (sample.metadata or {}):
                known = ", ".join(sample.metadata or {}) or "none"
                raise SpecError(
                    f"{self.asked.label} has no column {column!r} in the metadata of every sample; it has {known}"
                )
        return [str(sample.metadata[column]) for sample in self.samples]

    @cached_property
    def digest(self) -> str:
        """12 hex digits of what is asked, of the targets, and of the scorer with its file."""
        from inspect_ai._util.registry import registry_params

        asked = [[[(m.role, m.content) for m in prompt.messages], *prompt[1:]] for prompt in self.prompts]
        rows = [[sample.target, sample.choices, sample.metadata] for sample in self.samples]
        scorer = [
            _name(self.scorer),
            dict(registry_params(self.scorer)),
            _sha256_of_file(self.scorer),
            self.asked.scorer,
        ]
        rest = [asked, rows, self.ids, scorer, self.asked.facet]
        return hashlib.sha256(json.dumps(rest, sort_keys=True, default=str).encode()).hexdigest()[:12]

    def target(self, number: int) -> str:
        """What the sample gives as right."""
        target = self.samples[number].target
        return target if isinstance(target, str) else str(next(iter(target), ""))

    def score(self, number: int, messages: tuple[Message, ...], answer: str) -> ScorerResult:
        """The scorer's word on one answer; raises DataError for a value that is no number from 0 to 1.

        What the task's code raises, and a plan that asks again or otherwise than it did, leave an answer unscored.
        """
        try:
            with time_limit():
                score = _run(self._scored(self.samples[number], messages, answer))
        except AuditError:
            raise
        except TaskTimeout:
            return ScorerResult(None, f"the scorer took over {GRADING_SECONDS:g} s")
        except _AskAgain:
            return ScorerResult(None, "the solver asks again after this answer")
        except _SolverFailed as error:
            return ScorerResult(None, one_line(error))
        except TASK_ERRORS as error:  # the task's code, over whatever the model wrote
            return ScorerResult(None, f"the scorer raised {type(error).__name__}")
        return ScorerResult(None, "the scorer gave no score") if score is None else self._read(score)

    def check_served(self) -> None:
        """Raise AuditError for a plan or a scorer that cannot be served, as far as the samples' own targets show it."""
        again = [self._prompt(sample) for sample in self.samples[:_TRIED_TWICE]]
        if again != self.prompts[:_TRIED_TWICE]:
            raise SpecError(f"{self.asked.label} asks otherwise each time (it draws without a seed); shuffle with one")
        for answer in (self.target(0) or "x", "x"):  # a right answer, and one that says nothing
            try:
                score = _run(self._scored(self.samples[0], self.prompts[0].messages, answer))
            except AuditError:
                raise
            except _AskAgain as error:
                raise SpecError(
                    f"{self.asked.label}: {self._asker} asks the model more than once; {_SERVED}"
                ) from error
            except _SolverFailed as error:
                raise SpecError(f"{self.asked.label}: {error}; {_SERVED}") from error
            except TASK_ERRORS as error:
                raise SpecError(
                    f"{self.asked.label}: scorer {_name(self.scorer)} cannot score here ({reason(error)}); "
                    "none that asks a model or a sandbox can; a judge of ours (`judge:` in a spec) grades our suites"
                ) from error
            if score is not None:
                self._read(score)

    async def _scored(self, sample: Any, messages: tuple[Message, ...], answer: str) -> Any:
        from inspect_ai.scorer import Target

        state = await self._play(sample, answer)
        if _messages(state.messages[: len(messages)], self.asked.label) != messages:
            raise _SolverFailed("the solver asks otherwise than it did")
        with _without_models():
            return await self.scorer(state, Target(sample.target))

    def _prompt(self, sample: Any) -> Prompt:
        try:
            _run(self._play(sample, None))
        except _Ask as ask:
            return ask.prompt
        except AuditError:
            raise
        except (_SolverFailed, BaseExceptionGroup) as error:  # a group: of solvers that ask side by side
            what = str(error) if isinstance(error, _SolverFailed) else f"{self._asker} asks the model more than once"
            raise SpecError(f"{self.asked.label}: {what}; {_SERVED}") from error
        raise SpecError(f"{self.asked.label}: {self._solvers[-1][0]} never asks the model; {_SERVED}")

    async def _play(self, sample: Any, answer: str | None) -> Any:
        """The state after the plan, which met this answer; raises _Ask where there is none yet."""
        state = _state(sample)
        generate = _Generate(self, answer)
        with _without_models():
            for name, solver in self._solvers:
                try:
                    state = await solver(state, generate)
                except AuditError:
                    raise
                except TASK_ERRORS as error:
                    raise _SolverFailed(f"solver {name} cannot be served ({reason(error)})") from error
                if state.tools:
                    raise SpecError(f"{self.asked.label}: solver {name} gives the model tools; {_SERVED}")
                if state.completed:
                    break
        return state

    @cached_property
    def _solvers(self) -> list[tuple[str, Any]]:
        from inspect_ai.solver._chain import unroll

        plan = [*(unroll(self.task.setup) if self.task.setup else ()), *unroll(self.task.solver)]
        return [(_name(solver), solver) for solver in plan]

    @property
    def _asker(self) -> str:
        return "solver " + ", ".join(name for name, _ in self._solvers)

    def _read(self, score: Any) -> ScorerResult:
        """A score as a number from 0 to 1."""
        label = f"{self.asked.label}: scorer {_name(self.scorer)}"
        value, key = score.value, (self.asked.scorer or "").partition(".")[2]
        if isinstance(value, Mapping):
            if key not in value:
                raise SpecError(
                    f"{label} gives several values; name one: scorer={_name(self.scorer)}.KEY of {', '.join(value)}"
                )
            value = value[key]
        if isinstance(value, float) and math.isnan(value):
            return ScorerResult(None, "the scorer gave no score")
        number = _number(value, self.to_float)
        if number is None or not 0.0 <= number <= 1.0:
            raise DataError(f"{label} gives {repr(value)[:40]}, wanted a number from 0 to 1 or C, P, I or N")
        return ScorerResult(number)

    def _one(self, what: str, values: Sequence[T]) -> T:
        other = next((value for value in values if value != values[0]), values[0])
        if other != values[0]:
            raise SpecError(
                f"{self.asked.label} asks samples with different {what}, {values[0]} and {other}; one is served"
            )
        return values[0]


_TRUTH = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}  # as Inspect reads them
_SERVED = "solvers that edit messages and ask once can be served"


class _SolverFailed(Exception):
    """What a solver raised, with its name, or that it asks otherwise once it is answered."""


@dataclass(frozen=True)
class _Generate:
    """Inspect's ``generate`` for a plan that is played: asks, or puts the answer there once."""

    of: InspectTask
    answer: str | None

    async def __call__(self, state: Any, tool_calls: str = "loop", cache: Any = None, **options: Any) -> Any:  # noqa: ARG002
        from inspect_ai.model import ChatCompletionChoice, ChatMessageAssistant, GenerateConfig, ModelOutput

        config = self.of.task.config.merge(GenerateConfig(**options))
        if self.answer is None:
            raise _Ask(self._prompt(state, config))
        if state.output.choices:  # the answer stands there already
            raise _AskAgain
        message = ChatMessageAssistant(content=self.answer, model=str(state.model), source="generate")
        state.messages.append(message)
        choice = ChatCompletionChoice(message=message, stop_reason="stop")
        state.output = ModelOutput(model=str(state.model), choices=[choice])
        return state

    def _prompt(self, state: Any, config: Any) -> Prompt:
        label = self.of.asked.label
        if wrong := unsupported_settings(config):
            raise SpecError(f"{label} sets {wrong[0]}, which this sampler cannot do; leave it out")
        if config.system_message:
            raise SpecError(f"{label} sets system_message in its config; put it in with the solver system_message")
        messages = _messages(state.messages, label)
        if not messages or messages[-1].role is not Role.USER:
            raise SpecError(
                f"{label}: sample {state.sample_id!r} begins the answer for the model, wanted the user last"
            )
        return Prompt(messages, config.max_tokens, tuple(text for text in config.stop_seqs or () if text))


def inspect_task(asked: InspectName) -> InspectTask:
    """Load a task and its samples; raises AuditError for one that cannot be a suite."""

    def failed(error: BaseException) -> str:
        return f"{asked.label} cannot be loaded: {reason(error)}; its data must be here, or the hub in reach"

    with load_quietly("inspect_ai", _NEEDED, "inspect_ai", failed):
        task = _loaded(asked)
        _check(task, asked.label)
        scorer = _scorer(task, asked)
        found = InspectTask(asked, task, scorer, _to_float(scorer))
        assert found.ids
        assert found.clusters
        found.check_served()
    return found


def _loaded(asked: InspectName) -> Any:
    """The task itself, of a package or of a file; raises AuditError where there is none of this name."""
    from inspect_ai._eval.loader import load_task_spec
    from inspect_ai._util.registry import registry_find, registry_info, registry_lookup

    path, _, name = asked.task.rpartition("@")
    if (path or name).endswith(".py"):
        return _loaded_from_file(asked, Path(path or name), name if path else "")
    if asked.task.startswith("hf/"):
        raise SpecError(f"{asked.label} is made from a data set's own page; write it into a file and name that")
    if (made := registry_lookup("task", asked.task)) is None:
        known = [registry_info(each).name for each in registry_find(lambda info: info.type == "task")]
        raise _unknown(asked, asked.task, known)
    _check_arguments(asked, made)
    return load_task_spec(asked.task, dict(asked.arguments))[0]


def _loaded_from_file(asked: InspectName, file: Path, name: str) -> Any:
    from inspect_ai._eval.loader import create_file_tasks, load_file_tasks
    from inspect_ai._util.decorator import parse_decorators
    from inspect_ai._util.registry import registry_lookup

    if not file.is_file():
        raise DataError(f"{asked.label}: no file {str(file)!r} in {Path.cwd()}; give its path from here")
    names = [each[0] for each in parse_decorators(file, "task")]
    if not name and len(names) != 1:
        raise SpecError(f"{asked.label} is a file of {len(names)} tasks ({', '.join(names)}); name one: FILE.py@TASK")
    wanted = name or names[0]
    if wanted not in names:
        raise _unknown(asked, wanted, names)
    load_file_tasks(file.absolute())
    _check_arguments(asked, registry_lookup("task", wanted))
    return create_file_tasks(file, [wanted], dict(asked.arguments))[0]


def _unknown(asked: InspectName, name: str, known: Sequence[str]) -> SpecError:
    hint = did_you_mean(name, known)
    package = name.partition("/")[0]
    if "/" in name and not any(each.startswith(package + "/") for each in known):
        hint = f" No package {package!r} with tasks is installed."
    return SpecError(f"unknown {asked.label}.{hint} Name PACKAGE/TASK of an installed package, or FILE.py@TASK")


def _check_arguments(asked: InspectName, made: Any) -> None:
    """Raise SpecError for an argument that the task does not take, which Inspect would pass over."""
    parameters = inspect.signature(made).parameters
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for name, _ in asked.arguments:
        if name not in parameters and not anything:
            known = ", ".join((*_OWN, *parameters))
            raise SpecError(f"{asked.label} has no option {name!r}; it has {known}")


def _check(task: Any, label: str) -> None:
    """Raise SpecError for what no grid of answers can hold."""
    samples = list(task.dataset or ())
    if task.sample_source is None and not samples:
        raise DataError(f"{label} has no samples; its data set is empty")
    reasons = {
        "makes its samples while it runs": task.sample_source is not None,
        "needs a sandbox": task.sandbox or any(sample.sandbox or sample.files or sample.setup for sample in samples),
        "has no scorer": not task.scorer,
    }
    for name in _LIMITS:
        reasons[f"sets {name}, which no batch of answers can keep to"] = getattr(task, name, None) is not None
    refuse_task(label, reasons, "tasks of one prompt, one answer and one score")


def _scorer(task: Any, asked: InspectName) -> Any:
    """The scorer that is named, or the first."""
    scorers = {_name(each): each for each in task.scorer}
    wanted = (asked.scorer or next(iter(scorers))).partition(".")[0]
    if wanted not in scorers:
        raise SpecError(f"{asked.label} has no scorer {wanted!r}; it has {', '.join(scorers)}")
    if wanted.startswith("model_graded"):
        others = [name for name in scorers if not name.startswith("model_graded")]
        raise SpecError(
            f"{asked.label}: scorer {wanted} asks a model to grade, and none stands by; "
            + (
                f"name another (scorer={others[0]})"
                if others
                else "our suites of requests are graded by `judge:` in a spec"
            )
        )
    return scorers[wanted]


def _to_float(scorer: Any) -> Callable[[Any], float]:
    """How the scorer's metrics turn its values into numbers; Inspect's own way where they do not say."""
    from inspect_ai._util.registry import registry_info
    from inspect_ai.scorer import value_to_float

    metrics = registry_info(scorer).metadata["metrics"]
    flat = metrics if isinstance(metrics, Sequence) else [each for group in metrics.values() for each in group]
    for metric in flat:
        if inspect.isfunction(metric) and (found := inspect.getclosurevars(metric).nonlocals.get("to_float")):
            return found  # type: ignore[no-any-return]
    return value_to_float()  # type: ignore[no-any-return]


def _number(value: Any, to_float: Callable[[Any], float]) -> float | None:
    """The number that a value stands for; None for a text or a list that stands for none, which Inspect takes as 0."""
    if not isinstance(value, bool | int | float | str):
        return None
    known = inspect.getclosurevars(to_float).nonlocals if inspect.isfunction(to_float) else {}
    if isinstance(value, str) and "noanswer" in known and value not in known.values():
        try:
            return _TRUTH[value.lower()] if value.lower() in _TRUTH else float(value)
        except ValueError:
            return None
    return float(to_float(value))


def _state(sample: Any) -> Any:
    """A sample as Inspect hands it to the first solver."""
    from inspect_ai._eval.task.util import sample_messages
    from inspect_ai.model import ModelName
    from inspect_ai.scorer import Target
    from inspect_ai.solver import TaskState
    from inspect_ai.solver._task_state import set_sample_state
    from inspect_ai.util._store import init_subtask_store

    own = copy.deepcopy(sample)
    state = TaskState(
        model=ModelName("kvaudit/served"),
        sample_id=own.id or 0,
        epoch=1,
        input=own.input,
        messages=sample_messages(own),
        target=Target(own.target),
        choices=own.choices,
        metadata=own.metadata or {},
    )
    set_sample_state(state)
    init_subtask_store(state.store)
    return state


def _messages(messages: Sequence[Any], label: str) -> tuple[Message, ...]:
    found = []
    for message in messages:
        if not isinstance(message.content, str) and any(part.type != "text" for part in message.content):
            raise SpecError(f"{label} shows something else than text, which no model here reads")
        if message.role == "tool" or getattr(message, "tool_calls", None):
            raise SpecError(f"{label} has calls of tools in its messages; {_SERVED}")
        found.append(Message(Role(message.role), message.text))
    return tuple(found)


@contextmanager
def _without_models() -> Iterator[None]:
    """Let no solver and no scorer ask a model: the first token is one too many."""
    from inspect_ai.util import token_limit

    with token_limit(0):
        yield


def _run(work: Awaitable[T]) -> T:
    """Wait for a coroutine, in a context of its own."""

    async def whole() -> T:
        from inspect_ai.log._transcript import Transcript, init_transcript

        init_transcript(Transcript())  # the one that all share would grow with every answer
        return await work

    return asyncio.run(whole())


def _name(of: Any) -> str:
    """The name under which a solver or a scorer is known, without its package."""
    from inspect_ai._util.registry import is_registry_object, registry_unqualified_name

    return str(registry_unqualified_name(of)) if is_registry_object(of) else type(of).__name__


def _sha256_of_file(of: Any) -> str:
    """Of the file that defines a scorer, for another rule is another version."""
    source = inspect.getsourcefile(inspect.unwrap(of))
    return hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else ""
