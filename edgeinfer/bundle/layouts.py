"""The ways quantized weights lie in a bundle, and the files of each.

native: tiles of edgeinfer.bundle.native_layout, which our own kernel reads in place.
portable: rows of edgeinfer.bundle.packing, which ONNX Runtime's MatMulNBits and GatherBlockQuantized read.

`weights.bin` holds one of these two, the stored layout, and `model.onnx` is the graph that reads it. Beside it lies the
graph of the other layout, whose weights file is made of `weights.bin` on the device that needs it
(edgeinfer.bundle.conversion). Weights that are not quantized are the same in both, so a bundle without others has one
weights file for both graphs and counts as portable. Bundles made before the cache was paged have no native graph where
nothing is quantized.

static: columns of edgeinfer.bundle.static_layout, which DequantizeLinear reads, and the graphs of
edgeinfer.bundle.static_graph beside them. A bundle has no other layout then, and is not converted.
"""

from __future__ import annotations

from typing import Literal

Layout = Literal["native", "portable", "static"]
NATIVE: Layout = "native"
PORTABLE: Layout = "portable"
STATIC: Layout = "static"
# Those that are converted to each other.
LAYOUTS: tuple[Layout, ...] = (NATIVE, PORTABLE)
# Raised when the bytes of a layout change; a bundle of another version is exported again.
LAYOUT_VERSIONS: dict[Layout, int] = {NATIVE: 1, PORTABLE: 1, STATIC: 1}

MODEL = "model.onnx"
WEIGHTS = "weights.bin"


def tensor_layout(name: str, layout: Layout) -> Layout:
    """The layout of one tensor: an embedding, of which rows are looked up, is stored by rows in a static bundle too."""
    return PORTABLE if layout == STATIC and name == "embed" else layout


def model_name(stored: Layout, layout: Layout) -> str:
    """Name of the graph that reads `layout`, in a bundle that stores `stored`."""
    return MODEL if layout == stored else f"model.{layout}.onnx"


def weights_name(stored: Layout, layout: Layout, *, quantized: bool = True) -> str:
    """Name of the weights file in `layout`, in a bundle that stores `stored`."""
    return WEIGHTS if layout == stored or not quantized else f"weights.{layout}.bin"
