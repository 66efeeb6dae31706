"""Decoders with recurrent layers, shared caches or latent attention: the text of plain decoding, refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.bundle.conversion import convert_bundle
from edgeinfer.bundle.layouts import PORTABLE
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import BundleError, UnsupportedArchitectureError, UsageError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.source.checkpoint import checkpoint_tensors
from edgeinfer.quant.calibration_layers import LayerWalk
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.native.library import LIBRARY
from edgeinfer.runtime.paging.layout import PAGE, PageLayout
from tests.runtime.models import bundle_of, checkpoint_of

pytestmark = pytest.mark.skipif(not LIBRARY.is_file(), reason="the native kernel was not built")
LAYERS: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32}
SHARING: dict[str, Any] = {
    **{"num_hidden_layers": 6, "num_kv_shared_layers": 3, "sliding_window": 9, "head_dim": 16, "global_head_dim": 32},
    **{"layer_types": ["sliding_attention", "full_attention"] * 3, "use_double_wide_mlp": True},
    **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 320},
}
STREAMS = {name: value for name, value in SHARING.items() if name not in ("global_head_dim", "use_double_wide_mlp")}
STREAMS |= {"activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0, 0.0, 0.0], "laurel_rank": 32}
LATENT: dict[str, Any] = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 12, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
LATENT |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
PROMPT = "Once upon a time there was a little dog. Once upon a time there was"
TOKENS = np.arange(40, dtype=np.int64) * 37 % 300
DRAFTERS = ("ngram", "exit", "skip", "bits", "recycle")


MODELS = {"Lfm2": LAYERS, "Gemma4": SHARING, "Gemma3n": STREAMS, "DeepseekV3": LATENT}
EACH = pytest.mark.parametrize("bundle", MODELS, indirect=True)


@pytest.fixture(scope="module")
def bundle(request: pytest.FixtureRequest) -> Bundle:
    name = getattr(request, "param", "Lfm2")
    config = ExportConfig(bits=8, group_size=32, keep_small=False)
    return bundle_of(name, config, tie_word_embeddings=True, **MODELS[name])


def given(tokens: Any, start: int) -> ForwardInput:
    size = len(tokens)
    return ForwardInput(np.asarray(tokens, np.int64), np.arange(start, start + size), np.arange(size))


def run(backend: PagedBackend, tokens: Any) -> Any:
    return backend.forward(given(tokens, backend.cache.length)).logits.copy()


@EACH
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


@EACH
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


@EACH
def test_a_session_continues(bundle: Bundle, tmp_path: Path) -> None:
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
    with pytest.raises(UnsupportedArchitectureError, match="Portable bundles"):
        export_checkpoint(checkpoint_of("Lfm2", **LAYERS), tmp_path / "bundle", ExportConfig(bits=8, layout="portable"))


@pytest.mark.parametrize("bundle", ["Gemma4", "Gemma3n"], indirect=True)
def test_a_layer_whose_cache_is_read_attends_with_its_readers(bundle: Bundle) -> None:
    spec = bundle.manifest.decoder
    assert spec is not None and spec.kv_sources == (0, 1, 2, 1, 2, 1)
    mask = np.ones(12, np.bool_)
    mask[[2, 3, 5, 8]] = False  # attention and MLP of layer 1, which layers 3 and 5 read
    batch = ForwardInput(TOKENS, np.arange(40), np.arange(40), layer_mask=mask)
    wanted = ReferenceBackend(bundle, 64).forward(batch).logits
    backend = PagedBackend(bundle, 64)
    assert np.linalg.norm(backend.forward(batch).logits - wanted) < 0.03 * np.linalg.norm(wanted)
    whole = run(PagedBackend(bundle, 64), TOKENS)
    # The first layers alone, then the others: nothing that was written is written again.
    backend.cache.clear()
    first = np.arange(12) < 8
    hidden = backend.forward(ForwardInput(TOKENS, np.arange(40), np.arange(0), layer_mask=first)).hidden
    assert hidden is not None
    hidden = hidden.copy()
    backend.cache.trim(0)
    resumed = ForwardInput(TOKENS, np.arange(40), np.arange(40), layer_mask=~first, hidden=hidden)
    assert np.array_equal(backend.forward(resumed).logits, whole)


@pytest.mark.parametrize("bundle", ["Gemma4"], indirect=True)
def test_what_shared_caches_cannot_do_is_refused_by_name(bundle: Bundle, tmp_path: Path) -> None:
    for overflow in ("window", "merge"):
        with pytest.raises(UsageError, match="full_heads"):
            edgeinfer.load(bundle.path, context=128, overflow=overflow)
    with pytest.raises(UsageError, match="not a plain Llama"):
        next(iter(checkpoint_tensors(bundle)))
    for config, named in (
        (ExportConfig(bits=8, layout="portable"), "layers that share keys and values"),
        (ExportConfig(bits=8, format="gguf"), "no shared caches but of"),
    ):
        with pytest.raises(UnsupportedArchitectureError, match=named):
            export_checkpoint(checkpoint_of("Gemma4", **SHARING), tmp_path / "bundle", config)
    with pytest.raises(UnsupportedArchitectureError, match="kv_sources"):
        assert bundle.manifest.decoder is not None
        LayerWalk(bundle.manifest.decoder, bundle.tensor, [4], lambda _, weight, __: weight, (False,), hessian=False)


@pytest.mark.parametrize("bundle", ["DeepseekV3"], indirect=True)
def test_latent_attention_caches_little_and_refuses_by_name(bundle: Bundle, tmp_path: Path) -> None:
    """A small vector and one key of each token are cached; a full context forgets its middle."""
    geometry = bundle.manifest.geometry
    assert geometry.kv_bytes_per_token() == 4 * geometry.num_layers * (32 + 8)
    page_bytes = PageLayout.of(geometry, "float32").page_bytes
    assert page_bytes - 4096 < PAGE * geometry.kv_bytes_per_token() <= page_bytes
    with edgeinfer.load(bundle.path, context=64, threads=1, overflow="window") as model:
        reply = model.generate(PROMPT, max_tokens=96, temperature=0, speculation="off")
    assert len(reply.token_ids) == 96 or reply.finish_reason == "stop"
    for overflow in ("cluster", "merge"):
        with pytest.raises(UsageError, match="latent attention"):
            edgeinfer.load(bundle.path, context=128, overflow=overflow)
    with pytest.raises(BundleError, match="no graph for the portable layout"):
        edgeinfer.load(bundle.path, context=128, native=False)
    with pytest.raises(UnsupportedArchitectureError, match="Portable bundles of a decoder with latent attention"):
        config = ExportConfig(bits=8, layout="portable")
        export_checkpoint(checkpoint_of("DeepseekV3", **LATENT), tmp_path / "bundle", config)
    assert not (tmp_path / "bundle").exists()
