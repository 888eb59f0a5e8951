"""The checkpoints of a run that is over, loaded as the run loaded them, to serve answers again."""

from __future__ import annotations

from kvaudit.audit.runs.folder import RunFolder
from kvaudit.audit.sampling.given import load_given, load_named
from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.core.errors import DataError
from kvaudit.core.spec_train import BASE_ARM


def load_checkpoint(run: RunFolder, arm: str, seed: int, wanted: str) -> LoadedModel:
    """One checkpoint of a run; raises DataError where it is gone, or has another sha256 than ``wanted``."""
    spec, given = run.spec, run.spec.given(arm, seed)
    is_model = arm == BASE_ARM and not spec.starts
    name = given or (spec.model_path if is_model else str(run.checkpoint(arm, seed)))
    if not is_model and given is None and not run.checkpoint(arm, seed).is_dir():
        raise DataError(f"{str(run.path)!r} holds no checkpoint of {arm} seed {seed} any more; put {name!r} back")
    model = load_named(spec.model_path, dtype=spec.dtype, device=spec.device, chat=spec.chat)
    if not is_model:
        model = load_given(name, model, dtype=spec.dtype, device=spec.device, chat=spec.chat)
    if model.sha256 != wanted:
        raise DataError(
            f"model {name!r} has weights {model.sha256[:12]}, the run was made with {wanted[:12]}; put those back"
        )
    return model
