"""Every command is registered and keeps the contract; the help fits a screen; former names still work."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from typer.testing import CliRunner

from kvaudit.audit.cli import app
from kvaudit.audit.commands.base import HELP_HEADINGS, Command, load_commands
from kvaudit.core.moved import REMOVED

PACKAGE = "kvaudit.audit.commands"
HEAVY = ("torch", "transformers", "pandas", "scipy", "numpy", "matplotlib")
COLUMNS, LINES = 80, 40
LONGEST_SUMMARY = 60  # characters; the help cuts longer ones at 80 columns
# what kvaudit 0.1 called its commands
FORMER = (
    *("adjudicate", "calibrate", "card", "check", "compare", "data", "displace", "evaluate", "explain", "export"),
    *("gate", "generate", "guard", "init", "join", "judge", "list", "lm-eval", "mismatch", "pin", "plan", "pretrain"),
    *("probe", "questionnaire", "recipe", "remedy", "report", "run", "scan", "serve", "show", "tasks", "train"),
    *("verify", "view"),
)
REMOVED_COMMANDS = [name for removed in REMOVED for name in removed.commands]
FOUND = load_commands()
HOLDERS = [command.name for command in FOUND if command.call is None]
RENAMED = {old: new for command in FOUND for old, new in command.former_names.items()}


def faults(command: Command, found: Sequence[Command]) -> Iterator[str]:
    """Yield the faults of a command, given all commands."""
    if command.group not in [*HELP_HEADINGS, *(one.name for one in found if one.call is None)]:
        yield f"{command.name}: no group {command.group!r}"
    if not re.fullmatch(r"[a-z]+(-[a-z]+)*", command.name):
        yield f"{command.name}: no word to type"
    if [(one.group, one.order) for one in found].count((command.group, command.order)) > 1:
        yield f"{command.name}: another is at its place"
    if [(one.group, one.name) for one in found].count((command.group, command.name)) > 1:
        yield f"{command.name}: two of one name"
    if command.call is None and command.name not in [one.group for one in found]:
        yield f"{command.name}: does nothing and holds nothing"
    lines = [command.help_text, *(text for _, text in subcommands(command))]
    for line in (text.partition("\n")[0] for text in lines):
        if not 0 < len(line.rstrip(".")) <= LONGEST_SUMMARY:
            yield f"{command.name}: a summary of {len(line)} characters: {line}"


def subcommands(command: Command) -> list[tuple[str, str]]:
    """Return the commands inside a typer app, with their help."""
    if not isinstance(command.call, typer.Typer):
        return []
    group: Any = typer.main.get_group(command.call)
    return [(name, one.help or "") for name, one in group.commands.items()]


def heavy_imports(package: str) -> dict[str, list[str]]:
    """Return by file of a package which heavy libraries importing it loads, in a new process."""
    code = (
        "import importlib, pkgutil, sys\n"
        f"root = importlib.import_module({package!r})\n"
        "for entry in pkgutil.iter_modules(root.__path__):\n"
        f"    before = set(sys.modules); importlib.import_module({package!r} + '.' + entry.name)\n"
        f"    print(entry.name, *(name for name in {HEAVY!r} if name in set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name: brought for name, *brought in map(str.split, done.stdout.splitlines())}


@pytest.mark.parametrize("command", FOUND, ids=lambda command: f"{command.group} {command.name}")
def test_a_command_keeps_the_contract(command: Command) -> None:
    assert list(faults(command, FOUND)) == []


def test_no_command_s_file_imports_what_is_heavy() -> None:
    assert {name: brought for name, brought in heavy_imports(PACKAGE).items() if brought} == {}


def test_a_file_without_a_command_is_a_part_of_one() -> None:
    folder = Path(__file__).parent.parent / "kvaudit" / "audit" / "commands"
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("[a-z]*.py")}
    parts = [name for name, text in texts.items() if not re.search(r"^[A-Z_]+ = Command\(", text, re.MULTILINE)]
    assert "base" in parts
    assert [name for name in parts if not any(f"{PACKAGE}.{name} import" in text for text in texts.values())] == []


WRONG = {
    "no group": ('Command("wrong", group="", order=1, call=work)', "wrong: no group ''"),
    "a group that nobody knows": ('Command("wrong", group="Odds", order=1, call=work)', "wrong: no group 'Odds'"),
    "a taken place": ('Command("wrong", group="Look", order=1, call=work)', "wrong: another is at its place"),
    "a summary that is cut": (
        'Command("wrong", group="Look", order=9, call=talk)',
        "wrong: a summary of 70 characters",
    ),
    "no summary": ('Command("wrong", group="Look", order=9, call=mute)', "wrong: a summary of 0 characters"),
    "nothing to do": ('Command("wrong", group="Look", order=9, help="Nothing.")', "wrong: does nothing and holds"),
    "a name of two words": ('Command("so wrong", group="Look", order=9, call=work)', "so wrong: no word to type"),
}
PLANTED = '''
from kvaudit.audit.commands.base import Command
def work() -> None:
    """Work."""
def talk() -> None:
    """{long}"""
def mute() -> None:
    pass
COMMAND = {command}
'''


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a package of commands, which is forgotten again."""
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    yield tmp_path / "planted"
    for name in [name for name in sys.modules if name.partition(".")[0] == "planted"]:
        del sys.modules[name]


@pytest.mark.parametrize(("command", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_command_is_caught(command: str, said: str, planted: Path) -> None:
    (planted / "wrong.py").write_text(PLANTED.format(command=command, long="x" * 70))
    (wrong,) = load_commands("planted")
    (fault,) = faults(wrong, [*FOUND, wrong])
    assert fault.startswith(said)


def test_a_command_that_imports_torch_is_caught(planted: Path) -> None:
    (planted / "wrong.py").write_text("import torch\n")
    (planted / "right.py").write_text("")
    (planted.parent / "torch.py").touch()  # found before the real one, which takes seconds
    assert heavy_imports("planted") == {"right": [], "wrong": ["torch"]}


def test_the_help_fits_a_screen_and_cuts_no_summary() -> None:
    lines = CliRunner().invoke(app, ["--help"], terminal_width=COLUMNS).stdout.splitlines()
    assert len(lines) < LINES  # and a line for the prompt
    assert max(map(len, lines)) <= COLUMNS
    assert not [line for line in lines if line.endswith("...") and "COMMAND" not in line]
    shown = [line.split()[0] for line in lines if line.startswith("  ") and line[2:3].islower()]
    assert shown == [command.name for command in FOUND if command.group in HELP_HEADINGS]
    assert [line[:-1] for line in lines if line.endswith(":")] == list(HELP_HEADINGS)
    assert len(shown) <= 22


@pytest.mark.parametrize("command", [one for one in FOUND if one.call is None], ids=lambda one: one.name)
def test_a_command_that_holds_others_lists_them(command: Command) -> None:
    lines = CliRunner().invoke(app, [command.name, "--help"], terminal_width=COLUMNS).stdout.splitlines()
    for one in (one for one in FOUND if one.group == command.name):
        summary = one.help_text.partition("\n")[0].rstrip(".")
        assert [line for line in lines if line.split() == [one.name, *summary.split()]]


def test_no_help_labels_a_value_as_a_list() -> None:
    commands = [[]] + [[one.group, one.name] if one.group in HOLDERS else [one.name] for one in FOUND]
    commands += [[one.name, name] for one in FOUND for name, _ in subcommands(one)]
    helps = {" ".join(words): CliRunner().invoke(app, [*words, "--help"], terminal_width=COLUMNS) for words in commands}
    assert {name for name, done in helps.items() if done.exit_code or "list[" in done.stdout} == set()
    assert "  --set NAME=VALUE  " in helps["check"].stdout
    assert "  RUN <path>  " in helps["gate"].stdout
    assert "  names... <str>  " in helps["data fetch"].stdout


@pytest.mark.parametrize("old", FORMER)
def test_every_former_name_is_there_or_says_what_is_typed_now(old: str) -> None:
    named = [command.name for command in FOUND if command.group in HELP_HEADINGS]
    assert (old in named) + (old in RENAMED) + (old in REMOVED_COMMANDS) == 1


@pytest.mark.parametrize("old", RENAMED)
def test_a_former_name_says_the_new_one_and_does_the_same(old: str, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "none")
    words = {"lm-eval": ["--tasks"]}.get(old, [nowhere])
    before, now = (CliRunner().invoke(app, [*name.split(), *words]) for name in (old, RENAMED[old]))
    assert (before.exit_code, before.stdout) == (now.exit_code, now.stdout)
    first, _, rest = before.stderr.partition("\n")
    assert first == f"kvaudit {old} is now kvaudit {RENAMED[old]}; the old name will be removed in 0.2"
    assert rest == now.stderr
    assert now.exit_code == 2


@pytest.mark.parametrize("name", REMOVED_COMMANDS)
def test_a_removed_command_is_refused_with_what_to_do_instead(name: str) -> None:
    done = CliRunner().invoke(app, [*name.split(), "--fast"])
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(rf"error: {name} is no longer a command of kvaudit; .{{20,}}", line)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--join", "none", "--limit", "2"], "--limit has no effect with --join; leave one"),
        (["run", "--join", "none", "--only", "train"], "--only has no effect with --join"),
        (["run", "--only", "train", "none", "--workers", "2"], "--workers has no effect with --only train"),
        (["run", "--only", "trian", "none"], "unknown phase of --only 'trian'. Did you mean 'train'?"),
        (["gate", "one", "two"], "gate takes one run"),
        (["gate", "one", "--out", "pin.json"], "--out need --pin"),
        (["gate", "--pin", "one", "--waivers", "w.yaml"], "--pin gives no verdict"),
        (["card", "one", "two"], "a second run needs --recipe"),
        (["card", "one", "--recipe", "--arm", "a"], "goes with no other option"),
        (["init", "adit"], "unknown kind of file 'adit'. Did you mean 'audit'?"),
        (["init", "audit", "embedded"], "init audit takes no model"),
        (["init", "check"], "init check needs the model"),
        (["init", "audit", "--seed", "0"], "init audit takes no model and no option but --out"),
    ],
)
def test_options_that_mean_nothing_together_are_refused(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, words)
    (line,) = done.stderr.splitlines()
    assert (done.exit_code, line.startswith("error: "), said in line) == (2, True, True), line


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["check", "embedded", "--engine", "vllm", "--policy", "int8", "--engine=openvino"], "--engine"),
        (["run", "spec.yaml", "--threads", "1", "--threads", "1"], "--threads"),
        (["replay", "verify", "--model", "a", "--dtype", "auto", "--model", "b"], "--model"),
        (["list", "judges", "--card", "phrases", "--card", "logistic"], "--card"),
        (["data", "fetch", "xstest", "--from", "http://a", "--from", "http://b"], "--from"),
    ],
)
def test_an_option_given_twice_that_has_one_value_is_refused(words: list[str], option: str) -> None:
    done = CliRunner().invoke(app, words)
    line = f"error: {option} is given more than once, but only one value counts; give it once\n"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", line)


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--rate", "--rate"],  # "--rate" is the value of --rate
        ["init", "nothing", "--resume", "--resume"],
        ["scan", "none", "none"],
        ["list", "policies", "--plugin", "a.py", "--plugin", "b.py"],
        ["gate", "none", "--pin", "--pin"],
    ],
)
def test_flags_lists_and_wrong_arguments_are_not_called_given_twice(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "more than once" not in done.stderr


def test_commands_share_options_by_one_declaration() -> None:
    group: Any = typer.main.get_command(app)
    check, init = ({p.name: p.help for p in group.commands[name].params} for name in ("check", "init"))
    assert {name: text for name, text in init.items() if name in check and name not in ("model", "out")}.items() <= (
        check.items()
    )
    assert {"engine", "kv", "settings", "made_up", "data"} <= set(init)
