"""`bench spec`: order of replies, what counts as the same text, statistics, the section, and the command."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.apps.bench.render import print_section
from edgeinfer.apps.bench.spec import (
    CONTROL,
    Mode,
    PromptFigures,
    SpecOptions,
    make_modes,
    measure,
    prompt_figures,
    spec_section,
    speedups,
    tokens_per_pass,
)
from edgeinfer.apps.bench.texts import Prompt, TokenizedPrompt
from edgeinfer.apps.cli.main import main
from edgeinfer.core.errors import CapabilityError
from edgeinfer.core.results import MemoryUse, ModelInfo, Result, SpeculationUse, Timings, Usage
from tests.tables import each_row

INFO = ModelInfo("stub", "Stub", 1, 4.0, "stub", "stub")
SETUP = {"threads": 1, "kernel": "kernel", "model": "stub", "options": {"repeats": 1}}


class StubModel:
    """Says prompt + 1, + 2, ...; "bits" cannot run, "lossy" is lossy and says something else, "copy" is wrong. What it
    knows is the list of first tokens it was asked to continue."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], dict[str, Any], list[int]]] = []
        self.known: list[int] = []

    def generate(self, prompt: Sequence[int], **options: Any) -> Result:
        if options["speculation"] == "bits":
            raise CapabilityError("No second plane.", "Load another bundle.")
        self.calls.append((list(prompt), options, list(self.known)))
        self.known.append(prompt[0])
        wrong = 1 if options["speculation"] in ("copy", "lossy") else 0
        ids = tuple(prompt[-1] + 1 + wrong + place for place in range(options["max_tokens"]))
        drafting = SpeculationUse(options["speculation"], lossless=options["speculation"] != "lossy", rounds=2)
        timings = Timings(0, 0, 0, 0.5 if options["speculation"] == "auto" else 1.0, 0, 0, 0, 0)
        usage, memory = Usage(len(prompt), len(ids)), MemoryUse(None, 0, 0, 0, 0)
        return Result("", ids, "length", usage, timings, memory, drafting, INFO)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A stub whose drafting state can be saved and restored."""
    monkeypatch.setattr(edgeinfer.tools, "drafting_state", lambda stub: list(stub.known), raising=False)
    restore = lambda stub, state: setattr(stub, "known", list(state))  # noqa: E731
    monkeypatch.setattr(edgeinfer.tools, "restore_drafting", restore, raising=False)
    yield StubModel()


def item(name: str, category: str = "a", first: int = 50, cut: int = 0) -> TokenizedPrompt:
    return TokenizedPrompt(Prompt(category, name, ()), (first, first + 1), cut)


def options(*modes: str, repeats: int = 2, **more: Any) -> SpecOptions:
    return SpecOptions(modes=modes, max_tokens=4, repeats=repeats, **more)


def quiet(done: int, total: int) -> None:
    """No progress."""


def replies_of(
    ms: dict[str, list[float]], name: str = "p", category: str = "a", tokens: int = 5, cut: int = 0, wrong: str = ""
) -> PromptFigures:
    """One prompt's figures: milliseconds per token by mode, in two rounds except for plain decoding."""
    replies = {
        mode: [
            {
                "token_ids": tuple(range(tokens)) if mode != wrong else (9,) * tokens,
                "ms_per_token": each,
                "rounds": tokens - 1 if mode == "off" else 2,
                "lossless": True,
                "details": {},
            }
            for each in every
        ]
        for mode, every in ms.items()
    }
    return prompt_figures(item(name, category, cut=cut), replies)


def shown(capsys: pytest.CaptureFixture[str], *prompts: PromptFigures, model: str = "stub", skipped: str = "") -> str:
    reasons = {"bits": skipped} if skipped else {}
    data = {"setup": SETUP | {"model": model}, "modes": list(prompts[0]["modes"]), "skipped": reasons}
    print_section(spec_section(data | {"prompts": prompts}))
    return capsys.readouterr().out


def test_modes_take_turns_and_each_starts_elsewhere(model: Any) -> None:
    assert SpecOptions(modes=("auto", "copy", "auto")).modes == ("off", "auto", "copy")
    modes = make_modes(model, options("auto", control=True), {})
    assert [mode.name for mode in modes] == ["off", "auto", CONTROL]
    model.calls.clear()
    list(measure([item("p", first=50), item("q", first=60)], modes, 2, quiet))
    asked = [(prompt[0], given["speculation"]) for prompt, given, _ in model.calls if prompt[0] in (50, 60)]
    first, second, third = [("off", "auto", "off"), ("auto", "off", "off"), ("off", "off", "auto")]
    assert asked == [(50, mode) for mode in (*first, *second)] + [(60, mode) for mode in (*second, *third)]


def test_caches_are_emptied_before_each_reply(model: Any) -> None:
    """A reply to another first token, by the same drafters, lies between any two."""
    modes = make_modes(model, options("auto"), {})
    model.calls.clear()
    list(measure([item("p", first=0)], modes, 1, quiet))
    asked = [(prompt[0], given["speculation"], given["max_tokens"]) for prompt, given, _ in model.calls]
    assert asked == [(1, "off", 2), (0, "off", 4), (1, "auto", 2), (0, "auto", 4)]


def test_drafters_know_earlier_prompts_but_neither_repeats_nor_other_modes(model: Any) -> None:
    model.known = [7]
    modes = make_modes(model, options("auto"), {})
    model.calls.clear()
    list(measure([item("p", first=50), item("q", first=60)], modes, 2, quiet))
    known = [(prompt[0], known) for prompt, _, known in model.calls if prompt[0] in (50, 60)]
    assert known == [(50, [7])] * 4 + [(60, [7, 50])] * 4


def test_drafters_joined_by_a_plus_are_given_as_a_list_with_the_rule_and_width(model: Any) -> None:
    Mode(model, "ngram+recycle", options(verification="rejection", draft_width=2)).reply([5, 6])
    given = model.calls[-1][1]
    assert (given["speculation"], given["verification"], given["draft_width"]) == ("ngram,recycle", "rejection", 2)
    Mode(model, "off", options(verification="rejection")).reply([5, 6])
    assert "verification" not in model.calls[-1][1]


def test_a_mode_that_cannot_run_is_skipped_with_its_reason(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    skipped: dict[str, str] = {}
    assert [mode.name for mode in make_modes(model, options("bits", "auto"), skipped)] == ["off", "auto"]
    assert skipped == {"bits": "No second plane. Load another bundle."}

    def broken(prompt: Sequence[int], **given: Any) -> Result:
        raise CapabilityError("Broken.")

    monkeypatch.setattr(model, "generate", broken)
    with pytest.raises(CapabilityError):
        make_modes(model, options("auto"), {})


def test_replies_that_differ_are_counted_unless_the_mode_is_lossy(model: Any) -> None:
    modes = make_modes(model, options("copy", "lossy", "auto"), {})
    (found,) = measure([item("p")], modes, 3, quiet)
    wrong = {name: figures["mismatches"] for name, figures in found["modes"].items()}
    assert wrong == {"off": 0, "copy": 3, "lossy": 0, "auto": 0}


def test_figures_are_medians_of_repeats_and_means_of_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = (
        replies_of({"off": [2.0, 9.0, 3.0], "auto": [1.0, 1.0, 8.0]}, "slow"),
        replies_of({"off": [8.0, 8.0, 8.0], "auto": [1.0, 1.0, 1.0]}, "fast"),
    )
    assert speedups(prompts, "auto") == {"slow": 3.0, "fast": 8.0}
    assert (tokens_per_pass(prompts, "auto"), tokens_per_pass(prompts, "off")) == (2.0, 1.0)
    text = shown(capsys, *prompts)
    assert "5.50 (least 3.00)" in text and "slow" in text
    # The geometric mean is over categories.
    more = [replies_of({"off": [2.0], "auto": [1.0]}, name, name) for name in "bcd"]
    text = shown(capsys, *more, replies_of({"off": [8.0], "auto": [1.0]}, "x", "gsm8k"))
    assert f"{(2 * 2 * 2 * 8) ** 0.25:.2f}" in next(line for line in text.splitlines() if "geometric mean" in line)


def test_replies_too_short_to_be_timed_are_left_out_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    long = replies_of({"off": [2.0], "auto": [1.0]}, "long")
    short = replies_of({"off": [0.0], "auto": [0.0]}, "short", "b", tokens=2)
    assert speedups([long, short], "auto") == {"long": 2.0}
    assert "1 prompts had replies of fewer than 3 tokens" in shown(capsys, long, short)


def test_the_report_hides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = replies_of({"off": [1.0], "auto": [1.25], CONTROL: [0.8]}, "bad#1", "tales/write", cut=9, wrong="auto")
    text = shown(capsys, wrong, skipped="No second plane.")
    assert "auto: 1 replies differ from those of plain decoding." in text
    assert "on every prompt: no, on 0 of 1. Slower on:\n  bad#1: 0.800\n" in text
    assert "bits: skipped: No second plane." in text and "1 prompts were cut at the front" in text
    assert "Noise: off is 1.250 to 1.250 times as fast as itself." in text and "repeats=1" in text
    assert "cost-expanded" not in text
    text = shown(capsys, replies_of({"off": [1.0], "auto": [0.5]}, "good#1"), model="tales-cost-expanded-huge")
    assert "on every prompt: yes, on 1 of 1." in text and "The model is cost-expanded" in text
    assert "Every lossless mode gave the tokens of plain decoding in every reply." in text


def test_the_command_on_the_built_in_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "spec.json"
    arguments = "--categories tales/write,tales/retell --per-category 1 -n 6 --repeats 2 -t 1 --modes auto --control"
    assert main(["bench", "spec", *arguments.split(), "--warm-up", "1", "--json", str(out)]) == 0
    assert "tales/retell" in capsys.readouterr().out
    data = json.loads(out.read_text())
    assert data["modes"] == ["off", "auto", CONTROL]
    assert [prompt["category"] for prompt in data["prompts"]] == ["tales/write", "tales/retell"]
    for prompt in data["prompts"]:
        for mode in prompt["modes"].values():
            assert len(mode["ms_per_token"]) == 2 and all(each > 0 for each in mode["ms_per_token"])
            assert mode["tokens"] == [6, 6] and mode["mismatches"] == 0
    assert (data["setup"]["threads"], data["setup"]["options"]["max_tokens"]) == (1, 6)


@each_row(
    ("arguments", "code", "says"),
    [
        (["--categories", "poetry"], 2, "poetry"),
        (["--data", "absent"], 2, "holds no prompts"),
        (["--json", "absent/spec.json"], 5, "no such folder"),
        (["-n", "100000"], 2, "fill the context"),
        (["-n", "2"], 2, "fewer than 3 tokens"),
        (["--repeats", "0"], 2, "repeats"),
        (["--temp", "-1"], 2, "temperature"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "spec", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert says in captured.err and captured.out == ""
