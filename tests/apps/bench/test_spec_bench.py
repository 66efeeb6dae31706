"""The speculation benchmark: order of replies, what counts as the same text, statistics, tables, the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.apps.bench.benchmark import BenchContext
from edgeinfer.apps.bench.prompts import Prompt, TokenizedPrompt, builtin_prompts
from edgeinfer.apps.bench.render import Table, print_section, section_markdown
from edgeinfer.apps.bench.spec import SpecOptions, run_spec
from edgeinfer.apps.bench.spec_modes import (
    EdgeInferMode,
    LlamaCppMode,
    ReplySettings,
    SpecConfig,
    edgeinfer_modes,
    llamacpp_modes,
    measure,
)
from edgeinfer.apps.bench.spec_results import CONTROL, PromptTimes, SpecReply, SpecResults, SpecSetup, spec_section
from edgeinfer.apps.cli.main import main
from edgeinfer.errors import CapabilityError, CheckpointError, UsageError
from edgeinfer.results import MemoryUse, ModelInfo, Result, SpeculationUse, Timings, Usage
from tests.recorded import check_recorded
from tests.tables import each_row

INFO = ModelInfo("stub", "Stub", 1, 4.0, "stub", "stub")
SETUP = SpecSetup(1, "kernel", "stub", 4.0, {"repeats": 1})


class StubModel:
    """Says prompt + 1, + 2, ...; "bits" cannot run, "typical" is lossy and says something else, "copy" is wrong.

    What it knows is the list of first tokens it was asked to continue.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], dict[str, Any], list[int]]] = []
        self.known: list[int] = []

    def generate(self, prompt: Sequence[int], **options: Any) -> Result:
        if options["speculation"] == "bits":
            raise CapabilityError("No second plane.", "Load another bundle.")
        self.calls.append((list(prompt), options, list(self.known)))
        self.known.append(prompt[0])
        wrong = 1 if options["speculation"] in ("copy", "typical") else 0
        ids = tuple(prompt[-1] + 1 + wrong + place for place in range(options["max_tokens"]))
        drafting = SpeculationUse(options["speculation"], lossless=options["speculation"] != "typical", rounds=2)
        timings = Timings(0, 0, 0, 0.5 if options["speculation"] == "auto" else 1.0, 0, 0, 0, 0)
        usage, memory = Usage(len(prompt), len(ids)), MemoryUse(None, 0, 0, 0, 0)
        return Result("", ids, "length", usage, timings, memory, drafting, INFO)

    def drafting_state(self) -> list[int]:
        return list(self.known)

    def restore_drafting(self, state: list[int]) -> None:
        self.known = list(state)


def item(name: str, category: str = "a", first: int = 50, cut: int = 0) -> TokenizedPrompt:
    return TokenizedPrompt(Prompt(category, name, ()), (first, first + 1), cut)


def config(*modes: str, repeats: int = 2) -> SpecConfig:
    return SpecConfig(modes, ReplySettings(max_tokens=4), repeats)


def replies_of(
    ms: dict[str, list[float]], name: str = "p", category: str = "a", tokens: int = 5, cut: int = 0
) -> PromptTimes:
    """One prompt's replies: so many milliseconds per token by mode, in two rounds but for plain decoding."""
    replies = {
        mode: [SpecReply(tuple(range(tokens)), each, tokens - 1 if mode == "off" else 2, True, {}) for each in every]
        for mode, every in ms.items()
    }
    return PromptTimes(item(name, category, cut=cut), replies, dict.fromkeys(ms, "off"))


def results(*prompts: PromptTimes, skipped: dict[str, str] | None = None) -> SpecResults:
    return SpecResults(SETUP, tuple(prompts[0].replies), prompts, True, skipped or {})


def test_plain_decoding_is_always_measured_and_comes_first() -> None:
    assert config("auto", "copy", "auto").modes == ("off", "auto", "copy")


@each_row("change", [{"repeats": 0}, {"replies": ReplySettings(max_tokens=2)}])
def test_settings_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        SpecConfig(**change)
    assert SpecConfig(repeats=1, replies=ReplySettings(max_tokens=3)).modes == ("off", "auto")


def test_modes_take_turns_and_each_starts_elsewhere() -> None:
    model = StubModel()
    modes = edgeinfer_modes(model, config("auto", CONTROL), {})
    model.calls.clear()
    list(measure([item("p", first=50), item("q", first=60)], modes, repeats=2))
    asked = [(prompt[0], options["speculation"]) for prompt, options, _ in model.calls if prompt[0] in (50, 60)]
    first, second, third = [("off", "auto", "off"), ("auto", "off", "off"), ("off", "off", "auto")]
    assert asked == [(50, mode) for mode in (*first, *second)] + [(60, mode) for mode in (*second, *third)]


def test_caches_are_emptied_before_each_reply() -> None:
    """A reply to another first token, by the same drafters, lies between any two."""
    model = StubModel()
    modes = edgeinfer_modes(model, config("auto"), {})
    model.calls.clear()
    list(measure([item("p", first=0)], modes, repeats=1))
    asked = [(prompt[0], options["speculation"], options["max_tokens"]) for prompt, options, _ in model.calls]
    assert asked == [(1, "off", 2), (0, "off", 4), (1, "auto", 2), (0, "auto", 4)]


def test_drafters_know_earlier_prompts_but_neither_repeats_nor_other_modes() -> None:
    model = StubModel()
    model.known = [7]
    modes = edgeinfer_modes(model, config("auto"), {})
    model.calls.clear()
    list(measure([item("p", first=50), item("q", first=60)], modes, repeats=2))
    known = [(prompt[0], known) for prompt, _, known in model.calls if prompt[0] in (50, 60)]
    assert known == [(50, [7])] * 4 + [(60, [7, 50])] * 4


def test_drafters_joined_by_a_plus_are_given_as_a_list_and_measured_by_every_rule_and_width() -> None:
    model = StubModel()
    EdgeInferMode(model, "ngram+recycle", ReplySettings(4)).reply([5, 6])
    assert model.calls[-1][1]["speculation"] == "ngram,recycle"
    axes = SpecConfig(("auto",), ReplySettings(4), verifications=("keyed", "rejection"), widths=(1, 2))
    modes = edgeinfer_modes(model, axes, {})
    assert [mode.name for mode in modes] == ["off", "auto", "auto width 2", "auto rejection", "auto rejection width 2"]
    modes[-1].reply([5, 6])
    assert (model.calls[-1][1]["verification"], model.calls[-1][1]["draft_width"]) == ("rejection", 2)


def test_each_temperature_is_measured_beside_plain_decoding_at_the_same() -> None:
    model = StubModel()
    axes = SpecConfig(("auto",), ReplySettings(4), widths=(1, 2), temperatures=(0.7, 1.0))
    modes = edgeinfer_modes(model, axes, {})
    cold = ["off", "auto", "auto width 2"]
    names = [f"{mode}{at}" for at in ("", " T=0.7", " T=1") for mode in cold]
    assert ([mode.name for mode in modes], modes[4].plain) == (names, "off T=0.7")
    modes[-1].reply([5, 6])
    assert (model.calls[-1][1]["temperature"], model.calls[-1][1]["draft_width"]) == (1.0, 2)
    ms = {"off": [8.0], "auto": [4.0], "off T=0.7": [9.0], "auto T=0.7": [6.0]}
    found = results(replies_of(ms))
    assert found.overall_speedup("auto T=0.7") == pytest.approx(1.5)
    table = spec_section(json.loads(json.dumps(found.to_dict()))).parts[0]
    assert isinstance(table, Table) and table.header[3:] == ("auto", "auto T=0.7")
    assert SpecOptions(temperature=("0.7", "0", "0.70")).config.temperatures == (0.0,)
    for wrong in ("-1", "nan", "inf", "warm"):
        with pytest.raises(UsageError, match="0 or more"):
            SpecOptions(temperature=("0", wrong))


def test_a_mode_that_cannot_run_is_skipped_with_its_reason() -> None:
    skipped: dict[str, str] = {}
    modes = edgeinfer_modes(StubModel(), config("bits", "auto"), skipped)
    assert [mode.name for mode in modes] == ["off", "auto"]
    assert skipped == {"bits": "No second plane. Load another bundle."}


def test_plain_decoding_that_cannot_run_is_an_error() -> None:
    class Broken(StubModel):
        def generate(self, prompt: Sequence[int], **options: Any) -> Result:
            raise CapabilityError("Broken.")

    with pytest.raises(CapabilityError):
        edgeinfer_modes(Broken(), config("auto"), {})


def test_replies_that_differ_are_counted_unless_the_mode_is_lossy() -> None:
    model = StubModel()
    modes = edgeinfer_modes(model, config("copy", "typical", "auto"), {})
    (found,) = measure([item("p")], modes, repeats=3)
    assert {mode: found.mismatches(mode) for mode in found.replies} == {"off": 0, "copy": 3, "typical": 0, "auto": 0}


def test_plain_decoding_that_differs_from_itself_is_counted_too() -> None:
    replies = [SpecReply((1, 2, 3), 1.0, 2, True, {}), SpecReply((1, 2, 4), 1.0, 2, True, {})]
    assert PromptTimes(item("p"), {"off": replies}, {"off": "off"}).mismatches("off") == 1


def test_statistics_of_a_category() -> None:
    found = results(
        replies_of({"off": [2.0, 9.0, 3.0], "auto": [1.0, 1.0, 8.0]}, "slow"),
        replies_of({"off": [8.0, 8.0, 8.0], "auto": [1.0, 1.0, 1.0]}, "fast"),
    )
    summary = found.summary("auto", "a")
    assert summary is not None
    assert (summary.prompts, summary.accepted_length, summary.ms) == (2, 2.0, 1.0)
    assert (summary.speedup, summary.least, summary.worst) == (5.5, 3.0, "slow")
    plain = found.summary("off", "a")
    assert plain is not None and plain.accepted_length == plain.speedup == 1


def test_means_over_categories() -> None:
    story = ("tales/write", "tales/retell", "tales/again")
    found = results(
        *(replies_of({"off": [2.0], "auto": [1.0]}, name, name) for name in (*story, *story)),
    )
    found = results(*found.prompts, replies_of({"off": [8.0], "auto": [1.0]}, "x", "gsm8k"))
    assert found.overall_speedup("auto") == pytest.approx((2 * 2 * 2 * 8) ** 0.25)
    assert found.group_speedup("auto", story) == 2
    assert found.group_speedup("auto", (*story, "absent")) is None


def test_replies_too_short_to_be_timed_are_left_out_and_counted() -> None:
    found = results(
        replies_of({"off": [2.0], "auto": [1.0]}, "long"),
        replies_of({"off": [0.0], "auto": [0.0]}, "short", "b", tokens=2),
    )
    assert found.untimed == 1
    assert found.summary("auto", "b") is None
    assert found.overall_speedup("auto") == 2


def test_prompts_below_the_least_speedup_are_listed_slowest_first(capsys: pytest.CaptureFixture[str]) -> None:
    found = results(
        replies_of({"off": [1.0], "auto": [1.05]}, "slower"),
        replies_of({"off": [1.0], "auto": [1.01]}, "noise"),
        replies_of({"off": [1.0], "auto": [2.0]}, "slowest"),
    )
    print_section(spec_section(found.to_dict()))
    assert "on 1 of 3. Slower on:\n  slowest: 0.500\n  slower: 0.952\n" in capsys.readouterr().out


def test_the_report_hides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = replies_of({"off": [1.0], "auto": [1.25], CONTROL: [0.8]}, "bad#1", "tales/write", cut=9)
    wrong = replace(wrong, replies={**wrong.replies, "auto": [SpecReply((9,) * 5, 1.25, 2, True, {})]})
    data = results(wrong, skipped={"bits": "No second plane."}).to_dict()
    lines = section_markdown(spec_section(data)).splitlines()
    check_recorded("bench-spec", [line for line in lines if "python" not in line])
    print_section(spec_section(data))
    text = capsys.readouterr().out
    assert "auto: 1 replies differ from those of plain decoding." in text
    assert "on every prompt: no, on 0 of 1. Slower on:\n  bad#1: 0.800\n" in text
    assert "bits: skipped: No second plane." in text
    assert "1 prompts were cut at the front" in text
    assert "Noise: off is 1.250 to 1.250 times as fast as itself." in text
    assert "python 3" in text and "repeats=1" in text
    assert "put back" not in text and "cost-expanded" not in text


def test_the_report_says_that_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    setup = replace(SETUP, model="tales-cost-expanded-huge")
    found = replies_of({"off": [1.0], "auto": [0.5]}, "good#1")
    print_section(spec_section(SpecResults(setup, ("off", "auto"), (found,), False, {}).to_dict()))
    text = capsys.readouterr().out
    assert "on every prompt: yes, on 1 of 1." in text
    assert "Every lossless mode gave the tokens of its plain one in every reply." in text
    assert "The model is cost-expanded" in text
    assert "repeats profit from each other" in text


class StubWorker:
    """Answers as llama.cpp's worker does."""

    def generate(self, prompt: Sequence[int], tokens: int, stop_ids: Sequence[int], lookup: int) -> dict[str, Any]:
        assert (list(stop_ids), tokens) == ([3], 4)
        return {"token_ids": [1, 2, 3], "ms": 10.0, "rounds": 1 if lookup else 2}


def test_llamacpp_is_measured_plainly_and_with_lookup() -> None:
    modes = llamacpp_modes(StubWorker(), config(), [3])  # type: ignore[arg-type]
    assert [mode.name for mode in modes] == ["llama.cpp", "llama.cpp lookup 10", "llama.cpp lookup 2"]
    plain, lookup = modes[0].reply([5]), modes[1].reply([5])
    assert (plain.per_token_ms, plain.rounds, lookup.rounds) == (5.0, 2, 1)
    assert {mode.plain for mode in modes} == {LlamaCppMode.plain}


def test_llamacpp_is_not_compared_on_sampled_text() -> None:
    warm = SpecConfig(replies=ReplySettings(4, temperature=0.8))
    with pytest.raises(UsageError, match="temperature 0"):
        llamacpp_modes(StubWorker(), warm, [3])  # type: ignore[arg-type]


@each_row(
    "change",
    [
        {"expand": "qwen2.5-0.5b"},
        {"llamacpp": True},
        {"per_category": 0},
    ],
)
def test_options_that_contradict_each_other_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        SpecOptions(**change)


def test_a_bundle_is_not_expanded() -> None:
    with pytest.raises(UsageError, match="cannot be expanded"):
        run_spec(SpecOptions(expand="qwen2.5-0.5b", checkpoint=Path("x")), BenchContext("bundle"))


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        SpecOptions(checkpoint=tmp_path).artifacts()


def test_an_interrupt_keeps_the_prompts_that_are_done() -> None:
    prompts = builtin_prompts(1, ["tales/write", "tales/start"])
    total = len(prompts) * 2

    def interrupt(stage: str, done: int, replies: int) -> None:
        assert (stage, replies) == ("replies", total)
        if done == 3:
            raise KeyboardInterrupt

    options = SpecOptions(max_tokens=4, repeats=1, per_category=1, categories=("tales/write", "tales/start"))
    found, finished = run_spec(options, BenchContext(progress=interrupt))
    assert not finished
    assert [each.item.prompt.category for each in found.prompts] == ["tales/write"]


def test_the_command_on_the_built_in_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "spec.json"
    arguments = [
        "--categories",
        "tales/write,tales/retell",
        "--per-category",
        "1",
        "-n",
        "6",
        "--repeats",
        "2",
        "-t",
        "1",
    ]
    assert main(["bench", "spec", *arguments, "--modes", "auto", "--control", "--json", str(out)]) == 0
    assert "tales/retell" in capsys.readouterr().out
    data = json.loads(out.read_text())
    assert data["modes"] == ["off", "auto", CONTROL]
    assert [prompt["category"] for prompt in data["prompts"]] == ["tales/write", "tales/retell"]
    for prompt in data["prompts"]:
        for mode in prompt["modes"].values():
            assert len(mode["ms_per_token"]) == 2 and all(each > 0 for each in mode["ms_per_token"])
            assert mode["tokens"] == [6, 6] and mode["mismatches"] == 0
    assert data["setup"]["threads"] == 1
    assert data["setup"]["options"]["max_tokens"] == 6


@each_row(
    ("arguments", "code", "says"),
    [
        (["--expand"], 2, "--checkpoint"),
        (["--expand", "huge", "--checkpoint", "."], 2, "huge"),
        (["--categories", "poetry"], 2, "poetry"),
        (["--data", "absent"], 2, "holds no prompts"),
        (["--json", "absent/spec.json"], 5, "no such folder"),
        (["-n", "100000"], 2, "fill the context"),
        (["--repeats", "0"], 2, "repeats"),
        (["--lengths", "64,x"], 2, "lengths"),
        (["--lengths", "64,90000"], 2, "no room"),
        (["--lengths", "500", "--per-category", "1", "-n", "4"], 2, "Take more prompts"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "spec", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert says in captured.err
    assert captured.out == ""
