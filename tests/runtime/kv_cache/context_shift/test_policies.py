"""Places of the tokens that stay, sums kept by merging, and turned keys against keys of the new position."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.manifest import Capabilities
from edgeinfer.bundle.parts import RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.results import Overflow
from edgeinfer.nn.arithmetic import rope_tables, rotate
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.kv_cache.context_shift.cluster import ClusterOptions, ClusterPolicy
from edgeinfer.runtime.kv_cache.context_shift.policy import (
    ContextShiftPolicy,
    LayerRotations,
    Lost,
    Removed,
    Rotation,
    context_shift_summary,
)
from edgeinfer.runtime.kv_cache.context_shift.window import WindowPolicy
from tests.alone import Alone

if TYPE_CHECKING:
    from tests.runtime.conftest import Family

HEAD = 8
SPEC = DecoderSpec(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=HEAD,
    max_positions=4096,
    norm_eps=1e-5,
    rope=RopeSpec("default", 1e4, HEAD),
)


def raw_keys(count: int) -> Floats:  # (L, H, count, h)
    """Keys of a text's tokens before rotation, of few directions so that some are alike."""
    chance = np.random.default_rng(3)
    directions = chance.normal(size=(6, HEAD))
    chosen = directions[chance.integers(6, size=(SPEC.num_layers, SPEC.num_kv_heads, count))]
    return (chosen + 0.2 * chance.normal(size=chosen.shape)).astype(np.float32)


class Store:
    """The part of a cache and of its backend that policies use. Element 0 of a value is its place in the text."""

    name = "store"
    geometry = SPEC.geometry
    capabilities = Capabilities(layer_skip=True, hidden=True, tree=False)

    def __init__(self, capacity: int, text: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.editable = True
        self._raw = raw_keys(text)
        self._tables = rope_tables(SPEC.rope, capacity, capacity)
        shape = (SPEC.num_layers, SPEC.num_kv_heads, 0, HEAD)
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    def feed(self, place: int) -> None:
        """One more token of the text, by its place there."""
        raw, half = self._raw[:, :, place : place + 1], HEAD // 2
        cos, sin = (table[self.length] for table in self._tables)
        a, b = raw[..., :half], raw[..., half:]
        key = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        value = np.zeros_like(key)
        value[..., 0] = place
        self.keys, self.values = np.concatenate([self.keys, key], 2), np.concatenate([self.values, value], 2)
        self.length += 1

    def unrotated(self) -> Floats:  # (L, H, n, h)
        """Keys as they were before the rotation of the rows that they are in."""
        cos, sin = (table[: self.length] for table in self._tables)
        a, b = np.split(self.keys, 2, axis=-1)
        turned: Floats = np.concatenate([a * cos + b * sin, b * cos - a * sin], axis=-1)
        return turned

    def rewrite(self, edit: Any) -> None:
        edited = [edit(layer, self.keys[layer].copy(), self.values[layer].copy()) for layer in range(SPEC.num_layers)]
        self.keys, self.values = (np.stack(each) for each in zip(*edited, strict=True))
        self.length = self.keys.shape[2]

    @property
    def places(self) -> Floats:
        """Place in the text of each row, by layer and head; a mean where rows were merged. (L, H, n)"""
        places: Floats = self.values[..., 0]
        return places


TEXT = 300
capacities = st.integers(32, 100)
texts = st.integers(1, TEXT)


def fill(store: Store, policy: ContextShiftPolicy, count: int) -> Lost:
    """Feeds a text as the engine does."""
    lost = Lost()
    for place in range(count):
        if store.length == store.capacity:
            lost = lost.after(policy.make_room(range(place)), place)
            assert store.length == place - lost.tokens < store.capacity
        store.feed(place)
    return lost


@given(capacity=capacities, count=texts, sinks=st.integers(0, 4), freed=st.sampled_from([0.01, 0.125, 0.5]))
@settings(deadline=None, max_examples=20)
def test_window_holds_the_first_and_the_latest(capacity: int, count: int, sinks: int, freed: float) -> None:
    store = Store(capacity, TEXT)
    lost = fill(store, WindowPolicy(SPEC, store, sinks, freed), count)  # type: ignore[arg-type]
    assert lost.tokens == max(0, count - store.length)
    assert lost.events == -(-max(0, count - capacity) // max(1, int(freed * capacity)))
    first = min(count, sinks)
    expected = [*range(first), *range(first + lost.tokens, count)]
    assert np.array_equal(store.places, np.broadcast_to(expected, store.places.shape))
    np.testing.assert_allclose(store.unrotated(), raw_keys(TEXT)[:, :, expected], atol=1e-4)


@given(capacity=capacities, count=texts, chunk=st.sampled_from([2, 7, 64]), freed=st.sampled_from([0.1, 0.25]))
@settings(deadline=None, max_examples=20)
def test_clusters_lose_nothing_but_detail(capacity: int, count: int, chunk: int, freed: float) -> None:
    store = Store(capacity, TEXT)
    policy = ClusterPolicy(SPEC, store, ClusterOptions(chunk=chunk, freed=freed))  # type: ignore[arg-type]
    lost = fill(store, policy, count)
    assert lost.merged == lost.tokens == count - store.length
    weights = check_conserved(store, policy._counts, count)
    lengths = (weights * np.linalg.norm(store.unrotated(), axis=-1)).sum(axis=-1)
    np.testing.assert_allclose(lengths, np.linalg.norm(raw_keys(TEXT)[:, :, :count], axis=-1).sum(axis=-1), rtol=1e-4)


def check_conserved(store: Store, counted: dict[int, Floats], count: int) -> Floats:
    """The weighted sum of all values is that of the text, and the sinks are untouched; returns the weights."""
    weights = np.ones(store.places.shape, np.float32)
    for layer, counts in counted.items():
        weights[layer, :, : counts.shape[1]] = counts
    assert np.all(weights.sum(axis=-1) == count)
    assert np.all(weights[..., :4] == 1)
    np.testing.assert_allclose((weights * store.places).sum(axis=-1), sum(range(count)), rtol=1e-4)
    return weights


def test_forgetting_begins_anew() -> None:
    store, other = Store(40, 200), Store(40, 200)
    used, fresh = (ClusterPolicy(SPEC, each) for each in (store, other))  # type: ignore[arg-type]
    fill(store, used, 150)
    used.forget()
    store.keys, store.values, store.length = store.keys[:, :, :0], store.values[:, :, :0], 0
    fill(store, used, 90)
    fill(other, fresh, 90)
    assert np.array_equal(store.keys, other.keys)


def test_what_was_lost_adds_up() -> None:
    lost = Lost().after(Removed(5, 2.5), 40).after(Removed(3), 45)
    assert lost == Lost(events=2, tokens=8, merged=2.5, since=45)


def test_a_reply_is_lossy_once_something_was_lost() -> None:
    policy = WindowPolicy(SPEC, Store(40, 1))  # type: ignore[arg-type]
    assert context_shift_summary(None, Lost()) == Overflow("stop", 0, 0, 0, lossless=True)
    assert context_shift_summary(policy, Lost()) == Overflow("window", 0, 0, 0, lossless=True)
    lost = Lost(events=2, tokens=8, merged=2.5, since=45)
    assert context_shift_summary(policy, lost) == Overflow("window", 2, 5.5, 2.5, lossless=False)


WIDTH = 16
CONTEXT = 4096
SPECS = {
    "default": RopeSpec("default", 1e4, WIDTH),
    "partial": RopeSpec("default", 1e4, 6),
    "neighbours": RopeSpec("default", 1e4, 6, interleaved=True),
    "linear": RopeSpec("linear", 1e4, WIDTH, factor=4.0),
    "llama3": RopeSpec("llama3", 5e5, WIDTH, 8.0, 1.0, 4.0, original_max_positions=32),
    "longrope": RopeSpec(
        "longrope",
        1e4,
        WIDTH,
        original_max_positions=32,
        short_factors=(1.0,) * 8,
        long_factors=tuple(2.0 + 0.5 * i for i in range(8)),
        attention_factor=1.19,
    ),
}


@given(name=st.sampled_from([*SPECS]), data=st.data())
@settings(deadline=None)
def test_moved_keys_equal_keys_of_the_new_position(name: str, data: st.DataObject) -> None:
    places = st.lists(st.integers(0, CONTEXT - 1), min_size=5, max_size=5)
    old, new = np.array(data.draw(places)), np.array(data.draw(places))
    raw = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(5, 3, WIDTH)).astype(np.float32)
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
    spec = DecoderSpec(32, 16, 24, 3, 2, 1, WIDTH, 64, 1e-6, activation="silu", **ropes)
    keys = np.random.default_rng(0).normal(size=(1, 4, WIDTH)).astype(np.float32)
    old, new = np.arange(9, 13), np.arange(4)
    rotations = LayerRotations(spec, 64)
    for layer, name in ((0, "linear"), (2, "default")):
        wanted = Rotation(SPECS[name], 64).moved(keys, old, new)
        np.testing.assert_array_equal(rotations.moved(layer, keys, old, new), wanted)
        np.testing.assert_array_equal(rotations.mover(old, new)(layer, keys), wanted)
    np.testing.assert_array_equal(rotations.mover(old, new)(1, keys), keys)
    np.testing.assert_array_equal(rotations.moved(1, keys, old, new), keys)


def test_first_layers_keys_after_an_overflow_equal_the_remaining_texts(family: Family) -> None:
    """Keys of the first layer depend on nothing but token and position."""
    spec = family.bundle.manifest.decoder
    assert spec is not None
    tokens = (np.arange(40) * 37 + 11) % spec.vocab_size
    left = np.concatenate([tokens[:4], tokens[14:]])
    backend, fresh = Alone(ReferenceBackend(family.bundle, 40), 40), Alone(ReferenceBackend(family.bundle, 40), 40)
    backend.forward(Pass(tokens, np.arange(40), np.zeros(0, np.int64)))
    fresh.forward(Pass(left, np.arange(30), np.zeros(0, np.int64)))
    removed = WindowPolicy(spec, backend.cache, sinks=4, freed=0.25).make_room(tokens.tolist())
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
    backend, whole = Alone(ReferenceBackend(family.bundle, 40), 40), Alone(ReferenceBackend(family.bundle, 60), 60)
    expected = whole.forward(Pass(tokens, np.arange(60), np.arange(60))).logits[40:]
    backend.forward(Pass(tokens[:40], np.arange(40), np.zeros(0, np.int64)))
    WindowPolicy(spec, backend.cache, freed=0.5).make_room(tokens[:40].tolist())
    actual = backend.forward(Pass(tokens[40:], np.arange(20, 40), np.arange(20))).logits
    np.testing.assert_allclose(actual, expected, atol=2e-4)
