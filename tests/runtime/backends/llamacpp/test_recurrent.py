"""GGUF files with recurrent layers or windows: states that go back, copies, sessions, what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BackendError, CapabilityError, UsageError
from edgeinfer.runtime.backends.contract import PassCancelledError
from tests.alone import Alone, restore
from tests.export.gguf_cases import CONVS, DELTA, FALCON, GRANITE, LATENT, MAMBA, MIXED, NEMOTRON, ROUTED, SCAN, TIED
from tests.speculation import load_eager
from tests.tables import each_row

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

import pytest

from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.llamacpp.backend import LlamaCppBackend
from edgeinfer.runtime.backends.llamacpp.memory import kv_bytes, state_bytes
from tests.export.gguf_cases import GEMMA, GEMMA3N, GEMMA4, OSS, SHARED_CACHES, TRINITY, layers
from tests.runtime.backends.llamacpp.test_llamacpp_backend import close, feed

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")
pytestmark = pytest.mark.gguf

# Those that llama.cpp can take back row by row, and those that it cannot.
BACK: dict[str, Any] = {"Lfm2": CONVS | TIED, "Qwen3_5": DELTA, "NemotronH": NEMOTRON}
FORWARD: dict[str, Any] = {
    "Mamba2": MAMBA,
    "GraniteMoeHybrid": SCAN | GRANITE | MIXED | {"num_local_experts": 0},
    "FalconH1": FALCON,
}
ALL = BACK | FORWARD
LATENT_ALONE = {"DeepseekV2": LATENT | ROUTED | {"topk_method": "greedy"}}
FAMILIES = {name: (name, settings) for name, settings in (ALL | LATENT_ALONE).items()}
TEXT = np.random.default_rng(1).integers(2, 300, 40)
CAPACITY, DRAFTED, NEAR = 64, 6, 1e-4
Make = Callable[..., Alone[LlamaCppBackend]]
PROMPT = "Once upon a time there was a little dog."


@pytest.mark.parametrize("name", BACK)
def test_drafted_rows_are_taken_back(name: str, make_family: Make) -> None:
    backend = make_family(name)
    whole = feed(backend, TEXT)
    backend.cache.clear()
    feed(backend, TEXT[:12])
    for kept in range(1, DRAFTED + 1):
        start = backend.cache.length
        # Wrong tokens behind those that stay.
        feed(backend, [*TEXT[start : start + kept], *([7] * (DRAFTED + 1 - kept))])
        # It may go back further before the next pass, as where a choice is repeated.
        backend.cache.keep(start, range(min(kept + 1, DRAFTED)))
        backend.cache.keep(start, range(kept))
        assert backend.cache.length == start + kept
    rest = feed(backend, TEXT[backend.cache.length :])
    assert close(rest, whole[len(whole) - len(rest) :], NEAR)


@pytest.mark.parametrize("name", ALL)
def test_a_text_goes_back_to_its_mark_and_to_held_states(name: str, make_family: Make) -> None:
    backend = make_family(name)
    cache = backend.cache
    whole = feed(backend, TEXT)
    cache.clear()
    feed(backend, TEXT[:9])
    cache.mark()
    feed(backend, [7] * 12)
    assert (cache.marked, cache.rewindable_to(21), cache.rewindable_to(10)) == (9, 21, 9)
    cache.trim(cache.rewindable_to(10))
    assert close(feed(backend, TEXT[9:20]), whole[9:20], NEAR)
    if name in FORWARD:
        cache.hold(24)
        # The pass is divided there, though it ends behind.
        assert close(feed(backend, TEXT[20:30]), whole[20:30], NEAR)
        feed(backend, [7])
        cache.trim(cache.rewindable_to(26))
        assert cache.length == 24
    rest = feed(backend, TEXT[cache.length :])
    assert close(rest, whole[len(whole) - len(rest) :], NEAR)


def test_where_no_state_is_nothing_is_cut_or_evaluated(make_family: Make) -> None:
    backend = make_family("Mamba2")
    feed(backend, TEXT[:9])
    assert backend.cache.rewindable_to(5) == 0
    with pytest.raises(BackendError, match="cannot go back to 5 tokens"):
        backend.cache.trim(5)
    with pytest.raises(CapabilityError, match="cannot forget tokens"):
        backend.cache.drop(1, 2)
    assert not backend.capabilities.tree


@pytest.mark.parametrize("name", ALL)
@each_row("kv", ["float32", "float16"])
def test_copies_of_rows_and_states_give_the_same_bits(name: str, kv: str, make_family: Make) -> None:
    backend, other = make_family(name, kv), make_family(name, kv)
    feed(backend, TEXT[:9])
    backend.cache.mark()
    feed(backend, [*TEXT[9:20], *([7] * 3 if name in BACK else [])])
    backend.cache.trim(20)  # which llama.cpp is given when it must
    parts = [backend.cache.snapshot(*ends) for ends in ((0, 5), (5, 9), (9, 20))]
    assert [part.rewindable_to(part.length) for part in parts] == [0, 4, 11]
    expected = feed(backend, TEXT[20:])
    for part in parts:
        other.cache.append(part)
    assert np.array_equal(feed(other, TEXT[20:]), expected)
    other.cache.clear()
    feed(other, TEXT[:5])  # and copies that follow what was evaluated
    for part in parts[1:]:
        other.cache.append(part)
    assert np.array_equal(feed(other, TEXT[20:]), expected)


def test_copies_of_latent_attention_have_no_values(make_family: Make) -> None:
    backend, other = make_family("DeepseekV2"), make_family("DeepseekV2")
    feed(backend, TEXT[:20])
    rows = backend.cache.snapshot(3)
    expected = feed(backend, TEXT[20:])
    feed(other, TEXT[:3])
    other.cache.append(rows)
    assert np.array_equal(feed(other, TEXT[20:]), expected)


def test_copies_without_their_state_are_not_gone_on_from(make_family: Make) -> None:
    backend, other = make_family("NemotronH"), make_family("Qwen3_5")
    feed(backend, TEXT[:9])
    rows = backend.cache.snapshot()
    with pytest.raises(BackendError, match="another model"):
        restore(other.cache, rows)
    restore(backend.cache, rows.part(0, 5))
    with pytest.raises(BackendError, match="is not there after 5 tokens"):
        feed(backend, TEXT[5:6])
    assert backend.cache.rewindable_to(5) == 0
    (blob,) = rows.blobs
    with pytest.raises(BackendError, match="refuses the copied cache"):
        restore(backend.cache, dataclasses.replace(rows, blobs=[blob._replace(data=blob.data[:-4])]))
    backend.cache.clear()
    feed(backend, TEXT[:9])


def test_a_cancelled_pass_leaves_the_mark(make_family: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_family("Qwen3_5")
    whole = feed(backend, TEXT)
    backend.cache.clear()
    feed(backend, TEXT[:9])
    backend.cache.mark()
    monkeypatch.setattr(backend._context, "run", lambda *_: 2)
    with pytest.raises(PassCancelledError):
        feed(backend, TEXT[9:12])
    monkeypatch.undo()
    with pytest.raises(BackendError, match="is not there after 9 tokens"):
        feed(backend, TEXT[9:12])
    backend.cache.trim(backend.cache.rewindable_to(9))
    assert close(feed(backend, TEXT[9:]), whole[9:], NEAR)


@pytest.mark.parametrize("name", ALL)
def test_the_plan_counts_the_states(name: str, make_family: Make, bundles: Callable[[str], Bundle]) -> None:
    gguf = bundles(name).gguf
    planned = kv_bytes(gguf, "float32", CAPACITY) + state_bytes(gguf, DRAFTED)
    # llama.cpp says megabytes with two digits.
    assert abs(make_family(name).nbytes()["kv"] - planned) <= 2**14


@pytest.mark.parametrize("name", BACK)
def test_replies_are_the_same_with_speculation(name: str, bundles: Callable[[str], Bundle]) -> None:
    with edgeinfer.load(bundles(name).path, backend="llamacpp", context=100, kv="float32", speculation="off") as model:
        plain = model.generate(PROMPT, max_tokens=30, temperature=0).token_ids
    with load_eager(bundles(name).path, context=100, kv="float32", speculation="recycle") as model:
        replies = [model.generate(PROMPT, max_tokens=30, temperature=0) for _ in range(3)]
    assert [reply.token_ids for reply in replies] == [plain] * 3
    assert replies[-1].speculation.accepted > 0


def test_what_cannot_be_taken_back_is_decoded_plainly(bundles: Callable[[str], Bundle]) -> None:
    path = bundles("GraniteMoeHybrid").path
    with edgeinfer.load(path, backend="llamacpp", context=100) as model:
        assert model.plan.draft_max == 0
        assert len(model.generate(PROMPT, max_tokens=5, temperature=0).token_ids) == 5
    with pytest.raises(UsageError, match="cannot be taken back"):
        edgeinfer.load(path, backend="llamacpp", context=100, speculation="copy")


def test_a_conversation_goes_on_from_its_states(bundles: Callable[[str], Bundle], tmp_path: Path) -> None:
    with edgeinfer.load(bundles("Mamba2").path, backend="llamacpp", context=100, kv="float32") as model:
        first = model.generate(PROMPT, max_tokens=8, temperature=0)
        longer = model.generate(PROMPT + first.text, max_tokens=4, temperature=0)
    assert longer.timings.cached_prompt_tokens > 0


@each_row(
    ("name", "kind"), [("Mamba2", "states"), ("Qwen3_5", "states"), ("gemma3", "windows"), ("gpt-oss", "windows")]
)
def test_conversations_are_saved_and_kept(
    name: str, kind: str, bundles: Callable[[str], Bundle], tmp_path: Path
) -> None:
    """Also when another conversation comes in between."""
    path, file = bundles(name).path, tmp_path / "talk.session"
    options: dict[str, Any] = {"context": 128, "kv": "float32", "speculation": "off"}
    other = "A cat sat on the mat, and looked out of the window."
    with edgeinfer.load(path, backend="llamacpp", **options) as model:
        ids = model.tokenize(PROMPT)
        ids += model.generate(ids, max_tokens=20).token_ids
        model.save_session(file)
        expected = model.generate(ids, max_tokens=20).token_ids
    with edgeinfer.load(path, backend="llamacpp", **options, prefix_cache="4MB") as model:
        assert model.load_session(file) == ids[:-1]
        again = model.generate(ids, max_tokens=20)
        assert (again.token_ids, again.timings.cached_prompt_tokens) == (expected, len(ids) - 1)
        first = model.generate(other, max_tokens=20)
        model.generate(PROMPT, max_tokens=5)
        kept, size = model.generate(other, max_tokens=20), len(model.tokenize(other))
        assert kept.token_ids == first.token_ids
        if kind == "windows":
            assert kept.timings.cached_prompt_tokens == size - 1
            one = model.generate(PROMPT, max_tokens=4)
            assert model.generate(PROMPT, max_tokens=4, search="beam", beams=1).token_ids == one.token_ids
        else:  # states are kept at the end of the prompt and of all
            longer = model.generate([*model.tokenize(other), *first.token_ids, 5], max_tokens=1)
            assert longer.timings.cached_prompt_tokens == size + 19


def test_searches_that_copy_rows_are_refused(bundles: Callable[[str], Bundle]) -> None:
    with edgeinfer.load(bundles("Lfm2").path, backend="llamacpp", context=64) as model:
        with pytest.raises(CapabilityError, match="cannot copy what"):
            model.generate(PROMPT, max_tokens=4, search="beam")
        assert len(model.generate(PROMPT, max_tokens=4, temperature=0).token_ids) == 4


# Patterns that a graph has and that a file gives, caches that layers share, and heads that windows change.
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", GEMMA | layers(2, 3)),
    "gemma3": ("Gemma3", GEMMA | layers(3, 3)),
    "gemma3n": ("Gemma3n", GEMMA3N | TIED | layers(3, 4) | {"activation_sparsity_pattern": [0.95] * 4}),
    "gemma4": ("Gemma4", GEMMA4 | TIED | SHARED_CACHES | layers(3, 6)),
    "gpt-oss": ("GptOss", OSS | layers(2, 3)),
    "olmo3": ("Olmo3", {"sliding_window": 5, **layers(2, 3)}),
    "afmoe": ("Afmoe", TRINITY | layers(4, 5)),
}
FAMILIES |= WINDOWS


@pytest.mark.parametrize("name", WINDOWS)
def test_copies_give_the_same_bits(name: str, make_family: Make) -> None:
    """A text longer than two windows, in parts whose borders are no windows', and after cuts far back."""
    backend, other = make_family(name), make_family(name)
    feed(backend, TEXT[:24], [])
    whole, parts = backend.cache.snapshot(), [backend.cache.snapshot(*ends) for ends in ((0, 3), (3, 4), (4, 24))]
    assert [part.length for part in (whole, *parts)] == [24, 3, 1, 20]
    expected = feed(backend, TEXT[24:30])
    backend.cache.trim(9)
    again = feed(backend, TEXT[9:30])
    for pieces in ([whole], parts):
        other.cache.clear()
        for piece in pieces:
            other.cache.append(piece)
        assert np.array_equal(feed(other, TEXT[24:30]), expected)
        # Rows that no later one sees came back as well.
        other.cache.trim(9)
        assert np.array_equal(feed(other, TEXT[9:30]), again)


@each_row("kv", ["float16", "q8_0"])
def test_copies_of_other_types_come_back(kv: str, make_family: Make) -> None:
    backend, other = make_family("gemma2", kv), make_family("gemma2", kv)
    feed(backend, TEXT[:24], [])
    restore(other.cache, backend.cache.snapshot())
    assert np.array_equal(feed(other, TEXT[24:30]), feed(backend, TEXT[24:30]))


def test_copies_after_a_tree_and_a_full_cache(make_family: Make) -> None:
    backend, straight = make_family("gemma2"), make_family("gemma2")
    feed(backend, TEXT[:20], [])
    backend.forward(Pass(TEXT[20:24], np.array([20, 21, 21, 22]), np.arange(1), tree=np.array([-1, 0, 0, 2])))
    backend.cache.keep(20, [0, 2, 3])
    text = [*TEXT[:21], *TEXT[22:24], *TEXT]
    feed(backend, text[23:CAPACITY], [])
    copied = backend.cache.snapshot()
    assert copied.length == len(text)
    restore(straight.cache, copied.part(0, 50))
    backend.cache.trim(50)
    # Cells lie in another order there, in which scores are summed.
    assert close(feed(straight, text[50:]), feed(backend, text[50:]), 1e-4)


def test_what_is_no_copy_of_such_a_cache_is_refused(make_family: Make) -> None:
    backend, other = make_family("gemma2"), make_family("gemma4")
    feed(backend, TEXT[:24], [])
    with pytest.raises(BackendError, match="another model"):
        restore(other.cache, backend.cache.snapshot())
