"""The picture of what stays: the triangle is the ledger, in the terminal and as SVG."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner, Result

from kvaudit.audit.cache.ledger import NEVER
from kvaudit.audit.cli import app
from kvaudit.audit.commands.picture import Entry, Picture, picture, picture_svg, terminal, ticks, wrapped

SEEN, CODED, PASSED, EVICTED, FUTURE = Entry
SVG = "{http://www.w3.org/2000/svg}"


def drawn(evicted: dict[int, int], coded: dict[int, int], tokens: int = 4, heading: str = "policy") -> Picture:
    gone, keys = (torch.full((tokens,), NEVER, dtype=torch.int32) for _ in range(2))
    for table, times in ((gone, evicted), (keys, coded)):
        for key, time in times.items():
            table[key] = time
    return picture(heading, "layer 0", tokens - 1, gone, (keys if coded else None, None))


SMALL = drawn({1: 2}, {0: 3})
LETTERS = {SEEN: "s", CODED: "c", PASSED: "-", EVICTED: "x", FUTURE: "."}


def letters(cells: list[list[Entry]]) -> list[str]:
    return ["".join(LETTERS[cell] for cell in row) for row in cells]


def test_the_triangle_shows_what_each_query_saw() -> None:
    assert letters(SMALL.cells(4)) == ["s...", "ss..", "sxs.", "cxss"]


def test_it_is_the_ledger_s_own_rule() -> None:
    """Key j is visible to query i iff j <= i < evicted_at[j]."""
    generator = torch.Generator().manual_seed(0)
    evicted = torch.arange(1, 31) + torch.randint(0, 30, (30,), generator=generator)
    states = picture("p", "l", 9, evicted.int(), (None, None)).states()
    for query in range(30):
        for key in range(30):
            assert (states[query, key] == SEEN) == (key <= query < int(evicted[key]))


def test_an_entry_has_lower_precision_once_its_key_or_its_value_has() -> None:
    keys, values = torch.tensor([3, NEVER, NEVER, NEVER]).int(), torch.tensor([2, 3, NEVER, NEVER]).int()
    never = torch.full((4,), NEVER, dtype=torch.int32)
    assert letters(picture("p", "l", 3, never, (keys, values)).cells(4)) == ["s...", "ss..", "css.", "ccss"]


def test_what_a_query_passes_over_is_neither_seen_nor_gone() -> None:
    gone = torch.tensor([NEVER, 3, NEVER, NEVER, NEVER]).int()
    shown = picture("p", "l", 2, gone, (None, None), ((3, frozenset({2, 3})), (4, frozenset({0, 1, 4}))))
    assert letters(shown.cells(5)) == ["s....", "ss...", "sss..", "-xss.", "sx--s"]
    assert (shown.kept, shown.compressed) == (2, True)
    assert picture_svg(shown).count('<rect class="passed"') == 3  # two runs and the legend


def test_quest_is_drawn_where_it_chooses() -> None:
    said = shown("quest:budget=48,page=8,dense=1", "--length", "100")
    assert "layer 1, KV head 0 (the first of its query heads)" in said.stdout
    assert "░ not attended to" in said.stdout


def test_a_long_picture_is_merged_into_as_many_cells_as_fit() -> None:
    evicted = {key: 40 for key in range(20)}
    cells = letters(drawn(evicted, {}, tokens=80).cells(8))
    assert cells[3] == "ssss...."
    assert cells[4] == "xxsss..."
    assert len(drawn(evicted, {}, tokens=80).cells(30)) == 27  # three tokens to a cell


def test_counts_are_those_of_the_last_query() -> None:
    assert (SMALL.kept, SMALL.coded, SMALL.compressed) == (3, 1, True)
    assert not drawn({}, {}).compressed


def test_halves_of_a_line_are_two_queries_without_colours() -> None:
    lines = [line.plain for line in terminal(SMALL, 80, colours=False)]
    assert lines[0] == "    0 █▄"
    assert lines[1] == "      ▓·█▄"
    assert lines[2] == "      0 2"  # numbers keep apart
    assert (
        lines[3].strip()
        == "█ seen   ▒ seen in lower precision   · evicted   rows: queries, columns: keys; decoded from 3"
    )


def test_halves_of_a_line_are_two_queries_in_colours() -> None:
    first, second, *_ = terminal(SMALL, 80, colours=True)
    assert (first.plain, second.plain) == ("    0 █▄", "      ▀██▄")
    top, bottom = "#2f86cf", "#e09a3e"
    assert str(second.spans[0].style) == f"{top} on {bottom}"


@pytest.mark.parametrize("width", [20, 40, 90])
@pytest.mark.parametrize("tokens", [2, 15, 80, 333])
def test_no_line_of_the_triangle_is_wider_than_the_terminal(width: int, tokens: int) -> None:
    *triangle, _ = (line.plain for line in terminal(drawn({}, {}, tokens=tokens), width, colours=False))
    assert max(map(len, triangle)) <= width + 4  # a last position may stand over the edge of the scale


def test_ticks_are_round_and_few() -> None:
    assert ticks(80) == [0, 10, 20, 30, 40, 50, 60, 70]
    assert ticks(5) == [0, 1, 2, 3, 4]
    assert all(3 <= len(ticks(n)) <= 8 for n in range(3, 5000))


def bars(text: str) -> dict[str, list[tuple[float, float, float, float]]]:
    """Rectangles of the triangle by class: x, y, width, height."""
    group = ElementTree.fromstring(text).find(f"{SVG}g")
    assert group is not None
    found: dict[str, list[tuple[float, float, float, float]]] = {}
    for box in group.iter(f"{SVG}rect"):
        x, y, width, height = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        found.setdefault(box.attrib["class"], []).append((x, y, width, height))
    return found


def test_the_svg_draws_every_key_from_its_query_down() -> None:
    found = bars(picture_svg(SMALL))
    assert found["seen"] == [(0, 0, 90, 270), (90, 90, 90, 90), (180, 180, 90, 180), (270, 270, 90, 90)]
    assert found["coded"] == [(0, 270, 90, 90)]
    assert found["evicted"] == [(90, 180, 90, 180)]


def test_the_svg_s_areas_are_the_triangle_s_counts() -> None:
    evicted = {key: min(key + 5 + key % 7, 59) for key in range(50)}
    large = drawn(evicted, {key: key + 9 for key in range(40)}, tokens=60)
    cell, states = 540 / 60, large.states()
    for entry in (SEEN, CODED, EVICTED):
        area = sum(width * height for _, _, width, height in bars(picture_svg(large)).get(entry.name.lower(), []))
        assert area / cell**2 == pytest.approx(int((states == entry).sum()), rel=1e-3)


def test_hostile_text_stays_text_in_the_svg() -> None:
    text = picture_svg(drawn({}, {}, heading='a"><script>alert(1)</script>&'))
    assert "<script" not in text
    tree = ElementTree.fromstring(text)
    title = tree.find(f"{SVG}title")
    assert title is not None
    assert title.text == 'a"><script>alert(1)</script>&, layer 0'


def test_the_svg_follows_light_and_dark_pages_and_says_what_it_shows() -> None:
    text = picture_svg(SMALL)
    assert "prefers-color-scheme: dark" in text
    assert "the last of 4 queries sees 3 entries, 1 of them in lower precision" in text
    words = {node.text for node in ElementTree.fromstring(text).iter(f"{SVG}text")}
    assert {
        "query",
        "key: position of the entry",
        "seen",
        "seen in lower precision",
        "evicted",
        "decoded from here",
    } <= words


def test_the_legend_names_only_what_is_there() -> None:
    words = {node.text for node in ElementTree.fromstring(picture_svg(drawn({}, {}))).iter(f"{SVG}text")}
    assert "seen" in words
    assert not words & {"evicted", "seen in lower precision"}


def test_long_policies_are_broken_after_commas_and_signs() -> None:
    assert wrapped("snapkv:budget=96,window=8+kivi:bits=4,group=32", 20) == [
        "snapkv:budget=96,",
        "window=8+",
        "kivi:bits=4,group=32",
    ]
    assert "".join(wrapped("a:b=1,c=2|d:e=3", 3)) == "a:b=1,c=2|d:e=3"


def shown(*words: object) -> Result:
    return CliRunner().invoke(app, ["show", *map(str, words)])


def test_streaming_keeps_its_sink_and_the_most_recent(tmp_path: Path) -> None:
    done = shown("streaming:budget=16,sink=4,chunk=16", "--length", 40, "--svg", tmp_path / "new" / "s.svg")
    assert done.exit_code == 0, done.output
    heading, place, *rows = done.stdout.splitlines()
    assert heading == "streaming:budget=16,sink=4,window=0,interval=1,phase=both,chunk=16"
    assert place == "layer 0, KV head 0 of the embedded model; the last of 50 queries sees 17 entries"
    assert rows[24] == " " * 6 + "████" + "·" * 32 + "▀████████████▄"
    assert len(bars((tmp_path / "new" / "s.svg").read_text())["evicted"]) == 50 - 17


def test_quantised_entries_have_their_own_shade() -> None:
    done = shown("streaming:budget=24,chunk=16+kivi:residual=8,group=8", "--length", 40)
    assert done.exit_code == 0, done.output
    assert "of them in lower precision" in done.stdout
    assert "▒ seen in lower precision" in done.stdout
    assert done.stdout.splitlines()[25].strip().startswith("▒▒▒▒")


def test_a_layer_that_is_left_alone_is_drawn_as_it_is() -> None:
    policy = "q4_0:write=true,skip_layers=0"
    assert "layer 1, KV head 0" in shown(policy).stdout
    assert "nothing was compressed" in shown(policy, "--layer", 0).stdout


def test_pinned_roles_stay() -> None:
    done = shown("streaming:budget=32,sink=0,chunk=16,pin=system", "--length", 60)
    assert done.exit_code == 0, done.output
    rows = done.stdout.splitlines()[2:]
    # the template's own token before the system prompt leaves, the prompt does not, the last of the budget slides
    assert rows[35][6:] == "·" + "█" * 29 + "·" * 37 + "▀███▄"


def test_a_budget_that_is_not_reached_is_said_in_one_line() -> None:
    done = shown("streaming", "--length", 24)
    assert done.exit_code == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("nothing was compressed")]
    assert "within 32 tokens nothing was due in this layer; raise --length" in line


def test_a_mixture_shows_what_one_request_drew() -> None:
    heading = shown("streaming:budget=16,chunk=16|knorm:budget=16,chunk=16", "--length", 24).stdout.splitlines()[0]
    assert re.fullmatch(r"(streaming|knorm):\S+, which a request drew of the mixture", heading)


def test_layers_and_heads_can_be_chosen() -> None:
    policy = "random:budget=16,chunk=16"
    first, head, layer = (
        shown(policy, "--layer", chosen[0], "--head", chosen[1]).stdout.splitlines()
        for chosen in ((0, 0), (0, 1), (2, 0))
    )
    assert "layer 0, KV head 1" in head[1]
    assert "layer 2, KV head 0" in layer[1]
    assert first[2:] != head[2:]
    assert first[2:] != layer[2:]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["streaming", "--layer", 4], "--layer is 4, the embedded model has 4; wanted 0 to 3"),
        (["streaming", "--head", 2], "--head is 2, the embedded model has 2; wanted 0 to 1"),
        (["streaming", "--length", 4000], "--length 4000 needs 5001 positions, the model has 4096"),
        (["streamin"], "unknown policy 'streamin'. Did you mean 'streaming'?"),
        (["streaming:budget=2"], "budget=2 is below sink + window"),
        (["none", "--length", 8, "--svg", "/dev/null/x.svg"], "cannot write '/dev/null/x.svg'"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(words: list[object], message: str) -> None:
    done = shown(*words)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert message in line


def test_the_prompt_is_a_suite_s_item_of_exactly_the_length() -> None:
    for length in (2, 65, 130):
        text = shown("none", "--length", length).stdout
        tail = max(8, length // 4)
        assert re.search(rf"the last of {length + tail} queries sees {length + tail} entries", text)
        assert f"decoded from {length}" in text
