"""Speculation from the command line: the same text, what is printed of it, tuning, and requests that cannot be met."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import edgeinfer as package
from edgeinfer.apps.cli.main import main
from edgeinfer.runtime.tuning import drafting_search
from edgeinfer.tools import devices
from tests.cli import edgeinfer, refuses
from tests.edgeinfer.conftest import made_up_stopwatch
from tests.speculation import BUILTIN, PROMPT, needs_builtin

Capture = pytest.CaptureFixture[str]
GREEDY = ("run", "--raw", "-p", PROMPT, "-n", "30")
SAMPLED = (*GREEDY, "--temperature", "0.9", "--seed", "4", "--repetition-penalty", "1.1", "--stop", "zzz")


pytestmark = pytest.mark.usefixtures("cache", "told_costs")


def run(capsys: Capture, *arguments: str | Path, code: int = 0) -> str:
    """Return a command's stdout; stderr may only tell why the reply ended. One thread, so that load matters less."""
    assert main([*map(str, arguments), *(() if arguments[0] == "plan" else ("-t", "1"))]) == code
    out, err = capsys.readouterr()
    assert all(line.startswith("[") and line.endswith("for more]") for line in err.splitlines())
    return out


def run_json(capsys: Capture, *arguments: str | Path) -> dict[str, Any]:
    """The speculation of `edgeinfer run --json`, its figures checked."""
    data: dict[str, Any] = json.loads(run(capsys, "run", "-p", PROMPT, "--json", *arguments))
    found: dict[str, Any] = data["speculation"]
    assert found["rounds"] == found["recovered"] + found["bonus"] == sum(found["choices"].values())
    assert found["drafted"] == sum(use["drafted"] for use in found["per_drafter"].values())
    assert found["accepted"] == sum(found["accepted_per_position"])
    return found


@pytest.fixture(scope="module")
def plain_texts() -> tuple[str, str]:
    """What GREEDY and SAMPLED print without drafts."""
    with package.load(threads=1, speculation="off") as model:
        greedy = model.generate(PROMPT, max_tokens=30).text
        sampled = model.generate(PROMPT, max_tokens=30, temperature=0.9, seed=4, repetition_penalty=1.1).text
    return f"{PROMPT}{greedy}\n", f"{PROMPT}{sampled}\n"


@needs_builtin
@pytest.mark.parametrize(
    "options",
    [
        "--speculation auto",
        "--speculation ngram,bits --draft-width 3",
        f"--draft-model {BUILTIN}",
        f"--speculation model --draft-model {BUILTIN} --draft-max 63",
        f"--speculation off --draft-model {BUILTIN}",
        "--verification rejection",
    ],
)
def test_the_text_stays_the_same(capsys: Capture, plain_texts: tuple[str, str], options: str) -> None:
    for command, expected in zip((GREEDY, SAMPLED), plain_texts, strict=True):
        if command is GREEDY or "rejection" not in options:
            assert run(capsys, *command, *options.split()) == expected


@needs_builtin
def test_json_tells_who_drafted(capsys: Capture) -> None:
    off = run_json(capsys, "-n", "20", "--speculation", "off")
    assert (off["mode"], off["rounds"], off["per_drafter"]) == ("off", 0, {})
    model = run_json(capsys, "-n", "40", "--speculation", "copy,model", "--draft-model", BUILTIN)
    assert (model["mode"], model["exact"], model["lossless"], model["verification"]) == (
        "copy,model",
        True,
        True,
        "keyed",
    )
    assert set(model["per_drafter"]) <= {"copy", "model"}
    assert run_json(capsys, "-n", "20", "--no-exact", "--speculation", "copy")["exact"] is None
    drawn = run_json(
        capsys, "-n", "20", "--speculation", "copy", "--verification", "rejection", "--temperature", "1", "--seed", "1"
    )
    assert (drawn["verification"], drawn["lossless"], drawn["exact"]) == ("rejection", True, False)
    short = run_json(capsys, "-n", "60", "--draft-max", "2")
    assert short["mode"] == "auto" and len(short["accepted_per_position"]) <= 2


@needs_builtin
def test_verbose_tells_tokens_per_pass(capsys: Capture) -> None:
    assert main(["run", "-p", PROMPT, "-n", "20", "-v", "-t", "1", "--speculation", "copy,ngram"]) == 0
    assert " tokens per pass, " in capsys.readouterr().err
    assert main(["run", "-p", PROMPT, "-n", "20", "-v", "-t", "1", "--speculation", "off"]) == 0
    assert "per pass" not in capsys.readouterr().err


@needs_builtin
def test_a_choice_with_a_stop_token_is_refused() -> None:
    asked = ("run", "--raw", "-p", "Is it?", "--choice", "yes<|end|>")
    refuses(2, "stop token inside", edgeinfer(*asked, "--parse-special"))
    assert edgeinfer(*asked).stdout == b"yes<|end|>\n"


def test_a_chat_with_drafts(capsys: Capture, small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = []
    for options in ("--speculation off", "--speculation copy,recycle --draft-width 2", "--no-remember"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\nHello\n")))
        replies.append(
            run(capsys, "chat", "--terminal", "-m", small_bundle, "--seed", "1", "-n", "30", *options.split())
        )
    assert replies[0] and len(set(replies)) == 1


# Tuning.


@pytest.fixture
def tuned_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which all settings do as well: what is tuned here are layers."""
    monkeypatch.setattr(devices, "Stopwatch", made_up_stopwatch(lambda way: 1.0))


@pytest.mark.usefixtures("tuned_device")
@pytest.mark.parametrize("kept", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_tuning(
    capsys: Capture, small_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.setattr(drafting_search, "_PAYS", 0.0 if kept else 1e9)
    (tmp_path / "prompts.txt").write_text("Once upon a time\n\n  \nShe said: the cat\n")
    command = (
        "tune",
        "-m",
        str(small_bundle),
        "-t",
        "1",
        "--text",
        str(tmp_path / "prompts.txt"),
    )
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"exit", "kept", "device"}
    assert found["kept"] == {"exit": kept}
    assert found["exit"]["layers"] in (1, 2) and found["exit"]["exits_tried"] == 2
    assert main([*command]) == 0
    table = capsys.readouterr().out
    for line in ("exit after layer", "exits tried", "kept for auto" if kept else "does not pay"):
        assert line in table
