"""At which depths a drafter was trained to guess, as its manifest says by figures; knows nothing of how it guesses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from edgeinfer.bundle.manifest import Manifest
from edgeinfer.bundle.store import MANIFEST, Bundle, write_file

__all__ = ["add_figures", "exit_figure", "trained_depths"]

_PREFIX = "exit_agreement."


def exit_figure(depth: int) -> str:
    """The figure of how often a guess after so many layers is the target's, which only trained depths have."""
    return f"{_PREFIX}{depth}"


def trained_depths(manifest: Manifest) -> tuple[int, ...]:
    """Depths with such a figure, ascending, fewer than all layers."""
    layers = manifest.geometry.num_layers
    return tuple(depth for depth in range(1, layers) if exit_figure(depth) in manifest.quality)


def add_figures(bundle: Bundle, figures: Mapping[str, float]) -> None:
    """Writes figures beside those that the manifest has.

    Raises:
        StorageError: it cannot be written; the old one is still there.
    """
    manifest = replace(bundle.manifest, quality=bundle.manifest.quality | dict(figures))
    write_file(bundle.path / MANIFEST, manifest.to_json().encode())
