"""The one engine that a process keeps: started for a checkpoint and a condition, ended before the next begins.

An engine that is gone in the middle of a batch is started again and asked the batch anew, a few times. What it says of
itself stands in the run's provenance from the first start on, and no other engine goes on with the run.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch

from kvaudit.audit.engines import ENGINES
from kvaudit.audit.engines.base import Condition, EngineContext, EngineFailed, Reply, Session, require_replies
from kvaudit.audit.engines.base import GenerationRequest as AskedOfEngine
from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.sampling.conversations import item_prompt
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.core.errors import RunError
from kvaudit.core.files import in_file_name
from kvaudit.core.provenance import NOT_SHOWN, SERVED_BY
from kvaudit.core.records import Item
from kvaudit.core.spec import RunSpec

_TRIES = 3  # of one batch
_SHOWN, _BEFORE = 100, 30  # characters of what an engine says, and before where two such texts part
FIRST_TOKENS = 24  # of an answer that is shown while the rest is being asked
FirstHeard = Callable[[str, Item, str], None]  # way of serving, item, the beginning of its answer


class _Key(NamedTuple):
    checkpoint: str
    condition: str


class EngineSlot(Session):
    """Holds at most one engine. ``say`` is told when one is gone or refuses; every start happens inside ``around``."""

    def __init__(
        self,
        run: RunFolder,
        spec: RunSpec,
        say: Callable[[str], None],
        around: Callable[[Condition], AbstractContextManager[None]],
    ) -> None:
        self._run, self._spec, self._say, self._around = run, spec, say, around
        self._held: tuple[_Key, Session] | None = None
        self._wanted: tuple[Condition, LoadedModel] | None = None

    def under(self, condition: Condition, model: LoadedModel) -> Session:
        """The engine under a condition on a checkpoint; another one that is held ends now."""
        key = _Key(model.sha256, condition.canonical)
        if self._held is None or self._held[0] != key:
            self.stop()
            self._wanted = condition, model
            self._held = key, self._started(condition, model)
        self.described = self._held[1].described
        return self

    def answer(self, asked: Sequence[AskedOfEngine]) -> list[Reply]:
        """The replies of the engine that is held; one that is gone is started again, twice at the most."""
        for number in range(_TRIES):
            assert self._wanted is not None
            if self._held is None:
                self.under(*self._wanted)
            assert self._held is not None
            try:
                replies = self._held[1].answer(asked)
                require_replies(asked, replies, self._wanted[0].engine)
                refusals = [reply.refused for reply in replies if reply.refused is not None]
                if refusals:  # in the records they are unscored
                    said = f"{len(refusals)} of {len(replies)} requests were refused, and are unscored: {refusals[0]}"
                    self._say(said)
                return replies
            except EngineFailed as error:
                wanted = self._wanted  # ``stop`` forgets it
                self.stop()
                self._wanted = wanted
                if number == _TRIES - 1:
                    raise RunError(f"{error}; what is written stays: go on with --resume") from None
                self._say(f"{error}; starting it again")
        raise AssertionError

    def stop(self) -> None:
        """End the engine, if there is one."""
        if self._held is not None:
            self._held[1].stop()
        self._held = self._wanted = None

    def _started(self, condition: Condition, model: LoadedModel) -> Session:
        with self._around(condition):
            try:
                session = started_engine(condition, model, self._spec, self._run.path / "logs" / "engines")
            except RunError as error:
                raise RunError(f"{error}; what is written stays: go on with --resume") from None
        try:
            hold_engine(self._run, condition.canonical, condition.engine, session.described)
        except BaseException:
            session.stop()
            raise
        return session


def hold_engine(run: RunFolder, key: str, engine: str, described: Mapping[str, str]) -> None:
    """Note what an engine says it is, and raise RunError for one that says otherwise than the first did.

    Its weights are those of each checkpoint in turn, whose hash stands elsewhere.
    """
    now = dict(described)
    then = run.keep(SERVED_BY, key, now)
    changed = sorted(name for name in {*then, *now} - {"weights", NOT_SHOWN} if then.get(name) != now.get(name))
    if changed:
        name = changed[0]
        before, after = _where_they_part(str(then.get(name)), str(now.get(name)))
        raise RunError(
            f"engine {engine} said {name} {before!r} when the run began with it, now {after!r}; put back what it was, "
            "or give another --out"
        )


def _where_they_part(one: str, other: str) -> tuple[str, str]:
    """The two texts, from a little before their first difference on where they are long, so that it is seen."""
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    start = max(0, alike - _BEFORE) if max(len(one), len(other)) > _SHOWN else 0
    dots = "..." if start else ""
    return dots + one[start:][:_SHOWN], dots + other[start:][:_SHOWN]


def started_engine(condition: Condition, model: LoadedModel, spec: RunSpec, logs: Path) -> Session:
    """Start an engine; raises RunError with its last words where it does not come up."""
    log = logs / f"{in_file_name(condition.engine)}-{condition.hash}.log"
    work = EngineContext(model, spec.engine(condition.canonical), log, torch.get_num_threads())
    try:
        return ENGINES.get(condition.engine).start(dict(condition.settings), work)
    except EngineFailed as error:
        raise RunError(f"{error} (condition {condition.canonical})") from None


def try_out_engines(
    conditions: Sequence[Condition], model: LoadedModel, spec: RunSpec, item: Item, heard: FirstHeard | None = None
) -> None:
    """Start every condition once and have it say a token; raises what would otherwise come up after hours.

    What they wrote stays where an error names it. ``heard`` is told the beginning of each one's answer.
    """
    ids, stops = item_prompt(model.chat, item).ids, tuple(sorted(model.chat.stop_ids))
    most = 1 if heard is None else FIRST_TOKENS
    messages, tools = model.chat.request_of(item.messages, item.tools)
    asked = AskedOfEngine(ids, most, stops, temperature=0.0, top_p=1.0, seed=0, messages=messages, tools=tools)
    with _trial_logs() as logs:
        for condition in conditions:
            with started_engine(condition, model, spec, logs) as session:
                try:
                    (reply,) = session.answer([asked])
                except EngineFailed as error:
                    raise RunError(f"{error} (condition {condition.canonical})") from None
            if heard is not None:
                said = model.chat.text(reply.ids) if reply.text is None else reply.text
                heard(condition.canonical, item, said if reply.refused is None else f"refused: {reply.refused}")


@contextmanager
def _trial_logs() -> Iterator[Path]:
    """A folder for what engines write while they are tried out, which stays where something was raised and it tells
    something.
    """
    logs = Path(tempfile.mkdtemp(prefix="kvaudit-engines-"))
    try:
        yield logs
    except BaseException:
        if not any(path.stat().st_size for path in logs.iterdir()):
            shutil.rmtree(logs)
        raise
    shutil.rmtree(logs)
