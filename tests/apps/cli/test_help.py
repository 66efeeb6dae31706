"""Help of two levels, flags named as in Python, and suggestions for misspelt words."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeinfer.apps.cli.main import COMMANDS, build_parser, main
from edgeinfer.apps.cli.parser import Parser, help_text, usage
from edgeinfer.core.options import options_of
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.options.reply import ReplyOptions
from tests.cli import TIME_LIMIT, command, edgeinfer, environment, refuses
from tests.recorded import check_recorded

SCREEN_LINES, SCREEN_COLUMNS = 45, 80
DECLARED = {**options_of(LoadOptions), **options_of(ReplyOptions)}


@pytest.fixture(scope="module")
def parsers() -> list[Parser]:
    """The parsers of all commands and subcommands."""
    return list(nested(build_parser()))


def nested(parser: Parser) -> Iterator[Parser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield each
                yield from nested(each)


@pytest.fixture(autouse=True)
def screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(SCREEN_COLUMNS))


def lines(text: str) -> int:
    """Lines on a screen, which wraps longer ones."""
    return sum(max(1, -(-len(line) // SCREEN_COLUMNS)) for line in text.splitlines())


def shown(parser: Parser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.help is not argparse.SUPPRESS]


def test_short_help_fits_a_screen_and_the_long_one_shows_all(parsers: list[Parser]) -> None:
    for parser in parsers:
        short, long = parser.format_help(), parser.format_help_all()
        assert lines(short) <= SCREEN_LINES, f"{parser.prog} --help has {lines(short)} lines"
        assert short.startswith(f"usage: {parser.prog} ") and lines(short.partition("\n\n")[0]) <= 2
        assert f"All options: {parser.prog} --help-all" in short or short.count("--") + 1 == long.count("--")
        for action in shown(parser):
            for flag in action.option_strings:
                assert flag in long, f"{parser.prog} --help-all leaves out {flag}"
                assert action.help, f"{parser.prog} {flag} has no help"


def test_arguments_of_every_kind_are_laid_out_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser("tool", description="Does it.\n\n" + "word " * 40, epilog="example:\n  tool a b")
    parser.add_argument("place", help="where " * 20)
    parser.add_argument("maybe", nargs="?", metavar="MAYBE", help="or not")
    parser.add_argument("some", nargs="*")
    parser.add_argument("more", nargs="+", choices=["a", "b"])
    group = parser.add_argument_group("numbers")
    brief = group.add_argument("-n", "--number", type=int, required=True, help="a long text about a number " * 4)
    group.add_argument("--pair", nargs=2, metavar=("A", "B"), help="two of them")
    left = group.add_argument("--hidden", help="not shown here")
    parser.add_argument("--flag", action="store_true", help="on or off")
    commands = parser.add_subparsers(metavar="COMMAND")
    commands.add_parser("run", help="runs")
    found = {}
    for columns in (40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        found[str(columns)] = help_text(parser, {left}, {brief: "a number"}).splitlines()
    check_recorded("help", found | {"usage": usage(parser)})


def test_what_the_short_help_of_a_model_shows(capsys: pytest.CaptureFixture[str]) -> None:
    basic = ("--model", "--max-tokens", "--temperature", "--memory", "--context", "--threads", "--json-schema")
    for name in ("run", "chat"):
        assert main([name, "--help"]) == 0
        text = capsys.readouterr().out
        for flag in (*basic, "--speculation"):
            assert f"{flag} " in text, flag
        for rare in ("--beams", "--verification", "--kv ", "--top-k"):
            assert rare not in text, rare
        assert text.rstrip().splitlines()[-1] == f"All options: edgeinfer {name} --help-all"
        assert main([name, "--help-all"]) == 0
        assert "--beams" in capsys.readouterr().out


def test_help_of_chats_tells_what_they_sample_at(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, texts in (("--help", ["0.7 lively"]), ("--help-all", ["above 1 is wild", "add up to P"])):
        assert main(["chat", flag]) == 0
        told = " ".join(capsys.readouterr().out.split())
        for text, value in zip(texts, ("0.7", "0.9"), strict=False):
            assert f"{text} (default: {value}, or the model's)" in told


def test_every_option_of_a_reply_has_a_flag() -> None:
    # Log-probabilities belong to chunks, which a command does not print.
    assert {name for name, option in options_of(ReplyOptions).items() if not option.flags} == {
        "logprobs",
        "checker",
    }


def test_mistakes_are_told_with_what_was_meant() -> None:
    for line, says in {
        "run --memroy 1GB Hi": "No such option: --memroy. Did you mean --memory?",
        "run --temprature=1 Hi": "No such option: --temprature. Did you mean --temperature?",
        "run --repeat-penalti 1 Hi": "Did you mean --repetition-penalty?",
        "run --kv in8 Hi": "--kv cannot be 'in8'. Did you mean int8?",
        "run --zzzzz Hi": "See: edgeinfer run --help-all",
        "rnu Hi": "No such command: rnu. Did you mean run?",
        "download x": "Did you mean pull?",
        "qqqq": "edgeinfer --help lists all commands.",
        "bench sped": "Did you mean speed?",
        "export --forse": "No such option: --forse. Did you mean --force?",
        "run -n 0 Hi": "--max-tokens 0 is out of range. --max-tokens must be a whole number",
        "run --temperature 999 Hi": "--temperature 999.0 is out of range.",
        "run --memory 400 Hi": "--memory 400 means 400 bytes. Did you mean 400MB?",
        "run --json-object --regex a Hi": "--json-object and --regex cannot be combined.",
        "run --speculation ngrm Hi": "Did you mean 'ngram'? --speculation can be auto, off,",
        "run -n many Hi": "--max-tokens: 'many' is not a whole number.",
        "run hello you": 'Put it in quotes: edgeinfer run "hello you"',
        "run org/name Hello": 'Did you mean: edgeinfer run -m org/name "Hello"?',
    }.items():
        refuses(2, says, edgeinfer(*line.split()))


def test_greeting_and_overview() -> None:
    greeting = edgeinfer().stdout.decode()
    assert greeting.count("\n  edgeinfer ") == 3 and lines(greeting) < 10
    overview = edgeinfer("--help").stdout.decode()
    assert lines(overview) <= SCREEN_LINES
    for name, text in COMMANDS.items():
        assert f"  {name} " in overview and text in overview
    assert edgeinfer("help").stdout.decode() == overview
    assert edgeinfer("help", "devices").stdout == edgeinfer("devices", "--help").stdout


@pytest.mark.slow
def test_a_shell_completes_commands_options_values_and_models(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    for line, some in {
        "edgeinfer ru": {"run"},
        "edgeinfer run --json-s": {"--json-schema"},
        "edgeinfer run --kv int": {"int8", "int4"},
        "edgeinfer plan -m tal": {"tales"},
        "edgeinfer bench spe": {"speed", "spec"},
    }.items():
        told = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": "bash", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line}
        told |= {"COMP_POINT": str(len(line)), "COMP_TYPE": "9", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "told")}
        done = subprocess.run(command(), env=environment() | told, capture_output=True, check=False, timeout=TIME_LIMIT)
        assert done.stdout == done.stderr == b""
        assert {word.strip() for word in (tmp_path / "told").read_text().split("\n")} == some, line
    for shell in ("bash", "zsh", "fish"):
        assert b"edgeinfer" in edgeinfer("completion", shell).stdout


def test_models_that_are_not_here_are_said_before_anything_is_asked() -> None:
    refuses(3, "There is no model nothing-here", edgeinfer("models", "rm", "nothing-here"))
    refuses(2, "comes with edgeinfer", edgeinfer("models", "rm", "tales"))
