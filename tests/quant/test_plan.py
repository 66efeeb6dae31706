"""Plans: what a policy and patterns make of a model, and that they survive being recorded."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from edgeinfer.bundle.manifest import PlannedTensor, PlanRecord
from edgeinfer.errors import BundleError, UsageError
from edgeinfer.quant.policy import QuantPlan, QuantPolicy, QuantScheme
from tests.tables import each_row

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


@each_row("damage", [{"bits": 5}, {"block_size": 0}, {"bits": 32}, {"predicted_kl": -1.0}])
def test_malformed_entries_are_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(BundleError):
        dataclasses.replace(PlannedTensor("embed", 4, 32), **damage)


def test_malformed_records_are_refused() -> None:
    entry = PlannedTensor("embed", 4, 32)
    damages: list[dict[str, Any]] = [{"tensors": (entry, entry)}, {"calibration_tokens": -1}, {"budget_bytes": 0}]
    for damage in damages:
        with pytest.raises(BundleError):
            PlanRecord("rtn", **damage)
