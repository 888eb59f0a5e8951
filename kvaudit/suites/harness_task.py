"""A task of lm-evaluation-harness: documents, prompts, metric. The package is imported on first use.

Your own task files in the folder KVAUDIT_LM_EVAL_TASKS take precedence over the package's. Task files may run code
(``!function``) with the rights of this process.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kvaudit.core.errors import AuditError, DataError, RunError, SpecError, did_you_mean
from kvaudit.core.records import Message, Role
from kvaudit.core.text import install_command, is_text, reason, short_repr
from kvaudit.suites.task_family import LOADING_SECONDS, TASK_ERRORS, TaskTimeout, load_quietly, time_limit

FAMILY = "lm-eval:"
TASKS_VARIABLE = "KVAUDIT_LM_EVAL_TASKS"
FEWSHOT_SEED = 1234  # the harness's default, for identical prompts
_TASK_NAME = re.compile(r"(?P<task>[^:@/]+)(:(?P<metric>[^:@/,]+)(,(?P<filter>[^:@/]+))?)?(@(?P<column>[^:@/]+))?")
_DEFAULT_ANSWER = 256  # tokens, if a task sets none
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the harness's order
_PATHS = ("config_source", "tokenizer", "pretrained", "model")  # metadata that differs between machines
_SEEDS = 0, 1234  # of Python and numpy, the harness's defaults, under which some tasks make their documents
_REJECTED = -1e9  # nats of an option that was not chosen
_INSTALL = f"{FAMILY} suites need another package: {install_command('lm-eval')}"
_OUTPUT_TYPES = ("generate_until", "multiple_choice")
# divisor of the log-probability of an option, by metric
_LENGTH_OF: dict[str, Callable[[str], float]] = {
    "acc": lambda _: 1.0,
    "acc_norm": len,
    "acc_bytes": lambda text: len(text.encode()),
}


class HarnessTaskName(NamedTuple):
    """A parsed suite name: lm-eval:TASK, optionally followed by :METRIC or :METRIC,FILTER, and by @COLUMN.

    FILTER is the filter of the task that extracts the answer. Documents with the same value of COLUMN form a cluster.
    """

    task: str
    metric: str | None
    filter: str | None
    column: str | None

    @classmethod
    def of(cls, text: str) -> HarnessTaskName:
        """Parse the part of a suite's name after ``lm-eval:``; raise SpecError if it is malformed."""
        match = _TASK_NAME.fullmatch(text)
        if not match:
            raise SpecError(
                f"suite {FAMILY + text!r} names no task; write {FAMILY}TASK, {FAMILY}TASK:METRIC,FILTER or "
                f"{FAMILY}TASK@COLUMN"
            )
        return cls(**match.groupdict())

    @property
    def label(self) -> str:
        """The task in the words of error messages, such as "lm-eval task 'gsm8k'"."""
        return f"lm-eval task {self.task!r}"


@dataclass(frozen=True, eq=False)
class HarnessTask:
    """A task of lm-evaluation-harness, whose documents are asked and graded one by one.

    ``task`` is the package's own object.
    """

    name: HarnessTaskName
    task: Any

    @cached_property
    def documents(self) -> list[dict[str, Any]]:
        """The documents of the evaluation, in the task's order."""
        return list(self.task.eval_docs)

    @cached_property
    def training_documents(self) -> list[dict[str, Any]]:
        """The documents for training, possibly none."""
        return list(self.task.training_docs()) if self.task.has_training_docs() else []

    @property
    def chooses(self) -> bool:
        """Whether the model chooses between given answers."""
        return bool(self.task.OUTPUT_TYPE == "multiple_choice")

    @property
    def until(self) -> tuple[str, ...]:
        """The strings that stop an answer."""
        stops = (self.task.config.generation_kwargs or {}).get("until") or []
        return tuple(text for text in ([stops] if isinstance(stops, str) else stops) if text)

    @property
    def longest_answer(self) -> int:
        """The maximum number of tokens of an answer."""
        settings = self.task.config.generation_kwargs or {}
        return next((int(settings[key]) for key in _LENGTHS if settings.get(key)), _DEFAULT_ANSWER)

    @cached_property
    def digest(self) -> str:
        """The hash, 12 hex digits, of the documents and of the task's configuration without paths."""
        config = self.task.config.to_dict(keep_callable=True)
        config["metadata"] = {k: v for k, v in (config.get("metadata") or {}).items() if k not in _PATHS}
        config.pop("dataset_kwargs", None)
        rows = [config, self.documents, self.training_documents]
        return hashlib.sha256(json.dumps(rows, sort_keys=True, default=_to_text).encode()).hexdigest()[:12]

    def prompts(self, documents: Sequence[dict[str, Any]]) -> list[tuple[Message, ...]]:
        """Return the prompt of each document, with few-shot examples as earlier turns.

        Call it once for all documents, because the examples are drawn in sequence from one seed.
        """
        self.task.set_fewshot_seed(FEWSHOT_SEED)
        return [self._prompt(document, number) for number, document in enumerate(documents)]

    def options(self, document: dict[str, Any]) -> tuple[str, ...]:
        """Return the answers from which the model chooses; () if it generates its answer."""
        if not self.chooses:
            return ()
        with _blame(f"{self.name.label}: a document", "doc_to_choice"):
            options = tuple(map(str, self.task.doc_to_choice(document)))
        if not all(map(is_text, options)):
            raise DataError(
                f"{self.name.label} has options {short_repr(options)}, expected text; fix its doc_to_choice"
            )
        return options

    def weigh(self, options: Sequence[str], logprobs: Sequence[float]) -> list[float]:
        """Return the scores of the options, given their log-probs in nats.

        The task's metric decides: ``acc`` leaves the log-probs unchanged, ``acc_norm`` divides each by its option's
        length in characters, and ``acc_bytes`` by the length in bytes.
        """
        length = _LENGTH_OF[self.metric]
        return [value / length(option) for option, value in zip(options, logprobs, strict=True)]

    def target(self, document: dict[str, Any]) -> str:
        """Return the right answer of a document."""
        target = self.task.doc_to_target(document)
        if isinstance(target, int) and self.task.config.doc_to_choice is not None:
            target = self.task.doc_to_choice(document)[target]
        return str(target[0] if isinstance(target, list) and target else target)

    def score(self, document: dict[str, Any], answer: str) -> float:
        """Return the score of an answer by the task's metric, from 0 to 1 for the best.

        A metric of which less is better is reversed. Exceptions of the task's code are not caught.
        """
        value = self._values(document, answer)[self.metric]
        if not _is_share(value):
            raise DataError(
                f"{self.name.label}: metric {self.metric} is {repr(value)[:40]}, expected a number from 0 to 1"
            )
        return float(value) if self.task.higher_is_better().get(self.metric, True) else 1.0 - float(value)

    @cached_property
    def metric(self) -> str:
        """The name of the metric: the one in the suite's name, or else the task's first that can be used.

        A metric can be used if it gives the first document's right answer a value from 0 to 1; for multiple choice it
        must also be one that ``weigh`` knows. Raises SpecError if none can be used.
        """
        document = self.documents[0]
        values = self._values(document, self.target(document))
        requested = self.name.metric
        for name, value in values.items():
            usable = _is_share(value) and (not self.chooses or name in _LENGTH_OF)
            if usable and requested in (None, name):
                return name
        metrics = ", ".join(f"{name} ({repr(value)[:40]})" for name, value in values.items()) or "none"
        raise SpecError(
            f"{self.name.label} has no metric{f' {requested!r}' if requested else ''} that gives each document a "
            "number from 0 to 1"
            + (f" and is one of {', '.join(_LENGTH_OF)}" if self.chooses else "")
            + f"; its metrics, for the first document's own answer: {metrics}"
        )

    def _values(self, document: dict[str, Any], answer: str) -> dict[str, Any]:
        if self.chooses:
            options = self.options(document)
            # as if the model gave all probability to the answer
            results: list[Any] = [(0.0, True) if option == answer else (_REJECTED, False) for option in options]
        else:
            results = [self._filter(document, answer)]
        return dict(self.task.process_results(document, results))

    def _filter(self, document: dict[str, Any], answer: str) -> Any:
        from lm_eval.api.instance import Instance

        filters = {entry.name: entry for entry in self.task._filters}
        name = self.name.filter or next(iter(filters))
        if name not in filters:
            raise SpecError(f"{self.name.label} has no filter {name!r}; it has {', '.join(filters)}")
        instance: Any = Instance("generate_until", document, ("", {}), 0, resps=[answer])
        filters[name].apply([instance])
        return instance.filtered_resps[name]

    def _prompt(self, document: dict[str, Any], number: int) -> tuple[Message, ...]:
        label = f"{self.name.label}: document {number}"
        with _blame(label, "doc_to_text"):
            rows = self.task.fewshot_context(
                document,
                num_fewshot=self.task.config.num_fewshot or 0,
                apply_chat_template=True,
                fewshot_as_multiturn=True,
                chat_template=lambda rows, add_generation_prompt: rows,  # noqa: ARG005 - passed by keyword
            )
            messages = tuple(Message(Role(row["role"]), row["content"]) for row in rows)
        for message in messages:
            if not isinstance(message.content, str) or not is_text(message.content):
                raise DataError(
                    f"{label} asks {short_repr(message.content)}, expected text; fix the task's doc_to_text"
                )
        return messages


def harness_task(name: HarnessTaskName) -> HarnessTask:
    """Load a task and its documents; raises AuditError if it is missing or not supported."""

    def message(error: BaseException) -> str:
        return f"{name.label} cannot be loaded: {reason(error)}; its documents must be cached, or the hub reachable"

    with load_quietly("datasets", _INSTALL, "lm_eval", message), _without_bars(), _harness_seeds():
        task = _manager(name.task).load(name.task)["tasks"][name.task]
        _check_kind(task, name.label)
        loaded = HarnessTask(name, task)
        if name.column is not None and name.column not in loaded.documents[0]:
            columns = ", ".join(loaded.documents[0])
            raise SpecError(f"{name.label} has no column {name.column!r}; it has {columns}")
        assert loaded.metric  # raises here, not at the first answer
    return loaded


def _check_kind(task: Any, label: str) -> None:
    """Raise SpecError for a task whose documents are not one prompt with one answer each."""
    config = task.config
    reasons = {
        "is a class with its own requests": not _is_plain(task),
        "asks for the probability of whole texts, which would be computed in one prefill, where cache compression acts "
        "differently than in generation": task.OUTPUT_TYPE not in _OUTPUT_TYPES,
        "shows pictures or sound": bool(config.doc_to_image or config.doc_to_audio),
        "runs the model's answer as a program": bool(config.unsafe_code),
        "begins the answer for the model (gen_prefix)": config.gen_prefix is not None,
        "asks each document several times (repeats); use samples in a spec instead": config.repeats > 1,
        "puts its options into the prompts": isinstance(task.doc_to_text(task.eval_docs[0]), int),
    }
    if fault := next((text for text, is_true in reasons.items() if is_true), None):
        supported = f"{' and '.join(_OUTPUT_TYPES)} tasks of one prompt and one answer"
        raise SpecError(f"{label} {fault}; supported are {supported}")


def _is_plain(task: Any) -> bool:
    from lm_eval.api.task import ConfigurableTask as Plain

    return (
        isinstance(task, Plain)
        and type(task).construct_requests is Plain.construct_requests
        and type(task).fewshot_context is Plain.fewshot_context
    )


def _manager(task: str) -> Any:
    """Return an index of tasks (a TaskManager) that has the task.

    The index of the user's folder is tried first, because the index of all tasks takes longer to load.
    """
    folder = os.environ.get(TASKS_VARIABLE)
    if folder and not Path(folder).expanduser().is_dir():
        raise DataError(
            f"{TASKS_VARIABLE} is {folder!r}, which is not a folder; set it to the folder of your task files"
        )
    folders = tuple([str(Path(folder).expanduser())] if folder else [])
    for defaults in (False, True) if folders else (True,):
        manager = _index(folders, defaults)
        if task in manager.all_subtasks:
            return manager
    if task in manager.all_groups or task in manager.all_tags:
        raise SpecError(f"lm-eval's {task!r} is a group of tasks; name its tasks one by one")
    raise SpecError(
        f"unknown lm-eval task {task!r}.{did_you_mean(task, manager.all_subtasks)} `lm-eval ls tasks` lists "
        f"{len(manager.all_subtasks)}; put your own into the folder that {TASKS_VARIABLE} names"
    )


@cache
def _index(folders: tuple[str, ...], defaults: bool) -> Any:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise RunError(f"{_INSTALL} ({error})") from error
    return TaskManager(include_path=list(folders), include_defaults=defaults)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Silence, inside the context, the progress bars of the package datasets and everything that a task prints."""
    import datasets

    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield
    finally:
        if bars:
            datasets.enable_progress_bars()


@contextmanager
def _harness_seeds() -> Iterator[None]:
    """Seed the global random generators as the harness does, so that a task always makes the same documents."""
    import numpy as np

    states = random.getstate(), np.random.get_state()
    random.seed(_SEEDS[0])
    np.random.seed(_SEEDS[1])
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def _blame(label: str, function: str) -> Iterator[None]:
    """Turn errors, exits and timeouts inside the context into a DataError that blames the task's ``function``.

    The error begins with ``label``.
    """
    try:
        with time_limit(LOADING_SECONDS):
            yield
    except AuditError:
        raise
    except (*TASK_ERRORS, TaskTimeout) as error:
        raise DataError(f"{label} cannot be asked ({reason(error)}); fix the task's {function}") from error


def _is_share(value: Any) -> bool:
    """Return whether a metric's value is a number from 0 to 1, of any numeric type."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return False
    return math.isfinite(number) and 0.0 <= number <= 1.0


def _to_text(value: Any) -> str:
    """Convert a value that JSON cannot hold to a text, the same in every process; a function to its file's hash."""
    if not callable(value):
        return str(value)
    source = inspect.getsourcefile(value)
    body = Path(source).read_bytes() if source else b""
    return f"{value.__qualname__} of {hashlib.sha256(body).hexdigest()}"
