"""Models with experts through the public face: the same text whatever is left out of memory, and figures of experts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.core.errors import BudgetError, UsageError
from edgeinfer.export.options import ExportConfig
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of
from tests.speculation import PROMPT, load_eager, plain, same

EXPERTS, TOP_K, LAYERS = 12, 3, 4


@pytest.fixture(scope="module")
def bundle() -> Path:
    require_kernel()
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "max_position_embeddings": 512,
    }
    return bundle_of("qwen3-moe", ExportConfig(bits=4, keep_small=False, calibration="none"), **sizes).path


@pytest.fixture(scope="module")
def eager(bundle: Path) -> Iterator[edgeinfer.Model]:
    with load_eager(bundle, context=192) as model:
        yield model


@pytest.mark.parametrize("how", [{}, {"temperature": 0.9, "seed": 4}, {"draft_width": 3}])
@pytest.mark.parametrize("who", ["experts", "experts,copy", "auto"])
def test_drafting_with_fewer_experts_gives_the_same_text(
    eager: edgeinfer.Model, who: str, how: dict[str, float]
) -> None:
    edgeinfer.tools.restore_drafting(eager, {})
    found = same(eager, who, max_tokens=40, **how)
    assert found.drafted
    assert who != "experts" or set(found.per_drafter) == {"experts"}
    assert found.exact


@pytest.mark.skipif(sys.platform != "linux", reason="pages of files are not dropped elsewhere")
@pytest.mark.parametrize("who", ["resident", "experts", "auto"])
def test_experts_out_of_memory_give_the_same_text(bundle: Path, eager: edgeinfer.Model, who: str) -> None:
    expected = plain(eager, max_tokens=40)
    with load_eager(bundle, context=192, weights="experts") as model:
        assert plain(model, max_tokens=40).token_ids == expected.token_ids
        same(model, who, max_tokens=40)
        use = model.experts
        assert use is not None and use.hit_rate is not None
        assert 0 < use.resident_bytes <= model.plan.terms["experts"] == model.plan.configuration.expert_bytes
        assert use.expert_bytes > use.resident_bytes


def test_a_model_draws_on_fewer_experts_as_told(bundle: Path) -> None:
    with load_eager(bundle, context=192, speculation="experts", draft_experts=2) as model:
        assert same(model, "experts", max_tokens=30).drafted
    with pytest.raises(UsageError, match="draft_experts"):
        edgeinfer.load(bundle, context=192, speculation="experts", draft_experts=TOP_K + 1)
    with pytest.raises(UsageError, match=r"All experts .* in memory"):
        edgeinfer.load(bundle, context=192, speculation="resident")


def test_a_result_tells_how_its_tokens_used_experts(bundle: Path) -> None:
    with load_eager(bundle, context=192) as model:
        first = model.generate(PROMPT, max_tokens=20, ignore_eos=True)
        again = model.generate(PROMPT, max_tokens=20, ignore_eos=True)
        counts, whole = edgeinfer.tools.expert_counts(model), model.experts
    assert first.experts is not None and again.experts is not None and whole is not None and counts is not None
    assert first.experts.tokens == first.usage.total_tokens - 1
    # What was held of the prompt is not computed again.
    assert again.experts.tokens < first.experts.tokens
    assert whole.tokens >= first.experts.tokens + again.experts.tokens
    assert first.experts.token_sparsity == pytest.approx(1 - TOP_K / EXPERTS)
    sparsity = first.experts.chunk_sparsity
    assert sparsity[8] < sparsity[4] < sparsity[2] < first.experts.token_sparsity
    assert counts.usage.shape == (LAYERS, EXPERTS)
    assert (counts.usage.sum(axis=1) == TOP_K * counts.tokens).all()
    assert json.loads(json.dumps(first.to_dict()))["experts"]["chunk_sparsity"]["8"] == sparsity[8]


@pytest.mark.skipif(sys.platform != "linux", reason="pages of files are not dropped elsewhere")
def test_plans_count_the_experts_that_stay(bundle: Path) -> None:
    options: dict[str, Any] = {"context": 192, "kv": "float32", "prefill_chunk": 8, "speculation": "off"}
    least = edgeinfer.plan(bundle, **options, weights="experts")
    whole = edgeinfer.plan(bundle, **options)
    assert whole.configuration.weights == "mapped"
    assert least.configuration.weights == "experts"
    assert least.terms["experts"] == least.configuration.expert_bytes > 0
    assert 0 < least.terms["weights_mapped"] == whole.terms["weights_mapped"]
    assert whole.terms["experts"] > 0
    with pytest.raises(UsageError, match=r"cannot run with .* of experts.*expert_memory"):
        edgeinfer.plan(bundle, **options, expert_memory="1KB")
    with pytest.raises(UsageError, match="expert_memory"):
        edgeinfer.plan(bundle, **options, weights="streamed", expert_memory="1GB")
    with pytest.raises(BudgetError):
        edgeinfer.load(bundle, **options, memory="20MB")
