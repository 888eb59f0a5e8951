"""The example for TRL, run as it stands with the real package: its learner sees what its sampler saw."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "trl_grpo.py"


@pytest.mark.filterwarnings("ignore")  # TRL calls its rollout functions experimental, and old names of transformers
def test_a_learner_of_trl_sees_what_the_compressed_sampler_saw(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason='the extra is not installed: pip install "kvaudit[trl]"')
    from kvaudit.audit.again.mismatch import measure, survey
    from kvaudit.audit.sampling.model import load_model

    spec = importlib.util.spec_from_file_location("trl_grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    done = example.train("embedded", "snapkv:budget=24,window=8", tmp_path, dense=False, steps=1)
    assert len(done.gaps) == 1
    assert done.gaps[0] < 2e-5
    assert done.state.log_history[0]["grad_norm"] > 0
    # densely, the same tokens of the same weights are nats apart
    found = measure(load_model("embedded"), survey(tmp_path / "rollouts.jsonl"))
    assert found.panel["max_abs_gap"] > 1.0
    assert [bound.name for bound in found.alarms] == ["overlap_p5", "frac_sequences_vetoed"]
