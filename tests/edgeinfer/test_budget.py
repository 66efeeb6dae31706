"""Budgets: chosen, refused, kept under pressure with the same text, and what speculation takes of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.bundle.opening import nest_drafter, open_bundle
from edgeinfer.core.errors import BudgetError, UsageError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.export.options import ExportConfig
from edgeinfer.loading import open_model
from edgeinfer.runtime.planning import ledger as ledgers
from edgeinfer.runtime.profile.drafting import TunedDrafting
from edgeinfer.runtime.speculation.drafters.method import priors_of
from edgeinfer.runtime.system.memory import ProcessMemory
from tests.cache import export_checkpoint
from tests.cli import edgeinfer as command
from tests.cli import edgeinfer_process, python, refuses
from tests.heads import with_heads
from tests.runtime.models import bundle_of
from tests.speculation import BUILTIN, DENSE, PROMPT, known_costs, load_eager, needs_builtin, plain, random_bundle, same
from tests.tables import each_row

MB = 1_000_000


@each_row("size", ["banana", "0", "-5MB", "1e400", "100000TB"])
def test_bad_budgets(size: str) -> None:
    refuses(2, "GB" if size.endswith("TB") else "positive size", command("run", "-p", "Once", f"--memory={size}"))


@needs_builtin
@pytest.mark.slow
def test_a_budget_below_the_interpreter_tells_what_would_do() -> None:
    """As much as a process of its own takes."""
    done = edgeinfer_process("run", "-p", "Once", "--memory", "20MB")
    refuses(4, "without a model", done)
    least = done.stderr.decode().split("at least ")[1].split(" MB")[0]
    again = edgeinfer_process("run", "-p", "Once", "-n", "3", "--memory", f"{float(least) + 1}MB", "--json")
    assert again.returncode == 0
    memory = json.loads(again.stdout)["memory"]
    assert memory["peak_rss_bytes"] <= memory["planned_bytes"] <= memory["budget_bytes"]


class Pressure:
    """A process that another part of the program makes grow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = 0
        monkeypatch.setattr(ledgers, "process_memory", lambda: ProcessMemory(self.used, self.used, self.used, 0))
        monkeypatch.setattr(ledgers, "LOOK_S", 0.0)


def under(model: edgeinfer.Model, budget: int) -> edgeinfer.Model:
    """Puts a loaded model under a budget."""
    ledger = model._lifecycle.parts().ledger
    ledger.plan = dataclasses.replace(ledger.plan, budget_bytes=budget)
    ledger._replan = lambda plan, process, used, *, grammars=False: plan
    return model


def test_drafts_are_given_up_under_pressure_and_the_text_stays(
    small_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_eager(small_bundle) as model:
        expected = plain(model, max_tokens=60, ignore_eos=True)
        pressure = Pressure(monkeypatch)
        under(model, 1000 * MB)
        texts = []
        pressure.used = 999 * MB
        for chunk in model.stream(PROMPT, max_tokens=60, ignore_eos=True):
            texts.append(chunk.text)
            if len(texts) == 20:
                pressure.used = 1000 * MB - 1
        result = model.generate(PROMPT, max_tokens=60, ignore_eos=True)
        assert "".join(texts) == result.text == expected.text
        assert result.memory.given_up == ("long drafts", "drafting")
        assert result.speculation.rounds == 0
        pressure.used = 10 * MB
        relieved = model.generate(PROMPT, max_tokens=60, ignore_eos=True)
        assert relieved.memory.given_up == () and relieved.text == expected.text
        assert relieved.speculation.drafted > 0


def test_over_the_budget_a_reply_ends_in_an_error_and_the_model_goes_on(
    small_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with edgeinfer.load(small_bundle, threads=1) as model:
        expected = model.generate(PROMPT, max_tokens=30, ignore_eos=True)
        pressure = Pressure(monkeypatch)
        under(model, 1000 * MB)
        stream = model.stream(PROMPT, max_tokens=30, ignore_eos=True)
        for _ in range(5):
            next(stream)
        pressure.used = 1001 * MB
        with pytest.raises(BudgetError, match="nothing is left to give up") as caught:
            stream.complete()
        assert caught.value.terms["kv"] > 0 and caught.value.minimum_bytes == 1001 * MB
        assert stream.result.finish_reason == "cancelled"
        pressure.used = 0
        assert model.generate(PROMPT, max_tokens=30, ignore_eos=True).text == expected.text


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "int8": {"kv": "int8"},
    "int4": {"kv": "int4"},
    "streamed": {"weights": "streamed"},
    "short-chunks": {"prefill_chunk": 3},
}


@pytest.fixture(scope="module")
def configured(request: pytest.FixtureRequest) -> Iterator[edgeinfer.Model]:
    with load_eager(**CONFIGURATIONS[request.param]) as model:
        yield model


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("who", ["auto", "copy,ngram,recycle", "exit", "bits"])
@pytest.mark.parametrize("configured", CONFIGURATIONS, indirect=True)
@needs_builtin
def test_speculation_is_exact_in_every_configuration(
    configured: edgeinfer.Model, who: str, sampling: dict[str, Any]
) -> None:
    """The matrix of caches and places of weights, greedy and sampled."""
    same(configured, who, max_tokens=40, ignore_eos=True, **sampling)


@needs_builtin
@pytest.mark.slow
def test_streamed_weights_give_the_same_text(tmp_path: Path) -> None:
    """As planned for a budget in a process of its own, which stays within it."""
    run = (
        "import sys, json, edgeinfer\n"
        "with edgeinfer.load(memory=json.loads(sys.argv[1]), context=512, kv='float32', threads=1) as model:\n"
        "    chat = model.chat()\n"
        "    texts = [chat.send(text, max_tokens=40).text for text in ('Tell me of a dog.', 'And of a cat?')]\n"
        "    memory = model.generate('Once', max_tokens=5).to_dict()['memory']\n"
        "    print(json.dumps([texts, memory, model.plan.to_dict()['choice']]))\n"
    )

    def replies(budget: int | None) -> Any:
        return json.loads(python(run, json.dumps(budget), XDG_CACHE_HOME=str(tmp_path)))

    texts, _, choice = replies(None)
    assert choice["tokenizer"] == "kept"
    least_bytes = python("import edgeinfer; print(edgeinfer.plan(context=512, kv='float32').minimum_bytes)")
    tight, least, chosen = replies(int(least_bytes))
    assert chosen["kv"] == "float32" and tight == texts
    assert least["peak_rss_bytes"] <= least["planned_bytes"] <= least["budget_bytes"]


def test_plans_of_what_a_bundle_lacks(small_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Scales that another test found for this bundle would be used.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="int8"):
        edgeinfer.plan(small_bundle, kv="int8", native=False, backend="onnx")


def test_the_plan_has_terms_for_drafting(small_bundle: Path, short_drafter: Path) -> None:
    off, auto, one, both = (
        edgeinfer.plan(small_bundle, **options)
        for options in (
            {"speculation": "off"},
            {},
            {"draft_max": 1},
            {"draft_model": short_drafter},
        )
    )
    assert (off.draft_max, auto.draft_max, one.draft_max, both.draft_max) == (0, 15, 1, 15)
    assert not {"drafting", "draft_model"} & set(off.terms)
    assert one.terms["drafting"] < auto.terms["drafting"]
    assert auto.terms["drafting"] == both.terms["drafting"] and "draft_model" not in auto.terms
    weights = open_bundle(short_drafter).manifest.weight_bytes
    kv = 2 * 2 * 2 * 16 * 4 * 33
    assert both.terms["draft_model"] > weights + kv
    assert both.to_dict()["choice"]["draft_max"] == 15


@pytest.mark.parametrize("who", ["auto", *DENSE])
def test_drafters_hold_no_more_than_planned(small_bundle: Path, tmp_path: Path, short_drafter: Path, who: str) -> None:
    if who == "bits":
        small_bundle = export_checkpoint(
            small_bundle.parent / "checkpoint", tmp_path / "elastic", ExportConfig(bits=8, keep_small=False)
        )
    with load_eager(small_bundle, speculation=who, draft_model=short_drafter, remember=False) as model:
        if who == "bits" and model.plan.layout != "native":
            pytest.skip("planes need the native kernel")
        model.generate([5 + i % 300 for i in range(400)], speculation=who, ignore_eos=True)
        drafters = model._parts.speculator._drafters
        small = model._parts.speculator.parts.model
        assert small is not None
        # The draft model has a term of its own.
        held = sum(d.nbytes() - (sum(small.nbytes().values()) if d.name == "model" else 0) for d in drafters.values())
        assert held <= model.plan.terms["drafting"]


def test_drafts_that_were_asked_for_are_not_shortened(small_bundle: Path) -> None:
    options: list[dict[str, Any]] = [{"speculation": "copy,ngram"}, {"draft_max": 15}, {"draft_max": 3}]
    for option in options:
        with pytest.raises(BudgetError) as caught:
            edgeinfer.load(small_bundle, memory=1_000_000, **option)
        assert caught.value.terms["drafting"] > 0 and caught.value.minimum_bytes > 1_000_000


def test_a_model_in_a_tight_budget_drafts_less(small_bundle: Path) -> None:
    size = edgeinfer.plan(small_bundle, draft_max=1).planned_bytes
    with load_eager(small_bundle, memory=size + 4_000_000, draft_max=1) as model:
        found = same(model, "auto", max_tokens=40, ignore_eos=True)
        assert 0 < found.drafted <= found.rounds
        same(model, "recycle", max_tokens=40, ignore_eos=True, draft_width=4)


RUN = """
import json, sys
import edgeinfer
from edgeinfer.core.errors import BudgetError
options = json.loads(sys.argv[1])
who = options["speculation"]
if options.pop("tight"):
    try:
        edgeinfer.load(memory="1MB", context=1024, **options)
    except BudgetError as error:
        options |= {"memory": error.minimum_bytes, "context": 1024}
with edgeinfer.load(**options) as model:
    chat = model.chat()
    for message in ("Tell me of a dog.", "Again, please.", "Once more, with a cat."):
        for width in (1, 4):
            reply = chat.send(message, max_tokens=90, speculation=who, draft_width=width)
    found = reply.to_dict()
    print(json.dumps([found["memory"], found["speculation"], model.plan.draft_max]))
"""


@pytest.mark.slow
@needs_builtin
@pytest.mark.parametrize(
    "options",
    [
        {"speculation": "auto", "tight": False},
        {"speculation": "auto", "tight": True},
        {"speculation": "copy,ngram,recycle,model,exit,bits", "draft_model": str(BUILTIN), "tight": True},
    ],
    ids=["auto", "tight", "all"],
)
def test_a_process_that_drafts_stays_within_its_plan(options: dict[str, Any], tmp_path: Path) -> None:
    memory, found, draft_max = json.loads(python(RUN, json.dumps(options), XDG_CACHE_HOME=str(tmp_path)))
    assert memory["peak_rss_bytes"] <= memory["planned_bytes"] == sum(memory["terms"].values())
    if "memory" in options:
        assert memory["planned_bytes"] <= memory["budget_bytes"]
    # On a model so small "auto" may find that asking costs more than it gains; it must not draft beyond its plan.
    assert draft_max > 0 or found["rounds"] == 0
    assert found["rounds"] > 0 or options["speculation"] == "auto"


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_plans_reckon_with_the_drafters_that_are_asked(tmp_path: Path) -> None:
    plain, drafter = random_bundle(tmp_path / "plain"), random_bundle(tmp_path / "small", num_hidden_layers=1)
    headed = with_heads(plain, tmp_path / "headed", "routers")
    bundles = {
        plain: {"copy", "ngram", "recycle"},
        nest_drafter(headed, drafter, tmp_path / "rich").path: {"copy", "ngram", "recycle", "model"},
        bundle_of("llama-tied", ExportConfig(bits=8, keep_small=False)).path: {"copy", "ngram", "recycle", "bits"},
        bundle_of("qwen3-moe", ExportConfig(bits=4, keep_small=False, calibration="none")).path: {
            "copy",
            "ngram",
            "recycle",
            "experts",
        },
    }
    for path, expected in bundles.items():
        config = LoadOptions()
        subject = open_model(path, config)
        priors = priors_of(subject, TunedDrafting())
        with known_costs(kept=True), load_eager(path) as model, model._replies.idle() as parts:
            asked = set(parts.speculator.auto) - {"forced"}
        assert set(priors) == asked >= expected, path
        assert all(0 < prior.accepted < 1 and (prior.tables or prior.share > 0) for prior in priors.values())
        assert set(priors_of(subject, TunedDrafting(drafters=("copy",)))) == {"copy"}
        only, plain_plan = (edgeinfer.plan(path, speculation=how).speed for how in (",".join(expected), "off"))
        # The cost of asking in vain is reported, and does not count where ways to run are compared.
        assert only.turn_ms <= plain_plan.turn_ms and only.tokens_per_second > 0.8 * plain_plan.tokens_per_second
