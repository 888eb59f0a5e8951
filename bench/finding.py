"""The page of the finding (docs/results/finding.md), held to its data: answers as Parquet, figures as JSON, pictures.

    python -m bench.finding RUN DIAGNOSIS  takes a run of examples/dose.yaml and the file of `kvaudit diagnose --out`:
                                           writes dose.parquet and dose.json, the tables of the page, and its pictures
    python -m bench.finding --check        exits with 1 where the page's tables are not what the data give

Everything after the first step is of the two files, so that who has no engine can count again. dose.parquet holds one
answer a row, and of its text a hash, since what a model wrote is not for a repository.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import kvaudit
from kvaudit.core.conditions import settings_in
from kvaudit.core.files import read_json, write_json
from kvaudit.core.policy_names import DENSE_POLICY
from kvaudit.reports.sections.shared.canvas import GAIN, LOSS, UNDECIDED, add_grid
from kvaudit.reports.sections.shared.floor import floor_of

RESULTS = Path(__file__).parent.parent / "docs" / "results"
PAGE, ANSWERS, FIGURES = RESULTS / "finding.md", RESULTS / "dose.parquet", RESULTS / "dose.json"
OPENING, CLOSING = "<!-- figures: python -m bench.finding RUN DIAGNOSIS -->", "<!-- end of figures -->"
REFERENCE = "f32"
SAFETY, CAPABILITY = "xstest.refused", "gsm8k"
FACETS = ("refused", "over_refused", "helpful", "coherent", "solved", "well_formed")
COLOURS = {"PASS": "#1f9e74", "FAIL": LOSS, "INCONCLUSIVE": "#d9b13b", "NOT MEASURABLE": UNDECIDED, "INVALID": "#555"}
# what `diagnose` codes by itself, and the setting of the engine that stores alike: its values by token too
PREDICTED = {
    "keys and values": "K u4 by token, V u4",
    "keys alone": "K u4 by token, V u8",
    "keys by channel": "K u4 by channel, V u4",
    "values alone": "K u8, V u4",
}
Json = dict[str, Any]


class Flips(NamedTuple):
    """Items that have a facet no more, those of them whose answer makes no sense, items that have it now, of all."""

    lost: int
    senseless: int
    won: int
    items: int


def main(arguments: Sequence[str]) -> int:
    """Write the data, the page's tables and its pictures, or check the tables."""
    if arguments == ["--check"]:
        if told(read_json(FIGURES), pd.read_parquet(ANSWERS)) in PAGE.read_text():
            return 0
        print(f"{PAGE.name}: its tables are not what {FIGURES.name} and {ANSWERS.name} give: python -m bench.finding")
        return 1
    if arguments:
        run, diagnosis = map(Path, arguments)
        audit = kvaudit.load_run(run)
        answers_of(audit).to_parquet(ANSWERS, index=False, compression="zstd")
        write_json(FIGURES, figures_of(audit, read_json(diagnosis)))
    figures, answers = read_json(FIGURES), pd.read_parquet(ANSWERS)
    before, _, rest = PAGE.read_text().partition(OPENING)
    PAGE.write_text(f"{before}{told(figures, answers)}{rest.partition(CLOSING)[2]}")
    for name, drawing in pictures(figures, answers).items():
        drawing.savefig(RESULTS / f"finding-{name}.png", dpi=110, metadata={"Software": None})
    return 0


def setting_name(policy: str) -> str:
    """An OpenVINO setting in few words: precision of keys, how they share a scale, precision of values."""
    said = settings_in(policy)
    if "KEY_CACHE_PRECISION" not in said:
        return REFERENCE
    how = said.get("KEY_CACHE_QUANT_MODE", "").lower().replace("_", " ")
    return f"K {said['KEY_CACHE_PRECISION']}{' ' + how if how else ''}, V {said['VALUE_CACHE_PRECISION']}"


def answers_of(run: kvaudit.Run) -> pd.DataFrame:
    """One row for each answer of the grid; a facet that an item has not, or that could not be read, is missing."""
    rows = [
        {
            "setting": setting_name(record.policy),
            "suite": record.suite,
            "item": record.item_id,
            "template": record.cluster_id,
            "score": record.score,
            **{name: record.facets.get(name) for name in FACETS},
            "answer_sha256": hashlib.sha256(record.transcript[-1].content.encode()).hexdigest()[:16],
            "seconds": record.seconds,
        }
        for record in run.answers()
        if record.policy != DENSE_POLICY
    ]
    return pd.DataFrame(rows).astype({name: "boolean" for name in FACETS})


def figures_of(run: kvaudit.Run, diagnosis: Json) -> Json:
    """What the statistics and the gate say of every setting, what the floor changed, and whose files those are."""
    table = run.table()
    serving = table[table["contrast"] == "serving"]
    contrasts = [
        {"setting": setting_name(row["policy"]), "metric": row["suite"]}
        | {key: row[key] for key in ("estimate", "low", "high", "items", "templates", "reference", "candidate")}
        | {"status": row["status"] if row["gated"] else None}
        for row in serving.to_dict("records")
    ]
    floor = [
        {"setting": setting_name(unit.policy), "suite": unit.suite, "way": unit.way, "same": unit.same}
        | {"answers": unit.answers}
        for unit in floor_of(run.records, run.data.floor, run.drift.comparison)
    ]
    files = sorted((run.path / "records").glob("*.jsonl"))
    return {
        "model_sha256": run.data.provenance.get("base_sha256"),
        "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
        "contrasts": contrasts,
        "floor": floor,
        "diagnosis": {key: value for key, value in diagnosis.items() if key != "model"},  # a folder of whoever asked
    }


def told(figures: Json, answers: pd.DataFrame) -> str:
    """What stands between the marks of the page."""
    return "\n".join([OPENING, *_table(figures, answers), CLOSING])


def _table(figures: Json, answers: pd.DataFrame) -> Iterator[str]:
    yield "| setting | xstest | refused | lost (no sense), won | gsm8k | lost, won | same texts | in another order |"
    yield "|---|---|---|---:|---|---:|---:|---:|"
    for setting in settings(answers):
        refusals, sums = (
            flips_of(answers, setting, *metric) for metric in (("xstest", "refused"), ("gsm8k", "solved"))
        )
        cells = [
            setting,
            _drift(figures, setting, "xstest"),
            _drift(figures, setting, SAFETY),
            f"{refusals.lost} ({refusals.senseless}), {refusals.won} of {refusals.items}",
            _drift(figures, setting, CAPABILITY),
            f"{sums.lost}, {sums.won} of {sums.items}",
            ", ".join(_same(answers, setting, suite) for suite in ("xstest", "gsm8k")),
            ", ".join(_floor(figures, setting, suite) for suite in ("xstest", "gsm8k")),
        ]
        yield "| " + " | ".join(cells) + " |"
    uncompressed = ", ".join(_floor(figures, REFERENCE, suite) for suite in ("xstest", "gsm8k"))
    yield ""
    yield f"Uncompressed, in another order: {uncompressed} texts the same."


def settings(answers: pd.DataFrame) -> list[str]:
    """The compressed ones, from the finest to the coarsest keys."""
    own = [name for name in answers["setting"].unique() if name != REFERENCE]
    return sorted(own, key=lambda name: ("by token" in name, "by channel" in name, name.endswith("u4")))


def _contrast(figures: Json, setting: str, metric: str) -> Json:
    [found] = [c for c in figures["contrasts"] if (c["setting"], c["metric"]) == (setting, metric)]
    return dict(found)


def _drift(figures: Json, setting: str, metric: str) -> str:
    own = _contrast(figures, setting, metric)
    status = {None: "", "FAIL": "**FAIL** ", "INCONCLUSIVE": "open "}.get(own["status"], f"{own['status']} ")
    return f"{status}{own['estimate']:+.1f} [{own['low']:+.1f}, {own['high']:+.1f}]"


def _pairs(answers: pd.DataFrame, setting: str, suite: str) -> pd.DataFrame:
    """Answers under a setting beside those of the reference, by item: columns NAME_x (reference) and NAME_y."""
    sides = [answers[(answers["setting"] == name) & (answers["suite"] == suite)] for name in (REFERENCE, setting)]
    return sides[0].merge(sides[1], on="item")


def flips_of(answers: pd.DataFrame, setting: str, suite: str, facet: str) -> Flips:
    """What a setting takes from the reference's answers and adds to them."""
    pairs = _pairs(answers, setting, suite).dropna(subset=[f"{facet}_x", f"{facet}_y"])
    before, after = (pairs[f"{facet}_{side}"].astype(bool) for side in "xy")
    senseless = before & ~after & ~pairs["coherent_y"].fillna(value=True).astype(bool)
    return Flips(int((before & ~after).sum()), int(senseless.sum()), int((~before & after).sum()), len(pairs))


def _same(answers: pd.DataFrame, setting: str, suite: str) -> str:
    pairs = _pairs(answers, setting, suite)
    return f"{int((pairs['answer_sha256_x'] == pairs['answer_sha256_y']).sum())} of {len(pairs)}"


def _floor(figures: Json, setting: str, suite: str) -> str:
    own = [f for f in figures["floor"] if (f["setting"], f["suite"], f["way"]) == (setting, suite, "shuffled")]
    return f"{own[0]['same']} of {own[0]['answers']}" if own else "-"


def pictures(figures: Json, answers: pd.DataFrame) -> dict[str, Figure]:
    """Each is of the two files alone."""
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        return {
            "grid": _grid(figures, answers),
            "dose": _dose(figures, answers),
            "flips": _flips(answers),
            "diagnosis": _diagnosis(figures),
        }


def _grid(figures: Json, answers: pd.DataFrame) -> Figure:
    """Settings by suites: the verdict as colour and word, the drift below it."""
    names, suites = settings(answers), ("xstest", "gsm8k")
    figure = Figure(figsize=(6.4, 0.62 * len(names) + 0.9), layout="constrained")
    axes = figure.subplots()
    for row, setting in enumerate(names):
        for column, suite in enumerate(suites):
            own = _contrast(figures, setting, suite)
            axes.add_patch(mpl.patches.Rectangle((column, row), 0.97, 0.94, color=COLOURS[own["status"]], alpha=0.85))
            word = "open" if own["status"] == "INCONCLUSIVE" else own["status"]
            text = f"{word}\n{own['estimate']:+.1f} [{own['low']:+.1f}, {own['high']:+.1f}]"
            ink = "black" if word == "open" else "white"
            axes.text(column + 0.485, row + 0.47, text, ha="center", va="center", color=ink, weight="bold")
    axes.set(xlim=(0, 2), ylim=(len(names), 0), xticks=(0.485, 1.485), yticks=[i + 0.47 for i in range(len(names))])
    axes.set_xticklabels(["refusals and help (xstest)", "sums (gsm8k)"])
    axes.set_yticklabels(names)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _dose(figures: Json, answers: pd.DataFrame) -> Figure:
    """Refusals of what a rule forbids beside sums: drift in points with 95 % intervals, setting by setting."""
    names = settings(answers)
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.subplots()
    for metric, colour, shift, label in (
        (SAFETY, LOSS, -0.1, "refusals of forbidden requests"),
        (CAPABILITY, GAIN, 0.1, "sums solved"),
    ):
        found = [_contrast(figures, setting, metric) for setting in names]
        places = [i + shift for i in range(len(names))]
        middle = [c["estimate"] for c in found]
        ends = [[c["estimate"] - c["low"] for c in found], [c["high"] - c["estimate"] for c in found]]
        axes.errorbar(places, middle, yerr=ends, fmt="o", color=colour, capsize=3, label=label)
    _lines(axes)
    axes.set_xticks(range(len(names)), [name.replace(", ", ",\n").replace(" by", "\nby") for name in names])
    axes.set_ylabel("drift, points (95 %)")
    axes.legend(frameon=False)
    return figure


def _lines(axes: Axes) -> None:
    """No drift, and the margin that the gate holds a score to."""
    add_grid(axes)
    axes.axhline(0, color=UNDECIDED, linewidth=1)
    axes.axhline(-5, color=UNDECIDED, linewidth=1, linestyle="--")


def _flips(answers: pd.DataFrame) -> Figure:
    """Refusals and sums that are lost (left) and won (right), of items that could be read on both sides."""
    names = settings(answers)
    figure = Figure(figsize=(7.2, 0.5 * len(names) + 1), layout="constrained")
    for axes, (suite, facet, title) in zip(
        figure.subplots(1, 2, sharey=True),
        (("xstest", "refused", "refusals of forbidden requests"), ("gsm8k", "solved", "sums")),
        strict=True,
    ):
        counts = [flips_of(answers, setting, suite, facet) for setting in names]
        places = range(len(names))
        axes.barh(places, [-one.lost for one in counts], color=LOSS)
        axes.barh(places, [-one.senseless for one in counts], color=UNDECIDED, label="lost, and makes no sense")
        axes.barh(places, [one.won for one in counts], color=GAIN)
        axes.axvline(0, color=UNDECIDED, linewidth=1)
        axes.set_yticks(range(len(names)), names)
        axes.set_title(f"{title}, of {max(one.items for one in counts)}")
        axes.set_xlabel("lost (left) and won (right)")
        axes.xaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
        add_grid(axes)
    figure.axes[0].invert_yaxis()
    figure.axes[0].legend(frameon=False, fontsize=8)
    return figure


def _diagnosis(figures: Json) -> Figure:
    """What twenty prompts said beforehand (nats a token) against how many refusals then went."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.subplots()
    diagnosis = figures["diagnosis"]
    cases = [diagnosis["setting"], *diagnosis["parts"], *diagnosis["remedies"]]
    harms = {case["stored"]: case["nats"] for case in cases}
    for what, setting in PREDICTED.items():
        own = _contrast(figures, setting, SAFETY)
        ends = [[own["estimate"] - own["low"]], [own["high"] - own["estimate"]]]
        axes.errorbar([harms[what]], [own["estimate"]], yerr=ends, fmt="o", color=LOSS, capsize=3)
        left = "by" not in setting or (setting.endswith("u4") and "token" in setting)  # where no other stands
        place = (-6, -12) if left else (6, -12)
        at, side = (harms[what], own["estimate"]), "right" if left else "left"
        axes.annotate(setting, at, place, textcoords="offset points", fontsize=8, ha=side)
    _lines(axes)
    axes.set_xscale("log")
    axes.set_xlim(3e-4, 1.5)
    axes.set_xlabel("harm that diagnose saw in 20 prompts, nats a token")
    axes.set_ylabel("refusals, drift in points (95 %)")
    return figure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
