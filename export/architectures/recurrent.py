"""The tensors of recurrent layers, of which checkpoint tensors they are made, and their shapes."""

from __future__ import annotations

from collections.abc import Iterator

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.architectures.plans import TensorPlan, plan


def recurrent_tensors(spec: DecoderSpec, layer: int, root: str) -> Iterator[TensorPlan]:
    """Those of a layer that has a recurrence in the place of attention, or beside it; of others none."""
    prefix = f"layers.{layer}.mixer"
    if spec.mixer(layer) == "conv":
        yield from _conv_tensors(spec, prefix, root)
    elif spec.mixer(layer) == "delta":
        yield from _delta_tensors(spec, prefix, root)
    elif "mamba2" in spec.parts_of(layer):
        yield from _mamba2_tensors(spec, prefix, root)


def _conv_tensors(spec: DecoderSpec, prefix: str, root: str) -> Iterator[TensorPlan]:
    conv, hidden = spec.conv, spec.hidden_size
    assert conv is not None, "a layer with a convolution has its sizes"
    modules: dict[str, tuple[str, tuple[int, ...]]] = {
        "in": ("in_proj", (3 * hidden, hidden)),
        "conv": ("conv", (hidden, 1, conv.width)),
        "out": ("out_proj", (hidden, hidden)),
    }
    for name, (module, shape) in modules.items():
        yield plan(f"{prefix}.{name}", (f"{root}{module}.weight", shape))
        if conv.bias:
            yield plan(f"{prefix}.{name}_bias", (f"{root}{module}.bias", shape[:1]))


def _delta_tensors(spec: DecoderSpec, prefix: str, root: str) -> Iterator[TensorPlan]:
    delta, hidden = spec.delta, spec.hidden_size
    assert delta is not None, "a layer with a delta rule has its sizes"
    channels, heads = 2 * delta.keys + delta.values, delta.value_heads
    yield plan(
        f"{prefix}.in",
        (f"{root}in_proj_qkv.weight", (channels, hidden)),
        (f"{root}in_proj_z.weight", (delta.values, hidden)),
    )
    gates = ((f"{root}in_proj_{name}.weight", (heads, hidden)) for name in ("b", "a"))
    yield plan(f"{prefix}.gates", *gates)
    yield plan(f"{prefix}.conv", (f"{root}conv1d.weight", (channels, 1, delta.width)))
    yield plan(f"{prefix}.dt_bias", (f"{root}dt_bias", (heads,)))
    yield plan(f"{prefix}.a_log", (f"{root}A_log", (heads,)))
    yield plan(f"{prefix}.norm", (f"{root}norm.weight", (delta.value_size,)))
    yield plan(f"{prefix}.out", (f"{root}out_proj.weight", (hidden, delta.values)))


def _mamba2_tensors(spec: DecoderSpec, prefix: str, root: str) -> Iterator[TensorPlan]:
    scan, hidden = spec.mamba2, spec.hidden_size
    assert scan is not None, "a layer with a recurrence has its sizes"
    shapes: dict[str, tuple[str, tuple[int, ...], bool]] = {
        "in": ("in_proj", (scan.read_size, hidden), scan.bias),
        "conv": ("conv1d", (scan.conv_size, 1, scan.width), scan.conv_bias),
        "out": ("out_proj", (hidden, scan.inner_size), scan.bias),
    }
    for name, (module, shape, biased) in shapes.items():
        yield plan(f"{prefix}.{name}", (f"{root}{module}.weight", shape))
        if biased:
            yield plan(f"{prefix}.{name}_bias", (f"{root}{module}.bias", shape[:1]))
    for name, source in (("dt_bias", "dt_bias"), ("a_log", "A_log"), ("d", "D")):
        yield plan(f"{prefix}.{name}", (f"{root}{source}", (scan.heads,)))
    if scan.normed:
        yield plan(f"{prefix}.norm", (f"{root}norm.weight", (scan.inner_size,)))
