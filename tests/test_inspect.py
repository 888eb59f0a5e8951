"""Inspect, the real package: our sampler as its model, our records as its logs."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from reports_synthetic import Design, build, policy
from test_cli import kvaudit

from kvaudit.core.errors import AuditError
from kvaudit.core.facets import FACETS
from kvaudit.core.records import Record
from kvaudit.reports.records.readers.base import Request
from kvaudit.reports.records.readers.inspect_log import Inspect

pytest.importorskip("inspect_ai", reason="needs the extra inspect")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
]
DESIGN = Design(
    arms=("dense",),
    policies=("none", policy("snapkv", 96)),
    suites=("refusal",),
    clusters=6,
    items=12,
    samples=2,
    seeds=(1,),
    facets={"refusal": ("unsafe", "helpful")},
    hostile="\x1b[2J </script> \u202e \u2028 \x85",
)


def rows_of(unit: Path) -> dict[tuple[str, str, int], float | None]:
    """Return (metric, item, draw) -> score of our records."""
    scores: dict[tuple[str, str, int], float | None] = {}
    for record in map(Record.from_json, unit.read_bytes().splitlines()):
        scores["score", record.item_id, record.sample_index + 1] = record.score
        for name, value in record.facets.items():
            score = None if value is None else float(value == FACETS[name].wanted)
            scores[name, record.item_id, record.sample_index + 1] = score
    return scores


def test_exported_logs_are_read_back_with_the_same_grades(tmp_path: Path) -> None:
    run = build(tmp_path / "run", DESIGN)
    code, _, err = kvaudit("harness", "export", run, "--out", tmp_path / "logs")
    assert code == 0, err
    units = sorted((run / "records").glob("*.jsonl"))
    assert [path.stem for path in sorted((tmp_path / "logs").iterdir())] == [path.stem for path in units]
    for unit in units:
        log = Inspect().read(tmp_path / "logs" / f"{unit.stem}.eval", Request())
        assert log.problems == ()
        columns = log.rows[["metric", "item", "sample", "score"]].itertuples(index=False)
        read = {(m, item, sample): None if math.isnan(score) else score for m, item, sample, score in columns}
        assert read == rows_of(unit)


def test_a_changed_record_file_is_not_exported(tmp_path: Path) -> None:
    run = build(tmp_path / "run", DESIGN)
    unit = next((run / "records").glob("*.jsonl"))
    unit.write_text(unit.read_text().replace('"score": 1.0', '"score": 0.5', 1))
    code, _, err = kvaudit("harness", "export", run, "--out", tmp_path / "logs")
    assert code == 2
    assert "its seal says" in err


def test_inspect_generates_with_a_checkpoint_under_a_policy() -> None:
    from inspect_ai.model import ChatMessageUser, GenerateConfig, get_model

    import kvaudit.audit.serving.harness.inspect_model  # noqa: F401 - an installed kvaudit is found by its entry point

    model = get_model("kvaudit/embedded@streaming:budget=64,sink=4", memoize=False)
    messages = [ChatMessageUser(content="What is 2 + 3?")]

    async def generate() -> list[str]:
        config = GenerateConfig(max_tokens=8)
        outputs = await asyncio.gather(*(model.generate(messages, config=config) for _ in range(3)))
        assert all(output.usage.output_tokens <= 8 for output in outputs)
        for name, value in (
            *(("top_k", 1), ("presence_penalty", 1.0), ("logprobs", True), ("num_choices", 2)),
            *(("extra_body", {"min_p": 0.5}), ("prompt_logprobs", 1), ("effort", "low"), ("modalities", ["image"])),
        ):
            with pytest.raises(AuditError, match=f"{name} is set"):
                await model.generate(messages, config=GenerateConfig(**{name: value}))
        neutral = GenerateConfig(max_tokens=8, num_choices=1, presence_penalty=0.0, logprobs=False)
        assert (await model.generate(messages, config=neutral)).completion == outputs[0].completion
        return [output.completion for output in outputs]

    first, *others = asyncio.run(generate())
    assert first
    assert others == [first, first]
    model.api.close()


def test_an_unknown_policy_is_an_error_at_the_start() -> None:
    from inspect_ai.model import get_model

    import kvaudit.audit.serving.harness.inspect_model  # noqa: F401

    with pytest.raises(AuditError, match="no-such"):
        get_model("kvaudit/embedded@no-such", memoize=False)
