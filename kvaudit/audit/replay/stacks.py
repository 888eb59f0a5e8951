"""Reading rollouts of other training stacks (vLLM, verl, slime ...) from files with one JSON object per line.

Each stack has its own keys; docs/rollout-files.md describes them. Every value is checked, since the file may come from
anywhere. A file is streamed line by line, so it need not fit into memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from kvaudit.audit.cache.ledger import NEVER, Rollout
from kvaudit.audit.replay.interchange import Index, Length, first_error, read_rollouts
from kvaudit.audit.replay.rollout_checks import rollout_fault
from kvaudit.core.errors import DataError
from kvaudit.core.spec_parts import TemperatureOrGreedy
from kvaudit.core.text import clip, guide_path, join_names, short_text

PAGE = guide_path("rollout-files.md")
_LEDGERS = (".json", ".safetensors")  # read by kvaudit.audit.replay.interchange
_LONGEST = 1 << 28  # bytes of a line
_LOWEST = -100.0  # nats: float32 has no probability below, so no sampler draws such a token
_MAX_SHOWN = 200  # characters of an error
_LARGEST = 1e300  # size of a reward or an advantage, so that the sum over a group is finite

Flag = Annotated[int, Field(ge=0, le=1)]
BoundedNumber = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST, allow_inf_nan=False)]


class ImportedRollout(NamedTuple):
    """A rollout with the metadata of its training loop; its ledger has one layer with one head and no evictions.

    ``advantages`` has a number for each token after the prompt. ``place``: its location in the file, such as ``line
    3``.
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
    """One rollout of any stack as lists: ``ids`` are prompt and completion, other lists cover the completion only."""

    ids: Sequence[int]
    prompt_length: int
    logprobs: Sequence[float]  # one per completion token, or one per sampled token
    mask: Sequence[int] | None = None  # 1 where the model drew the token; None: everywhere
    advantage: float | Sequence[float] | None = None
    reward: float | None = None
    group: str | int | None = None


class StackLine(BaseModel):
    """The base of the pydantic models of one line of a rollout file; each training stack has a subclass.

    Unknown keys are ignored. The fields defined here are kvaudit's own and allowed in a line of any stack.
    """

    model_config = ConfigDict(frozen=True)

    temperature: TemperatureOrGreedy | None = None
    tokenizer_sha256: str | None = None

    def rollouts(self) -> Iterator[RolloutLists]:
        """Yield the rollouts of the line, without padding; raises ValueError if its fields do not fit."""
        raise NotImplementedError


class KvauditLine(StackLine):
    """A line in kvaudit's own layout; an unknown key is an error, and ``info`` may hold anything."""

    model_config = ConfigDict(extra="forbid")

    ids: list[Index] | None = None
    prompt_length: Length | None = None
    prompt_ids: list[Index] | None = None
    completion_ids: list[Index] | None = None
    logprobs: list[float]
    mask: Annotated[list[Flag] | None, Field(validation_alias=AliasChoices("mask", "env_mask"))] = None
    reward: BoundedNumber | None = None
    advantage: BoundedNumber | list[BoundedNumber] | None = None
    group: str | int | None = None
    info: Any = None

    def rollouts(self) -> Iterator[RolloutLists]:
        ids, start, mask = self._tokens()
        yield RolloutLists(ids, start, self.logprobs, mask, self.advantage, self.reward, self.group)

    def _tokens(self) -> tuple[list[int], int, list[int] | None]:
        if self.prompt_ids is not None and self.completion_ids is not None:
            if self.ids is not None or self.prompt_length is not None:
                raise ValueError("has prompt_ids and completion_ids as well as ids or prompt_length; give one pair")
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


class SlimeLine(StackLine):
    """``Sample.to_dict()`` of slime: ``tokens`` are prompt and response, other lists cover the response only."""

    tokens: list[Index]
    response_length: Length
    rollout_log_probs: list[float]
    loss_mask: list[Flag] | None = None
    reward: Any = None  # a number, or a dict from which the run's --reward-key chooses
    group_index: int | None = None

    def rollouts(self) -> Iterator[RolloutLists]:
        start, reward = len(self.tokens) - self.response_length, _reward(self.reward)
        yield RolloutLists(self.tokens, start, self.rollout_log_probs, self.loss_mask, None, reward, self.group_index)


class VerlLine(StackLine):
    """A row of verl's DataProto: ``prompts`` padded on the left, ``responses`` on the right."""

    prompts: list[Index]
    responses: list[Index]
    attention_mask: list[Flag]
    rollout_log_probs: list[float]
    response_mask: list[Flag] | None = None
    advantages: list[BoundedNumber] | None = None
    token_level_scores: list[BoundedNumber] | None = None
    uid: str | int | None = None

    def rollouts(self) -> Iterator[RolloutLists]:
        width = len(self.prompts)
        _require_length("attention_mask", self.attention_mask, width + len(self.responses), "prompts and responses")
        prompt = _select(self.prompts, self.attention_mask[:width])
        is_real = self.attention_mask[width:]

        def response(name: str) -> Any:
            values = getattr(self, name)
            if values is None:
                return None
            _require_length(name, values, len(is_real), "responses")
            return _select(values, is_real)

        mask, advantage, logprobs = map(response, ("response_mask", "advantages", "rollout_log_probs"))
        # the sum over tokens; padding scores 0
        reward = None if self.token_level_scores is None else _reward(sum(self.token_level_scores))
        yield RolloutLists(prompt + response("responses"), len(prompt), logprobs, mask, advantage, reward, self.uid)


class TokenLogprob(BaseModel):
    """One token of a chat answer, with its log-prob in nats."""

    logprob: float


class Logprobs(BaseModel):
    """The log-probs of a completion (``token_logprobs``) or of a chat answer (``content``)."""

    token_logprobs: list[float] | None = None
    content: list[TokenLogprob] | None = None


class VllmChoice(BaseModel):
    """One answer in a response of vLLM's server."""

    token_ids: list[Index]
    logprobs: Logprobs
    prompt_token_ids: list[Index] | None = None


class VllmLine(StackLine):
    """A response of vLLM's OpenAI server to a request with ``return_token_ids`` and ``logprobs``."""

    choices: Annotated[list[VllmChoice], Field(min_length=1)]
    prompt_token_ids: list[Index] | None = None

    def rollouts(self) -> Iterator[RolloutLists]:
        for choice in self.choices:
            prompt = choice.prompt_token_ids or self.prompt_token_ids
            if not prompt:
                raise ValueError("has no prompt_token_ids; ask the server with return_token_ids")
            logprobs = choice.logprobs.token_logprobs
            if logprobs is None:
                logprobs = [token.logprob for token in choice.logprobs.content or ()]
            yield RolloutLists(prompt + choice.token_ids, len(prompt), logprobs)


class PrimeRlLine(StackLine):
    """A rollout of prime-rl: lists of the prompt and of the completion, each with its mask."""

    prompt_ids: list[Index]
    completion_ids: list[Index]
    completion_logprobs: list[float]
    completion_mask: list[Flag] | None = None
    advantage: BoundedNumber | list[BoundedNumber] | None = None
    reward: BoundedNumber | None = None
    example_id: str | int | None = None

    def rollouts(self) -> Iterator[RolloutLists]:
        ids, start = self.prompt_ids + self.completion_ids, len(self.prompt_ids)
        metadata = (self.advantage, self.reward, self.example_id)
        yield RolloutLists(ids, start, self.completion_logprobs, self.completion_mask, *metadata)


class SkyRlLine(StackLine):
    """A trajectory of SkyRL's generator: prompt and response; other lists cover the response only."""

    prompt_token_ids: list[Index]
    response_ids: list[Index]
    rollout_logprobs: list[float]
    loss_mask: Annotated[list[Flag] | None, Field(validation_alias=AliasChoices("loss_mask", "loss_masks"))] = None
    reward: Annotated[Any, Field(validation_alias=AliasChoices("reward", "rewards"))] = None  # a number, or by token

    def rollouts(self) -> Iterator[RolloutLists]:
        ids, start = self.prompt_token_ids + self.response_ids, len(self.prompt_token_ids)
        yield RolloutLists(ids, start, self.rollout_logprobs, self.loss_mask, None, _reward(self.reward))


class NemoRlLine(StackLine):
    """A row of NeMo-RL's train_data_step*.jsonl: lists over all tokens, padded on the right."""

    token_ids: list[Index]
    token_loss_mask: list[Flag]
    generation_logprobs: list[float]
    input_lengths: Length | None = None
    advantages: list[BoundedNumber] | None = None
    rewards: BoundedNumber | None = None

    def rollouts(self) -> Iterator[RolloutLists]:
        end = len(self.token_ids) if self.input_lengths is None else self.input_lengths
        names = ["token_loss_mask", "generation_logprobs"] + ["advantages"] * (self.advantages is not None)
        lists = {name: getattr(self, name) for name in names}
        yield _split_prompt(self.token_ids, lists, end, self.rewards)


class ArealLine(StackLine):
    """A rollout of AReaL: lists over all tokens, with a mask of sampled tokens."""

    input_ids: list[Index]
    loss_mask: list[Flag]
    logprobs: list[float]
    attention_mask: list[Flag] | None = None
    rewards: BoundedNumber | None = None

    def rollouts(self) -> Iterator[RolloutLists]:
        mask = [1] * len(self.input_ids) if self.attention_mask is None else self.attention_mask
        _require_length("attention_mask", mask, len(self.input_ids), "tokens")
        end = sum(mask)
        if 0 in mask[:end]:
            raise ValueError("has padding before its last token in attention_mask; pad on the right")
        lists: dict[str, list[Any]] = {"loss_mask": self.loss_mask, "logprobs": self.logprobs}
        yield _split_prompt(self.input_ids, lists, end, self.rewards)


class SglangMeta(BaseModel):
    """SGLang's metadata of an answer: (log-prob, id, text) of every token."""

    output_token_logprobs: list[tuple[float, Index, Any]]
    input_token_logprobs: list[tuple[Any, Index, Any]] | None = None


class SglangLine(StackLine):
    """A response of SGLang's ``/generate`` to a request with ``return_logprob`` and ``logprob_start_len: 0``."""

    meta_info: SglangMeta
    output_ids: list[Index] | None = None
    input_ids: list[Index] | None = None
    reward: BoundedNumber | None = None

    def rollouts(self) -> Iterator[RolloutLists]:
        tokens = self.meta_info.output_token_logprobs
        logprobs, ids = [row[0] for row in tokens], [row[1] for row in tokens]
        if self.output_ids is not None and self.output_ids != ids:
            raise ValueError("has other output_ids than the tokens of its output_token_logprobs")
        prompt = self.input_ids or [row[1] for row in self.meta_info.input_token_logprobs or ()]
        if not prompt:
            raise ValueError("has no ids of its prompt; ask the server with return_logprob and logprob_start_len: 0")
        yield RolloutLists(prompt + ids, len(prompt), logprobs, None, None, self.reward)


# recognised by keys that only this stack writes; every other line must have kvaudit's own layout
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


def import_rollouts(path: Path, undrawn: list[str] | None = None) -> Iterator[ImportedRollout]:
    """Yield the rollouts of a file; raises DataError with file and line at the first invalid one.

    A rollout without a sampled token, such as an aborted one, is skipped. Its location (such as ``line 3``) is appended
    to ``undrawn``, if that is given.
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
        except ValidationError as error:  # before ValueError, which it subclasses
            raise DataError(f"{str(path)!r}, {place}: {clip(first_error(error), _MAX_SHOWN)}") from None
        except ValueError as error:
            raise DataError(f"{str(path)!r}, {place} {error}") from None


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        number = 0
        # one byte more than is allowed shows that a line is longer
        while line := file.readline(_LONGEST + 1):
            number += 1
            if len(line) > _LONGEST:
                raise DataError(f"{str(path)!r}, line {number} is longer than {_LONGEST >> 20} MB; one rollout a line")
            if line.isspace():
                continue
            try:
                yield f"line {number}", json.loads(line.rstrip(b"\r\n"))
            except (ValueError, RecursionError) as error:
                reason = clip(" ".join(str(error).split()), _MAX_SHOWN)
                raise DataError(
                    f"{str(path)!r}, line {number} is not JSON ({reason}); write one rollout a line, see {PAGE}"
                ) from None


def _samples(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (location, content) of each sample in a file of slime's ``--save-debug-rollout-data``.

    The file is a pickle; it is read without running code in it. Raises DataError if that is not possible.
    """
    try:
        rows = list(torch.load(path, map_location="cpu", weights_only=True)["samples"])
    except Exception as error:  # a damaged pickle can raise any exception
        reason = clip(" ".join(str(error).split()), _MAX_SHOWN // 2)
        raise DataError(
            f"{str(path)!r} is no rollout file of slime, or holds objects, which are not run ({reason}); write it as "
            f"lines, see {PAGE}"
        ) from None
    for number, row in enumerate(rows):
        yield f"sample {number}", {k: _to_list(v) for k, v in row.items()} if isinstance(row, dict) else row


def _to_list(value: Any) -> Any:
    """Return a dense tensor as a list, anything else (a sparse tensor too) unchanged."""
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
    return value.tolist() if is_dense else value


def _rollouts(place: str, value: Any, undrawn: list[str]) -> Iterator[ImportedRollout]:
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__}, wanted an object with the tokens of a rollout")
    if {"input", "output"} <= value.keys() and not {"ids", "prompt_ids"} & value.keys():
        raise ValueError(f"holds texts and no token ids, as verl's rollout_data_dir does; see {PAGE}")
    stack, form = next(
        ((name, form) for name, (keys, form) in STACKS.items() if keys <= value.keys()), ("kvaudit", KvauditLine)
    )
    has_tokens = bool({"ids", "prompt_ids", "completion_ids"} & value.keys())
    if form is KvauditLine and not has_tokens and not value.keys() <= form.model_fields.keys():
        raise ValueError(
            f"has the keys of no supported stack: {join_names(map(short_text, value), 6)}; supported are "
            f"{', '.join(STACKS)} and kvaudit's own layout; see {PAGE}"
        )
    line = form.model_validate(value)
    rows = list(line.rollouts())
    for number, row in enumerate(rows):
        row_place = place if len(rows) == 1 else f"{place}, choice {number}"
        if _draws_nothing(row):
            undrawn.append(row_place)
            continue
        rollout = _rollout(row)
        if fault := rollout_fault(rollout) or _placeholder_fault(rollout):
            raise ValueError(fault)
        advantages = _advantages(row.advantage, len(rollout.ids) - rollout.prompt_length)
        group = None if row.group is None else str(row.group)
        metadata = (row.reward, group, line.temperature, line.tokenizer_sha256)
        yield ImportedRollout(row_place, stack, rollout, advantages, *metadata)


def _split_prompt(ids: list[int], lists: Mapping[str, list[Any]], end: int, reward: float | None) -> RolloutLists:
    """Build a rollout from lists that cover all its tokens, of which those from ``end`` on are padding.

    ``lists`` are the mask of sampled tokens, the log-probs and perhaps the advantages. The prompt ends at the first
    sampled token; without one, all tokens but the last are the prompt.
    """
    for name, values in lists.items():
        _require_length(name, values, len(ids), "tokens")
    if end > len(ids):
        raise ValueError(f"has {len(ids)} tokens, and says that it has {end}")
    mask, logprobs, *advantages = lists.values()
    start = mask.index(1) if 1 in mask else end - 1
    advantage = advantages[0][start:end] if advantages else None
    return RolloutLists(ids[:end], start, logprobs[start:end], mask[start:end], advantage, reward)


def _placeholder_fault(rollout: Rollout) -> str | None:
    """Return a message if a log-prob is a placeholder, like the -9999 that engines write for -inf; else None."""
    drawn = rollout.sampled.nonzero()[:, 0]
    low = (rollout.sampler_logprobs[drawn] <= _LOWEST).nonzero()
    if not len(low):
        return None
    token = int(drawn[int(low[0])])
    return (
        f"has log-prob {float(rollout.sampler_logprobs[token]):g} at token {token}, a placeholder for -inf or for a "
        "missing one, since no sampler draws such a token; mask it, or leave the rollout out"
    )


def _draws_nothing(row: RolloutLists) -> bool:
    """Return whether a completion has no sampled token: it is empty or fully masked.

    False for lists whose lengths do not fit, which is an error of another kind.
    """
    length = len(row.ids) - row.prompt_length
    mask = [1] * length if row.mask is None else row.mask
    return row.prompt_length > 0 and len(mask) == length and len(row.logprobs) in (0, length) and not any(mask)


def _rollout(row: RolloutLists) -> Rollout:
    ids = torch.tensor(row.ids, dtype=torch.int64)
    tokens, length = len(ids), len(ids) - row.prompt_length
    if not 0 < row.prompt_length < tokens:
        raise ValueError(f"has {tokens} tokens, {max(length, 0)} of them after the prompt; both parts need some")
    drawn = torch.ones(length, dtype=torch.bool)
    if row.mask is not None:
        _require_length("mask", row.mask, length, "completion")
        drawn = torch.tensor(row.mask, dtype=torch.bool)
    logprobs, count = torch.tensor(row.logprobs, dtype=torch.float32), int(drawn.sum())
    if len(logprobs) not in (length, count):
        raise ValueError(f"has {len(logprobs)} log-probs for {length} completion tokens, {count} of them sampled")
    if len(logprobs) == length:  # log-probs of given tokens are not the sampler's
        logprobs = logprobs[drawn]
    sampled = torch.cat([torch.zeros(row.prompt_length, dtype=torch.bool), drawn])
    return Rollout(
        ids=ids,
        prompt_length=row.prompt_length,
        sampled=sampled,
        sampler_logprobs=torch.zeros(tokens).masked_scatter(sampled, logprobs),
        # expanded from a single number, so that it takes no memory
        evicted_at=torch.full((1, 1, 1), NEVER, dtype=torch.int32).expand(1, 1, tokens),
        kv_bytes_peak=0,  # unknown for another engine
        kv_bytes_dense=0,
        retention=1.0,
        answer_start=row.prompt_length,
    )


def _advantages(value: float | Sequence[float] | None, length: int) -> Tensor | None:
    if value is None:
        return None
    if isinstance(value, Sequence):
        _require_length("advantage", value, length, "completion")
        return torch.tensor(value, dtype=torch.float64)
    return torch.full((length,), value, dtype=torch.float64)


def _reward(value: Any) -> float | None:
    """Return the reward if it is a single number, else None."""
    if not isinstance(value, int | float):
        return None
    if not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"has a reward that is no number from {-_LARGEST:g} to {_LARGEST:g}")
    return float(value)


def _require_length(name: str, values: Sequence[Any], expected: int, of: str) -> None:
    if len(values) != expected:
        raise ValueError(f"has {len(values)} values in {name} for {expected} tokens of its {of}")


def _select(values: Sequence[Any], mask: Sequence[int]) -> list[Any]:
    return [value for value, is_kept in zip(values, mask, strict=True) if is_kept]
