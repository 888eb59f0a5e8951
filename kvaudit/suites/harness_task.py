"""One task of lm-evaluation-harness: documents, prompts, metric. The package is loaded when one is asked for.

Task files of one's own are looked for in the folder that KVAUDIT_LM_EVAL_TASKS names, before those of the package. They
are programs (``!function``), and run with this process's rights.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kvaudit.core.errors import AuditError, DataError, RunError, SpecError, did_you_mean
from kvaudit.core.records import Message, Role
from kvaudit.core.text import install_line, is_text, reason, shown
from kvaudit.suites.task_family import TASK_ERRORS, load_quietly, refuse_task

FAMILY = "lm-eval:"
TASKS_VARIABLE = "KVAUDIT_LM_EVAL_TASKS"
FEWSHOT_SEED = 1234  # the harness's own, so that prompts are its own too
_TASK_NAME = re.compile(r"(?P<task>[^:@/]+)(:(?P<metric>[^:@/,]+)(,(?P<filter>[^:@/]+))?)?(@(?P<column>[^:@/]+))?")
_LONGEST_ANSWER = 256  # tokens, where a task says nothing
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the harness's order
_CHANCE = -1e9  # nats of an option that was not taken
_NEEDED = f"{FAMILY} suites need a package more: {install_line('lm-eval')}"
_OUTPUT_TYPES = ("generate_until", "multiple_choice")
# what the log-probability of an option is divided by
_WEIGHTS: dict[str, Callable[[str], float]] = {
    "acc": lambda _: 1.0,
    "acc_norm": len,
    "acc_bytes": lambda text: len(text.encode()),
}


class HarnessTaskName(NamedTuple):
    """What a name says: lm-eval:TASK, then :METRIC or :METRIC,FILTER, then @COLUMN whose values are the clusters."""

    task: str
    metric: str | None
    filter: str | None
    column: str | None

    @classmethod
    def of(cls, text: str) -> HarnessTaskName:
        """Read what follows ``lm-eval:``."""
        found = _TASK_NAME.fullmatch(text)
        if not found:
            raise SpecError(
                f"suite {FAMILY + text!r} names no task; write {FAMILY}TASK, {FAMILY}TASK:METRIC,FILTER or "
                f"{FAMILY}TASK@COLUMN"
            )
        return cls(**found.groupdict())

    @property
    def label(self) -> str:
        """The task, as an error names it."""
        return f"lm-eval task {self.task!r}"


@dataclass(frozen=True, eq=False)
class HarnessTask:
    """A task whose documents are all asked and graded one by one; ``task`` is the package's own object."""

    asked: HarnessTaskName
    task: Any

    @cached_property
    def documents(self) -> list[dict[str, Any]]:
        """What is evaluated, in the task's order."""
        return list(self.task.eval_docs)

    @cached_property
    def training_documents(self) -> list[dict[str, Any]]:
        """What the task keeps for training, which may be nothing."""
        return list(self.task.training_docs()) if self.task.has_training_docs() else []

    @property
    def chooses(self) -> bool:
        """Whether the model is to choose between given answers."""
        return bool(self.task.OUTPUT_TYPE == "multiple_choice")

    @property
    def until(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        given = (self.task.config.generation_kwargs or {}).get("until") or []
        return tuple(text for text in ([given] if isinstance(given, str) else given) if text)

    @property
    def longest_answer(self) -> int:
        """Tokens that an answer may take."""
        settings = self.task.config.generation_kwargs or {}
        return next((int(settings[key]) for key in _LENGTHS if settings.get(key)), _LONGEST_ANSWER)

    @cached_property
    def digest(self) -> str:
        """12 hex digits of the documents, and of the configuration but where it lies."""
        config = self.task.config.to_dict(keep_callable=True)
        config["metadata"] = {k: v for k, v in (config.get("metadata") or {}).items() if k != "config_source"}
        config.pop("dataset_kwargs", None)
        rows = [config, self.documents, self.training_documents]
        return hashlib.sha256(json.dumps(rows, sort_keys=True, default=_spelled).encode()).hexdigest()[:12]

    def prompts(self, documents: Sequence[dict[str, Any]]) -> list[tuple[Message, ...]]:
        """The conversation that asks each document, few-shot examples as earlier turns.

        All in one go and from one seed, or the examples would depend on what else is asked.
        """
        self.task.set_fewshot_seed(FEWSHOT_SEED)
        return [self._checked_prompt(document, number) for number, document in enumerate(documents)]

    def options(self, document: dict[str, Any]) -> tuple[str, ...]:
        """The answers to choose from, where there are any."""
        if not self.chooses:
            return ()
        with _blamed(f"{self.asked.label}: a document", "doc_to_choice"):
            options = tuple(map(str, self.task.doc_to_choice(document)))
        if not all(map(is_text, options)):
            raise DataError(f"{self.asked.label} has options {shown(options)}, wanted text; mend its doc_to_choice")
        return options

    def weigh(self, options: Sequence[str], logprobs: Sequence[float]) -> list[float]:
        """What options are worth to the metric: ``acc_norm`` divides by characters, ``acc_bytes`` by bytes."""
        length = _WEIGHTS[self.metric]
        return [value / length(option) for option, value in zip(options, logprobs, strict=True)]

    def target(self, document: dict[str, Any]) -> str:
        """The answer that the document itself gives."""
        target = self.task.doc_to_target(document)
        if isinstance(target, int) and self.task.config.doc_to_choice is not None:
            target = self.task.doc_to_choice(document)[target]
        return str(target[0] if isinstance(target, list) and target else target)

    def score(self, document: dict[str, Any], answer: str) -> float:
        """The metric of one answer, 1 for the best; whatever the task's code raises comes through."""
        value = self._values(document, answer)[self.metric]
        if not _is_share(value):
            raise DataError(f"{self.asked.label}: metric {self.metric} is {_shown(value)}, wanted a number from 0 to 1")
        return float(value) if self.task.higher_is_better().get(self.metric, True) else 1.0 - float(value)

    @cached_property
    def metric(self) -> str:
        """The metric that was named, or the first one that gives every document a number from 0 to 1."""
        document = self.documents[0]
        values = self._values(document, self.target(document))
        named = self.asked.metric
        for name, value in values.items():
            usable = _is_share(value) and (not self.chooses or name in _WEIGHTS)
            if usable and named in (None, name):
                return name
        found = ", ".join(f"{name} ({_shown(value)})" for name, value in values.items()) or "none"
        wanted = f"no metric {named!r}" if named else "no metric"
        raise SpecError(
            f"{self.asked.label} has {wanted} that gives each document a number from 0 to 1"
            + (f" and is one of {', '.join(_WEIGHTS)}" if self.chooses else "")
            + f"; its metrics on the first document's own answer: {found}"
        )

    def _values(self, document: dict[str, Any], answer: str) -> dict[str, Any]:
        """Every metric of one answer."""
        if self.chooses:
            options = self.options(document)
            # as if the model had found the answer certain and all others hopeless
            results: list[Any] = [(0.0, True) if option == answer else (_CHANCE, False) for option in options]
        else:
            results = [self._filtered(document, answer)]
        return dict(self.task.process_results(document, results))

    def _filtered(self, document: dict[str, Any], answer: str) -> Any:
        from lm_eval.api.instance import Instance

        filters = {each.name: each for each in self.task._filters}
        wanted = self.asked.filter or next(iter(filters))
        if wanted not in filters:
            raise SpecError(f"{self.asked.label} has no filter {wanted!r}; it has {', '.join(filters)}")
        instance: Any = Instance("generate_until", document, ("", {}), 0, resps=[answer])
        filters[wanted].apply([instance])
        return instance.filtered_resps[wanted]

    def _checked_prompt(self, document: dict[str, Any], number: int) -> tuple[Message, ...]:
        """The conversation; raises DataError, naming the document, where the task's code makes none of text."""
        where = f"{self.asked.label}: document {number}"
        with _blamed(where, "doc_to_text"):
            messages = self._prompt(document)
        for message in messages:
            if not isinstance(message.content, str) or not is_text(message.content):
                raise DataError(f"{where} asks {shown(message.content)}, wanted text; mend the task's doc_to_text")
        return messages

    def _prompt(self, document: dict[str, Any]) -> tuple[Message, ...]:
        rows = self.task.fewshot_context(
            document,
            num_fewshot=self.task.config.num_fewshot or 0,
            apply_chat_template=True,
            fewshot_as_multiturn=True,
            chat_template=lambda rows, add_generation_prompt: rows,  # noqa: ARG005 - the harness names it
        )
        return tuple(Message(Role(row["role"]), row["content"]) for row in rows)


def harness_task(asked: HarnessTaskName) -> HarnessTask:
    """Load a task and its documents; raises AuditError for one that cannot be a suite."""

    def failed(error: BaseException) -> str:
        return f"{asked.label} cannot be loaded: {reason(error)}; its documents must be here, or the hub in reach"

    with load_quietly("datasets", _NEEDED, "lm_eval", failed), _without_bars():
        task = _manager(asked.task).load(asked.task)["tasks"][asked.task]
        _check_kind(task, asked.label)
        found = HarnessTask(asked, task)
        if asked.column is not None and asked.column not in found.documents[0]:
            raise SpecError(f"{asked.label} has no column {asked.column!r}; it has {', '.join(found.documents[0])}")
        assert found.metric  # found here, or the first answer would tell
    return found


def _check_kind(task: Any, label: str) -> None:
    """Raise SpecError for what no grid of answers can hold."""
    config = task.config
    reasons = {
        "is written as a class, with requests of its own": not _asks_plainly(task),
        "asks how probable whole texts are, which would go through the cache in one prefill, where compression acts "
        "otherwise than while an answer is written": task.OUTPUT_TYPE not in _OUTPUT_TYPES,
        "shows pictures or sound": bool(config.doc_to_image or config.doc_to_audio),
        "runs what the model writes as a program": bool(config.unsafe_code),
        "begins the answer for the model (gen_prefix)": config.gen_prefix is not None,
        "asks each document several times (repeats), as samples in a spec do": config.repeats > 1,
        "puts its options into the prompts": isinstance(task.doc_to_text(task.eval_docs[0]), int),
    }
    refuse_task(label, reasons, f"{' and '.join(_OUTPUT_TYPES)} tasks of one prompt and one answer")


def _asks_plainly(task: Any) -> bool:
    from lm_eval.api.task import ConfigurableTask as Plain

    own = type(task)
    return (
        isinstance(task, Plain)
        and own.construct_requests is Plain.construct_requests
        and own.fewshot_context is Plain.fewshot_context
    )


def _manager(task: str) -> Any:
    """The package's index that knows the task: of one's own folder, or, which takes longer to read, of all."""
    own = os.environ.get(TASKS_VARIABLE)
    if own and not Path(own).expanduser().is_dir():
        raise DataError(f"{TASKS_VARIABLE} is {own!r}, which is no folder; name the one that holds your task files")
    folders = tuple([str(Path(own).expanduser())] if own else [])
    for defaults in (False, True) if folders else (True,):
        manager = _index(folders, defaults)
        if task in manager.all_subtasks:
            return manager
    if task in manager.all_groups or task in manager.all_tags:
        raise SpecError(f"lm-eval's {task!r} is a group of tasks; name its tasks one by one")
    raise SpecError(
        f"unknown lm-eval task {task!r}.{did_you_mean(task, manager.all_subtasks)} `lm-eval ls tasks` lists "
        f"{len(manager.all_subtasks)}; your own belong in the folder that {TASKS_VARIABLE} names"
    )


@cache
def _index(folders: tuple[str, ...], defaults: bool) -> Any:
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise RunError(f"{_NEEDED} ({error})") from error
    return TaskManager(include_path=list(folders), include_defaults=defaults)


@contextmanager
def _without_bars() -> Iterator[None]:
    import datasets

    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if bars:
            datasets.enable_progress_bars()


@contextmanager
def _blamed(where: str, part: str) -> Iterator[None]:
    """Raise DataError that names a part of the task for whatever its code raises, or where it ends the program."""
    try:
        yield
    except AuditError:
        raise
    except TASK_ERRORS as error:
        raise DataError(f"{where} cannot be asked ({reason(error)}); mend the task's {part}") from error


def _is_share(value: Any) -> bool:
    """Whether a metric is one number from 0 to 1, of whatever numeric type."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return False
    return math.isfinite(number) and 0.0 <= number <= 1.0


def _shown(value: Any) -> str:
    return repr(value)[:40]


def _spelled(value: Any) -> str:
    """A value that JSON lacks, as text that another process spells alike: a function by the file that defines it."""
    if not callable(value):
        return str(value)
    source = inspect.getsourcefile(value)
    body = Path(source).read_bytes() if source else b""
    return f"{value.__qualname__} of {hashlib.sha256(body).hexdigest()}"
