"""Speculation from the command line: the same text, what is printed of it, tuning, and requests that cannot be met."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import edgeinfer as package
from edgeinfer.apps.cli.main import main
from edgeinfer.runtime.tuning import drafting_search
from edgeinfer.tools import devices
from tests.cache import export_checkpoint
from tests.cli import edgeinfer, refuses
from tests.edgeinfer.conftest import made_up_stopwatch
from tests.factories import make_checkpoint, make_tokenizer
from tests.speculation import BUILTIN, DENSE, PROMPT, needs_builtin

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
        "--speculation copy,recycle",
        "--speculation ngram,bits --draft-width 3",
        "--speculation exit,skip --draft-max 2",
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
    typical = run_json(
        capsys, "-n", "20", "--speculation", "copy", "--verification", "typical", "--temperature", "1", "--seed", "1"
    )
    assert (typical["verification"], typical["lossless"], typical["exact"]) == ("typical", False, False)
    short = run_json(capsys, "-n", "60", "--draft-max", "2")
    assert short["mode"] == "auto" and len(short["accepted_per_position"]) <= 2


@needs_builtin
def test_verbose_tells_tokens_per_pass(capsys: Capture) -> None:
    assert main(["run", "-p", PROMPT, "-n", "20", "-v", "-t", "1", "--speculation", "copy,ngram"]) == 0
    assert " tokens per pass, " in capsys.readouterr().err
    assert main(["run", "-p", PROMPT, "-n", "20", "-v", "-t", "1", "--speculation", "off"]) == 0
    assert "per pass" not in capsys.readouterr().err


@needs_builtin
@pytest.mark.parametrize("asked", [("--raw",), ()], ids=["text", "chat"])
@pytest.mark.parametrize("who", ["off", "auto", "forced"])
def test_a_choice(capsys: Capture, who: str, asked: tuple[str, ...]) -> None:
    choices = ("yes", "no, never", "no")
    options = [option for text in choices for option in ("--choice", text)]
    out = run(capsys, "run", "-p", "Is it?", "--speculation", who, *asked, *options)
    assert out.rstrip("\n") in choices


@needs_builtin
def test_a_choice_with_a_stop_token_is_refused() -> None:
    asked = ("run", "--raw", "-p", "Is it?", "--choice", "yes<|end|>")
    refuses(2, "stop token inside", edgeinfer(*asked, "--parse-special"))
    assert edgeinfer(*asked).stdout == b"yes<|end|>\n"


@needs_builtin
def test_what_is_kept_and_what_is_not(capsys: Capture, cache: Path) -> None:
    first = run(capsys, "run", "-p", PROMPT, "-n", "20", "--no-remember")
    assert not cache.exists()
    assert run(capsys, "run", "-p", PROMPT, "-n", "20") == first
    kept = {path.name for path in cache.rglob("*") if path.is_file()}
    assert {"costs.json", "acceptance.npz", "ngram.npz", "recycle.npz"} <= kept
    for path in cache.rglob("costs.json"):
        path.write_text("{")
    assert main(["run", "-p", PROMPT, "-n", "20", "-t", "1", "--speculation", "copy"]) == 0
    assert capsys.readouterr().out == first


def test_a_chat_with_drafts(capsys: Capture, small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = []
    for options in ("--speculation off", "--speculation copy,recycle --draft-width 2", "--no-remember"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\nHello\n")))
        replies.append(
            run(capsys, "chat", "--terminal", "-m", small_bundle, "--seed", "1", "-n", "30", *options.split())
        )
    assert replies[0] and len(set(replies)) == 1


# Planning.


def plan_json(capsys: Capture, *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(run(capsys, "plan", "--json", *arguments, code=code))
    return data


def test_a_plan_counts_what_drafts(capsys: Capture, small_bundle: Path, short_drafter: Path) -> None:
    plans = {
        name: plan_json(capsys, "-m", small_bundle, *options.split())
        for name, options in {
            "auto": "",
            "off": "--speculation off",
            "short": "--draft-max 2",
            "copy": "--speculation copy",
            "model": f"--draft-model {short_drafter}",
        }.items()
    }
    assert {name: plan["choice"]["draft_max"] for name, plan in plans.items()} == {
        "auto": 15,
        "off": 0,
        "short": 2,
        "copy": 15,
        "model": 15,
    }
    drafting = {name: plan["terms"].get("drafting", 0) for name, plan in plans.items()}
    assert drafting["model"] >= drafting["auto"] > drafting["short"] > 0 == drafting["off"]
    assert 0 < drafting["copy"] < drafting["auto"]
    assert [name for name, plan in plans.items() if "draft_model" in plan["terms"]] == ["model"]
    table = run(capsys, "plan", "-v", "-m", small_bundle, "--draft-model", short_drafter)
    assert "draft model " in table and "drafting " in table


def test_a_budget_without_room_for_drafts(capsys: Capture, small_bundle: Path) -> None:
    for options in ("--speculation copy", "--draft-max 15"):
        plan = plan_json(capsys, "-m", small_bundle, "--memory", "1MB", *options.split(), code=4)
        assert plan["terms"]["drafting"] > 0
    plan = plan_json(capsys, "-m", small_bundle, "--memory", "1MB", code=4)
    assert plan["planned_bytes"] == plan["minimum_bytes"] == min(way["planned_bytes"] for way in plan["alternatives"])
    done = edgeinfer("run", "-m", small_bundle, "-p", "Once", "--memory", "1MB", "--speculation", "copy")
    refuses(4, "The model needs", done)


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
    command = ("tune", "-m", small_bundle, "--text", tmp_path / "prompts.txt", "--evaluations", "5")
    found = json.loads(run(capsys, *command, "--json", "--seed", "2"))
    assert set(found) == {"exit", "skip", "kept", "device"}
    assert found["kept"] == {"exit": kept, "skip": kept}
    for name in ("exit", "skip"):
        result = found[name]
        assert set(result) == {
            "layers",
            "layer_mask",
            "match_rate",
            "predicted_speedup",
            "draft_length",
            "sets_tried",
        }
        assert len(result["layer_mask"]) == 6 and set(result["layer_mask"]) <= {True, False}
        assert 0 <= result["match_rate"] <= 1 and result["predicted_speedup"] > 0
    assert found["exit"]["layer_mask"] == [layer < found["exit"]["layers"] for layer in (0, 0, 1, 1, 2, 2)]
    assert (found["exit"]["sets_tried"], found["skip"]["sets_tried"]) == (2, 5)
    # The next session drafts with what was found.
    with package.load(small_bundle, threads=1) as model:
        assert {"exit", "skip"} & set(package.tools.drafting_state(model)) == ({"exit", "skip"} if kept else set())
    options = ("-m", small_bundle, "-n", "30")
    assert run_json(capsys, *options)["mode"] == "auto"
    texts = {
        run(capsys, "run", "-p", PROMPT, *options, "--speculation", who) for who in ("off", "auto", "exit", "skip")
    }
    assert len(texts) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("tuned_device")
@pytest.mark.parametrize("kept", [True, False])
def test_what_tuning_prints_of_layers(
    capsys: Capture, small_bundle: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.setattr(drafting_search, "_PAYS", 0.0 if kept else 1e9)
    assert main(["tune", "-m", str(small_bundle), "-t", "1", "--evaluations", "5"]) == 0
    table = capsys.readouterr().out
    for line in ("exit after layer", "blocks skipped", "sets tried", "kept for auto" if kept else "does not pay"):
        assert line in table


@pytest.mark.usefixtures("tuned_device")
def test_tuning_by_prompts_of_its_own(capsys: Capture, small_bundle: Path) -> None:
    found = json.loads(run(capsys, "tune", "-m", small_bundle, "--evaluations", "1", "--granularity", "2", "--json"))
    assert found["skip"]["sets_tried"] == 1
    assert found["exit"]["layers"] == 2


@pytest.mark.usefixtures("tuned_device")
def test_tuning_that_cannot_be(small_bundle: Path, bigrams: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "blank").write_text("\n \n")
    for code, says, options in (
        (2, "must be at least 1", ("--evaluations", "0")),
        (2, "no exit after every", ("--granularity", "3")),
        (2, "Cannot read", ("--text", tmp_path / "missing")),
        (2, "not UTF-8", ("--text", tmp_path / "latin")),
        (2, "contains no prompts", ("--text", tmp_path / "blank")),
        (2, "context", ("-c", "16")),
        (2, "Unknown drafter", ("--speculation", "nonsense")),
        (3, "No model at", ("-m", "nowhere")),
        (2, "cannot skip layers", ("-m", bigrams)),
    ):
        assert main(["tune", "-m", str(small_bundle), "-t", "1", *map(str, options)]) == code
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert says in err and err.startswith("error: ") and "unexpected" not in err


# What cannot be done.


def test_draft_models_that_do_not_fit(small_bundle: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "merges", "llama")
    make_tokenizer(tmp_path / "merges", sentences=["all the other words of another language"] * 3)
    make_checkpoint(tmp_path / "vocabulary", "llama", vocab_size=256)
    damaged = shutil.copytree(small_bundle, tmp_path / "damaged")
    (damaged / "weights.bin").write_bytes(b"short")
    cases: dict[str, str | Path] = {
        "have tokenizers with different": export_checkpoint(tmp_path / "merges", tmp_path / "other"),
        "tokens and 256 logits": export_checkpoint(tmp_path / "vocabulary", tmp_path / "narrow"),
        "weights.bin": damaged,
        "No model at": "nowhere",
        "is not a bundle": tmp_path,
    }
    for says, model in cases.items():
        refuses(3, says, edgeinfer("run", "-m", small_bundle, "-p", "Once", "--draft-model", model))
    refuses(3, "No model at", edgeinfer("plan", "-m", small_bundle, "--draft-model", "nowhere"))


CANNOT: dict[str, tuple[str, int, str, str]] = {
    "unknown": ("small", 2, "Unknown drafter 'nonsense'", "--speculation nonsense"),
    "without-its-model": ("small", 2, "No draft model was given", "--speculation model"),
    "hierarchy-without-a-model": ("small", 2, "No draft model was given", "--speculation copy,model"),
    "planes-of-four-bits": ("small", 2, "cannot read one plane", "--speculation bits"),
    "exit-of-a-closed-graph": ("bigrams", 2, "cannot leave a pass early", "--speculation exit"),
    "layers-of-a-closed-graph": ("bigrams", 2, "cannot skip layers", "--speculation copy,skip"),
    "trees-of-a-closed-graph": ("bigrams", 2, "cannot verify trees", "--draft-width 2"),
    "no-draft": ("small", 2, "--draft-max 0 is out of range", "--draft-max 0"),
    "endless-draft": ("small", 2, "--draft-max 1000 is out of range", "--draft-max 1000"),
    "endless-width": ("small", 2, "--draft-width 100 is out of range", "--draft-width 100"),
    "unknown-verification": ("small", 2, "--verification", "--verification hope"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_cannot_be_done_is_one_line(small_bundle: Path, bigrams: Path, name: str) -> None:
    which, code, says, options = CANNOT[name]
    bundle = {"small": small_bundle, "bigrams": bigrams}[which]
    refuses(code, says, edgeinfer("run", "-m", bundle, "-p", "Once", "-n", "4", *options.split()))


FILLING = ("run", "--raw", "-p", "the dog " * 15, "-n", "500", "-c", "80")


@pytest.fixture(scope="module")
def filled(small_bundle: Path) -> str:
    """What FILLING prints without drafts."""
    done = edgeinfer(*FILLING, "-m", small_bundle, "--speculation", "off", "-t", "1")
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


@pytest.mark.parametrize("who", [who for who in DENSE if who != "bits"])
def test_drafts_longer_than_what_is_left(
    capsys: Capture, small_bundle: Path, short_drafter: Path, filled: str, who: str
) -> None:
    """They are clipped; also by a draft model that holds less than the model."""
    options = ("--speculation", who, "--draft-max", "63", "--draft-model", short_drafter)
    assert run(capsys, *FILLING, "-m", small_bundle, *options) == filled
