"""Options at the edge of what floats and files can be are one line."""

from __future__ import annotations

import pytest
from test_cli import refused

from kvaudit.core.errors import SpecError
from kvaudit.reports.verdict.rules import margin_of


def test_a_margin_that_no_sample_could_show_is_refused() -> None:
    assert "--margin is 0.001, wanted at least 0.01" in refused("plan", "--margin=0.001")
    with pytest.raises(SpecError, match=r"wanted at least 0\.01"):
        margin_of(0.009, "gate.margins.math")
    assert margin_of(0.01, "gate.margins.math") == 0.0001


@pytest.mark.parametrize("value", ["inf", "1e-320", "101"])
def test_a_temperature_that_a_spec_refuses_is_refused(value: str) -> None:
    assert "wanted 0, or 0.001 to 100" in refused("replay", "verify", "x", f"--temperature={value}")


def test_an_infinite_tolerance_is_refused() -> None:
    assert "--tolerance is" in refused("replay", "verify", "x", "--tolerance=inf")
