"""The declared stop: all arms of a seed end at the earliest step at which an alarm ended one, whoever came first."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from training_world import play_for_parity, rows, sha256, sharp, short, silent

from kvaudit.audit.sampling.model import LoadedModel
from kvaudit.audit.training import grpo, rollouts
from kvaudit.audit.training.validation import MARK, EarlyStop, Mark, read_mark
from kvaudit.core.errors import DataError, UnknownName
from kvaudit.core.spec_train import ValidationSpec

ARMS = ("dense", "naive")
RANG, QUIET = {"alarm/ess": 1, "alarm/overlap_p5": 0}, {"alarm/ess": 0, "alarm/overlap_p5": 0}


def early_stops(folder: Path, **more: Any) -> dict[str, EarlyStop]:
    spec = ValidationSpec(**({"every": 2, "stop_on": ("ess",), "patience": 2} | more))
    folders = [folder / arm for arm in ARMS]
    for own in folders:
        own.mkdir(parents=True, exist_ok=True)
    return {arm: EarlyStop(spec, 6, own, folders) for arm, own in zip(ARMS, folders, strict=True)}


def test_an_arm_ends_where_its_alarm_rang_long_enough_at_a_validation(tmp_path: Path) -> None:
    early_stop = early_stops(tmp_path)["naive"]
    assert not early_stop.ends(0, [])
    assert not early_stop.ends(2, [QUIET, RANG])
    assert not early_stop.ends(3, [QUIET, RANG, RANG])
    assert early_stop.ends(4, [QUIET, RANG, RANG, RANG])
    assert read_mark(tmp_path / "naive") == Mark(4, "ess")


def test_the_step_of_a_seed_is_the_earliest_and_known_when_every_arm_has_ended(tmp_path: Path) -> None:
    both = early_stops(tmp_path)
    assert both["dense"].ends(6, [QUIET] * 6)
    assert both["dense"].step is None
    assert both["naive"].ends(2, [RANG, RANG])
    assert [early_stop.step for early_stop in both.values()] == [2, 2]


def test_an_arm_stops_where_another_has_ended(tmp_path: Path) -> None:
    both = early_stops(tmp_path)
    assert both["naive"].ends(4, [QUIET, QUIET, RANG, RANG])
    assert not both["dense"].ends(2, [QUIET] * 2)
    assert both["dense"].ends(4, [QUIET] * 4)
    assert read_mark(tmp_path / "dense") == Mark(4, None)


def test_a_malformed_mark_is_refused(tmp_path: Path) -> None:
    (tmp_path / MARK).write_text('{"step": true, "alarm": null}')
    with pytest.raises(DataError, match="has no valid step and alarm"):
        read_mark(tmp_path)


def test_only_declared_alarms_stop_anything() -> None:
    with pytest.raises(UnknownName, match=r"alarm in train\.watch\.stop_on 'reward'"):
        short(watch={"every": 1, "stop_on": ["reward"]})


@pytest.fixture(scope="module")
def base(tiny_folder: Path) -> LoadedModel:
    return sharp(tiny_folder)


def test_all_arms_are_cut_to_the_same_step_in_whatever_order_they_are_trained(
    base: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "play", play_for_parity)
    spec = {"every": 1, "items": 1, "stop_on": ["overlap_p5"], "patience": 2}
    ended = []
    for number, order in enumerate(permutations(ARMS)):
        folders = {arm: tmp_path / str(number) / arm for arm in ARMS}
        for arm in (*order, *order):  # to their own ends, then to that of all
            config = short(arm=arm, steps=3, group=2, ledger_every=1, watch=spec)
            assert config.watch is not None
            early_stop = EarlyStop(config.watch, 3, folders[arm], list(folders.values()))
            grpo.train(config, base, folders[arm], silent, early_stop=early_stop)
        ended.append([sha256(folder / "model.safetensors") for folder in folders.values()])
        for folder in folders.values():
            story = json.loads((folder / "provenance.json").read_text())
            assert (story["steps"], len(rows(folder))) == (2, 2)
            kept = {path.name for path in (folder / "ledgers").iterdir()}
            assert kept == set(story["ledgers"]) == {f"{n}.safetensors" for n in ("step-1", "step-2", "final")}
    assert ended[0] == ended[1]
