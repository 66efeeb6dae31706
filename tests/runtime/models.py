"""Random checkpoints and bundles of them, made once for all tests of the runtime; whoever changes one takes a copy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from edgeinfer.bundle.layouts import NATIVE, Layout
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.onnx.adapters import pack_adapters
from edgeinfer.runtime.backends.onnx.backend import OnnxBackend
from edgeinfer.runtime.backends.onnx.graph_backend import GraphBackend
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from tests.alone import Alone
from tests.cache import made
from tests.factories import make_checkpoint

Settings = list[tuple[str, Any]]


def checkpoint_of(variant: str, **settings: Any) -> Path:
    """The checkpoint of a variant, as tests.factories makes it."""
    return made(_checkpoint, variant, sorted(settings.items())) / "checkpoint"


def bundle_of(variant: str, config: ExportConfig, **settings: Any) -> Bundle:
    """The bundle of that checkpoint."""
    return open_bundle(made(_bundle, variant, sorted(settings.items()), config) / "bundle")


def make_graph_backend(
    bundle: Bundle,
    capacity: int,
    *,
    layout: Layout | None = None,
    adapters: dict[str, str] | None = None,
    **options: Any,
) -> Alone[GraphBackend]:
    """The backend of the graph of a layout, with a sequence; None is the stored one."""
    if (layout or bundle.manifest.layout) == NATIVE:
        packed = pack_adapters(bundle.manifest, adapters) if adapters else None
        return Alone(PagedBackend(bundle, capacity, adapters=packed, **options), capacity)
    paged = ("kv", "pages", "weighed")
    usable = {name: value for name, value in options.items() if name not in paged}
    return Alone(OnnxBackend(bundle, capacity, **usable), capacity)


def given(tokens: Sequence[int] | Ints, start: int, **how: Any) -> Pass:
    """A pass over tokens behind so many that the cache holds, whose logits are wanted in all rows."""
    rows = np.arange(len(tokens))
    return Pass(np.array(tokens, np.int64), start + rows, rows, **how)


def feed(backend: Alone[Any], tokens: Sequence[int] | Ints, **how: Any) -> Floats:  # (S, V)
    """Feed tokens in one pass and give the logits after each."""
    return backend.forward(given(tokens, backend.cache.length, **how)).logits.copy()


def depths(parents: Sequence[int] | Ints) -> list[int]:
    """How far each row of a draft tree is from its root."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


@st.composite
def passes(draw: st.DrawFn, /, layers: int, **more: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Tokens of 0 to 319, with wanted rows, a tree or none, blocks that are left out or none, and what more is said."""
    size = draw(st.integers(1, 6))
    mask = st.lists(st.booleans(), min_size=2 * layers, max_size=2 * layers).map(np.array)
    return {
        "tokens": np.array(draw(st.lists(st.integers(0, 319), min_size=size, max_size=size))),
        "rows": np.array(draw(st.lists(st.integers(0, size - 1), max_size=size)), np.int64),
        "tree": draw(st.none() | st.tuples(*(st.integers(-1, row - 1) for row in range(size))).map(np.array)),
        "layer_mask": draw(st.none() | mask),
        **{name: draw(strategy) for name, strategy in more.items()},
    }


def _checkpoint(folder: Path, variant: str, settings: Settings) -> None:
    make_checkpoint(folder / "checkpoint", variant, **dict(settings))


def _bundle(folder: Path, variant: str, settings: Settings, config: ExportConfig) -> None:
    export_checkpoint(checkpoint_of(variant, **dict(settings)), folder / "bundle", config)
