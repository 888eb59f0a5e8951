"""The ledger: when each cache entry left. One integer per entry replays a whole compressed rollout.

Key j was visible to query i in layer l and KV head h iff ``j <= i < evicted_at[l, h, j]``. Where the cache was
quantised too, queries from ``keys_quantised_at[j]`` on saw key j as the codec stores it, values alike.

File format 3: safetensors with, per rollout n, ``n.ids`` int32 [T], ``n.sampled`` bool [T], ``n.sampler_logprobs``
float32 [T] (nats) and ``n.evicted_at`` [L, H, T], a uint16 where T fits (the largest number means never), an int32
otherwise; with a codec also ``n.keys_quantised_at`` and ``n.values_quantised_at`` [T] in the same coding and the
codes at a border, ``n.hints`` uint16 [N] (``quantised.hints``); of a mixture-of-experts model also ``n.experts``
[T, M, k], a uint8 where the numbers fit and a uint16 otherwise (the largest number means none); where queries chose
what they attend to also ``n.choosing`` int32 [N] and ``n.chosen`` [S, A, N, k], a uint16 where its numbers fit, with
unit and layers in the header (see ``Selection``). Metadata key ``kvaudit`` holds JSON of the rest. Formats 1 (all
int32, ids int64, no codec) and 2 (no hints, no experts, no choices) are still read.
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
    """What every query of a batch could see: ``evicted_at`` int32 [B, L, H, T], in row positions.

    A quantised cache has its ``codec`` and since when keys and values are codes: int32 [B, T].
    A model of M mixture-of-experts blocks has the k ``experts`` each chose per token: int16 [B, T, M, k], -1 for a
    token that never entered the cache. ``ids`` int64 [B, T] are the tokens it was recorded for, -1 beyond a row's end;
    None: nobody said. ``hints`` are each row's codes at a border, as ``quantised.hints`` packs them; none where nobody
    recorded them. Where queries attended to chosen keys only, ``selections`` has every row's (``Selection``).
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
    """One sampled row with its ledger; CPU tensors.

    ``ids`` [T] int64, ``sampled`` [T] bool, ``sampler_logprobs`` [T] float32 nats (0 where not sampled), ``evicted_at``
    [L, H, T] int32. ``answer_start`` is the index of the first token of the last completion; ``retention`` is kept/seen
    entries at that moment, over compressed layers; ``kv_bytes_peak`` is this row's share of allocated tensors,
    ``kv_bytes_live`` what its entries took while decoding, without slack and bookkeeping (None: nobody counted). A
    quantised cache has its ``codec`` and gives two more tables [T] int32 and the ``hints`` (uint16 words, None where
    nobody recorded them). ``experts`` [T, M, k] int16 are those of a mixture-of-experts model, see ``Ledger``;
    ``selection`` says what queries attended to where they chose. ``row_keys`` are the numbers of the row that its
    prompt was prefilled in and of its own, where the policy draws by them. ``pinned`` are runs of tokens that a role
    pinned, each from its first to behind its last, where what heads share depends on them.
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
    kv_bytes_live: int | None = None  # in no ledger file, since a ledger says it
    stored: EngineStore | None = None  # how the engine that sampled it stores keys and values; in no ledger file
    written: tuple[Tensor, Tensor] | None = None  # keys and values [L, H, T - 1, D] as that engine wrote them
    turns: tuple[Rollout, ...] = ()  # of several that were drawn: each as the engine read it, its own tokens sampled

    @property
    def engine_turns(self) -> tuple[Rollout, ...]:
        """What an engine read and drew at once: every turn with all that came before it, or the whole."""
        return self.turns or (self,)


def batch_ledger(rollouts: Sequence[Rollout]) -> Ledger:
    """What every query of some rollouts could see, as one batch filled up to the longest.

    Raises DataError where they were not stored in one way.
    """
    first, longest = rollouts[0], max(len(rollout.ids) for rollout in rollouts)
    if any(rollout.codec != first.codec for rollout in rollouts):
        raise DataError("rollouts of one batch were stored by unlike quantisers; replay them apart")
    # [L, H, longest] each
    evicted_at = [torch.nn.functional.pad(r.evicted_at, (0, longest - len(r.ids)), value=NEVER) for r in rollouts]
    experts = [rollout.experts for rollout in rollouts if rollout.experts is not None]  # [T, M, k] of all or of none
    return Ledger(
        torch.stack(evicted_at),  # [B, L, H, longest]
        first.codec,
        _filled([r.keys_quantised_at for r in rollouts if r.keys_quantised_at is not None], NEVER),
        _filled([r.values_quantised_at for r in rollouts if r.values_quantised_at is not None], NEVER),
        _filled(experts, -1),
        _filled([rollout.ids for rollout in rollouts], -1),
        () if first.codec is None else tuple(_words(rollout.hints) for rollout in rollouts),
        [rollout.selection for rollout in rollouts],
    )


def _filled(rows: Sequence[Tensor], value: int) -> Tensor | None:
    """Rows [T, ...] of unlike lengths as one tensor; None of none."""
    return pad_sequence(list(rows), batch_first=True, padding_value=value) if rows else None


def _words(hints: Tensor | None) -> Tensor:
    return torch.zeros(0, dtype=torch.uint16) if hints is None else hints


def save_ledgers(path: Path, rollouts: Sequence[Rollout], policy: Policy) -> str:
    """Write the rollouts to ``path`` and return the file's sha256. Raises SpecError for a policy without replay."""
    if not policy.replayable:
        raise SpecError(f"policy {policy.canonical!r} cannot be replayed, so there is no ledger to keep")
    tensors = {f"{n}.{name}": tensor for n, rollout in enumerate(rollouts) for name, tensor in _tensors(rollout)}
    scalars = [_scalars(rollout) for rollout in rollouts]
    header = {"format": LEDGER_FORMAT, "policy": policy.canonical, "policy_hash": policy.hash, "rollouts": scalars}
    # one key only: safetensors writes several in no fixed order, and equal ledgers must have equal hashes
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
            yield name, _shortened(times.contiguous())
    if rollout.experts is not None:
        small = torch.uint8 if int(rollout.experts.max()) < torch.iinfo(torch.uint8).max else torch.uint16
        yield "experts", rollout.experts.to(small)  # -1, none, becomes the largest number
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


def _shortened(times: Tensor) -> Tensor:
    """Half the bytes where every time fits."""
    if times.shape[-1] >= _SHORT_NEVER - 1:  # times go up to the number of tokens, and one number is taken
        return times
    return times.clamp(max=_SHORT_NEVER).to(_SHORT)  # NEVER becomes the largest number


def _lengthened(times: Tensor) -> Tensor:
    if times.dtype is not _SHORT:
        return times
    wide = times.to(torch.int32)  # uint16 knows few operations
    return torch.where(wide == _SHORT_NEVER, NEVER, wide)


def load_ledgers(path: Path, *, sha256: str | None = None) -> tuple[list[Rollout], Policy]:
    """Read (rollouts, policy); raises DataError for a missing, corrupt, foreign or tampered file."""
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
        _check(path, rollout)
    return rollouts, policy


def _rollout(file: Any, number: int, scalars: dict[str, Any]) -> Rollout:
    fields = _checked_scalars(scalars)
    names = (*_TENSORS, *_TIMES[1:]) if fields.get("codec") else _TENSORS
    names = (*names, *([_HINTS] if f"{number}.{_HINTS}" in file.keys() else []))  # noqa: SIM118 - not a mapping
    tensors = {name: file.get_tensor(f"{number}.{name}") for name in names}
    for name, tensor in tensors.items():
        if tensor.dtype not in _TYPES.get(name, (torch.int32, _SHORT)):
            raise TypeError(f"{name} of rollout {number} holds {tensor.dtype}")
    tensors |= {name: _lengthened(tensors[name]) for name in _TIMES if name in tensors}
    tensors["ids"] = tensors["ids"].long()  # as embeddings want them
    if f"{number}.experts" in file.keys():  # noqa: SIM118  # no dictionary
        tensors["experts"] = _signed(file.get_tensor(f"{number}.experts")).to(torch.int16)
    if "selection" in fields:
        choosing, chosen = (file.get_tensor(f"{number}.{name}") for name in ("choosing", "chosen"))
        unit, layers = fields["selection"]["unit"], tuple(fields["selection"]["layers"])
        fields |= {"selection": Selection(unit, layers, choosing, _signed(chosen).to(torch.int32))}
    return Rollout(**tensors, **fields)


def _signed(stored: Tensor) -> Tensor:
    """The largest number of an unsigned type means none, -1."""
    wide = stored.to(torch.int64)
    return wide if stored.dtype.is_signed else torch.where(wide == torch.iinfo(stored.dtype).max, -1, wide)


def _checked_scalars(scalars: dict[str, Any]) -> dict[str, Any]:
    """The same numbers if all are there and of their kind; a TypeError is a damaged header."""
    whole = [name for name in _SCALARS if name != "retention"]
    # the type itself: to isinstance, JSON's true is a whole number
    if any(type(scalars[name]) is not int or not 0 <= scalars[name] < 2**62 for name in whole):
        raise TypeError(f"{', '.join(whole)} are whole numbers")
    if type(scalars["retention"]) not in (int, float) or type(scalars.get("codec", "")) is not str:
        raise TypeError("retention is a number and codec a text")
    chosen = scalars.get("selection", {"unit": 1, "layers": []})  # as where nothing chose
    if type(chosen["unit"]) is not int or chosen["unit"] < 1 or any(type(n) is not int for n in chosen["layers"]):
        raise TypeError("selection names its unit and its layers in whole numbers")
    if unknown := set(scalars) - {*_SCALARS, "codec", "row_keys", "pinned", "selection"}:
        raise TypeError(f"unknown entries {sorted(unknown)}")
    found = dict(scalars)
    if "row_keys" in found:
        found["row_keys"] = _row_keys(found["row_keys"])
    if "pinned" in found:
        found["pinned"] = tuple(_run(run) for run in found["pinned"])
    if "codec" in found:
        found["codec"] = _codec(found["codec"])
    return found


def _codec(text: str) -> Quantiser | None:
    """The quantiser of that name; a TypeError is a damaged header."""
    codec = quantiser_of(parse_policy(text)) if text else None
    if text and codec is None:
        raise TypeError(f"it names {text!r} as its codec, which quantises nothing")
    return codec


def _row_keys(keys: Any) -> tuple[int, int]:
    """The pair, if it is one of whole numbers that a tensor holds; a TypeError is a damaged header."""
    if type(keys) is not list or len(keys) != 2 or any(type(key) is not int or abs(key) >= 2**63 for key in keys):
        raise TypeError("row_keys are two whole numbers of 64 bits")
    return keys[0], keys[1]


def _run(run: Any) -> tuple[int, int]:
    """The pair, if it is a run of positions; a TypeError is a damaged header."""
    if type(run) is not list or len(run) != 2 or any(type(end) is not int for end in run) or not 0 <= run[0] < run[1]:
        raise TypeError("pinned are runs of positions, each two whole numbers that rise")
    return run[0], run[1]


def _header(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    try:
        header = json.loads(metadata.get("kvaudit", "null"))
    except ValueError:
        header = None
    if not isinstance(header, dict) or type(header.get("format")) is not int or header["format"] not in READABLE:
        raise DataError(f"file {str(path)!r} is not a ledger of format {' or '.join(map(str, READABLE))}")
    return header


def _check(path: Path, rollout: Rollout) -> None:
    tokens = rollout.ids.shape[0]
    if rollout.experts is not None and (rollout.experts.dim() != 3 or len(rollout.experts) != tokens):
        raise DataError(f"ledger {str(path)!r}: experts {tuple(rollout.experts.shape)} do not fit {tokens} tokens")
    # the last token was drawn and perhaps never fed
    if rollout.experts is not None and int(rollout.experts[:-1].min()) < 0:
        raise DataError(f"ledger {str(path)!r}: a token that later ones saw was sent to no expert; the file is damaged")
    along = [rollout.evicted_at, rollout.sampled, rollout.sampler_logprobs]
    along += [t for t in (rollout.keys_quantised_at, rollout.values_quantised_at) if t is not None]
    if rollout.evicted_at.dim() != 3 or any(t.shape[-1] != tokens for t in along):
        raise DataError(
            f"ledger {str(path)!r}: evicted_at {tuple(rollout.evicted_at.shape)} does not fit {tokens} tokens"
        )
    if rollout.hints is not None and not (rollout.codec and are_valid_hints(rollout.hints)):
        raise DataError(f"ledger {str(path)!r}: the codes at a border are not in order; the file is damaged")
    if rollout.selection is not None and (fault := selection_fault(rollout.selection, rollout.evicted_at)):
        raise DataError(f"ledger {str(path)!r} {fault}")
    loose = ((rollout.sampler_logprobs != 0) & ~rollout.sampled).nonzero()  # [n, 1]
    if len(loose):
        raise DataError(f"ledger {str(path)!r}: token {int(loose[0])} has a log-prob and was not sampled")
    if not (0 < rollout.prompt_length <= rollout.answer_start <= tokens and 0 <= rollout.retention <= 1):
        raise DataError(f"ledger {str(path)!r}: prompt, answer or retention do not fit its {tokens} tokens")
    own = torch.arange(tokens, dtype=torch.int32)  # codes may be read by an entry's own query, never earlier
    if (rollout.evicted_at <= own).any() or any((t < own).any() for t in along[3:]):
        raise DataError(f"ledger {str(path)!r}: an entry left before its own query saw it; the file is damaged")
