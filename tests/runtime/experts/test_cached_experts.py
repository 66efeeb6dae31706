"""Experts left out of memory: the same bits with states and without, no more resident than the limit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edgeinfer
from edgeinfer.bundle.layouts import NATIVE, PORTABLE, Layout
from edgeinfer.bundle.packing import find_expert
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import tensors_in
from edgeinfer.core.errors import CapabilityError
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.contract import ExpertChoice, Pass, PassCancelledError
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from edgeinfer.runtime.system.memory import process_memory, releases_pages
from edgeinfer.runtime.weights.experts import ExpertBytes, ExpertCache, RouterGuess
from tests.alone import Alone, restore
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of, depths, feed, make_graph_backend, passes
from tests.speculation import load_eager
from tests.tables import each_row
from tests.windowed import cache_experts, stream_layers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages of files are not dropped elsewhere")

LAYERS, EXPERTS, CAPACITY = 4, 6, 64


def export(layout: Layout = NATIVE, **sizes: Any) -> Bundle:
    settings = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": LAYERS} | sizes
    return bundle_of("qwen3-moe", ExportConfig(bits=4, keep_small=False, layout=layout, calibration="none"), **settings)


def decoder_of(bundle: Bundle) -> DecoderSpec:
    assert bundle.manifest.decoder is not None
    return bundle.manifest.decoder


def takes(bundle: Bundle) -> ExpertBytes:
    return ExpertBytes.of(decoder_of(bundle), tensors_in(bundle.manifest, NATIVE))


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    require_kernel()
    return export()


Pair = tuple[Alone[Any], Alone[Any]]


@pytest.fixture(scope="module", params=["least", "half", "all", "streamed"])
def pair(request: pytest.FixtureRequest, bundle: Bundle) -> Iterator[Pair]:
    """A backend that leaves experts out of memory and one that does not."""
    whole = takes(bundle)
    inner = make_graph_backend(bundle, CAPACITY)
    if request.param == "streamed":
        other: Alone[Any] = stream_layers(inner, 1)
    else:
        limits = {"least": whole.least, "half": max(whole.least, whole.total // 2), "all": 10 * whole.total}
        other = cache_experts(inner, decoder_of(bundle), limits[request.param])
    plain = make_graph_backend(bundle, CAPACITY)
    yield other, plain
    other.close()
    plain.close()


def _bias(seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Hides two experts of every layer."""
    hidden = np.random.default_rng(seed).permuted(np.tile(np.arange(EXPERTS), (LAYERS, 1)), axis=1) < 2
    return np.where(hidden, np.float32(-1e9), np.float32(0))


CHOICES = st.builds(ExpertChoice, st.integers(1, 3), st.none() | st.integers(0, 9).map(_bias))


@given(script=st.lists(passes(LAYERS, experts=st.none() | CHOICES), min_size=1, max_size=5))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_pass_gives_the_same_bits(pair: Pair, script: list[dict[str, Any]]) -> None:
    for backend in pair:
        backend.cache.trim(0)
        backend.forward(Pass(np.array([5, 6]), np.arange(2), np.array([1])))
    for asked in script:
        how = dict(asked)
        tokens, start = how.pop("tokens"), pair[0].cache.length
        places = start + np.array(range(len(tokens)) if how["tree"] is None else depths(how["tree"]))
        mine, theirs = (backend.forward(Pass(tokens, places, **how)) for backend in pair)
        np.testing.assert_array_equal(mine.logits, theirs.logits)
        assert mine.experts is not None and theirs.experts is not None
        np.testing.assert_array_equal(mine.experts, theirs.experts)
        bias = None if how["experts"] is None else how["experts"].bias
        used = theirs.experts
        if bias is not None:
            layers = np.broadcast_to(np.arange(LAYERS)[:, None, None], used.shape)
            assert not bias[layers[used >= 0], used[used >= 0]].any()
        if how["layer_mask"] is not None:
            assert (used[~how["layer_mask"][1::2]] == -1).all()
            for backend in pair:
                backend.cache.trim(start)


def test_what_ran_is_resident_within_the_limit(bundle: Bundle) -> None:
    whole = takes(bundle)
    backend = cache_experts(
        make_graph_backend(bundle, CAPACITY), decoder_of(bundle), max(whole.least, whole.total // 2)
    )
    chance = np.random.default_rng(0)
    for start in range(0, 40):
        used = backend.forward(Pass(chance.integers(0, 320, 1), np.array([start]), np.array([0]))).experts
        assert used is not None
        # Those of the last layers ran last, and nothing has taken their place.
        assert backend.expert_cache.cached[LAYERS - 1][used[LAYERS - 1, 0]].all()
        assert backend.expert_cache.cached_bytes <= backend.expert_cache.limit
    assert backend.expert_cache.hit_rate is not None and 0.2 < backend.expert_cache.hit_rate < 1
    backend.close()


def test_experts_are_asked_for_before_they_are_chosen(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of random weights change hidden states little, so routers guess well; logits are those without guesses."""
    whole, inner = takes(bundle), make_graph_backend(bundle, CAPACITY)
    moe = decoder_of(bundle).moe
    assert inner.pages is not None and moe is not None
    top_k = moe.top_k
    guess = RouterGuess.of(inner.pages, tensors_in(bundle.manifest, NATIVE), top_k)
    backend = cache_experts(inner, decoder_of(bundle), whole.least, guess=guess)
    plain = make_graph_backend(bundle, CAPACITY)
    asked: list[tuple[int, list[int]]] = []
    fetch = ExpertCache.fetch

    def watched(cache: ExpertCache, layer: int, experts: Any = None) -> None:
        asked.append((layer, [] if experts is None else experts.tolist()))
        fetch(cache, layer, experts)

    monkeypatch.setattr(ExpertCache, "fetch", watched)
    right = 0
    for start in range(30):
        asked.clear()
        mine, theirs = (b.forward(Pass(np.array([start]), np.array([start]), np.array([0]))) for b in (backend, plain))
        np.testing.assert_array_equal(mine.logits, theirs.logits)
        assert mine.experts is not None
        assert [layer for layer, _ in asked] == list(range(1, LAYERS))
        right += sum(len(set(experts) & set(mine.experts[layer, 0].tolist())) for layer, experts in asked)
    # By chance it would be a third of them.
    assert right / (30 * (LAYERS - 1) * top_k) > 0.6
    backend.close()
    plain.close()


@pytest.mark.slow
def test_memory_in_use_equals_the_expert_caches_count() -> None:
    """Pages of the file that the process has, against what it believes to have."""
    require_kernel()
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "moe_intermediate_size": 512,
        "num_experts": 24,
        "num_experts_per_tok": 2,
    }
    bundle = export(**sizes)
    whole = takes(bundle)
    plain = make_graph_backend(bundle, CAPACITY)

    def peak(backend: Alone[Any], first: int) -> int:
        """Most resident bytes of files after any of a prompt's and a reply's passes."""
        chance, most = np.random.default_rng(1), 0
        backend.cache.trim(0)
        for size in (first, *[1] * 20):
            tokens = chance.integers(0, 320, size)
            backend.forward(Pass(tokens, backend.cache.length + np.arange(size), np.array([size - 1])))
            most = max(most, process_memory().file)
        return most

    everything = peak(plain, 32)
    assert plain.pages is not None
    plain.pages.release()
    nothing = process_memory().file
    limit = whole.total // 3
    assert limit > whole.least
    backend = cache_experts(plain, decoder_of(bundle), limit)
    some = peak(backend, 32) - nothing
    others = sum(t.nbytes for t in tensors_in(bundle.manifest, NATIVE) if find_expert(t.name) is None)
    assert 0.5 * limit < some < limit + others + 1_000_000
    assert everything - nothing > 1.8 * some
    backend.close()


def test_a_pass_is_cancelled_between_windows(bundle: Bundle) -> None:
    backend = cache_experts(make_graph_backend(bundle, CAPACITY), decoder_of(bundle), takes(bundle).least)
    ran = ExpertCache.used

    def used(cache: ExpertCache, ids: Any) -> None:
        ran(cache, ids)
        backend.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertCache, "used", used)
        with pytest.raises(PassCancelledError):
            backend.forward(Pass(np.arange(9), np.arange(9), np.array([8])))
    assert backend.cache.length == 0
    backend.forward(Pass(np.arange(9), np.arange(9), np.array([8])))
    backend.close()


@each_row(
    ("layout", "share", "match"),
    [(NATIVE, 0.25, r"experts of one layer take .* use more memory"), (PORTABLE, 9.0, "cannot be loaded on demand")],
)
def test_too_small_a_limit_and_experts_in_one_matrix_are_refused(layout: Layout, share: float, match: str) -> None:
    require_kernel()
    bundle = export(layout)
    inner = make_graph_backend(bundle, CAPACITY)
    with pytest.raises(CapabilityError, match=match):
        cache_experts(inner, decoder_of(bundle), int(share * takes(export()).least))
    inner.close()


releasing = pytest.mark.skipif(not releases_pages(), reason="pages of weights cannot be released here")

MIXTURE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 24, "head_dim": 32, "shared_expert_intermediate_size": 32},
}
SCAN: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
# By transformers' names of classes.
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3_5Moe": MIXTURE | DELTA,
    "GraniteMoeHybrid": SCAN
    | {"layer_types": DELTA["layer_types"], "shared_intermediate_size": 32}
    | {"num_local_experts": 6, "num_experts_per_tok": 3},
}
CONTEXT, PROMPT = 128, "Once upon a time there was a little dog. Once upon a time there was"
TOKENS = np.arange(60, dtype=np.int64) * 37 % 300
# From and to which token a pass goes, and how many stay.
PASSES = ((0, 30, 30), (30, 38, 33), (33, 34, 34), (34, 50, 50))


@pytest.fixture(scope="module", params=KINDS)
def hybrid(request: pytest.FixtureRequest) -> Bundle:
    require_kernel()
    config = ExportConfig(bits=8, group_size=32, keep_small=False)
    return bundle_of(request.param, config, tie_word_embeddings=True, **KINDS[request.param])


@pytest.mark.slow
@releasing
def test_passes_drafts_and_copies_have_the_bits_of_resident_experts(hybrid: Bundle) -> None:
    whole = feed(Alone(PagedBackend(hybrid, CONTEXT), CONTEXT), TOKENS)
    decoder = hybrid.manifest.decoder
    assert decoder is not None
    takes = ExpertBytes.of(decoder, tensors_in(hybrid.manifest, NATIVE))
    others = (
        cache_experts(Alone(PagedBackend(hybrid, CONTEXT), CONTEXT), decoder, takes.least),
        stream_layers(Alone(PagedBackend(hybrid, CONTEXT), CONTEXT), 2),
    )
    for backend in others:
        for start, stop, kept in PASSES:
            assert np.array_equal(feed(backend, TOKENS[start:stop]), whole[start:stop])
            backend.cache.trim(kept)
        rows = backend.cache.snapshot()
        assert np.array_equal(feed(backend, TOKENS[50:]), whole[50:])
        restore(backend.cache, rows)
        assert np.array_equal(feed(backend, TOKENS[50:]), whole[50:])
        backend.close()


@pytest.mark.slow
@releasing
def test_replies_have_the_tokens_of_resident_experts(hybrid: Bundle) -> None:
    """Drafted and not, with as few experts in memory as a pass needs."""
    decoder = hybrid.manifest.decoder
    assert decoder is not None
    least = ExpertBytes.of(decoder, tensors_in(hybrid.manifest, NATIVE)).least
    options: dict[str, Any] = {"context": CONTEXT, "threads": 1}
    with edgeinfer.load(hybrid.path, speculation="off", **options) as model:
        plain = model.generate(PROMPT, max_tokens=24, temperature=0).token_ids
    with load_eager(hybrid.path, speculation="recycle", expert_memory=least, **options) as model:
        replies = [model.generate(PROMPT, max_tokens=24, temperature=0) for _ in range(2)]
        assert model.plan.configuration.weights == "experts"
    assert [reply.token_ids for reply in replies] == [plain] * 2
    assert replies[-1].speculation.drafted > 0
