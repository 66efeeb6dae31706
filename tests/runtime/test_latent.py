"""Decoders with latent attention in the whole runtime: small caches, the text of plain decoding, refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import BundleError, UnsupportedArchitectureError, UsageError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.paging.layout import PAGE, PageLayout
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of, checkpoint_of

LATENT: dict[str, Any] = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 12, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
LATENT |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
PROMPT = "Once upon a time there was a little dog. Once upon a time there was"
DRAFTERS = ("ngram", "exit", "bits", "recycle")


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    require_kernel()
    return bundle_of("DeepseekV3", ExportConfig(bits=8, group_size=32, keep_small=False), **LATENT)


def test_the_cache_holds_a_small_vector_and_one_key_of_each_token(bundle: Bundle) -> None:
    geometry = bundle.manifest.geometry
    layout, layers = PageLayout.of(geometry, "float32"), geometry.num_layers
    assert geometry.kv_bytes_per_token() == 4 * layers * (32 + 8)
    assert layout.page_bytes - 4096 < PAGE * geometry.kv_bytes_per_token() <= layout.page_bytes


def test_drafting_and_sessions_leave_the_text_as_it_is(bundle: Bundle, tmp_path: Path) -> None:
    with edgeinfer.load(bundle.path, context=128, threads=1) as model:
        plain = model.generate(PROMPT, max_tokens=32, temperature=0, speculation="off")
        for drafter in DRAFTERS:
            reply = model.generate(PROMPT, max_tokens=32, temperature=0, speculation=drafter)
            assert reply.token_ids == plain.token_ids, drafter
        model.save_session(tmp_path / "talk")
        expected = model.generate(PROMPT + plain.text, max_tokens=8, temperature=0)
    with edgeinfer.load(bundle.path, context=128, threads=2) as other:
        other.load_session(tmp_path / "talk")
        again = other.generate(PROMPT + plain.text, max_tokens=8, temperature=0, speculation="ngram")
    assert again.token_ids == expected.token_ids and again.timings.cached_prompt_tokens > 0


def test_what_latent_attention_cannot_do_is_refused_by_name(bundle: Bundle, tmp_path: Path) -> None:
    for overflow in ("cluster", "merge"):
        with pytest.raises(UsageError, match="latent attention"):
            edgeinfer.load(bundle.path, context=128, overflow=overflow)
    with pytest.raises(BundleError, match="no graph for the portable layout"):
        edgeinfer.load(bundle.path, context=128, native=False)
    checkpoint = checkpoint_of("DeepseekV3", **LATENT)
    with pytest.raises(UnsupportedArchitectureError, match="Portable bundles of a decoder with latent attention"):
        export_checkpoint(checkpoint, tmp_path / "bundle", ExportConfig(bits=8, layout="portable"))
    assert not (tmp_path / "bundle").exists()


def test_a_full_context_forgets_its_middle(bundle: Bundle) -> None:
    with edgeinfer.load(bundle.path, context=64, threads=1, overflow="window") as model:
        reply = model.generate(PROMPT, max_tokens=96, temperature=0, speculation="off")
    assert len(reply.token_ids) == 96 or reply.finish_reason == "stop"
