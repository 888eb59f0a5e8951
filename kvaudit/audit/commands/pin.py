"""``kvaudit gate --pin``: names the reference by its weights, once, for every later gate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvaudit.audit.commands.command_line import say, wide_console
from kvaudit.core.errors import DataError, RunError
from kvaudit.core.files import read_json, write_output
from kvaudit.core.provenance import PROVENANCE, check_checkpoint
from kvaudit.core.text import inline
from kvaudit.reports.verdict.pin import Pin, PinnedCheckpoint, is_sha256


def write_pin(folders: Sequence[Path], out: Path) -> None:
    """Write the pin of finished checkpoints (or of all seeds of an arm); raises RunError where ``out`` exists."""
    if out.exists():
        raise RunError(f"{str(out)!r} exists, and a pin that moves is none; give another --out")
    found = tuple(pinned for folder in folders for pinned in _pinned(folder))
    names = [f"{one.arm} seed {one.seed}" if one.named else f"weights {one.sha256[:12]}" for one in found]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{name} is given twice; give every checkpoint once, and one for each seed")
    made = Pin(found, datetime.now(UTC).date().isoformat(), out.name)
    write_output(out, made.to_json())
    console = wide_console()
    for name, entry in zip(names, found, strict=True):
        known = f"weights {entry.sha256[:12]}, base {entry.base_sha256[:12]}, policy {entry.policy}"
        say(console, inline(f"{name}: {known if entry.named else 'trained elsewhere, pinned under whatever name'}"))
    say(console, f"pin: {out} ({made.sha256[:12]})")


def _pinned(folder: Path) -> Iterator[PinnedCheckpoint]:
    """The checkpoint in a folder, or those of every seed below it, each held to the hashes it was finished with."""
    seeds = sorted(folder.glob(f"seed-*/{PROVENANCE}"))
    if (folder / PROVENANCE).is_file():
        yield _trained(folder)
    elif seeds:
        yield from (_trained(path.parent) for path in seeds)
    else:
        yield _untrained(folder)


def _trained(folder: Path) -> PinnedCheckpoint:
    check_checkpoint(folder)
    provenance = read_json(folder / PROVENANCE)
    weights = _weights(folder, provenance)
    arm, seed, base, config = (provenance.get(key) for key in ("arm", "seed", "base_sha256", "config"))
    policy = config.get("policy") if isinstance(config, dict) else None
    texts = is_sha256(base) and isinstance(arm, str) and isinstance(policy, str)
    # True is an int too, so not isinstance
    if not texts or type(seed) is not int or provenance.get("sha256") != weights:
        raise DataError(
            f"{str(folder / PROVENANCE)!r} does not tell arm, seed, base, policy and the weights {weights[:12]}; "
            "give a checkpoint that kvaudit finished"
        )
    return PinnedCheckpoint(_name(folder, str(arm), seed), seed, weights, str(base), str(policy))


def _weights(folder: Path, provenance: Mapping[str, Any]) -> str:
    """What identifies a checkpoint; the model of an adapter need not be at hand where the provenance tells its hash."""
    from kvaudit.audit.sampling.checkpoints import adapter_sha256, checkpoint_sha256, is_adapter

    if is_adapter(folder):
        over_base = adapter_sha256(folder, str(provenance.get("base_sha256")))
        if over_base == provenance.get("sha256"):  # otherwise it began from an adapter of the same model
            return over_base
    return checkpoint_sha256(folder)


def _name(folder: Path, arm: str, seed: int) -> str:
    """What a run calls the arm: in a sweep that of the spec and its policy, which only the folder says."""
    place = folder.resolve()
    name = place.parent.name
    return name if place.name == f"seed-{seed}" and name.startswith(f"{arm}_") else arm


def _untrained(folder: Path) -> PinnedCheckpoint:
    """A model that was not trained here, which has no arm and no seed until a run names it."""
    from kvaudit.audit.sampling.checkpoints import checkpoint_sha256
    from kvaudit.core.spec_train import BASE_ARM

    if not list(folder.glob("*.safetensors")):
        raise DataError(
            f"{str(folder)!r} holds neither a finished checkpoint nor .safetensors weights; give a folder such as "
            "RUN/checkpoints/dense or RUN/checkpoints/dense/seed-11"
        )
    weights = checkpoint_sha256(folder)
    return PinnedCheckpoint(BASE_ARM, 0, weights, weights, "none")
