"""A cache without a model, whose values say which tokens of the text a row stands for."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgeinfer.bundle.arithmetic import rope_tables
from edgeinfer.bundle.manifest import Capabilities
from edgeinfer.bundle.parts import RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.runtime.arrays import Floats

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
    """The part of `contract.Backend` that policies use. Element 0 of a value is its token's place in the text."""

    name = "store"
    geometry = SPEC.geometry
    capabilities = Capabilities(layer_skip=True, hidden=True, tree=False)

    def __init__(self, capacity: int, text: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._raw = raw_keys(text)
        self._tables = rope_tables(SPEC.rope, capacity, capacity)
        shape = (SPEC.num_layers, SPEC.num_kv_heads, 0, HEAD)
        self.keys, self.values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    @property
    def cache(self) -> Store:
        return self

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
