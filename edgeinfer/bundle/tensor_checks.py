"""Whether the tensors and graphs that a manifest lists fit its files and its decoder; reads no file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from edgeinfer.bundle.experts import expert_tensor
from edgeinfer.bundle.layouts import WEIGHTS
from edgeinfer.bundle.manifest import Manifest
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.tables import file_bytes
from edgeinfer.errors import BundleError

__all__ = ["check_graphs", "check_tensors"]

_AGAIN = "Export or download the bundle again."


def check_tensors(manifest: Manifest) -> None:
    """Every weight must lie in the weights file, and the decoder be no larger than its weights.

    Raises:
        BundleError: they do not.
    """
    if not manifest.tensors:
        return
    if WEIGHTS not in manifest.files:
        raise BundleError(f"The manifest lists tensors but no {WEIGHTS}.", _AGAIN)
    size = manifest.files[WEIGHTS].bytes
    for tensor in manifest.tensors:
        if file_bytes([tensor]) > size:
            raise BundleError(f"{tensor.name} reaches past the end of {WEIGHTS}.", _AGAIN)
    decoder = manifest.decoder
    if decoder is None:
        raise BundleError("The manifest lists tensors but describes no decoder.", _AGAIN)
    vocabulary, qkv = (decoder.vocab_size, decoder.hidden_size), decoder.q_size + 2 * decoder.kv_size
    wanted = itertools.chain(
        (("embed", vocabulary), ("head", vocabulary)),
        ((f"layers.{i}.attn.qkv", (qkv, decoder.hidden_size)) for i in range(decoder.num_layers)),
        itertools.chain.from_iterable(_expert_shapes(decoder, i) for i in range(decoder.num_layers)),
    )
    shapes = {tensor.name: tensor.shape for tensor in manifest.tensors}
    for name, shape in wanted:
        if shapes.get(name) != shape:
            raise BundleError(f"{name} has shape {shapes.get(name)}, the decoder needs {shape}.", _AGAIN)


def check_graphs(manifest: Manifest) -> None:
    """Every graph of a static bundle must be there, and be of its decoder.

    Raises:
        BundleError: it is not.
    """
    static, decoder = manifest.static, manifest.decoder
    if static is None:
        return
    if decoder is None or not manifest.tensors:
        raise BundleError("The static bundle describes no decoder, or lists no tensors.", _AGAIN)
    if decoder.moe is not None:
        raise BundleError("The static bundle describes a mixture of experts, which has no static graphs.", _AGAIN)
    for graph in static.all:
        if graph.file not in manifest.files:
            raise BundleError(f"The static bundle has no {graph.file}.", _AGAIN)
    if (len(static.layers), static.context) != (decoder.num_layers, decoder.max_positions):
        message = f"The static graphs have {len(static.layers)} layers and a context of {static.context} tokens"
        raise BundleError(f"{message}; the decoder has {decoder.num_layers} and {decoder.max_positions}.", _AGAIN)


def _expert_shapes(decoder: DecoderSpec, layer: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names and shapes of a layer's router and experts, where it has any."""
    moe, hidden = decoder.experts_of(layer), decoder.hidden_size
    if moe is None:
        return
    yield f"layers.{layer}.mlp.router", (moe.experts, hidden)
    part, rows = ("gate_up", 2 * moe.expert_size) if moe.gated else ("up", moe.expert_size)
    for expert in range(moe.experts):
        yield expert_tensor(layer, expert, part), (rows, hidden)
        yield expert_tensor(layer, expert, "down"), (hidden, moe.expert_size)
