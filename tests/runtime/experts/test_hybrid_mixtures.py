"""Mixtures whose layers also keep states: experts out of memory and streamed layers leave every bit and every reply."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import tensors_in
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.contract import Backend, ForwardInput
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from edgeinfer.runtime.backends.onnx.windowed import CachedExpertsBackend, StreamedBackend
from edgeinfer.runtime.system.memory import releases_pages
from edgeinfer.runtime.weights.experts import ExpertBytes
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of
from tests.speculation import load_eager

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not releases_pages(), reason="pages of weights cannot be released here"),
]

EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 24, "head_dim": 32, "shared_expert_intermediate_size": 32},
}
SCAN: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
# By transformers' names of classes.
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3_5Moe": EXPERTS | DELTA,
    "GraniteMoeHybrid": SCAN
    | {"layer_types": DELTA["layer_types"], "shared_intermediate_size": 32}
    | {"num_local_experts": 6, "num_experts_per_tok": 3},
}
CONTEXT, PROMPT = 128, "Once upon a time there was a little dog. Once upon a time there was"
TOKENS = np.arange(60, dtype=np.int64) * 37 % 300
# From and to which token a pass goes, and how many stay.
PASSES = ((0, 30, 30), (30, 38, 33), (33, 34, 34), (34, 50, 50))


@pytest.fixture(scope="module", params=KINDS)
def bundle(request: pytest.FixtureRequest) -> Bundle:
    require_kernel()
    config = ExportConfig(bits=8, group_size=32, keep_small=False)
    return bundle_of(request.param, config, tie_word_embeddings=True, **KINDS[request.param])


def run(backend: Backend, tokens: Any) -> Any:
    size, start = len(tokens), backend.cache.length
    return backend.forward(ForwardInput(tokens, np.arange(start, start + size), np.arange(size))).logits.copy()


def test_passes_drafts_and_copies_have_the_bits_of_resident_experts(bundle: Bundle) -> None:
    whole = run(PagedBackend(bundle, CONTEXT), TOKENS)
    decoder = bundle.manifest.decoder
    assert decoder is not None
    takes = ExpertBytes.of(decoder, tensors_in(bundle.manifest, NATIVE))
    others = (
        CachedExpertsBackend(PagedBackend(bundle, CONTEXT), decoder, takes.least),
        StreamedBackend(PagedBackend(bundle, CONTEXT), 2),
    )
    for backend in others:
        for start, stop, kept in PASSES:
            assert np.array_equal(run(backend, TOKENS[start:stop]), whole[start:stop])
            backend.cache.trim(kept)
        rows = backend.cache.snapshot()
        assert np.array_equal(run(backend, TOKENS[50:]), whole[50:])
        backend.cache.restore(rows)
        assert np.array_equal(run(backend, TOKENS[50:]), whole[50:])
        backend.close()


def test_replies_have_the_tokens_of_resident_experts(bundle: Bundle) -> None:
    """Drafted and not, with as few experts in memory as a pass needs."""
    decoder = bundle.manifest.decoder
    assert decoder is not None
    least = ExpertBytes.of(decoder, tensors_in(bundle.manifest, NATIVE)).least
    options: dict[str, Any] = {"context": CONTEXT, "threads": 1}
    with edgeinfer.load(bundle.path, speculation="off", **options) as model:
        plain = model.generate(PROMPT, max_tokens=24, temperature=0).token_ids
    with load_eager(bundle.path, speculation="recycle", expert_memory=least, **options) as model:
        replies = [model.generate(PROMPT, max_tokens=24, temperature=0) for _ in range(2)]
        assert model.plan.configuration.weights == "experts"
    assert [reply.token_ids for reply in replies] == [plain] * 2
    assert replies[-1].speculation.drafted > 0
