"""The names that a spec may use (``core.spec_parts.PluginNames``), and the loader of plug-in files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvaudit.audit.engines import ENGINES, Condition, parse_serving_mode
from kvaudit.audit.judges.base import JUDGES
from kvaudit.audit.policies import POLICIES
from kvaudit.audit.runs.launchers.base import LAUNCHERS
from kvaudit.audit.training.config import TrainConfig, get_arm
from kvaudit.audit.training.losses.base import LOSSES
from kvaudit.audit.training.rewards.base import REWARDS
from kvaudit.core.errors import AuditError, DataError, SpecError
from kvaudit.core.moved import removed_import
from kvaudit.core.plugins import parse_plugin
from kvaudit.core.spec_parts import PluginNames
from kvaudit.core.spec_train import TrainSpec
from kvaudit.core.text import reason, short_repr
from kvaudit.suites.base import SUITES
from kvaudit.suites.contexts import bare_name


def _reference(canonical: str, settings: Any) -> str | None:
    """Return the uncompressed setting that the condition ``canonical`` (engine and settings) is compared with.

    Returns None if ``canonical`` is a policy of kvaudit's own cache. ``settings`` are those that the spec gives to the
    reference; None means the engine's default. Raises SpecError if the reference compresses, or if settings are given
    for a policy.
    """
    condition = parse_serving_mode(canonical)
    if not isinstance(condition, Condition):
        if settings is not None:
            raise SpecError(
                f"reference of {canonical} is {short_repr(settings)}, but a policy of kvaudit's own cache takes none; "
                "remove it"
            )
        return None
    if settings is None:
        return condition.reference.canonical
    reference = condition.reference_with(settings)
    if reference.compressing:
        settings_text = ", ".join(reference.compressing)
        raise SpecError(
            f"reference of {canonical} is {reference.canonical}, which compresses ({settings_text}); name one that "
            "does not"
        )
    return reference.canonical


def _check_training(section: TrainSpec) -> None:
    for arm in section.arms:
        get_arm(arm)
    for trained in section.trained:
        TrainConfig.of(section, trained.name, section.seeds[0])


NAMES = PluginNames(
    policy=lambda text: parse_serving_mode(text).canonical,
    reference=_reference,
    kind=lambda suite: SUITES.get(suite).kind,
    default_gate=lambda suite: SUITES.get(suite).default_gate,
    placements=lambda suite: SUITES.get(suite).placements,
    lengths=lambda suite: SUITES.get(suite).lengths,
    bare=bare_name,
    check_training=_check_training,
    loss_defaults=lambda loss: LOSSES.get(loss).defaults,
    check_judge=lambda text: parse_plugin(JUDGES, text),
)


def load_plugins(files: Sequence[Path]) -> dict[str, str]:
    """Register the plug-ins of every file; return their sha256 by file name.

    Raises SpecError if a file has no plug-in, or two files have the same name.
    """
    names = [file.name for file in files]
    for name in names:
        if names.count(name) > 1:
            raise SpecError(f"two plug-in files are called {name!r}, but a run identifies them by name; rename one")
    return {file.name: _load(file) for file in files}


def _explain_former_path(error: BaseException) -> str:
    """Return what to import instead if a plug-in failed since it imports a module by a former name; else empty."""
    module = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    if (refusal := removed_import(module)) is not None:
        return f"; {refusal}"
    room = module.partition(".")[0]
    return f"; {room} is kvaudit.{room} now" if room in ("audit", "suites", "reports") else ""


def _load(file: Path) -> str:
    try:
        registries = (POLICIES, SUITES, JUDGES, REWARDS, LAUNCHERS, ENGINES)
        names = [name for registry in registries for name in registry.load_file(file)]
    except AuditError:
        raise
    except (Exception, SystemExit) as error:  # foreign code may raise anything
        raise DataError(
            f"plug-in {str(file)!r} fails on import: {reason(error)}{_explain_former_path(error)}"
        ) from error
    if not names:
        raise SpecError(
            f"plug-in {str(file)!r} has no policy, suite, judge, reward, launcher or engine; subclass "
            "Evictor, Quantiser, Selector, Suite, Judge, Reward, Launcher or Engine with a name"
        )
    return hashlib.sha256(file.read_bytes()).hexdigest()
