"""The slot in which a process runs one engine at a time, for a checkpoint and a condition (engine with settings).

An engine is stopped before the next one starts. If it dies during a batch, it is restarted, up to three tries per
batch. Its description is stored at its first start, and the run refuses an engine with another description.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import takewhile
from pathlib import Path

import torch

from kvaudit.audit.engines import ENGINES
from kvaudit.audit.engines.base import (
    Condition,
    EngineContext,
    EngineFailed,
    GenerationRequest,
    Reply,
    Session,
    parse_condition,
    require_replies,
)
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.sampling.conversations import item_prompt
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training.adapters import without_adapter
from kvaudit.core.errors import RunError
from kvaudit.core.files import in_file_name
from kvaudit.core.provenance import NOT_SHOWN, SERVED_BY
from kvaudit.core.records import Item
from kvaudit.core.spec import RunSpec
from kvaudit.core.spec_train import DENSE_ARM, TrainSpec

_TRIES = 3  # of one batch
# characters of a changed description that an error shows, and how many of them come before the difference
_SHOWN, _BEFORE = 100, 30
FIRST_TOKENS = 24  # of the first answer, which is printed before the run
OnFirstAnswer = Callable[[str, Item, str], None]  # policy or condition, item, the beginning of its answer


class EngineSlot(Session):
    """A session that passes requests to the one engine that currently runs, and starts it when needed.

    ``around(condition)`` returns a context manager, inside which an engine is started, for example to show the start.
    """

    def __init__(
        self,
        run: RunFolder,
        spec: RunSpec,
        print_line: Callable[[str], None],
        around: Callable[[Condition], AbstractContextManager[None]],
    ) -> None:
        self._run, self._spec, self._print_line, self._around = run, spec, print_line, around
        self._session: Session | None = None
        self._target: tuple[Condition, LoadedModel] | None = None  # of the session
        self._key = ("", "")  # of the target: sha256 of the weights, condition

    def switch_to(self, condition: Condition, model: LoadedModel) -> Session:
        """Return this session, now with an engine of these settings and checkpoint; stop any other engine first."""
        key = (model.sha256, condition.canonical)
        if self._session is None or key != self._key:
            self.stop()
            self._session, self._target, self._key = self._start(condition, model), (condition, model), key
        self.described = self._session.described
        return self

    def answer(self, requests: Sequence[GenerationRequest]) -> list[Reply]:
        """Return the engine's replies; restart an engine that dies, at most twice, then raise RunError."""
        assert self._target is not None
        condition, model = self._target
        for tries_left in reversed(range(_TRIES)):
            self.switch_to(condition, model)
            assert self._session is not None
            try:
                replies = self._session.answer(requests)
                require_replies(requests, replies, condition.engine)
            except EngineFailed as error:
                self.stop()
                if not tries_left:
                    raise RunError(f"{error}; finished work is kept: go on with --resume") from None
                self._print_line(f"{error}; restarting it")
                continue
            refusals = [reply.refused for reply in replies if reply.refused is not None]
            if refusals:
                self._print_line(
                    f"{len(refusals)} of {len(replies)} requests were refused, and are unscored: {refusals[0]}"
                )
            return replies
        raise AssertionError

    def stop(self) -> None:
        """Stop the engine if one runs."""
        if self._session is not None:
            self._session.stop()
        self._session = self._target = None

    def _start(self, condition: Condition, model: LoadedModel) -> Session:
        with self._around(condition):
            try:
                session = start_engine(condition, model, self._spec, self._run.path / "logs" / "engines")
            except RunError as error:
                raise RunError(f"{error}; finished work is kept: go on with --resume") from None
        try:
            check_engine_unchanged(self._run, condition.canonical, condition.engine, session.described)
        except BaseException:
            session.stop()
            raise
        return session


def check_engine_unchanged(run: RunFolder, key: str, engine: str, description: Mapping[str, str]) -> None:
    """Store, under ``key``, what an engine reports of itself at its first start; raise RunError if it differs later.

    The ``weights`` in the description are not compared: they differ between checkpoints, whose hashes are checked
    elsewhere.
    """
    current = dict(description)
    stored = run.keep(SERVED_BY, key, current)
    names = {*stored, *current} - {"weights", NOT_SHOWN}
    changed = sorted(name for name in names if stored.get(name) != current.get(name))
    if changed:
        name = changed[0]
        before, after = _cut_to_difference(str(stored.get(name)), str(current.get(name)))
        raise RunError(
            f"engine {engine} reported {name} {before!r} when the run began, and reports {after!r} now; restore the "
            "former state, or give another --out"
        )


def _cut_to_difference(before: str, after: str) -> tuple[str, str]:
    """Return the two texts, each cut to the part around their first difference if they are long."""
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    start = max(0, common - _BEFORE) if max(len(before), len(after)) > _SHOWN else 0
    dots = "..." if start else ""
    return dots + before[start:][:_SHOWN], dots + after[start:][:_SHOWN]


def start_engine(condition: Condition, model: LoadedModel, spec: RunSpec, logs: Path) -> Session:
    """Start an engine; raise RunError with the end of its output if it does not start."""
    log = logs / f"{in_file_name(condition.engine)}-{condition.hash}.log"
    work = EngineContext(model, spec.engine(condition.canonical), log, torch.get_num_threads())
    try:
        return ENGINES.get(condition.engine).start(dict(condition.settings), work)
    except EngineFailed as error:
        raise RunError(f"{error} (condition {condition.canonical})") from None


def try_out_engines(
    conditions: Sequence[Condition],
    model: LoadedModel,
    spec: RunSpec,
    item: Item,
    on_answer: OnFirstAnswer | None = None,
) -> dict[str, int]:
    """Start every engine with each of its settings and sample one token, so that errors show before a run begins.

    Returns {condition: context window in tokens} for the engines that report their window. If there is an error, the
    engine logs that have text are kept. ``on_answer`` is called with the beginning of each answer.
    """
    ids, stops = item_prompt(model.chat, item).ids, tuple(sorted(model.chat.stop_ids))
    max_tokens = 1 if on_answer is None else FIRST_TOKENS
    messages, tools = model.chat.request_of(item.messages, item.tools)
    request = GenerationRequest(
        ids, max_tokens, stops, temperature=0.0, top_p=1.0, seed=0, messages=messages, tools=tools
    )
    windows = dict[str, int]()
    with _trial_logs() as logs:
        for condition in conditions:
            with start_engine(condition, model, spec, logs) as session:
                windows |= {} if session.window is None else {condition.canonical: session.window}
                try:
                    (reply,) = session.answer([request])
                except EngineFailed as error:
                    raise RunError(f"{error} (condition {condition.canonical})") from None
            if on_answer is not None:
                text = model.chat.text(reply.ids) if reply.text is None else reply.text
                on_answer(condition.canonical, item, text if reply.refused is None else f"refused: {reply.refused}")
    return windows


def try_rollout_engine(spec: RunSpec, section: TrainSpec, model: LoadedModel) -> None:
    """Start and stop the engine that samples rollouts in training (``section.rollouts``), if the spec names one.

    If it does not start, the RunError then comes before the first arm is trained.
    """
    if section.rollouts is None or section.arms == (DENSE_ARM,):
        return
    condition = parse_condition(section.rollouts)
    with _trial_logs() as logs:
        log = logs / f"{in_file_name(condition.engine)}.log"
        work = EngineContext(without_adapter(model), spec.engine(section.rollouts), log, torch.get_num_threads())
        try:
            ENGINES.get(condition.engine).drawer(dict(condition.settings), work).stop()
        except EngineFailed as error:
            raise RunError(f"{error} (train.rollouts {condition.canonical})") from None


@contextmanager
def _trial_logs() -> Iterator[Path]:
    """Yield a folder for the logs of engines, and keep it if the body raises and a log has text."""
    logs = Path(tempfile.mkdtemp(prefix="kvaudit-engines-"))
    try:
        yield logs
    except BaseException:
        if not any(path.stat().st_size for path in logs.iterdir()):
            shutil.rmtree(logs)
        raise
    shutil.rmtree(logs)
