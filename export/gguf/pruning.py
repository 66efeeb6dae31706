"""Chooses layers to leave out of a model, which then drafts for the whole one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.gguf.metadata import GgufArray
from edgeinfer.bundle.gguf.reader import GgufFile
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import UsageError
from edgeinfer.core.results import Progress
from edgeinfer.nn.arithmetic import log_softmax, rms_norm
from edgeinfer.nn.decoder import Decoder, DecoderRun, WholeTexts
from edgeinfer.quant.calibration import ModelReader
from edgeinfer.quant.calibration_layers import require_computed

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

# Some minutes of two slow cores; at most so many tokens, which more would not make a better choice, and at least these.
_OPERATIONS = 1e13
_MOST_TOKENS, _FEWEST_TOKENS = 2048, 64
# Whose predictions are compared at a time.
_ROWS = 128
_LAYER = re.compile(r"blk\.(\d+)\.")
# Of llama.cpp's architectures, those whose layers are all alike: others count on where a layer is, for windows,
# positions or kinds of layers.
_UNIFORM = frozenset(
    {
        *("llama", "mistral3", "qwen2", "qwen3", "phi2", "phi3", "gemma", "olmo", "granite", "starcoder2", "stablelm"),
        *("qwen2moe", "qwen3moe", "olmoe", "granitemoe", "phimoe", "internlm2", "minicpm", "falcon", "gpt2", "gptneox"),
    }
)
_HINT = "Layers are numbered from 0, as edgeinfer inspect --tensors shows them in blk.N."


def check_prunable(file: GgufFile, layers: Sequence[int]) -> None:
    """Refuses to leave out missing layers, all layers, or layers of a model that cannot run without them."""
    if not layers:
        return
    architecture = file.metadata.text("general.architecture", "")
    count = file.metadata.integer(f"{architecture}.block_count", 0)
    check_layers(architecture, count, layers)
    for key, value in file.metadata.items():
        if isinstance(value, GgufArray) and key.startswith(f"{architecture}.") and value.count >= count > 1:
            message = f"{key} has a value for every layer, and llama.cpp cannot leave any of them out."
            raise UsageError(message, "Draft with another small model that has the same tokenizer.")


def check_layers(architecture: str, count: int, layers: Sequence[int]) -> None:
    """`check_prunable` before there is a file."""
    if architecture not in _UNIFORM:
        message = f"Layers of {architecture or 'an unnamed architecture'} are not all alike, so none can be left out."
        raise UsageError(message, "Draft with another small model that has the same tokenizer.")
    for layer in layers:
        if not 0 <= layer < count:
            raise UsageError(f"The model has {count} layers, but no layer {layer}.", _HINT)
    if len(set(layers)) >= count:
        raise UsageError(f"Not all {count} layers of the model can be left out.", "Keep at least one.")


def is_pruned(tensor: str, pruned: Sequence[int]) -> bool:
    found = _LAYER.match(tensor)
    return found is not None and int(found[1]) in pruned


def renumbered(tensor: str, pruned: Sequence[int]) -> str:
    """A tensor's name after layers were left out."""
    found = _LAYER.match(tensor)
    if found is None:
        return tensor
    layer = int(found[1])
    return f"blk.{layer - sum(p < layer for p in pruned)}.{tensor[found.end() :]}"


def choose_layers(
    spec: DecoderSpec, reader: ModelReader, texts: Sequence[Ints], count: int, progress: Progress | None = None
) -> tuple[int, ...]:
    """The layers to leave out, ascending: one after the other, the layer whose absence changes predictions least.

    Each candidate is a stream that leaves the model's own at its layer, so that every weight is read once for all of
    them. How much a layer turns the hidden states is no better guide: on three small models its choice was no better
    than layers at even distances (docs/log).

    Args:
        texts: token ids; texts do not see each other.
    """
    if not 0 < count < spec.num_layers:
        hint = f"Leave out 1 to {spec.num_layers - 1}."
        raise UsageError(f"{count} of {spec.num_layers} layers cannot be left out.", hint)
    texts = [np.asarray(text, np.int64) for text in texts]
    pruned: tuple[int, ...] = ()
    head = reader.tensor("embed" if spec.tied else "head")
    reference = _final_states(spec, reader, texts, pruned, None)[-1]  # (T, D)
    for step in range(count):
        final = _final_states(spec, reader, texts, pruned, partial(_step, progress, step, count))
        del final[-1]
        losses = {layer: _divergence(reference, states, head) for layer, states in final.items()}
        if not np.isfinite(list(losses.values())).all():
            raise UsageError("The model's activations are not finite.", "Name the layers by number.")
        pruned = tuple(sorted((*pruned, min(losses, key=losses.__getitem__))))
    return pruned


def prune_tokens(spec: DecoderSpec, parameters: int, count: int) -> int:
    """Number of tokens for which choosing layers takes some minutes."""
    vocabulary = spec.vocab_size * spec.hidden_size
    each = 2 * count * spec.num_layers * (max(parameters - vocabulary, 0) / 2 + vocabulary)
    return int(min(max(_OPERATIONS / each, _FEWEST_TOKENS), _MOST_TOKENS))


def _step(progress: Progress | None, step: int, steps: int, layer: int, layers: int) -> None:
    if progress is not None:
        progress("choosing layers", step * layers + layer + 1, steps * layers)


def _final_states(
    spec: DecoderSpec,
    reader: ModelReader,
    texts: Sequence[Ints],
    pruned: Sequence[int],
    progress: Callable[[int, int], None] | None,
) -> dict[int, Floats]:  # (T, D) each
    """Normed hidden states of the model without some layers, as -1, and without one more, by its number.

    Without `progress` only the former.
    """
    tokens = np.concatenate(list(texts))
    distinct, places = np.unique(tokens, return_inverse=True)
    streams = {-1: reader.rows("embed", distinct)[places]}
    require_computed(spec)
    decoder = Decoder(spec, reader.tensor, max(map(len, texts)))
    for layer in range(spec.num_layers):
        if layer not in pruned:
            before = streams[-1].copy() if progress is not None else None
            names = list(streams)
            # As further texts, so that each weight is multiplied by all of them at once.
            run = DecoderRun(WholeTexts(spec, [len(text) for text in texts] * len(names)))
            moved = decoder.layer(layer, np.concatenate(list(streams.values())), run)
            streams = dict(zip(names, np.split(moved, len(names)), strict=True))
            if before is not None:
                streams[layer] = before
        if progress is not None:
            progress(layer, spec.num_layers)
    norm = reader.tensor("final_norm")
    return {name: rms_norm(states, norm, spec.norm_eps) for name, states in streams.items()}


def _divergence(reference: Floats, states: Floats, head: Floats) -> float:  # (T, D), (T, D), (V, D)
    """Mean divergence of predictions from hidden states, in nats."""
    total = 0.0
    for start in range(0, len(states), _ROWS):
        rows = slice(start, start + _ROWS)
        wanted, found = (log_softmax(x[rows] @ head.T, np.float32) for x in (reference, states))
        total += float((np.exp(wanted) * (wanted - found)).sum(dtype=np.float64))
    return total / len(states)
