"""One file of rollouts served again, for tests of what is measured of it."""

from __future__ import annotations

from typing import Any

from kvaudit.audit.replay.rollout_checks import RecordedRollouts
from kvaudit.audit.rerun.measure import run_measure
from kvaudit.audit.rerun.mismatch import FilePanel, Mismatch, Survey
from kvaudit.audit.rerun.verify import Verification, Verify
from kvaudit.audit.sampling.model import LoadedModel


def verify(model: LoadedModel, recorded: RecordedRollouts, **options: Any) -> Verification:
    ((_, found),) = run_measure(Verify(model, [recorded], **options))
    return found


def measure(model: LoadedModel, found: Survey, **options: Any) -> FilePanel:
    ((_, total),) = run_measure(Mismatch(model, found, **options))
    return total
