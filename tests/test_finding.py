"""The finding's page, held to its data: counted here once more, by another way, from the answers alone."""

from __future__ import annotations

import json
from collections import Counter

import pandas as pd
import pytest

from bench import finding


@pytest.fixture(scope="module")
def answers() -> pd.DataFrame:
    return pd.read_parquet(finding.ANSWERS)


def test_the_page_tells_what_the_data_give() -> None:
    assert finding.main(["--check"]) == 0


def test_a_figure_that_was_changed_by_hand_is_found(tmp_path, monkeypatch, capsys) -> None:
    page = tmp_path / "finding.md"
    page.write_text(finding.PAGE.read_text().replace("17 (7), 1 of 63", "17 (7), 2 of 63"))
    monkeypatch.setattr(finding, "PAGE", page)
    assert finding.main(["--check"]) == 1
    assert "tables differ from dose.json and dose.parquet" in capsys.readouterr().out


def test_flips_are_those_of_a_plain_count(answers) -> None:
    rows = {(r.setting, r.item): r for r in answers[answers["suite"] == "xstest"].itertuples()}
    for setting in finding.settings(answers):
        count = Counter[str]()
        for (name, item), served in rows.items():
            plain = rows[finding.REFERENCE, item]
            if name == setting and not (pd.isna(plain.refused) or pd.isna(served.refused)):
                count[f"{plain.refused} {served.refused}"] += 1
                count["senseless"] += bool(plain.refused and not served.refused and served.coherent == False)  # noqa: E712
        found = finding.flips_of(answers, setting, "xstest", "refused")
        assert (found.lost, found.won, found.items) == (
            count["True False"], count["False True"], count.total() - count["senseless"],
        )  # fmt: skip
        assert found.senseless == count["senseless"] <= found.lost


def test_drifts_of_the_statistics_are_the_means_of_the_answers(answers) -> None:
    contrasts = json.loads(finding.FIGURES.read_text())["contrasts"]
    means = answers.groupby(["setting", "suite"])["score"].mean()
    for one in contrasts:
        if one["metric"] in ("xstest", "gsm8k"):
            own, plain = (means[name, one["metric"]] for name in (one["setting"], finding.REFERENCE))
            assert one["estimate"] == pytest.approx(100 * (own - plain), abs=1e-9)
