"""What a policy saves, counted one way on both sides: the entries by themselves, and all that was allocated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from report_text import run_text
from reports_synthetic import build, tiny, write_unit

from kvaudit.audit.cache.ledger import NEVER
from kvaudit.audit.cache.store import EntryBytes, peak_live_bytes
from kvaudit.audit.policies import parse_policy
from kvaudit.audit.sampling.decoding import Decoding
from kvaudit.audit.sampling.model import LoadedModel, load_model
from kvaudit.audit.sampling.sampler import Sampler
from kvaudit.reports.records.rows import Columns, read_unit
from kvaudit.reports.run import write_report

ALL = torch.ones(8, dtype=torch.bool)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model()


def rewritten(folder: Path, *, live: bool) -> Path:
    """A run whose uncompressed cache allocated 1.13 of its entries, and snapkv .832 of them; it held .7."""
    run = build(folder / "run", tiny())
    for path in (run / "records").glob("*.jsonl"):
        lines = []
        for line in path.read_text().splitlines():
            row = json.loads(line)
            plain = row["policy"] == "none"
            row |= {"kv_bytes_dense": 1000, "kv_bytes_peak": 1130 if plain else 832}
            row["kv_bytes_live"] = 1000 if plain else 700
            if not live:
                del row["kv_bytes_live"]
            lines.append(json.dumps(row) + "\n")
        write_unit(path, "".join(lines))
    write_report(run)
    return run / "report"


def test_every_page_counts_savings_against_the_uncompressed_cache(tmp_path: Path) -> None:
    report = rewritten(tmp_path, live=True)
    none, snapkv = json.loads((report / "disclosure.json").read_text())["serving"]
    assert [none[key]["value"] for key in ("kv_live_of_none", "kv_allocated_of_none")] == [1.0, 1.0]
    assert snapkv["kv_allocated_of_none"]["value"] == pytest.approx(0.832 / 1.13)  # .736: 26 % saved, not 17 %
    assert snapkv["kv_live_of_none"]["value"] == pytest.approx(0.7)
    text = run_text(report.parent)
    assert "| none | 1.00 KB | 1.00x | 1.13 KB | 1.00x | 100.0 % |" in text
    assert "| snapkv 96 | 700 B | 0.70x | 832 B | 0.74x | 50.0 % |" in text
    assert "70.0 % to 100.0 % live, 73.6 % to 100.0 % allocated." in text
    card = (report / "card.md").read_text()
    assert "| kv allocated of none | kv live of none | retention |" in card
    assert "Live bytes of the cache are unknown" not in card
    cells = json.loads((report / "drift.json").read_text())["cells"]
    assert {c["kv_ratio"] for c in cells if c["policy"] == "none"} == {1.0}


def test_records_without_live_bytes_are_read_and_said_to_lack_them(tmp_path: Path) -> None:
    report = rewritten(tmp_path, live=False)
    none, snapkv = json.loads((report / "disclosure.json").read_text())["serving"]
    assert none["kv_live_of_none"] == snapkv["kv_live_of_none"] == {"state": "unknown"}
    assert none["kv_allocated_of_none"]["value"] == 1.0
    assert "Live bytes of the cache are unknown: some records have no kv_bytes_live" in run_text(report.parent)
    assert "| *unknown* |" in (report / "card.md").read_text()


@pytest.mark.parametrize("policy", ["none", "snapkv:budget=64,window=16", "int8", "kivi:bits=2"])
def test_live_bytes_are_all_entries_without_compression_and_fewer_with_it(policy: str, model: LoadedModel) -> None:
    prompts = [list(range(20, 200)), list(range(30, 130))]
    episode = Sampler(model, parse_policy(policy)).open(prompts, [1, 2])
    episode.decode(Decoding(8, temperature=1.0))
    for rollout in episode.rollouts():
        assert rollout.kv_bytes_live is not None
        assert (rollout.kv_bytes_live == rollout.kv_bytes_dense) is (policy == "none")
        assert rollout.kv_bytes_live <= min(rollout.kv_bytes_dense, rollout.kv_bytes_peak)


def test_live_bytes_are_those_of_the_fullest_moment() -> None:
    """Two heads of four tokens at 10 bytes: the first head's first two entries leave before the last query."""
    evicted_at = torch.full((1, 2, 4), NEVER, dtype=torch.int32)
    evicted_at[0, 0, :2] = 3
    entry = EntryBytes((6.0, 4.0), (6.0, 4.0))
    assert peak_live_bytes(evicted_at, [entry], None, ALL[:4]) == 60  # 3 + 3 at the third query, 2 + 4 at the fourth
    evicted_at[0, 0, 2] = 3
    assert peak_live_bytes(evicted_at, [entry], None, ALL[:4]) == 60
    last = torch.tensor([False, False, False, True])
    assert peak_live_bytes(evicted_at, [entry], None, last) == 50  # what only a prefill saw is in no decoding
    assert peak_live_bytes(evicted_at, [entry], None, ~ALL[:4]) == 50  # nothing was decoded: what is held at the end
    evicted_at[0, :, :2] = 2
    assert peak_live_bytes(evicted_at, [entry], None, ALL[:4]) == 40


def test_live_bytes_of_codes_are_counted_from_when_they_are_codes() -> None:
    """One head of three tokens: keys of 8 bytes become 2, values of 8 become 3, one step on."""
    entry = EntryBytes((8.0, 8.0), (2.0, 3.0))
    never = torch.full((1, 1, 3), NEVER, dtype=torch.int32)
    at_once = torch.tensor([1, 2, 3], dtype=torch.int32)
    assert peak_live_bytes(never, [entry], (at_once, at_once), ALL[:3]) == 2 * 5 + 16
    gone = never.clone()
    gone[0, 0, 0] = 2
    assert peak_live_bytes(gone, [entry], (at_once, at_once), ALL[:3]) == 5 + 16
    on_write = torch.zeros(3, dtype=torch.int32)
    assert peak_live_bytes(never, [entry], (on_write, on_write), ALL[:3]) == 3 * 5


@pytest.mark.parametrize("value", [-1, 1.5, "many", True])
def test_live_bytes_that_are_no_number_of_bytes_are_kept_out(value: object, tmp_path: Path) -> None:
    run = build(tmp_path / "run", tiny())
    path = next((run / "records").glob("*.jsonl"))
    first, *others = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps(json.loads(first) | {"kv_bytes_live": value}) + "\n" + "".join(others))
    problems = []
    read_unit(path, columns := Columns(), problems)
    assert columns.rows == len(others)
    assert [problem.line for problem in problems] == [1]
    assert "kv_bytes_live" in problems[0].reason
