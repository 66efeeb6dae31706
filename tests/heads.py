"""Random heads for tests, and copies of bundles that have them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.additions import Heads, add_heads
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle

# Kinds that draft.
DRAFTING = ("medusa", "hydra")


def random_heads(bundle: Bundle, kind: str, *, tokens: int = 64, heads: int = 3, seed: int = 0) -> Heads:
    """Heads of a kind for a bundle's model; those that draft guess its lowest token ids, by rows of their own: so many,
    or all for 0, by the model's head, which Medusa's can."""
    geometry, rng = bundle.manifest.geometry, np.random.default_rng(seed)
    size, layers = geometry.hidden_size, geometry.num_layers

    def draw(*shape: int) -> NDArray[np.float16]:
        drawn: NDArray[np.float16] = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float16)
        return drawn

    arrays: dict[str, NDArray[Any]] = {
        "norm": np.ones(size, np.float32),
        "tokens": np.arange(tokens, dtype=np.int32),
        "rows": draw(tokens, size),
    }
    if kind == "medusa":
        own = {"weight": draw(heads, size, size), "bias": draw(heads, size)}
        arrays = own | {name: arrays[name] for name in ("tokens", "rows")} if tokens else own
    elif kind == "hydra":
        arrays["embeddings"] = draw(tokens, size)
        for head in range(heads):
            arrays |= {f"weight.{head}": draw(2, size, (2 + head) * size), f"bias.{head}": draw(size)}
    else:
        arrays = {"weight": draw(layers, size), "bias": draw(layers)}
    return Heads(kind, arrays, {"made": "at random"})


def with_heads(source: Path, folder: Path, *kinds: str, **sizes: int) -> Path:
    """A copy of a bundle with random heads of these kinds."""
    shutil.copytree(source, folder)
    for kind in kinds:
        add_heads(folder, random_heads(open_bundle(folder), kind, **sizes))
    return folder
