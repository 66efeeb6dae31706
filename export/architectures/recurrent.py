"""The tensors of recurrent layers: ours, the checkpoint's behind the module's name, and their shapes."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.bundle import DecoderSpec

__all__ = ["recurrent_tensors"]


def recurrent_tensors(spec: DecoderSpec, layer: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Those of a layer that has a recurrence in the place of attention; of others none."""
    conv, hidden = spec.conv, spec.hidden_size
    if conv is None or spec.mixer(layer) != "conv":
        return
    modules: dict[str, tuple[str, tuple[int, ...]]] = {
        "in": ("in_proj", (3 * hidden, hidden)),
        "conv": ("conv", (hidden, 1, conv.width)),
        "out": ("out_proj", (hidden, hidden)),
    }
    for name, (module, shape) in modules.items():
        yield name, f"{module}.weight", shape
        if conv.bias:
            yield f"{name}_bias", f"{module}.bias", shape[:1]
