"""Rollouts of other stacks, one JSON object a line, by the names that each of them and we write (``STACKS``).

Described in docs/rollout-files.md. Every value is checked, since the file is a stranger's. A file is read line by
line, as often as somebody asks, and never held.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.replay.interchange import first_error, read_rollouts
from kvaudit.audit.replay.interchange import Form, Index, Length
from kvaudit.audit.replay.rollout_checks import rollout_fault
from kvaudit.core.errors import DataError
from kvaudit.core.spec_parts import TemperatureOrGreedy
from kvaudit.core.text import clip, clipped, guide, some

PAGE = guide("rollout-files.md")
_LEDGERS = (".json", ".safetensors")  # of kvaudit.audit.replay.interchange
_LONGEST = 1 << 28  # bytes of a line
_LOWEST = -100.0  # nats that a token can have that was drawn: beyond that float32 has no probability
_SHOWN = 200  # characters of what is wrong
_LARGEST = 1e300  # size of a reward or an advantage, so that a group of them can be added up

Flag = Annotated[int, Field(ge=0, le=1)]
ToldNumber = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST, allow_inf_nan=False)]


class ImportedRollout(NamedTuple):
    """One rollout, and what its loop said of it. The ledger is a single column that never left, for want of a model.

    ``advantages`` [tokens behind the prompt]. ``place`` is where it stands in the file, in words.
    """

    place: str
    stack: str
    rollout: Rollout
    advantages: Tensor | None
    reward: float | None
    group: str | None
    temperature: float | None
    tokenizer_sha256: str | None


class RolloutLists(NamedTuple):
    """One rollout in lists, whoever wrote it: ``ids`` of prompt and completion, the rest about the completion."""

    ids: Sequence[int]
    prompt_length: int
    logprobs: Sequence[float]  # one per completion token, or one per sampled token
    mask: Sequence[int] | None = None  # 1 where the model drew the token; None: everywhere
    advantage: float | Sequence[float] | None = None
    reward: float | None = None
    group: str | None = None


class OwnLine(Form):
    """Our layout; an unknown key is an error, and ``info`` may hold anything."""

    ids: list[Index] | None = None
    prompt_length: Length | None = None
    prompt_ids: list[Index] | None = None
    completion_ids: list[Index] | None = None
    logprobs: list[float]
    mask: Annotated[list[Flag] | None, Field(validation_alias=AliasChoices("mask", "env_mask"))] = None
    reward: ToldNumber | None = None
    advantage: ToldNumber | list[ToldNumber] | None = None
    group: str | int | None = None
    temperature: TemperatureOrGreedy | None = None
    tokenizer_sha256: str | None = None
    info: Any = None

    def parts(self) -> list[RolloutLists]:
        """The one rollout of the line."""
        ids, start, mask = self._tokens()
        return [RolloutLists(ids, start, self.logprobs, mask, self.advantage, self.reward, _named(self.group))]

    def _tokens(self) -> tuple[list[int], int, list[int] | None]:
        if self.prompt_ids is not None and self.completion_ids is not None:
            if self.ids is not None or self.prompt_length is not None:
                raise ValueError(
                    "has prompt_ids and completion_ids, and ids or prompt_length beside them; give one pair"
                )
            return self.prompt_ids + self.completion_ids, len(self.prompt_ids), self.mask
        if self.ids is None:
            raise ValueError("has no tokens; give prompt_ids and completion_ids, or ids and prompt_length")
        if self.prompt_length is not None:
            return self.ids, self.prompt_length, self.mask
        if self.mask is None or len(self.mask) != len(self.ids) or 1 not in self.mask:
            raise ValueError("has ids and does not say where the prompt ends; give prompt_length, or a mask of all ids")
        # a mask of all ids: the prompt ends where the model first drew
        start = self.mask.index(1)
        return self.ids, start, self.mask[start:]


class ForeignLine(BaseModel):
    """A line of another stack; what is not asked of it is passed over.

    ``temperature`` and ``tokenizer_sha256`` are ours, for whoever writes such lines.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    temperature: TemperatureOrGreedy | None = None
    tokenizer_sha256: str | None = None


class SlimeLine(ForeignLine):
    """``Sample.to_dict()`` of slime: ``tokens`` are prompt and response, all lists are about the response."""

    tokens: list[Index]
    response_length: Length
    rollout_log_probs: list[float]
    loss_mask: list[Flag] | None = None
    reward: Any = None  # a number, or a dict of which the run's --reward-key chooses
    group_index: int | None = None

    def parts(self) -> list[RolloutLists]:
        """The one rollout of the line."""
        start = len(self.tokens) - self.response_length
        reward = _reward(self.reward) if isinstance(self.reward, int | float) else None
        return [
            RolloutLists(
                self.tokens, start, self.rollout_log_probs, self.loss_mask, None, reward, _named(self.group_index)
            )
        ]


class VerlLine(ForeignLine):
    """A row of verl's DataProto: ``prompts`` padded on the left, ``responses`` on the right."""

    prompts: list[Index]
    responses: list[Index]
    attention_mask: list[Flag]
    rollout_log_probs: list[float]
    response_mask: list[Flag] | None = None
    advantages: list[ToldNumber] | None = None
    token_level_scores: list[ToldNumber] | None = None
    uid: str | int | None = None

    def parts(self) -> list[RolloutLists]:
        """The one rollout of the line, without its padding."""
        width = len(self.prompts)
        _fitting("attention_mask", self.attention_mask, width + len(self.responses), "prompts and responses")
        prompt = _where(self.prompts, self.attention_mask[:width])
        real = self.attention_mask[width:]

        def response(name: str, values: list[Any]) -> list[Any]:
            _fitting(name, values, len(real), "responses")
            return _where(values, real)

        mask = None if self.response_mask is None else response("response_mask", self.response_mask)
        advantage = None if self.advantages is None else response("advantages", self.advantages)
        logprobs = response("rollout_log_probs", self.rollout_log_probs)
        # of all tokens together; padding has none
        reward = None if self.token_level_scores is None else sum(self.token_level_scores)
        ids = prompt + response("responses", self.responses)
        return [RolloutLists(ids, len(prompt), logprobs, mask, advantage, reward, _named(self.uid))]


class TokenLogprob(ForeignLine):
    """One token of a chat answer."""

    logprob: float


class Logprobs(ForeignLine):
    """Of a completion ``token_logprobs``, of a chat answer ``content``."""

    token_logprobs: list[float] | None = None
    content: list[TokenLogprob] | None = None

    def values(self) -> list[float]:
        """One per token."""
        if self.token_logprobs is not None:
            return self.token_logprobs
        return [token.logprob for token in self.content or ()]


class VllmChoice(ForeignLine):
    """One answer of a server."""

    token_ids: list[Index]
    logprobs: Logprobs
    prompt_token_ids: list[Index] | None = None


class VllmLine(ForeignLine):
    """An answer of vLLM's OpenAI server, asked with ``return_token_ids`` and ``logprobs``."""

    choices: Annotated[list[VllmChoice], Field(min_length=1)]
    prompt_token_ids: list[Index] | None = None

    def parts(self) -> list[RolloutLists]:
        """A rollout per choice."""
        found = []
        for choice in self.choices:
            prompt = choice.prompt_token_ids or self.prompt_token_ids
            if not prompt:
                raise ValueError("has no prompt_token_ids; ask the server with return_token_ids")
            found.append(RolloutLists(prompt + choice.token_ids, len(prompt), choice.logprobs.values()))
        return found


class PrimeRlLine(ForeignLine):
    """A rollout of prime-rl: lists of the prompt and of the completion, each with its mask."""

    prompt_ids: list[Index]
    completion_ids: list[Index]
    completion_logprobs: list[float]
    completion_mask: list[Flag] | None = None
    advantage: ToldNumber | list[ToldNumber] | None = None
    reward: ToldNumber | None = None
    example_id: str | int | None = None

    def parts(self) -> list[RolloutLists]:
        """The one rollout of the line."""
        ids, start = self.prompt_ids + self.completion_ids, len(self.prompt_ids)
        origin = (self.advantage, self.reward, _named(self.example_id))
        return [RolloutLists(ids, start, self.completion_logprobs, self.completion_mask, *origin)]


class SkyRlLine(ForeignLine):
    """A trajectory of SkyRL's generator: prompt and response, the lists about the response."""

    prompt_token_ids: list[Index]
    response_ids: list[Index]
    rollout_logprobs: list[float]
    loss_mask: Annotated[list[Flag] | None, Field(validation_alias=AliasChoices("loss_mask", "loss_masks"))] = None
    reward: Annotated[Any, Field(validation_alias=AliasChoices("reward", "rewards"))] = None  # a number, or by token

    def parts(self) -> list[RolloutLists]:
        """The one rollout of the line."""
        ids, start = self.prompt_token_ids + self.response_ids, len(self.prompt_token_ids)
        reward = _reward(self.reward) if isinstance(self.reward, int | float) else None
        return [RolloutLists(ids, start, self.rollout_logprobs, self.loss_mask, None, reward)]


class NemoRlLine(ForeignLine):
    """A row of NeMo-RL's train_data_step*.jsonl: lists of all tokens, padded on the right."""

    token_ids: list[Index]
    token_loss_mask: list[Flag]
    generation_logprobs: list[float]
    input_lengths: Length | None = None
    advantages: list[ToldNumber] | None = None
    rewards: ToldNumber | None = None

    def parts(self) -> list[RolloutLists]:
        """The one rollout of the line, without its padding."""
        end = len(self.token_ids) if self.input_lengths is None else self.input_lengths
        lists: dict[str, list[Any]] = {
            "token_loss_mask": self.token_loss_mask,
            "generation_logprobs": self.generation_logprobs,
        }
        if self.advantages is not None:
            lists["advantages"] = self.advantages
        return [_behind_the_prompt(self.token_ids, lists, end, self.rewards)]


class ArealLine(ForeignLine):
    """A rollout of AReaL: lists of all tokens, by a mask of what the model drew."""

    input_ids: list[Index]
    loss_mask: list[Flag]
    logprobs: list[float]
    attention_mask: list[Flag] | None = None
    rewards: ToldNumber | None = None

    def parts(self) -> list[RolloutLists]:
        """The one rollout of the line, without its padding."""
        end = len(self.input_ids) if self.attention_mask is None else sum(self.attention_mask)
        lists: dict[str, list[Any]] = {"loss_mask": self.loss_mask, "logprobs": self.logprobs}
        return [_behind_the_prompt(self.input_ids, lists, end, self.rewards)]


class SglangMeta(ForeignLine):
    """What SGLang says of an answer: [log-prob, id, text] of every token."""

    output_token_logprobs: list[tuple[float, Index, Any]]
    input_token_logprobs: list[tuple[Any, Index, Any]] | None = None


class SglangLine(ForeignLine):
    """An answer of SGLang's own ``/generate``, asked with ``return_logprob`` and ``logprob_start_len: 0``."""

    meta_info: SglangMeta
    output_ids: list[Index] | None = None
    input_ids: list[Index] | None = None
    reward: ToldNumber | None = None

    def parts(self) -> list[RolloutLists]:
        """The one rollout of the line."""
        drawn = self.meta_info.output_token_logprobs
        ids = [row[1] for row in drawn]
        if self.output_ids is not None and self.output_ids != ids:
            raise ValueError("has other output_ids than the tokens of its output_token_logprobs")
        prompt = self.input_ids or [row[1] for row in self.meta_info.input_token_logprobs or ()]
        if not prompt:
            raise ValueError("has no ids of its prompt; ask the server with return_logprob and logprob_start_len: 0")
        return [RolloutLists(prompt + ids, len(prompt), [row[0] for row in drawn], None, None, self.reward)]


StackLine = OwnLine | SlimeLine | VerlLine | VllmLine | PrimeRlLine | SkyRlLine | NemoRlLine | ArealLine | SglangLine
# by the keys that give a stack away; whatever has none of them is held to our own layout
STACKS: Mapping[str, tuple[frozenset[str], type[StackLine]]] = {
    "vLLM": (frozenset({"choices"}), VllmLine),
    "slime": (frozenset({"tokens", "response_length"}), SlimeLine),
    "verl": (frozenset({"prompts", "responses"}), VerlLine),
    "prime-rl": (frozenset({"completion_ids", "completion_logprobs"}), PrimeRlLine),
    "SkyRL": (frozenset({"prompt_token_ids", "response_ids"}), SkyRlLine),
    "NeMo-RL": (frozenset({"token_ids", "generation_logprobs"}), NemoRlLine),
    "AReaL": (frozenset({"input_ids", "loss_mask", "logprobs"}), ArealLine),
    "SGLang": (frozenset({"meta_info"}), SglangLine),
}
_OWN_TOKENS = {"ids", "prompt_ids", "completion_ids"}  # one of them, at least, is in a line of ours
OWN: Literal["kvaudit"] = "kvaudit"


def import_rollouts(path: Path, undrawn: list[str] | None = None) -> Iterator[ImportedRollout]:
    """Every rollout of a file that says anything; raises DataError with file and line at the first that is none.

    One in which the model drew no token, as an aborted one is written, is passed over: ``undrawn`` gets its place.
    """
    if not path.is_file():
        raise DataError(f"rollouts {str(path)!r} do not exist; give a file of one rollout a line, see {PAGE}")
    if path.suffix.lower() in _LEDGERS:
        recorded = read_rollouts(path)
        for number, rollout in enumerate(recorded.rollouts):
            yield ImportedRollout(f"rollout {number}", "ledger", rollout, None, None, None, recorded.temperature, None)
        return
    read: Callable[[Path], Iterator[tuple[str, Any]]] = _samples if path.suffix.lower() == ".pt" else _lines
    for place, value in read(path):
        try:
            yield from _rollouts(place, value, [] if undrawn is None else undrawn)
        except ValidationError as error:  # first, being a ValueError itself
            raise DataError(f"{str(path)!r}, {place}: {clip(first_error(error), _SHOWN)}") from None
        except ValueError as error:
            raise DataError(f"{str(path)!r}, {place} {error}") from None


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        number = 0
        # a byte more than is allowed, by which a longer line is told
        while line := file.readline(_LONGEST + 1):
            number += 1
            if len(line) > _LONGEST:
                raise DataError(f"{str(path)!r}, line {number} is longer than {_LONGEST >> 20} MB; one rollout a line")
            if line.isspace():
                continue
            try:
                yield f"line {number}", json.loads(line.rstrip(b"\r\n"))
            except (ValueError, RecursionError) as error:
                what = clip(" ".join(str(error).split()), _SHOWN)
                raise DataError(
                    f"{str(path)!r}, line {number} is not JSON ({what}); write one rollout a line, see {PAGE}"
                ) from None


def _samples(path: Path) -> Iterator[tuple[str, Any]]:
    """What slime keeps with ``--save-debug-rollout-data``; nothing in the file is run."""
    try:
        rows = torch.load(path, map_location="cpu", weights_only=True)["samples"]
        named = list(enumerate(rows))
    except Exception as error:  # a damaged pickle raises whatever its opcodes stumble over
        what = clip(" ".join(str(error).split()), _SHOWN // 2)
        raise DataError(
            f"{str(path)!r} is no rollout file of slime, or holds objects, which are not run ({what}); write it as "
            f"lines, see {PAGE}"
        ) from None
    for number, row in named:
        yield f"sample {number}", {k: _listed(v) for k, v in row.items()} if isinstance(row, dict) else row


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _rollouts(place: str, value: Any, undrawn: list[str]) -> Iterator[ImportedRollout]:
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__}, wanted an object with the tokens of a rollout")
    if {"input", "output"} <= value.keys() and not {"ids", "prompt_ids"} & value.keys():
        raise ValueError(f"holds texts and no token ids, as verl's rollout_data_dir does; {PAGE} has what to write")
    stack, form = next(((name, form) for name, (keys, form) in STACKS.items() if keys <= value.keys()), (OWN, OwnLine))
    if form is OwnLine and not _OWN_TOKENS & value.keys() and not value.keys() <= OwnLine.model_fields.keys():
        raise ValueError(
            f"is of no stack known here, by its keys {some(map(clipped, value), 6)}; known are {', '.join(STACKS)} and "
            f"our own; {PAGE} has what to write"
        )
    line: StackLine = form.model_validate(value)
    parts = line.parts()
    for number, part in enumerate(parts):
        where = place if len(parts) == 1 else f"{place}, choice {number}"
        if _draws_nothing(part):
            undrawn.append(where)
            continue
        rollout = _rollout(part)
        if fault := rollout_fault(rollout) or _stand_in(rollout):
            raise ValueError(fault)
        length = len(rollout.ids) - rollout.prompt_length
        origin = (part.reward, part.group, line.temperature, line.tokenizer_sha256)
        yield ImportedRollout(where, stack, rollout, _advantages(part.advantage, length), *origin)


def _behind_the_prompt(ids: list[int], lists: Mapping[str, list[Any]], end: int, reward: float | None) -> RolloutLists:
    """A rollout from lists of all tokens: mask, log-probs and perhaps advantages, in this order, up to ``end``.

    The prompt ends where the model first drew; without a drawn token all but the last are the prompt.
    """
    for name, values in lists.items():
        _fitting(name, values, len(ids), "tokens")
    mask, logprobs, *advantages = lists.values()
    start = mask.index(1) if 1 in mask else end - 1
    told = advantages[0][start:end] if advantages else None
    return RolloutLists(ids[:end], start, logprobs[start:end], mask[start:end], told, reward)


def _stand_in(rollout: Rollout) -> str | None:
    """Say where a number stands that no sampled token has: engines write -9999 for -inf, and for what is missing."""
    drawn = rollout.sampled.nonzero()[:, 0]
    low = (rollout.sampler_logprobs[drawn] <= _LOWEST).nonzero()
    if not len(low):
        return None
    token = int(drawn[int(low[0])])
    value = float(rollout.sampler_logprobs[token])
    return (
        f"has log-prob {value:g} at token {token}, which stands for -inf or for a missing one: no sampler draws such a "
        "token; mask it, or leave the rollout out"
    )


def _draws_nothing(part: RolloutLists) -> bool:
    """Whether a completion is empty or masked as a whole, and nothing else in the line says otherwise."""
    length = len(part.ids) - part.prompt_length
    mask = [1] * length if part.mask is None else part.mask
    return part.prompt_length > 0 and len(mask) == length and len(part.logprobs) in (0, length) and not any(mask)


def _rollout(part: RolloutLists) -> Rollout:
    ids = torch.tensor(part.ids, dtype=torch.int64)
    tokens, length = len(ids), len(ids) - part.prompt_length
    if not 0 < part.prompt_length < tokens:
        raise ValueError(f"has {tokens} tokens, {max(length, 0)} of them behind the prompt; both parts need some")
    drawn = torch.ones(length, dtype=torch.bool)
    if part.mask is not None:
        _fitting("mask", part.mask, length, "completion")
        drawn = torch.tensor(part.mask, dtype=torch.bool)
    logprobs, count = torch.tensor(part.logprobs, dtype=torch.float32), int(drawn.sum())
    if len(logprobs) not in (length, count):
        raise ValueError(f"has {len(logprobs)} log-probs for {length} completion tokens, {count} of them sampled")
    # of every completion token: those of given ones say nothing of a sampler
    if len(logprobs) == length:
        logprobs = logprobs[drawn]
    sampled = torch.cat([torch.zeros(part.prompt_length, dtype=torch.bool), drawn])
    return Rollout(
        ids=ids,
        prompt_length=part.prompt_length,
        sampled=sampled,
        sampler_logprobs=torch.zeros(tokens).masked_scatter(sampled, logprobs),
        # one layer of one head that nothing left, in the memory of a single number
        evicted_at=torch.full((1, 1, 1), NEVER, dtype=torch.int32).expand(1, 1, tokens),
        kv_bytes_peak=0,  # what the other engine allocated is not known
        kv_bytes_dense=0,
        retention=1.0,
        answer_start=part.prompt_length,
    )


def _advantages(value: float | Sequence[float] | None, length: int) -> Tensor | None:
    if value is None:
        return None
    if isinstance(value, Sequence):
        _fitting("advantage", value, length, "completion")
        return torch.tensor(value, dtype=torch.float64)
    return torch.full((length,), value, dtype=torch.float64)


def _reward(value: float) -> float:
    if not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"has a reward that is no number from {-_LARGEST:g} to {_LARGEST:g}")
    return float(value)


def _fitting(name: str, values: Sequence[Any], wanted: int, of: str) -> None:
    if len(values) != wanted:
        raise ValueError(f"has {len(values)} values in {name} for {wanted} tokens of its {of}")


def _where(values: Sequence[Any], mask: Sequence[int]) -> list[Any]:
    return [value for value, real in zip(values, mask, strict=True) if real]


def _named(group: str | int | None) -> str | None:
    return None if group is None else str(group)
