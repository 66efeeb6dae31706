"""Random models of a shape in the formats of all engines, made on first use and kept; knows nothing of timing."""

from __future__ import annotations

from pathlib import Path

from edgeinfer.apps.bench.gguf_random import write_random_gguf
from edgeinfer.apps.bench.model_files import (
    LAYOUTS,
    BundleKind,
    Layout,
    ModelFiles,
    export_command,
    tree_bytes,
)
from edgeinfer.apps.bench.shapes import Shape, write_random_checkpoint

__all__ = ["LAYOUTS", "Artifacts", "BundleKind", "Layout", "default_folder", "export_command", "tree_bytes"]


def default_folder() -> Path:
    """Where model files are kept unless told otherwise."""
    return Path.home() / ".cache" / "edgeinfer" / "bench"


class Artifacts(ModelFiles):
    """Random models of one shape.

    Args:
        folder: holds a subfolder per shape; a 0.5B shape takes about 3 GB.
        shape: of the models.
        rebuild: replace bundles that are already there; for work on the exporter.
    """

    def __init__(self, folder: Path, shape: Shape, *, rebuild: bool = False) -> None:
        super().__init__(folder / shape.name, shape.name, rebuild=rebuild)
        self._shape = shape

    def checkpoint(self) -> Path:
        """A Hugging Face checkpoint in float32."""
        return self._make("checkpoint", lambda path: write_random_checkpoint(path, self._shape))

    def gguf(self) -> Path:
        """A GGUF file with every matrix in Q4_0, of weights of its own."""
        return self._make("q4_0.gguf", lambda path: write_random_gguf(path, self._shape))
