"""Which scheme each tensor gets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from edgeinfer.bundle.manifest import PlannedTensor, PlanRecord
from edgeinfer.core.errors import BundleError, UsageError
from edgeinfer.quant.policy import (
    QuantPlan,
    QuantPolicy,
    QuantScheme,
    effective_block,
)
from tests.tables import each_row


@each_row(
    ("k", "requested", "block"),
    [(896, 128, 128), (896, 32, 32), (160, 128, 32), (192, 128, 64), (172, 128, 32), (176, 64, 32)],
)
def test_block_is_the_largest_that_divides(k: int, requested: int, block: int) -> None:
    assert effective_block(k, requested) == block


def test_vectors_stay_float() -> None:
    policy = QuantPolicy(4, 4, 32)
    assert policy.scheme("final_norm", (4096,)) is None
    assert policy.scheme("layers.0.attn.qkv_bias", (4096,)) is None


def test_vocabulary_matrices_have_bits_of_their_own() -> None:
    policy = QuantPolicy(4, 8, 32)
    assert policy.scheme("embed", (1000, 1000)) == QuantScheme(8, 32)
    assert policy.scheme("head", (1000, 1000)) == QuantScheme(8, 32)
    assert policy.scheme("layers.0.mlp.down", (1024, 1024)) == QuantScheme(4, 32)


@each_row(("bits", "wider"), [(2, 8), (3, 8), (4, 8), (8, None)])
def test_small_linear_layers_stay_wider(bits: int, wider: int | None) -> None:
    shape = (256, 256)
    kept = QuantPolicy(bits, 4, 32).scheme("layers.0.attn.out", shape)
    assert (kept.bits if kept else None) == wider
    forced = QuantPolicy(bits, 4, 32, keep_small=False).scheme("layers.0.attn.out", shape)
    assert forced is not None
    assert forced.bits == bits


def test_large_eight_bit_matrices_have_no_zero_points() -> None:
    policy = QuantPolicy(8, 8, 32)
    large, medium = policy.scheme("layers.0.mlp.down", (2048, 2048)), policy.scheme("layers.0.mlp.down", (512, 512))
    assert large is not None and medium is not None
    assert (large.symmetric, medium.symmetric) == (True, False)


def test_thirty_two_bits_quantize_nothing() -> None:
    policy = QuantPolicy(32, 32, 32)
    assert policy.scheme("layers.0.mlp.down", (2048, 2048)) is None
    assert policy.scheme("embed", (2048, 2048)) is None


SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (512, 512),
    "layers.0.attn_norm": (512,),
    "layers.0.attn.qkv": (1024, 512),
    "layers.0.mlp.router": (8, 512),
    "layers.0.mlp.experts.0.down": (512, 64),
    "layers.0.mlp.shared.down": (512, 512),
    "layers.0.mlp.shared.gate": (1, 512),
    "layers.1.mlp.down": (512, 1024),
}
POLICY = QuantPolicy(2, 4, 32)


def test_a_policy_protects_routers_and_shared_experts() -> None:
    plan = QuantPlan.from_policy(POLICY, SHAPES)
    bits = {name: scheme.bits if scheme else 32 for name, scheme in plan.schemes.items()}
    assert bits == {
        "embed": 4,
        "layers.0.attn.qkv": 2,
        "layers.0.mlp.router": 32,
        "layers.0.mlp.experts.0.down": 2,
        "layers.0.mlp.shared.down": 8,
        "layers.0.mlp.shared.gate": 32,
        "layers.1.mlp.down": 2,
    }
    assert plan.scheme("layers.0.attn_norm") is None


def test_the_last_pattern_that_matches_wins() -> None:
    plan = QuantPlan.from_policy(POLICY, SHAPES, (("*.down", 8), ("layers.1.*", 4), ("embed", 32)), "gptq")
    assert plan.scheme("layers.0.mlp.experts.0.down") == QuantScheme(8, 32)
    assert plan.scheme("layers.1.mlp.down") == QuantScheme(4, 32)
    assert plan.scheme("embed") is None
    assert plan.scheme("layers.0.attn.qkv") == QuantScheme(2, 32)
    assert plan.method == "gptq"


@each_row("pattern", ["layers.7.*", "*.router", "*_norm", "Embed"])
def test_a_pattern_that_matches_nothing_is_an_error(pattern: str) -> None:
    with pytest.raises(UsageError) as caught:
        QuantPlan.from_policy(POLICY, SHAPES, ((pattern, 8),))
    assert pattern in caught.value.message
    assert caught.value.hint


def test_a_plan_survives_the_manifest() -> None:
    plan = QuantPlan.from_policy(POLICY, SHAPES, (("*.qkv", 8),), "gptq")
    plan = dataclasses.replace(plan, predicted={"embed": 0.25, "layers.1.mlp.down": 0.5}, budget_bytes=1000)
    record = plan.record("0" * 64, 4096)
    assert (record.predicted_kl, record.calibration_tokens) == (0.75, 4096)
    assert (record.method, record.budget_bytes) == ("gptq", 1000)
    assert [t.name for t in record.tensors] == list(plan.schemes)
    for tensor in record.tensors:
        scheme = plan.scheme(tensor.name)
        kept = (32, 0, False) if scheme is None else (scheme.bits, scheme.block_size, scheme.symmetric)
        assert (tensor.bits, tensor.block_size, tensor.symmetric) == kept
        assert tensor.predicted_kl == plan.predicted.get(tensor.name)


def test_nothing_predicted_is_not_zero() -> None:
    assert QuantPlan.from_policy(POLICY, SHAPES).record().predicted_kl is None


@each_row("damage", [{"bits": 7}, {"block_size": 0}, {"bits": 32}, {"predicted_kl": -1.0}])
def test_malformed_entries_are_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(BundleError):
        dataclasses.replace(PlannedTensor("embed", 4, 32), **damage)


def test_malformed_records_are_refused() -> None:
    entry = PlannedTensor("embed", 4, 32)
    damages: list[dict[str, Any]] = [{"tensors": (entry, entry)}, {"calibration_tokens": -1}, {"budget_bytes": 0}]
    for damage in damages:
        with pytest.raises(BundleError):
            PlanRecord("rtn", **damage)
