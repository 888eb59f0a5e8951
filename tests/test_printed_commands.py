"""The commands that README and the guides print are ones that kvaudit takes, and files that they name are there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvaudit.audit.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"(?:\$ )?(?:[A-Z_]+=\S+ )*kvaudit (.*)")


def printed(page: Path) -> Iterator[list[str]]:
    """The words after ``kvaudit`` of each command in a page's blocks."""
    for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            for part in line.split(" && "):
                if found := COMMAND.fullmatch(part.strip()):
                    yield shlex.split(found[1], comments=True)


PRINTED = {page: commands for page in PAGES if (commands := list(printed(page)))}


@cache
def idle_command_line() -> Any:
    """The command line, with every command doing nothing."""
    root = get_command(app)
    commands = [root]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        command.callback = None
    return root


def parsed(words: list[str]) -> Any:
    """Return what the command line makes of the words; raises for what it refuses."""
    return idle_command_line().main(words, prog_name="kvaudit", standalone_mode=False)


@pytest.mark.parametrize("page", PRINTED, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_prints_commands_that_there_are(page: Path) -> None:
    for words in PRINTED[page]:
        assert not parsed(words), words
        for word in words:
            assert not word.startswith("examples/") or any(ROOT.glob(re.sub(r"\$\w+", "*", word))), words


@pytest.mark.parametrize(
    "words", [["chek", "model"], ["check", "model", "--kw", "u4"], ["gate"], ["run", "--limit", "x"]]
)
def test_a_command_that_is_not_there_is_noticed(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"No such|Missing|valid integer"):
        parsed(words)


def test_printed_commands_that_need_no_model_run() -> None:
    alone = [words for commands in PRINTED.values() for words in commands if words[0] == "plan"]
    assert alone
    for words in alone:
        assert CliRunner().invoke(app, words).exit_code == 0, words
