"""Turned keys are the keys that a pass at their new position would have written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.arithmetic import rope_tables, rotate
from edgeinfer.bundle.parts import RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.kv_cache.context_shift.policy import LayerRotations, Rotation
from edgeinfer.runtime.kv_cache.context_shift.window import WindowPolicy

if TYPE_CHECKING:
    from tests.runtime.conftest import Family

HEAD = 16
CONTEXT = 4096
SPECS = {
    "default": RopeSpec("default", 1e4, HEAD),
    "partial": RopeSpec("default", 1e4, 6),
    "neighbours": RopeSpec("default", 1e4, 6, interleaved=True),
    "linear": RopeSpec("linear", 1e4, HEAD, factor=4.0),
    "llama3": RopeSpec("llama3", 5e5, HEAD, 8.0, 1.0, 4.0, original_max_positions=32),
    "longrope": RopeSpec(
        "longrope",
        1e4,
        HEAD,
        original_max_positions=32,
        short_factors=(1.0,) * 8,
        long_factors=tuple(2.0 + 0.5 * i for i in range(8)),
        attention_factor=1.19,
    ),
}


@given(name=st.sampled_from([*SPECS]), data=st.data())
@settings(deadline=None)
def test_moved_keys_are_those_of_the_new_position(name: str, data: st.DataObject) -> None:
    places = st.lists(st.integers(0, CONTEXT - 1), min_size=5, max_size=5)
    old, new = np.array(data.draw(places)), np.array(data.draw(places))
    raw = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(5, 3, HEAD)).astype(np.float32)
    cos, sin = rope_tables(SPECS[name], CONTEXT, CONTEXT)
    before, after = (
        rotate(raw, cos[p], sin[p], interleaved=SPECS[name].interleaved).swapaxes(0, 1) for p in (old, new)
    )
    rotation = Rotation(SPECS[name], CONTEXT)
    np.testing.assert_allclose(rotation.moved(before, old, new), after, atol=1e-5)
    # Heads may hold different tokens.
    each = np.stack([old, old, old]), np.stack([new, new, new])
    np.testing.assert_array_equal(rotation.moved(before, *each), rotation.moved(before, old, new))


def test_every_layer_has_its_own_rotation() -> None:
    ropes: dict[str, Any] = {"rope": SPECS["default"], "more_ropes": (SPECS["linear"],), "rope_layers": (1, -1, 0)}
    spec = DecoderSpec(32, 16, 24, 3, 2, 1, HEAD, 64, 1e-6, activation="silu", **ropes)
    keys = np.random.default_rng(0).normal(size=(1, 4, HEAD)).astype(np.float32)
    old, new = np.arange(9, 13), np.arange(4)
    rotations = LayerRotations(spec, 64)
    for layer, name in ((0, "linear"), (2, "default")):
        wanted = Rotation(SPECS[name], 64).moved(keys, old, new)
        np.testing.assert_array_equal(rotations.moved(layer, keys, old, new), wanted)
        np.testing.assert_array_equal(rotations.mover(old, new)(layer, keys), wanted)
    np.testing.assert_array_equal(rotations.mover(old, new)(1, keys), keys)
    np.testing.assert_array_equal(rotations.moved(1, keys, old, new), keys)


def test_keys_and_tables_are_left_alone() -> None:
    keys = np.ones((1, 2, HEAD), np.float32)
    rotation = Rotation(SPECS["partial"], 64)
    moved = rotation.moved(keys, np.array([0, 9]), np.array([5, 9]))
    assert np.all(keys == 1)
    np.testing.assert_array_equal(moved[..., 6:], keys[..., 6:])
    np.testing.assert_allclose(moved[0, 1], keys[0, 1], atol=1e-6)


def test_first_layers_keys_after_an_overflow_are_those_of_the_text_that_is_left(family: Family) -> None:
    """Keys of the first layer depend on nothing but token and position."""
    spec = family.bundle.manifest.decoder
    assert spec is not None
    tokens = (np.arange(40) * 37 + 11) % spec.vocab_size
    left = np.concatenate([tokens[:4], tokens[14:]])
    backend, fresh = ReferenceBackend(family.bundle, 40), ReferenceBackend(family.bundle, 40)
    backend.forward(ForwardInput(tokens, np.arange(40), np.zeros(0, np.int64)))
    fresh.forward(ForwardInput(left, np.arange(30), np.zeros(0, np.int64)))
    removed = WindowPolicy(spec, backend, sinks=4, freed=0.25).make_room(tokens.tolist())
    assert (removed.rows, removed.merged, backend.cache.length) == (10, 0, 30)
    actual, expected = backend.cache.snapshot(), fresh.cache.snapshot()
    np.testing.assert_allclose(actual.keys[0], expected.keys[0], atol=1e-5)
    np.testing.assert_allclose(actual.values[0], expected.values[0], atol=1e-5)


def test_a_window_that_outlasts_the_models_own_loses_nothing(make_family: Callable[..., Family]) -> None:
    """All layers see 6 tokens back; sinks and what is dropped are further away."""
    family = make_family("mistral")
    spec = family.bundle.manifest.decoder
    assert spec is not None
    assert set(spec.windows) == {6}
    tokens = (np.arange(60) * 37 + 11) % spec.vocab_size
    backend, whole = ReferenceBackend(family.bundle, 40), ReferenceBackend(family.bundle, 60)
    expected = whole.forward(ForwardInput(tokens, np.arange(60), np.arange(60))).logits[40:]
    backend.forward(ForwardInput(tokens[:40], np.arange(40), np.zeros(0, np.int64)))
    WindowPolicy(spec, backend, freed=0.5).make_room(tokens[:40].tolist())
    actual = backend.forward(ForwardInput(tokens[40:], np.arange(20, 40), np.arange(20))).logits
    np.testing.assert_allclose(actual, expected, atol=2e-4)
