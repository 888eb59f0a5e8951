"""Every section of the report, found by walking the package and held to what its base says."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from reports_synthetic import build, policy, tiny
from test_formats_contract import ARM, DECIDERS, HOSTILE, SUITE, Markup
from test_layers import imports
from test_reports_engines import floored

import kvaudit.reports.sections
from kvaudit.core.plugins import Registry
from kvaudit.reports.page.formats import html, markdown
from kvaudit.reports.page.formats.json_files import verdict_facts
from kvaudit.reports.page.page import Page
from kvaudit.reports.page.run_page import page_of, run_banner, verdict_passages
from kvaudit.reports.records.load import load_run
from kvaudit.reports.run import decide_run, with_report_sections
from kvaudit.reports.sections.base import Inputs, Section, sections
from kvaudit.reports.sections.shared.words import dump_json
from kvaudit.reports.verdict import decide

REPORTS = Path(kvaudit.reports.sections.__file__).parent.parent
TAME = {
    "circle",
    "clippath",
    "defs",
    "g",
    "path",
    "pattern",
    "rect",
    "svg",
    "text",
    "tspan",
    "use",
    "image",
}  # of a figure
EMPTY = tiny()
EMPTY = dataclasses.replace(EMPTY, arms=("dense", "naive"), suites=("refusal",), clusters=1, items=1, telemetry=0)
RICH = dataclasses.replace(
    tiny(),
    arms=("dense", "naive"),
    seeds=(11, 12, 13),
    policies=("none", policy("snapkv", 96), policy("snapkv", 64), policy("streaming", 4096)),  # the last has all room
    items=32,
    facets={"refusal": ("unsafe",)},
    telemetry=4,
)
STRANGE = dataclasses.replace(
    RICH,
    arms=("dense", ARM),
    seeds=(11,),
    policies=("none", policy("snap<kv>|", 96), policy("snap<kv>|", 64)),
    suites=("refusal", SUITE),
    drops={(ARM, "refusal"): 0.5},
    hostile=HOSTILE.replace("\ud800", ""),
    facets={},
    telemetry=0,
)


class World(NamedTuple):
    """Runs that a section meets: next to nothing, every kind of number, engines asked again, text of a stranger."""

    empty: Inputs
    rich: Inputs
    engines: Inputs
    strange: Inputs


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("runs")
    rich = build(folder / "rich", RICH)
    (folder / "engines").mkdir()
    engines = floored(folder / "engines", {})
    made = (build(folder / "empty", EMPTY), rich, engines, build(folder / "strange", STRANGE))
    return World(*(Inputs(decide_run(data), data) for data in map(load_run, made)))


_COMPUTED: dict[tuple[Section[Any], int], Any] = {}


def computed(section: Section[Any], inputs: Inputs) -> Any:
    """What a section finds in a run of the world, computed once for all checks."""
    key = section, id(inputs)
    if key not in _COMPUTED:
        _COMPUTED[key] = section.compute(inputs)
    return _COMPUTED[key]


def shown(section: Section[Any], inputs: Inputs, value: Any) -> Page:
    """A page that has this section alone, with the figures it draws."""
    values = {} if value is None else {section.name: value}
    findings = dataclasses.replace(inputs.decided, values=values)
    passages = () if value is None else (section.passage(value, findings),)
    return Page(findings, run_banner(findings), passages)


def says_nothing_of_an_empty_run(section: Section[Any], world: World) -> None:
    page = shown(section, world.empty, computed(section, world.empty))
    assert markdown.render(page)
    assert Markup(html.render(page)).open == []


def lets_no_text_become_markup(section: Section[Any], world: World) -> None:
    page = shown(section, world.strange, computed(section, world.strange))
    value = page.findings.values.get(section.name)
    for drawing in section.draw(value, page.findings) if value is not None else ():
        assert not drawing or {tag.lower() for tag in Markup(drawing.svg).tags} <= TAME
    for table in (table for passage in page.sections for table in passage.tables):
        assert all("\n" not in cell and "\x1b" not in cell for row in (table.headers, *table.rows) for cell in row)
    assert not {"script", "i"} & set(Markup(html.render(page)).tags)


def facts_are_plain(section: Section[Any], world: World) -> None:
    for value in (None, *(computed(section, inputs) for inputs in world)):
        facts = section.facts(value)
        assert set(facts) == set(section.keys)
        _check_plain(facts)
        assert json.loads(dump_json(facts)) == json.loads(dump_json(json.loads(dump_json(facts))))


def _check_plain(value: Any) -> None:
    """What JSON can spell, and NaN, which becomes null: anything else would be text by accident."""
    if isinstance(value, Mapping):
        assert all(isinstance(key, str | int) for key in value)
        inside: list[Any] = list(value.values())
    elif isinstance(value, list | tuple | frozenset):
        assert not hasattr(value, "_fields"), "a list of fields without their names"
        inside = list(value)
    else:
        assert value is None or isinstance(value, str | int | float | bool), type(value)
        inside = []
    for inner in inside:
        _check_plain(inner)


def finds_a_frozen_value(section: Section[Any], world: World) -> None:
    for inputs in world:
        value = computed(section, inputs)
        for one in value if isinstance(value, tuple) and not hasattr(value, "_fields") else (value,):
            frozen = one is None or isinstance(one, tuple) or one.__dataclass_params__.frozen
            assert frozen, f"{type(one).__name__} can be changed behind the back of who holds it"


def decides_nothing(section: Section[Any], world: World) -> None:
    assert not imports(Path(inspect.getfile(type(section)))) & DECIDERS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decide, "decide", _refuse)
        before = world.rich.decided.verdict
        page = shown(section, world.rich, section.compute(world.rich))
    assert page.findings.verdict is before


def _refuse(*_: Any) -> None:
    raise AssertionError("a section decided")


def is_about_gated_cells_where_it_says_so(section: Section[Any], world: World) -> None:
    verdict = world.rich.decided.verdict
    open_ = tuple(dataclasses.replace(d, gated=False) for d in verdict.decisions)
    ungated = dataclasses.replace(world.rich.decided, verdict=dataclasses.replace(verdict, decisions=open_))
    if section.gated:
        assert computed(section, world.rich) is not None, "there are gated cells"
        assert section.compute(dataclasses.replace(world.rich, decided=ungated)) is None


def draws_what_it_names(section: Section[Any], world: World) -> None:
    value = computed(section, world.rich)
    if value is not None:
        drawn = [drawing.name for drawing in section.draw(value, world.rich.decided) if drawing]
        assert set(drawn) <= set(section.figures)
        assert bool(drawn) == bool(section.figures)


def has_a_place_of_its_own(section: Section[Any], world: World) -> None:
    findings = world.rich.decided
    page = Page(findings, run_banner(findings), ())
    others = [other for other in sections() if other.name != section.name]
    taken = {*verdict_passages(findings), *(other.order for other in others)}
    keys = {place for place, _, _ in verdict_facts(page)} | {place for other in others for place in other.keys.values()}
    assert section.order not in taken
    assert not keys & set(section.keys.values())
    for hook, place in (("remarks", section.remarks_at), ("banner_lines", section.banner_lines_at)):
        assert (hook in vars(type(section))) == bool(place), f"{hook} need a place among others"


CHECKS = (
    says_nothing_of_an_empty_run,
    lets_no_text_become_markup,
    facts_are_plain,
    finds_a_frozen_value,
    decides_nothing,
    is_about_gated_cells_where_it_says_so,
    draws_what_it_names,
    has_a_place_of_its_own,
)
EVERY = pytest.mark.parametrize("section", sections(), ids=lambda section: section.name)


@EVERY
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_section_keeps_its_contract(section: Section[Any], check: Callable[..., None], world: World) -> None:
    check(section, world)


def test_no_other_file_names_the_file_of_a_section() -> None:
    own = {type(section).__module__: Path(inspect.getfile(type(section))) for section in sections()}
    for path in REPORTS.rglob("*.py"):
        assert not [module for module in own.keys() & imports(path) if own[module] != path], path


def test_cells_that_have_no_two_sides_stop_no_section(tmp_path: Path) -> None:
    of_several = dataclasses.replace(RICH, facets={}, estimands=("selectivity", "parity", "worst"), telemetry=0)
    run = build(tmp_path / "run", dataclasses.replace(of_several, drops={("naive", "refusal"): 0.3}))
    data = load_run(run)
    found = with_report_sections(data, decide_run(data))
    assert {d.estimand for d in found.verdict.decisions if d.gated} == {"selectivity", "parity", "worst"}
    assert "examples" not in found.values, "an example is of one cell against another"
    assert markdown.render(page_of(found))


def test_every_file_has_a_section() -> None:
    files = sorted(path.stem for path in (REPORTS / "sections").glob("[a-z]*.py") if path.stem != "base")
    assert sorted({type(section).__module__.rpartition(".")[2] for section in sections()}) == files


def test_sections_are_found_without_loading_matplotlib_or_torch() -> None:
    code = "import sys; from kvaudit.reports.sections.base import sections; sections(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPORTS.parent.parent, capture_output=True, text=True, check=True
    )
    assert not {"matplotlib", "torch", "scipy.optimize"} & set(done.stdout.split())


def test_most_sections_find_something_here(world: World) -> None:
    found = {section.name for section in sections() for inputs in world if computed(section, inputs) is not None}
    assert {section.name for section in sections()} - found <= {"contexts", "judge", "judges", "looks"}


# --- wrong ones: a file of its own, so that the package has none --------------------------------------------------

WRONG = """
from kvaudit.reports.verdict.decide import decide
from kvaudit.reports.sections.shared.canvas import Drawing
from kvaudit.reports.sections.base import Section


class {name}(Section):
    name = "wrong"
    title = explain = "Wrong"
    order = 1000
{body}
"""
RIGHT_BODY = """
    def compute(self, inputs):
        return inputs.decided.drift.cells
"""
PLANTED = {
    says_nothing_of_an_empty_run: RIGHT_BODY
    + "    def finding(self, value, decided): return str(1 / (len(value) - 4))",
    lets_no_text_become_markup: RIGHT_BODY
    + "    figures = ('wrong',)\n"
    + "    def draw(self, value, decided): yield Drawing('wrong', '<svg>' + value[-1].arm, '')",
    facts_are_plain: RIGHT_BODY + "    keys = {'wrong': 999}\n    def facts(self, value): return {'wrong': value}",
    finds_a_frozen_value: "    def compute(self, inputs): return list(inputs.decided.drift.cells)",
    decides_nothing: RIGHT_BODY,
    is_about_gated_cells_where_it_says_so: RIGHT_BODY + "    gated = True",
    draws_what_it_names: RIGHT_BODY + "    figures = ('never drawn',)",
    has_a_place_of_its_own: RIGHT_BODY + "    order = 180",
}


@pytest.mark.parametrize("check", PLANTED, ids=lambda check: check.__name__)
def test_a_wrong_section_is_caught_by_the_check_it_breaks(
    check: Callable[..., None], world: World, tmp_path: Path
) -> None:
    planted: Registry[Section[Any]] = Registry("section", "kvaudit.reports.sections", Section)
    path = tmp_path / f"wrong_{check.__name__}.py"
    path.write_text(WRONG.format(name="Wrong", body=PLANTED[check]))
    assert planted.load_file(path) == ["wrong"], "found by itself"
    with pytest.raises((AssertionError, ArithmeticError, AttributeError)):
        check(planted.get("wrong")(), world)


def test_former_names_of_hooks_work_for_one_release(world: World) -> None:
    hooks = {
        "asides_at": 3,
        "instead": lambda section, value, decided: [f"try {value}"],
        "asides": lambda section, value, decided, head: [f"next to {value}"],
    }
    section, findings = type("FormerHooks", (Section,), hooks)(), world.rich.decided
    assert list(section.suggestions(1, findings)) == ["try 1"]
    assert list(section.banner_lines(2, findings, None)) == ["next to 2"]
    assert section.banner_lines_at == 3
