"""GGUF files with sliding windows: copies of two caches, beyond what a window shows; sessions and prefix caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import BackendError, CapabilityError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import ForwardInput
from tests.export.gguf_cases import GEMMA, GEMMA3N, GEMMA4, OSS, SHARED_CACHES, TIED, TRINITY, layers
from tests.tables import each_row

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

from edgeinfer.runtime.backends.llamacpp.backend import LlamaCppBackend
from tests.runtime.backends.llamacpp.test_llamacpp_backend import close, feed

pytestmark = pytest.mark.gguf

# Patterns that a graph has and that a file gives, caches that layers share, and heads that windows change.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", GEMMA | layers(2, 3)),
    "gemma3": ("Gemma3", GEMMA | layers(3, 3)),
    "gemma3n": ("Gemma3n", GEMMA3N | TIED | layers(3, 4) | {"activation_sparsity_pattern": [0.95] * 4}),
    "gemma4": ("Gemma4", GEMMA4 | TIED | SHARED_CACHES | layers(3, 6)),
    "gpt-oss": ("GptOss", OSS | layers(2, 3)),
    "olmo3": ("Olmo3", {"sliding_window": 5, **layers(2, 3)}),
    "afmoe": ("Afmoe", TRINITY | layers(4, 5)),
}
TEXT = np.random.default_rng(1).integers(2, 300, 40)
CAPACITY, DRAFTED = 64, 6
PROMPT = "Once upon a time there was a little dog."
Make = Callable[..., LlamaCppBackend]


@pytest.mark.parametrize("name", FAMILIES)
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
    other.cache.restore(backend.cache.snapshot())
    assert np.array_equal(feed(other, TEXT[24:30]), feed(backend, TEXT[24:30]))
    seen: list[tuple[int, int]] = []

    def look(layer: int, keys: Floats, values: Floats) -> tuple[Floats, Floats]:
        seen.append((layer, keys.shape[1]))
        return keys, values

    # An edit knows its layer, so the layers must differ.
    other.cache.rewrite(look)
    assert seen == [(layer, 30) for layer in range(3)]
    assert close(feed(other, TEXT[30:33]), feed(backend, TEXT[30:33]), 0.02)


def test_copies_after_a_tree_and_a_full_cache(make_family: Make) -> None:
    backend, straight = make_family("gemma2"), make_family("gemma2")
    feed(backend, TEXT[:20], [])
    backend.forward(ForwardInput(TEXT[20:24], np.array([20, 21, 21, 22]), np.arange(1), tree=np.array([-1, 0, 0, 2])))
    backend.cache.keep(20, [0, 2, 3])
    text = [*TEXT[:21], *TEXT[22:24], *TEXT]
    feed(backend, text[23:CAPACITY], [])
    copied = backend.cache.snapshot()
    assert copied.length == len(text)
    straight.cache.restore(copied.part(0, 50))
    backend.cache.trim(50)
    # Cells lie in another order there, in which scores are summed.
    assert close(feed(straight, text[50:]), feed(backend, text[50:]), 1e-4)


def test_what_is_no_copy_of_such_a_cache_is_refused(make_family: Make) -> None:
    backend, other = make_family("gemma2"), make_family("gemma4")
    feed(backend, TEXT[:24], [])
    with pytest.raises(BackendError, match="another model"):
        other.cache.restore(backend.cache.snapshot())
    # What llama.cpp gives at once lacks the rows that the window hides.
    with pytest.raises(CapabilityError, match="do not save its sessions"):
        backend.cache._codec.decode(backend._context.state(0), 0, 24)


@each_row("name", ["gemma3", "gpt-oss"])
def test_conversations_are_saved_and_kept(name: str, bundles: Callable[[str], Bundle], tmp_path: Path) -> None:
    path = bundles(name).path
    options: dict[str, Any] = {"context": 128, "kv": "float32", "speculation": "off"}
    file, other = tmp_path / "talk.session", "A cat sat on the mat, and looked out of the window."
    with edgeinfer.load(path, backend="llamacpp", **options) as model:
        ids = model.tokenize(PROMPT)
        ids += model.generate(ids, max_tokens=20, temperature=0).token_ids
        model.save_session(file)
        expected = model.generate(ids, max_tokens=20, temperature=0).token_ids
    with edgeinfer.load(path, backend="llamacpp", **options, prefix_cache="4MB") as model:
        assert model.load_session(file) == ids[:-1]
        again = model.generate(ids, max_tokens=20, temperature=0)
        assert (again.token_ids, again.timings.cached_prompt_tokens) == (expected, len(ids) - 1)
        first = model.generate(other, max_tokens=20, temperature=0)
        model.generate(PROMPT, max_tokens=5, temperature=0)
        kept = model.generate(other, max_tokens=20, temperature=0)
        assert kept.token_ids == first.token_ids
        assert kept.timings.cached_prompt_tokens == len(model.tokenize(other)) - 1
        one = model.generate(PROMPT, max_tokens=4, temperature=0)
        assert model.generate(PROMPT, max_tokens=4, search="beam", beams=1).token_ids == one.token_ids
