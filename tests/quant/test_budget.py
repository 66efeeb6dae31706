"""Plans within a budget: never above it in the bytes of the file, better with more, and as patterns say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.kinds import Segment
from edgeinfer.bundle.layouts import NATIVE, PORTABLE, Layout
from edgeinfer.bundle.packing import QuantizedShape
from edgeinfer.bundle.tables import Outline, file_bytes, lay_out
from edgeinfer.core.errors import BudgetError, UsageError
from edgeinfer.quant.budget import Candidate, Limits, candidate_schemes, plan_below, plan_within
from edgeinfer.quant.policy import QuantScheme

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (300, 64),
    "layers.0.attn_norm": (64,),
    "layers.0.attn.qkv": (128, 64),
    "layers.0.mlp.router": (3, 64),
    **{f"layers.0.mlp.experts.{e}.gate_up": (192, 64) for e in range(3)},
    **{f"layers.0.mlp.experts.{e}.down": (64, 96) for e in range(3)},
    "layers.0.mlp.shared.down": (64, 96),
    "final_norm": (64,),
}


# Errors of types of GGUF as shares of those of our own with as many bits.
SHARES = {"": 1, "Q5_0": 0.8, "IQ4_XS": 0.7}


def draw(name: str, scheme: QuantScheme | None) -> Outline:
    return drawn(name, SHAPES[name], scheme)


def drawn(name: str, shape: tuple[int, ...], scheme: QuantScheme | None) -> Outline:
    if scheme is None:
        return Outline(name, shape)
    zeros, paired = not scheme.symmetric, name.endswith("gate_up")
    if scheme.kind:
        kept = (Segment(scheme.kind, shape[0]),)
        return Outline(name, shape, QuantizedShape(shape[0], shape[1], scheme.bits, 32, False, paired, segments=kept))
    return Outline(name, shape, QuantizedShape(shape[0], shape[1], scheme.bits, scheme.block_size, zeros, paired))


def stored(schemes: dict[str, QuantScheme | None], layout: Layout) -> int:
    return file_bytes(lay_out([draw(name, schemes.get(name)) for name in SHAPES], layout))


def candidates(limits: Limits | None = None, layout: Layout = NATIVE) -> dict[str, list[Candidate]]:
    """Costs as quantization has them: a quarter with each bit, more for larger blocks and no zero points."""
    weights = {name: 1 + len(name) % 5 for name in SHAPES}
    return {
        name: [
            Candidate(s, weights[name] * 4.0**-s.bits * (1 + s.block_size / 128) * (1.2 if s.symmetric else 1))
            if s is not None
            else Candidate(s, 0.0)
            for s in schemes
        ]
        for name, schemes in candidate_schemes(SHAPES, limits, layout).items()
    }


@settings(max_examples=12, deadline=None)
@given(st.integers(60_000, 160_000), st.sampled_from([NATIVE, PORTABLE]))
def test_the_file_never_exceeds_the_budget(budget: int, layout: Layout) -> None:
    found = candidates(layout=layout)
    plan = plan_within(budget, found, SHAPES, draw, layout)
    assert stored(dict(plan.schemes), layout) <= budget
    assert plan.budget_bytes == budget
    assert plan.scheme("layers.0.mlp.router") is None
    shared = plan.scheme("layers.0.mlp.shared.down")
    assert shared is not None and shared.bits == 8
    assert set(plan.predicted) == set(found)


@settings(max_examples=12, deadline=None)
@given(st.floats(1e-5, 3.0), st.sampled_from([NATIVE, PORTABLE]))
def test_a_plan_stays_below_a_divergence_in_few_bytes(divergence: float, layout: Layout) -> None:
    found = candidates(layout=layout)
    plan, loose = (plan_below(nats, found, SHAPES, draw, layout) for nats in (divergence, 2 * divergence))
    least = sum(min(c.cost for c in each) for each in found.values())
    assert sum(plan.predicted.values()) <= max(divergence, least) + 1e-6
    size = stored(dict(plan.schemes), layout)
    assert stored(dict(loose.schemes), layout) <= size + 4096, "padding aside, more divergence takes fewer bytes"
    capped = plan_below(1e-5, found, SHAPES, draw, layout, most=size)
    assert stored(dict(capped.schemes), layout) <= size
    assert plan.budget_bytes is None


def test_experts_of_the_portable_layout_share_a_scheme() -> None:
    plan = plan_within(70_000, candidates(layout=PORTABLE), SHAPES, draw, PORTABLE)
    assert len({plan.scheme(name) for name in SHAPES if ".experts." in name}) == 1


def test_experts_of_different_widths_share_the_block_that_fits_all() -> None:
    """64 and 96 columns have blocks of 32 in common; biases of experts are no matrices and share nothing."""
    limits = Limits(block_size=64, symmetric=True)
    found = candidates(limits, PORTABLE)
    names = [*SHAPES, "layers.0.mlp.experts.down_bias"]

    def with_biases(name: str, scheme: QuantScheme | None) -> Outline:
        return draw(name, scheme) if name in SHAPES else Outline(name, (3 * 64,))

    plan = plan_within(70_000, found, names, with_biases, PORTABLE)
    assert {s and s.block_size for name, s in plan.schemes.items() if ".experts." in name} == {32}
    assert plan.scheme("layers.0.attn.qkv") == QuantScheme(4, 64, symmetric=True)
    apart = Limits(bits_for=(("*.down", 8), ("*.gate_up", 4)))
    with pytest.raises(UsageError, match=r"layers\.0\.mlp\.experts .* different bits") as caught:
        plan_within(70_000, candidates(apart, PORTABLE), SHAPES, draw, PORTABLE)
    assert "the same bits" in caught.value.hint
    assert plan_within(110_000, candidates(apart), SHAPES, draw, NATIVE)


def test_an_impossible_budget_names_a_possible_one() -> None:
    with pytest.raises(BudgetError) as caught:
        plan_within(20_000, candidates(), SHAPES, draw, NATIVE)
    least = caught.value.minimum_bytes
    assert f"{least:,}" in caught.value.hint
    assert stored(dict(plan_within(least, candidates(), SHAPES, draw, NATIVE).schemes), NATIVE) <= least


def test_limits_are_kept() -> None:
    limits = Limits(head_bits=8, block_size=32, symmetric=True, bits_for=(("*.down", 4), ("*.2.down", 32)))
    found = candidate_schemes(SHAPES, limits)
    assert found["embed"] == [QuantScheme(8, 32, symmetric=True)]
    assert found["layers.0.mlp.experts.0.down"] == [QuantScheme(4, 32, symmetric=True)]
    assert found["layers.0.mlp.experts.2.down"] == [None]
    assert {s.bits for s in found["layers.0.attn.qkv"] if s} == {2, 3, 4, 5, 8}
    assert "layers.0.mlp.router" not in found
    with pytest.raises(UsageError):
        candidate_schemes(SHAPES, Limits(bits_for=(("layers.9.*", 4),)))


def test_the_programme_chooses_among_types_of_gguf() -> None:
    """Rows of 512 values have 2 to 6 bits in blocks of 256, those of 96 types of 4 and 5 bits in blocks of 32."""
    wide = {f"layers.{layer}.attn.qkv": (256, 512) for layer in range(6)}
    found = candidate_schemes(wide | {"embed": (256, 96)})
    kinds = {name: {s.kind for s in schemes if s} for name, schemes in found.items()}
    assert kinds == {name: {"", "Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K"} for name in wide} | {
        "embed": {"", "IQ4_NL", "Q5_0", "Q5_1"}
    }
    for others in (candidate_schemes(wide, layout=PORTABLE), candidate_schemes(wide, Limits(block_size=128))):
        assert not any(scheme.kind for schemes in others.values() for scheme in schemes if scheme)
    priced = {
        name: [Candidate(s, 4.0 ** (place - s.bits) * SHARES.get(s.kind, 0.5)) for s in found[name] if s]
        for place, name in enumerate(wide)
    }
    whole, chosen = sum(n * k for n, k in wide.values()) / 8, {}
    for bits in (5.6, 6.6):
        plan = plan_within(int(bits * whole), priced, wide, lambda name, s: drawn(name, wide[name], s), NATIVE)
        chosen[bits] = [scheme.kind for scheme in plan.schemes.values() if scheme]
    assert {"Q5_K", "Q6_K"} < {*chosen[5.6]}
    assert {"Q4_K", "Q5_K"} < {*chosen[6.6]}
