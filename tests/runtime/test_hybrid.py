"""Decoders with recurrent layers in the whole runtime: the same bits as plain however a text is cut, drafted, kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.bundle import PORTABLE, Bundle, open_bundle
from edgeinfer.bundle.conversion import convert_bundle
from edgeinfer.errors import BundleError, UnsupportedArchitectureError, UsageError
from edgeinfer.export import ExportConfig, export_checkpoint
from edgeinfer.export.source.bundle_checkpoint import checkpoint_tensors
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from edgeinfer.runtime.native.library import LIBRARY
from tests.factories import make_checkpoint

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the native kernel was not built")
LAYERS: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32}
PROMPT = "Once upon a time there was a little dog. Once upon a time there was"
TOKENS = np.arange(40, dtype=np.int64) * 37 % 300
DRAFTERS = ("ngram", "exit", "skip", "bits", "recycle")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("hybrid")
    make_checkpoint(folder / "checkpoint", "Lfm2", tie_word_embeddings=True, **LAYERS)
    config = ExportConfig(bits=8, group_size=32, keep_small=False)
    return open_bundle(export_checkpoint(folder / "checkpoint", folder / "bundle", config))


def given(tokens: Any, start: int) -> ForwardInput:
    size = len(tokens)
    return ForwardInput(np.asarray(tokens, np.int64), np.arange(start, start + size), np.arange(size))


def run(backend: PagedBackend, tokens: Any) -> Any:
    return backend.forward(given(tokens, backend.cache.length)).logits.copy()


@pytest.mark.parametrize("kv", ["float32", "int8"])
def test_cuts_threads_company_and_forks_leave_every_bit(kv: str, bundle: Bundle) -> None:
    backend, other = PagedBackend(bundle, 64, kv=kv), PagedBackend(bundle, 64, kv=kv, threads=2)
    whole = run(backend, TOKENS)
    parts = np.concatenate([run(other, TOKENS[a:b]) for a, b in ((0, 17), (17, 18), (18, 40))])
    assert np.array_equal(parts, whole)
    backend.cache.trim(20)
    fork = backend.cache.fork()
    pair = [(backend.cache, given(TOKENS[20:25], 20)), (fork, given(TOKENS[20:22], 20))]
    outputs = [output.logits.copy() for output in backend.forward_together(pair)]
    assert np.array_equal(outputs[0], whole[20:25]) and np.array_equal(outputs[1], whole[20:22])
    kept = backend.cache.snapshot()
    backend.cache.clear()
    backend.cache.restore(kept)
    assert np.array_equal(run(backend, TOKENS[25:]), whole[25:])


def test_drafting_leaves_the_text_as_it_is(bundle: Bundle) -> None:
    with edgeinfer.load(bundle.path, context=128, threads=1) as model:
        plain = model.generate(PROMPT, max_tokens=32, temperature=0, speculation="off")
        for drafter in DRAFTERS:
            reply = model.generate(PROMPT, max_tokens=32, temperature=0, speculation=drafter)
            assert reply.token_ids == plain.token_ids, drafter
        longer = model.generate(PROMPT + plain.text, max_tokens=8, temperature=0, speculation="ngram")
    with edgeinfer.load(bundle.path, context=128, threads=1) as fresh:
        again = fresh.generate(PROMPT + plain.text, max_tokens=8, temperature=0, speculation="off")
    assert longer.timings.cached_prompt_tokens > 0 and longer.token_ids == again.token_ids


def test_a_session_goes_on_where_it_was(bundle: Bundle, tmp_path: Path) -> None:
    with edgeinfer.load(bundle.path, context=128, threads=1) as model:
        first = model.generate(PROMPT, max_tokens=8, temperature=0)
        model.save_session(tmp_path / "talk")
        expected = model.generate(PROMPT + first.text, max_tokens=8, temperature=0)
    with edgeinfer.load(bundle.path, context=128, threads=1) as other:
        other.load_session(tmp_path / "talk")
        reply = other.generate(PROMPT + first.text, max_tokens=8, temperature=0)
    assert reply.token_ids == expected.token_ids and reply.timings.cached_prompt_tokens > 0


def test_what_recurrent_layers_cannot_do_is_refused_by_name(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="recurrent layers"):
        edgeinfer.load(bundle.path, context=128, overflow="window")
    with pytest.raises(BundleError, match="no graph for the portable layout"):
        edgeinfer.load(bundle.path, context=128, native=False)
    with pytest.raises(UsageError, match="no graph for the portable layout"):
        convert_bundle(bundle, PORTABLE, tmp_path / "portable")
    with pytest.raises(UsageError, match="not a plain Llama"):
        next(iter(checkpoint_tensors(bundle)))
    make_checkpoint(tmp_path / "checkpoint", "Lfm2", **LAYERS)
    with pytest.raises(UnsupportedArchitectureError, match="Portable bundles"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", ExportConfig(bits=8, layout="portable"))
