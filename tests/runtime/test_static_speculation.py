"""Static bundles as a caller meets them: text is plain decoding's whoever drafts, chats go on, budgets are kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.errors import CapabilityError, UsageError
from edgeinfer.export.options import ExportConfig, StaticOptions
from tests.cli import edgeinfer as command
from tests.cli import edgeinfer_process, refuses
from tests.edgeinfer.conftest import TEMPLATE
from tests.runtime.models import bundle_of
from tests.speculation import PROMPT, known_costs, load_eager, plain, same
from tests.tables import each_row

SHAPES = StaticOptions(context=256, chunk=16)
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "penalties": SAMPLED | {"repetition_penalty": 1.2, "presence_penalty": 0.2},
}
WHO = ("auto", "copy", "ngram", "recycle", "forced", "model", "copy,ngram,recycle,model")
# An ordinary bundle of a checkpoint, a static one, and a shallow static one.
EXPORTS: dict[str, StaticOptions | None] = {
    "ordinary": None,
    "static": SHAPES,
    "shallow": StaticOptions(context=256, chunk=16, widths=(2, 4), layers=(0, 1)),
}


@pytest.fixture(scope="module")
def bundles() -> dict[str, Path]:
    settings: dict[str, Any] = {"max_position_embeddings": 512, "chat_template": TEMPLATE}
    configs = {name: ExportConfig(bits=4, keep_small=False, static=static) for name, static in EXPORTS.items()}
    return {name: bundle_of("qwen3", config, **settings).path for name, config in configs.items()}


@pytest.fixture(scope="module")
def model(bundles: dict[str, Path]) -> Iterator[edgeinfer.Model]:
    """The static bundle, with the shallow one to draft for it."""
    with load_eager(bundles["static"], draft_model=bundles["shallow"], prefix_cache="8MB") as made:
        yield made


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("who", WHO)
def test_text_equals_plain_decoding(model: edgeinfer.Model, who: str, way: str) -> None:
    for width in (1, 3):
        found = same(model, who, max_tokens=60, ignore_eos=True, draft_width=width, **WAYS[way])
        assert found.exact and found.lossless
        if way == "greedy" and who not in ("forced", "auto"):
            assert found.accepted > 0


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("static", "ordinary"), id="target"),
        pytest.param(("ordinary", "shallow"), id="drafter", marks=pytest.mark.slow),
    ],
)
def test_beside_ordinary_bundles(bundles: dict[str, Path], names: tuple[str, str]) -> None:
    target, drafter = names
    with load_eager(bundles[target], draft_model=bundles[drafter], context=128) as mixed:
        for options in ({}, SAMPLED):
            assert same(mixed, "model", max_tokens=40, ignore_eos=True, **options).accepted > 0


def test_without_exactness_speculation_still_works(bundles: dict[str, Path]) -> None:
    with load_eager(bundles["static"], exact=False) as loose:
        result = loose.generate(PROMPT, max_tokens=40, ignore_eos=True, speculation="copy,ngram,recycle")
        assert result.usage.completion_tokens == 40


@each_row("who", ["exit", "skip", "bits"])
def test_drafters_that_need_other_graphs(model: edgeinfer.Model, who: str) -> None:
    with pytest.raises(CapabilityError, match="onnx-static backend cannot"):
        model.generate(PROMPT, speculation=who)


def test_conversations_take_turns_and_come_back(model: edgeinfer.Model, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
    chat, other = model.chat(system="Be brief."), model.chat(system="Say much.")
    chat.send("Tell me about the dog", **options)
    other.send("And the cat?", **options)
    chat.save(tmp_path / "talk.session")
    reply = chat.send("And now?", **options)
    assert reply.timings.cached_prompt_tokens > 10
    model.score([5, 6])  # empties the cache
    again = model.load_chat(tmp_path / "talk.session").send("And now?", **options)
    assert again.token_ids == reply.token_ids and again.timings.cached_prompt_tokens > 10


@pytest.mark.parametrize("overflow", ["window", pytest.param("cluster", marks=pytest.mark.slow)])
def test_a_conversation_may_outgrow_its_context(bundles: dict[str, Path], overflow: str) -> None:
    with load_eager(bundles["static"], context=64, overflow=overflow) as small:
        result = small.generate(PROMPT, max_tokens=120, ignore_eos=True)
        assert result.usage.completion_tokens == 120


def test_the_context_is_the_exported_one(bundles: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="the model allows 256"):
        edgeinfer.load(bundles["static"], context=257)
    with pytest.raises(UsageError, match="cannot use a KV cache of type int8"):
        edgeinfer.load(bundles["static"], kv="int8")
    with load_eager(bundles["static"]) as loaded:
        assert loaded.plan.context == 256
        assert loaded.info.backend == "onnx-static"
        assert plain(loaded, max_tokens=4).usage.completion_tokens > 0


def test_the_commands(bundles: dict[str, Path]) -> None:
    with known_costs():
        chat = command("chat", "--terminal", "-m", bundles["static"], stdin=b"Hello\n/quit\n")
    assert chat.returncode == 0, chat.stderr
    refuses(2, "the model allows 256", command("run", "-m", bundles["static"], "-p", "Once", "-c", "9999"))


# Memory is that of a process, which the tests' own is far larger than.
@pytest.mark.slow
def test_a_budget_is_kept(bundles: dict[str, Path]) -> None:
    done = edgeinfer_process("run", "-m", bundles["static"], "-p", PROMPT, "-n", "8", "--json", "--memory", "200MB")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    memory = result["memory"]
    assert memory["peak_rss_bytes"] <= memory["planned_bytes"] <= memory["budget_bytes"]
    assert result["model"]["backend"] == "onnx-static"
    plan = edgeinfer_process("plan", "-m", bundles["static"], "--memory", "200MB", "--json")
    assert plan.returncode == 0, plan.stderr
    assert json.loads(plan.stdout)["fits"]


@pytest.fixture(scope="module")
def large() -> Path:
    """A bundle whose weights, in all sessions, are most of the process."""
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 8192}
    return bundle_of("llama", ExportConfig(bits=8, static=StaticOptions(chunk=16)), **sizes).path


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--speculation", "off"], [], ["--no-exact"]], ids=["plain", "drafting", "loose"])
def test_plans_are_kept(large: Path, options: list[str]) -> None:
    done = edgeinfer_process("run", "-m", large, "-p", PROMPT, "-n", "24", "--json", *options)
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout)["memory"]
    assert memory["peak_rss_bytes"] <= memory["planned_bytes"], memory
    if "off" in options:  # whoever drafts may never have need of the widest graphs
        assert memory["planned_bytes"] <= 1.3 * memory["peak_rss_bytes"], memory
