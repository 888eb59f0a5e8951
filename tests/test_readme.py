"""What README and pages show is so: examples run as printed, links lead somewhere, rooms stand on their floors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from conform.world import MIXED, left_padded, prompts
from test_layers import FILES, RANK
from transformers import AutoModelForCausalLM, LlamaConfig

from kvaudit.audit.runs.names import NAMES
from kvaudit.audit.runs.pilot import impossible_cells
from kvaudit.audit.sampling.checkpoints import load_base_chat
from kvaudit.core.spec import parse_spec
from kvaudit.core.text import guide_path, install_command

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The names that headings of a page are linked by: lower case, words joined by hyphens, no other signs."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            lost.append(target)
    assert not lost


EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.yaml")) if "\nevaluate:" in path.read_text("utf-8")]


FOREIGN = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of packages that an example needs


def example_text(name: str) -> str:
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    if '"inspect:agent' in text:
        pytest.importorskip("inspect_evals", reason="needs the packages inspect-ai and inspect_evals")
    return text


@FOREIGN
@pytest.mark.parametrize("spec", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_a_spec_that_can_be_read(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVAUDIT_REAL_MODEL", "somewhere")
    assert parse_spec(example_text(spec.name), spec.name, NAMES).arms


@FOREIGN
@pytest.mark.parametrize("name", ["audit.yaml", "arms.yaml", "agents.yaml"])
def test_what_init_writes_can_pass_its_own_gate(name: str) -> None:
    spec = parse_spec(example_text(name).replace("my-model", "embedded"), name, NAMES)
    assert list(impossible_cells(spec, load_base_chat(spec.model_path).count_tokens)) == []


def test_an_error_names_pages_that_are_there() -> None:
    assert (ROOT / "docs" / Path(guide_path("choose-suites.md")).name).is_file()
    for path in FILES:
        for name in re.findall(r"guide\(['\"]([a-z-]+\.md)['\"]\)", path.read_text(encoding="utf-8")):
            assert Path(guide_path(name)).is_file(), path


def test_the_picture_of_the_rooms_has_each_on_its_floor() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (picture,) = re.findall(r"```\nfloor .*?\n(.*?)```", page, re.DOTALL)
    floors = (line.split() for line in picture.splitlines() if line.strip())
    assert {f"kvaudit.{room}": int(floor) for floor, *rooms in floors for room in rooms} == RANK


def test_the_cache_alone_replays_what_generate_saw() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**MIXED), dtype=torch.float64).eval()
    model.generation_config.pad_token_id = 0
    ids, positions = left_padded(prompts(150, 90))
    inputs = {"input_ids": ids, "attention_mask": (positions >= 0).long()}
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 32, dtype=torch.int64)], 1)
    scope = {"model": model, "inputs": inputs, "mask": mask}
    with torch.no_grad():
        exec(example, scope)
        dense = model(scope["out"], attention_mask=mask).logits
    drawn = slice(ids.shape[1] - 1, -1)
    greedy = scope["logits"][:, drawn].argmax(-1)
    assert torch.equal(greedy, scope["out"][:, ids.shape[1] :]), "the replay explains every token that was drawn"
    assert (dense[:, drawn].argmax(-1) != greedy).any(), "the dense pass does not"


def test_what_is_to_be_installed_is_installed_from_where_this_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert install_command("openvino") == "pip install '.[openvino]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("lora") == f"pip install '{ROOT}[lora]'"
    monkeypatch.setattr("kvaudit.core.text.__file__", str(tmp_path / "kvaudit" / "core" / "text.py"))
    assert install_command("lora") == "pip install 'kvaudit[lora]'"
