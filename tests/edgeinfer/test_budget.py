"""A budget through the public face: chosen, refused, kept under pressure, with the same text; bad budgets."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.errors import BudgetError, UsageError
from edgeinfer.runtime.planning import ledger as ledgers
from edgeinfer.runtime.system.memory import ProcessMemory
from tests.cli import edgeinfer as command
from tests.cli import edgeinfer_process, python, refuses
from tests.speculation import PROMPT, load_eager, needs_builtin, plain, same
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
        monkeypatch.setattr(ledgers, "_INTERVAL", 0.0)


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
