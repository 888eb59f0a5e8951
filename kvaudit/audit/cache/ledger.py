"""The ledger: when each cache entry was evicted. One integer per entry is enough to replay a compressed rollout.

Key j was visible to query i in layer l and KV head h iff ``j <= i < evicted_at[l, h, j]``. If the cache was quantised
too, queries from ``keys_quantised_at[j]`` on saw key j as the codec stores it, and values likewise.

File format 3 is safetensors. Rollout n has these tensors:

* ``n.ids`` int32 [T], ``n.sampled`` bool [T] and ``n.sampler_logprobs`` float32 [T] (nats);
* ``n.evicted_at`` [L, H, T], a uint16 if T fits (the largest number means never), else an int32;
* with a codec ``n.keys_quantised_at`` and ``n.values_quantised_at`` [T] in the same form, and ``n.hints`` uint16 [N]
  (see ``hints``);
* for a mixture-of-experts model ``n.experts`` [T, M, k], a uint8 if the numbers fit, else a uint16 (the largest number
  means none);
* if queries selected their keys, ``n.choosing`` int32 [N] and ``n.chosen`` [S, A, N, k], a uint16 if its numbers fit,
  else an int32: the ``queries`` and ``chosen`` of a ``Selection``, whose unit and layers are in the metadata.

The metadata key ``kvaudit`` has the rest as JSON. Formats 1 (all int32, ids int64, no codec) and 2 (no hints, experts
or choices) can still be read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvaudit.audit.cache.engine_store import EngineStore
from kvaudit.audit.cache.hints import are_valid_hints
from kvaudit.audit.cache.selection import Selection, selection_fault
from kvaudit.audit.policies import Policy, Quantiser, parse_policy, quantiser_of
from kvaudit.core.errors import DataError, SpecError

LEDGER_FORMAT = 3
READABLE = (1, 2, 3)
NEVER = 2**31 - 1  # the largest int32, which no query reaches
_TENSORS = ("ids", "sampled", "sampler_logprobs", "evicted_at")
_HINTS = "hints"
_TIMES = ("evicted_at", "keys_quantised_at", "values_quantised_at")
_SHORT, _SHORT_NEVER = torch.uint16, 2**16 - 1
_TYPES = {
    "ids": (torch.int32, torch.int64),
    "sampled": (torch.bool,),
    "sampler_logprobs": (torch.float32,),
}  # all others are times
_SCALARS = ("prompt_length", "answer_start", "kv_bytes_peak", "kv_bytes_dense", "retention")


@dataclass(frozen=True)
class Ledger:
    """The record of what every query of a batch could see.

    ``evicted_at`` int32 [B, L, H, T] has, for each entry, the row position of the first query that did not see it.

    A quantised cache has a ``codec`` and the times at which keys and values were quantised: int32 [B, T]. ``experts``
    int16 [B, T, M, k] are those selected in M mixture-of-experts blocks, -1 for a token that was never fed.
    ``ids`` int64 [B, T] are the recorded tokens, -1 after a row's end; None if unknown. ``hints`` are packed per row
    (``hints.pack_hints``), empty if not recorded. ``selections`` are per row, if queries selected their keys.
    """

    evicted_at: Tensor
    codec: Quantiser | None = None
    keys_quantised_at: Tensor | None = None
    values_quantised_at: Tensor | None = None
    experts: Tensor | None = None
    ids: Tensor | None = None
    hints: tuple[Tensor, ...] = ()
    selections: Sequence[Selection | None] | None = None


@dataclass(frozen=True)
class Rollout:
    """One sampled row with its ledger, as CPU tensors.

    Fields not listed here are as in ``Ledger``, without the dimension B. ``ids`` [T] int64, ``sampled`` [T] bool,
    ``sampler_logprobs`` [T] float32 nats (0 where not sampled), ``evicted_at`` [L, H, T] int32. ``answer_start`` is the
    index of the first token of the last completion; ``retention`` is the share of the entries seen that are in the
    cache at that moment, mean over compressed layers. ``kv_bytes_peak`` is this row's share of the allocated tensors,
    ``kv_bytes_live`` the bytes of its entries while decoding (``store.peak_live_bytes``; None if not counted).
    ``row_keys`` seed the policy's random draws, if it has any: the key for the prompt, which a group shares, and the
    row's own key. ``pinned`` are runs [start, end) of pinned tokens, if a budget that heads share depends on them.
    """

    ids: Tensor
    prompt_length: int
    sampled: Tensor
    sampler_logprobs: Tensor
    evicted_at: Tensor
    kv_bytes_peak: int
    kv_bytes_dense: int
    retention: float
    answer_start: int
    codec: Quantiser | None = None
    keys_quantised_at: Tensor | None = None
    values_quantised_at: Tensor | None = None
    experts: Tensor | None = None
    hints: Tensor | None = None
    row_keys: tuple[int, int] | None = None
    pinned: tuple[tuple[int, int], ...] | None = None
    selection: Selection | None = None
    # the following are not in ledger files
    kv_bytes_live: int | None = None
    stored: EngineStore | None = None  # how the engine that sampled the row stores keys and values
    written: tuple[Tensor, Tensor] | None = None  # keys and values [L, H, T - 1, D] as that engine wrote them
    turns: tuple[Rollout, ...] = ()  # if several were sampled: each as the engine read it, its own tokens sampled

    @property
    def engine_turns(self) -> tuple[Rollout, ...]:
        """The rollout split into one rollout per request to an engine: each turn, preceded by all text before it.

        A rollout that has no turns is returned alone.
        """
        return self.turns or (self,)


def batch_ledger(rollouts: Sequence[Rollout]) -> Ledger:
    """Combine rollouts into one padded batch; raise DataError if they were stored by different codecs."""
    first, longest = rollouts[0], max(len(rollout.ids) for rollout in rollouts)
    if any(rollout.codec != first.codec for rollout in rollouts):
        raise DataError("rollouts of one batch were stored by different quantisers; replay them separately")
    # [L, H, longest] each
    evicted_at = [torch.nn.functional.pad(r.evicted_at, (0, longest - len(r.ids)), value=NEVER) for r in rollouts]
    no_hints = torch.zeros(0, dtype=torch.uint16)
    return Ledger(
        torch.stack(evicted_at),  # [B, L, H, longest]
        first.codec,
        _pad_rows([r.keys_quantised_at for r in rollouts if r.keys_quantised_at is not None], NEVER),
        _pad_rows([r.values_quantised_at for r in rollouts if r.values_quantised_at is not None], NEVER),
        _pad_rows([r.experts for r in rollouts if r.experts is not None], -1),  # all rollouts have experts, or none
        _pad_rows([r.ids for r in rollouts], -1),
        () if first.codec is None else tuple(no_hints if r.hints is None else r.hints for r in rollouts),
        [r.selection for r in rollouts],
    )


def _pad_rows(rows: Sequence[Tensor], value: int) -> Tensor | None:
    """Stack rows [T, ...] of different lengths, padded with ``value``; return None for no rows."""
    return pad_sequence(list(rows), batch_first=True, padding_value=value) if rows else None


def save_ledgers(path: Path, rollouts: Sequence[Rollout], policy: Policy) -> str:
    """Write the rollouts to ``path`` and return the file's sha256.

    Raises SpecError for a policy that cannot be replayed.
    """
    if not policy.replayable:
        raise SpecError(
            f"policy {policy.canonical!r} cannot be replayed, so no eviction ledger can be kept; choose another policy"
        )
    tensors = {f"{n}.{name}": tensor for n, rollout in enumerate(rollouts) for name, tensor in _tensors(rollout)}
    scalars = [_scalars(rollout) for rollout in rollouts]
    header = {"format": LEDGER_FORMAT, "policy": policy.canonical, "policy_hash": policy.hash, "rollouts": scalars}
    # a single key: safetensors writes several in no fixed order, and equal ledgers must have equal hashes
    metadata = {"kvaudit": json.dumps(header)}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata=metadata)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _tensors(rollout: Rollout) -> Iterator[tuple[str, Tensor]]:
    yield "ids", rollout.ids.to(torch.int32)
    yield "sampled", rollout.sampled
    yield "sampler_logprobs", rollout.sampler_logprobs
    for name in _TIMES:
        times = getattr(rollout, name)
        if times is not None:
            yield name, _shorten(times.contiguous())
    if rollout.experts is not None:
        dtype = torch.uint8 if int(rollout.experts.max()) < torch.iinfo(torch.uint8).max else torch.uint16
        yield "experts", rollout.experts.to(dtype)  # -1, none, becomes the largest number
    if rollout.hints is not None:
        yield _HINTS, rollout.hints
    if rollout.selection is not None:
        chosen = rollout.selection.chosen
        yield "choosing", rollout.selection.queries
        yield "chosen", chosen.to(_SHORT) if int(chosen.max()) < _SHORT_NEVER else chosen


def _scalars(rollout: Rollout) -> dict[str, Any]:
    scalars = {name: getattr(rollout, name) for name in _SCALARS}
    if rollout.codec:
        scalars["codec"] = rollout.codec.canonical
    if rollout.row_keys:
        scalars["row_keys"] = list(rollout.row_keys)
    if rollout.pinned is not None:
        scalars["pinned"] = [list(run) for run in rollout.pinned]
    if rollout.selection is not None:
        scalars["selection"] = {"unit": rollout.selection.unit, "layers": list(rollout.selection.layers)}
    return scalars


def _shorten(times: Tensor) -> Tensor:
    """Return the times at which entries were evicted or quantised as uint16 if all of them fit, else unchanged.

    In uint16 the largest number of the type stands for NEVER.
    """
    if times.shape[-1] >= _SHORT_NEVER - 1:
        return times
    return times.clamp(max=_SHORT_NEVER).to(_SHORT)  # NEVER becomes the largest number


def _lengthen(times: Tensor) -> Tensor:
    if times.dtype is not _SHORT:
        return times
    wide = times.to(torch.int32)  # torch has few operators for uint16
    return torch.where(wide == _SHORT_NEVER, NEVER, wide)


def load_ledgers(path: Path, *, sha256: str | None = None) -> tuple[list[Rollout], Policy]:
    """Read a ledger file; return rollouts and policy.

    Raises DataError for a file that is missing, damaged or not the one with this ``sha256``.
    """
    if not path.is_file():
        raise DataError(f"ledger {str(path)!r} does not exist")
    if sha256 is not None and (got := hashlib.sha256(path.read_bytes()).hexdigest()) != sha256:
        raise DataError(f"ledger {str(path)!r} has sha256 {got[:12]}, provenance says {sha256[:12]}; it was changed")
    try:
        with safe_open(path, framework="pt") as file:
            header = _header(path, file.metadata() or {})
            rollouts = [_rollout(file, n, scalars) for n, scalars in enumerate(header["rollouts"])]
            policy = parse_policy(str(header["policy"]))
    except SafetensorError as error:
        raise DataError(f"ledger {str(path)!r} is not a readable safetensors file ({error})") from None
    except (TypeError, KeyError, AttributeError) as error:
        raise DataError(f"ledger {str(path)!r} is damaged ({error}); sample it again") from None
    for rollout in rollouts:
        if fault := _fault(rollout):
            raise DataError(f"ledger {str(path)!r}{fault}")
    return rollouts, policy


def _header(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    try:
        header = json.loads(metadata.get("kvaudit", "null"))
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or type(header.get("format")) is not int or header["format"] not in READABLE:
        raise DataError(f"file {str(path)!r} is not a ledger of format {' or '.join(map(str, READABLE))}")
    return header


def _rollout(file: Any, number: int, scalars: dict[str, Any]) -> Rollout:
    fields, stored = _parse_scalars(scalars), set(file.keys())
    names = (*_TENSORS, *_TIMES[1:]) if fields.get("codec") else _TENSORS
    if f"{number}.{_HINTS}" in stored:
        names = (*names, _HINTS)
    tensors = {name: file.get_tensor(f"{number}.{name}") for name in names}
    for name, tensor in tensors.items():
        if tensor.dtype not in _TYPES.get(name, (torch.int32, _SHORT)):
            raise TypeError(f"{name} of rollout {number} holds {tensor.dtype}")
    tensors |= {name: _lengthen(tensors[name]) for name in _TIMES if name in tensors}
    tensors["ids"] = tensors["ids"].long()  # embeddings take int64
    if f"{number}.experts" in stored:
        tensors["experts"] = _to_signed(file.get_tensor(f"{number}.experts")).to(torch.int16)
    if "selection" in fields:
        queries, chosen = (file.get_tensor(f"{number}.{name}") for name in ("choosing", "chosen"))
        unit, layers = fields["selection"]["unit"], tuple(fields["selection"]["layers"])
        fields |= {"selection": Selection(unit, layers, queries, _to_signed(chosen).to(torch.int32))}
    return Rollout(**tensors, **fields)


def _to_signed(stored: Tensor) -> Tensor:
    """Convert a stored tensor to int64; the largest number of an unsigned type becomes -1."""
    wide = stored.to(torch.int64)
    return wide if stored.dtype.is_signed else torch.where(wide == torch.iinfo(stored.dtype).max, -1, wide)


def _parse_scalars(scalars: dict[str, Any]) -> dict[str, Any]:
    integers = [name for name in _SCALARS if name != "retention"]
    # ``type`` and not isinstance, for which JSON's true is an int
    if any(type(scalars[name]) is not int or not 0 <= scalars[name] < 2**62 for name in integers):
        raise TypeError(f"{', '.join(integers)} are whole numbers")
    if type(scalars["retention"]) not in (int, float) or type(scalars.get("codec", "")) is not str:
        raise TypeError("retention is a number and codec a text")
    selection = scalars.get("selection", {"unit": 1, "layers": []})
    if (
        type(selection["unit"]) is not int
        or not 1 <= selection["unit"] <= NEVER
        or any(type(n) is not int for n in selection["layers"])
    ):
        raise TypeError("selection has a unit and layers, in whole numbers below 2^31")
    if unknown := set(scalars) - {*_SCALARS, "codec", "row_keys", "pinned", "selection"}:
        raise TypeError(f"unknown entries {sorted(unknown)}")
    parsers = {"row_keys": _parse_row_keys, "pinned": _parse_runs, "codec": _parse_codec}
    return {name: parsers[name](value) if name in parsers else value for name, value in scalars.items()}


def _parse_codec(text: str) -> Quantiser | None:
    codec = quantiser_of(parse_policy(text)) if text else None
    if text and codec is None:
        raise TypeError(f"it names {text!r} as its codec, which quantises nothing")
    return codec


def _parse_row_keys(keys: Any) -> tuple[int, int]:
    if type(keys) is not list or len(keys) != 2 or any(type(key) is not int or abs(key) >= 2**63 for key in keys):
        raise TypeError("row_keys are two whole numbers of 64 bits")
    return keys[0], keys[1]


def _parse_runs(runs: Any) -> tuple[tuple[int, int], ...]:
    for run in runs:
        if (
            type(run) is not list
            or len(run) != 2
            or any(type(end) is not int for end in run)
            or not 0 <= run[0] < run[1]
        ):
            raise TypeError("pinned are runs of positions, each two whole numbers that rise")
    return tuple((run[0], run[1]) for run in runs)


def _fault(rollout: Rollout) -> str | None:
    """Return what is wrong with a rollout, as a phrase to follow the name of its ledger; None if nothing is."""
    tokens = rollout.ids.numel()
    quantised_at = [t for t in (rollout.keys_quantised_at, rollout.values_quantised_at) if t is not None]
    by_token = [rollout.ids, rollout.sampled, rollout.sampler_logprobs, *quantised_at]
    if any(tuple(t.shape) != (tokens,) for t in by_token):
        return f": one of its tensors by token has another shape than its {tokens} tokens; the file is damaged"
    if rollout.evicted_at.dim() != 3 or rollout.evicted_at.shape[2] != tokens:
        return f": evicted_at {tuple(rollout.evicted_at.shape)} does not fit {tokens} tokens"
    experts = rollout.experts
    if experts is not None and (experts.dim() != 3 or len(experts) != tokens or 0 in experts.shape):
        return f": experts {tuple(experts.shape)} do not fit {tokens} tokens"
    # the last token may have been sampled and never fed
    if experts is not None and bool((experts[:-1] < 0).any()):
        return ": a token that later ones saw has no expert; the file is damaged"
    if rollout.hints is not None and not (rollout.codec and are_valid_hints(rollout.hints)):
        return ": the hints are not in order; the file is damaged"
    if rollout.selection is not None and (fault := selection_fault(rollout.selection, rollout.evicted_at)):
        return f" {fault}"
    return _number_fault(rollout, quantised_at)


def _number_fault(rollout: Rollout, quantised_at: list[Tensor]) -> str | None:
    tokens = rollout.ids.shape[0]
    wrong = ((rollout.sampler_logprobs != 0) & ~rollout.sampled).nonzero()  # [n, 1]
    if len(wrong):
        return f": token {int(wrong[0])} has a log-prob and was not sampled"
    if not (0 < rollout.prompt_length <= rollout.answer_start <= tokens and 0 <= rollout.retention <= 1):
        return f": prompt, answer or retention do not fit its {tokens} tokens"
    positions = torch.arange(tokens, dtype=torch.int32)
    # an entry's own query may read its code, but no earlier one
    if (rollout.evicted_at <= positions).any() or any((t < positions).any() for t in quantised_at):
        return ": an entry left before its own query saw it; the file is damaged"
    return None
