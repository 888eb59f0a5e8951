"""What does an OpenVINO KV setting do to refusals and sums? Data, tables and pictures of docs/results/finding.md.

    python -m bench.finding RUN DIAGNOSIS    # a run of examples/dose.yaml and the file of `kvaudit diagnose --out`:
                                             # writes dose.parquet, dose.json, the page's tables and its pictures
    python -m bench.finding                  # writes tables and pictures again from the two files, without an engine
    python -m bench.finding --check          # exits with 1 if the page's tables differ from the two files

Takes 2 seconds; ``make check`` runs the last. dose.parquet has one answer per row, with a hash in place of the text.
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
from kvaudit.core.files import read_json, write_json
from kvaudit.core.policy_names import DENSE_POLICY, engine_settings
from kvaudit.reports.sections.shared.canvas import GAIN, LOSS, UNDECIDED, add_grid
from kvaudit.reports.sections.shared.floor import floor_of

RESULTS = Path(__file__).parent.parent / "docs" / "results"
PAGE, ANSWERS, FIGURES = RESULTS / "finding.md", RESULTS / "dose.parquet", RESULTS / "dose.json"
OPENING, CLOSING = "<!-- figures: python -m bench.finding RUN DIAGNOSIS -->", "<!-- end of figures -->"
REFERENCE = "f32"
SAFETY, CAPABILITY = "xstest.refused", "gsm8k"
FACETS = ("refused", "over_refused", "helpful", "coherent", "solved", "well_formed")
COLOURS = {"PASS": "#1f9e74", "FAIL": LOSS, "INCONCLUSIVE": "#d9b13b", "NOT MEASURABLE": UNDECIDED, "INVALID": "#555"}
# what `diagnose` quantises -> the engine's setting that stores the same; its values are by token too
PREDICTED = {
    "keys and values": "K u4 by token, V u4",
    "keys alone": "K u4 by token, V u8",
    "keys by channel": "K u4 by channel, V u4",
    "values alone": "K u8, V u4",
}
Json = dict[str, Any]


class Flips(NamedTuple):
    """Numbers of items that lost a facet, of those whose answer then makes no sense, that won it, and of all."""

    lost: int
    senseless: int
    won: int
    items: int


def main(arguments: Sequence[str]) -> int:
    """Write the data, the page's tables and pictures, or check the tables."""
    if arguments == ["--check"]:
        if page_block(read_json(FIGURES), pd.read_parquet(ANSWERS)) in PAGE.read_text():
            return 0
        print(f"{PAGE.name}: tables differ from {FIGURES.name} and {ANSWERS.name}; rewrite: python -m bench.finding")
        return 1
    if arguments:
        run, diagnosis = map(Path, arguments)
        audit = kvaudit.load_run(run)
        answer_table(audit).to_parquet(ANSWERS, index=False, compression="zstd")
        write_json(FIGURES, figures_of(audit, read_json(diagnosis)))
    figures, answers = read_json(FIGURES), pd.read_parquet(ANSWERS)
    before, _, rest = PAGE.read_text().partition(OPENING)
    PAGE.write_text(f"{before}{page_block(figures, answers)}{rest.partition(CLOSING)[2]}")
    for name, drawing in draw_pictures(figures, answers).items():
        drawing.savefig(RESULTS / f"finding-{name}.png", dpi=110, metadata={"Software": None})
    return 0


def setting_name(policy: str) -> str:
    """Return a short name of an OpenVINO setting: precision of keys, scale sharing of keys, precision of values."""
    settings = engine_settings(policy)
    if "KEY_CACHE_PRECISION" not in settings:
        return REFERENCE
    mode = settings.get("KEY_CACHE_QUANT_MODE", "").lower().replace("_", " ")
    return f"K {settings['KEY_CACHE_PRECISION']}{' ' + mode if mode else ''}, V {settings['VALUE_CACHE_PRECISION']}"


def answer_table(run: kvaudit.Run) -> pd.DataFrame:
    """Return one row per answer of the grid; a facet that the item lacks or that could not be read is missing."""
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
    """Return every setting's statistics and verdicts, the A/A floor, the diagnosis and hashes of the run's files."""
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
        "diagnosis": {key: value for key, value in diagnosis.items() if key != "model"},  # it names a local folder
    }


def page_block(figures: Json, answers: pd.DataFrame) -> str:
    """Return the page's text between its marks, with both marks."""
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
    """Return the compressed settings, those with the finest keys first."""
    names = [name for name in answers["setting"].unique() if name != REFERENCE]
    return sorted(names, key=lambda name: ("by token" in name, "by channel" in name, name.endswith("u4")))


def _contrast(figures: Json, setting: str, metric: str) -> Json:
    [contrast] = [c for c in figures["contrasts"] if (c["setting"], c["metric"]) == (setting, metric)]
    return dict(contrast)


def _drift(figures: Json, setting: str, metric: str) -> str:
    contrast = _contrast(figures, setting, metric)
    word = {None: "", "FAIL": "**FAIL** ", "INCONCLUSIVE": "open "}.get(contrast["status"], f"{contrast['status']} ")
    return word + _interval(contrast)


def _interval(contrast: Json) -> str:
    return f"{contrast['estimate']:+.1f} [{contrast['low']:+.1f}, {contrast['high']:+.1f}]"


def _pairs(answers: pd.DataFrame, setting: str, suite: str) -> pd.DataFrame:
    """Return answers under a setting and the reference, joined by item: columns NAME_x (reference) and NAME_y."""
    sides = [answers[(answers["setting"] == name) & (answers["suite"] == suite)] for name in (REFERENCE, setting)]
    return sides[0].merge(sides[1], on="item")


def flips_of(answers: pd.DataFrame, setting: str, suite: str, facet: str) -> Flips:
    """Count the items that lose and win a facet under a setting."""
    pairs = _pairs(answers, setting, suite).dropna(subset=[f"{facet}_x", f"{facet}_y"])
    before, after = (pairs[f"{facet}_{side}"].astype(bool) for side in "xy")
    senseless = before & ~after & ~pairs["coherent_y"].fillna(value=True).astype(bool)
    return Flips(int((before & ~after).sum()), int(senseless.sum()), int((~before & after).sum()), len(pairs))


def _same(answers: pd.DataFrame, setting: str, suite: str) -> str:
    pairs = _pairs(answers, setting, suite)
    return f"{int((pairs['answer_sha256_x'] == pairs['answer_sha256_y']).sum())} of {len(pairs)}"


def _floor(figures: Json, setting: str, suite: str) -> str:
    for unit in figures["floor"]:
        if (unit["setting"], unit["suite"], unit["way"]) == (setting, suite, "shuffled"):
            return f"{unit['same']} of {unit['answers']}"
    return "-"


def draw_pictures(figures: Json, answers: pd.DataFrame) -> dict[str, Figure]:
    """Return the page's pictures by name, drawn from the two files."""
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        return {
            "grid": _grid(figures, answers),
            "dose": _dose(figures, answers),
            "flips": _flips(answers),
            "diagnosis": _diagnosis(figures),
        }


def _grid(figures: Json, answers: pd.DataFrame) -> Figure:
    """Draw settings by suites: the verdict as colour and word, and the drift."""
    names, suites = settings(answers), ("xstest", "gsm8k")
    figure = Figure(figsize=(6.4, 0.62 * len(names) + 0.9), layout="constrained")
    axes = figure.subplots()
    for row, setting in enumerate(names):
        for column, suite in enumerate(suites):
            contrast = _contrast(figures, setting, suite)
            colour = COLOURS[contrast["status"]]
            axes.add_patch(mpl.patches.Rectangle((column, row), 0.97, 0.94, color=colour, alpha=0.85))
            word = "open" if contrast["status"] == "INCONCLUSIVE" else contrast["status"]
            text = f"{word}\n{_interval(contrast)}"
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
    """Draw the drift of refusals and of sums with 95 % intervals, by setting."""
    names = settings(answers)
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.subplots()
    for metric, colour, shift, label in (
        (SAFETY, LOSS, -0.1, "refusals of forbidden requests"),
        (CAPABILITY, GAIN, 0.1, "sums solved"),
    ):
        contrasts = [_contrast(figures, setting, metric) for setting in names]
        places = [i + shift for i in range(len(names))]
        ends = [[c["estimate"] - c["low"] for c in contrasts], [c["high"] - c["estimate"] for c in contrasts]]
        axes.errorbar(
            places, [c["estimate"] for c in contrasts], yerr=ends, fmt="o", color=colour, capsize=3, label=label
        )
    _add_reference_lines(axes)
    axes.set_xticks(range(len(names)), [name.replace(", ", ",\n").replace(" by", "\nby") for name in names])
    axes.set_ylabel("drift, points (95 %)")
    axes.legend(frameon=False)
    return figure


def _add_reference_lines(axes: Axes) -> None:
    """Draw lines at no drift and at the gate's margin."""
    add_grid(axes)
    axes.axhline(0, color=UNDECIDED, linewidth=1)
    axes.axhline(-5, color=UNDECIDED, linewidth=1, linestyle="--")


def _flips(answers: pd.DataFrame) -> Figure:
    """Draw how many refusals and sums are lost (left) and won (right), of items readable on both sides."""
    names = settings(answers)
    figure = Figure(figsize=(7.2, 0.5 * len(names) + 1), layout="constrained")
    for axes, (suite, facet, title) in zip(
        figure.subplots(1, 2, sharey=True),
        (("xstest", "refused", "refusals of forbidden requests"), ("gsm8k", "solved", "sums")),
        strict=True,
    ):
        counts = [flips_of(answers, setting, suite, facet) for setting in names]
        places = range(len(names))
        axes.barh(places, [-count.lost for count in counts], color=LOSS)
        axes.barh(places, [-count.senseless for count in counts], color=UNDECIDED, label="lost, and makes no sense")
        axes.barh(places, [count.won for count in counts], color=GAIN)
        axes.axvline(0, color=UNDECIDED, linewidth=1)
        axes.set_yticks(range(len(names)), names)
        axes.set_title(f"{title}, of {max(count.items for count in counts)}")
        axes.set_xlabel("lost (left) and won (right)")
        axes.xaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
        add_grid(axes)
    figure.axes[0].invert_yaxis()
    figure.axes[0].legend(frameon=False, fontsize=8)
    return figure


def _diagnosis(figures: Json) -> Figure:
    """Draw the harm that twenty prompts predicted (nats a token) against the drift of refusals."""
    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.subplots()
    diagnosis = figures["diagnosis"]
    cases = [diagnosis["setting"], *diagnosis["parts"], *diagnosis["remedies"]]
    harms = {case["stored"]: case["nats"] for case in cases}
    for stored, setting in PREDICTED.items():
        contrast = _contrast(figures, setting, SAFETY)
        ends = [[contrast["estimate"] - contrast["low"]], [contrast["high"] - contrast["estimate"]]]
        axes.errorbar([harms[stored]], [contrast["estimate"]], yerr=ends, fmt="o", color=LOSS, capsize=3)
        is_left = "by" not in setting or (setting.endswith("u4") and "token" in setting)  # avoids other labels
        offset, side = ((-6, -12), "right") if is_left else ((6, -12), "left")
        axes.annotate(
            setting, (harms[stored], contrast["estimate"]), offset, textcoords="offset points", fontsize=8, ha=side
        )
    _add_reference_lines(axes)
    axes.set_xscale("log")
    axes.set_xlim(3e-4, 1.5)
    axes.set_xlabel("harm that diagnose saw in 20 prompts, nats a token")
    axes.set_ylabel("refusals, drift in points (95 %)")
    return figure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
