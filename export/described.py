"""What a checkpoint's config and its tensors say together: the decoder, and that every tensor is used; writes nothing.

Every format that is exported to asks the same.
"""

from __future__ import annotations

import fnmatch

from edgeinfer.bundle import DecoderSpec
from edgeinfer.errors import BundleError, CheckpointError
from edgeinfer.export.architectures import Architecture, TensorPlan
from edgeinfer.export.checkpoint import Checkpoint
from edgeinfer.export.hf_config import HFConfig

__all__ = ["check_tensors", "read_spec"]


def read_spec(hf_config: HFConfig, family: Architecture, checkpoint: Checkpoint) -> DecoderSpec:
    """The decoder config.json describes; where it does not say whether it is tied, one without a head is."""
    layers, count = hf_config.integer("num_hidden_layers"), len(checkpoint.names)
    if layers > count:
        # Before anything is made for each of what may be any number of layers.
        message = f"config.json: num_hidden_layers={layers}, but the checkpoint has only {count} tensors."
        raise CheckpointError(message, "Check that config.json belongs to these weights.")
    silent = hf_config.get("tie_word_embeddings") is None
    tied = family.naming.head not in checkpoint if silent else hf_config.flag("tie_word_embeddings")
    try:
        return family.read(hf_config, tied)
    except BundleError as error:
        # The description's own checks speak of bundles; here the checkpoint is at fault.
        hint = "Check that config.json is complete and belongs to this model."
        raise CheckpointError(f"config.json: {error.message}", hint) from error


def check_tensors(checkpoint: Checkpoint, family: Architecture, plans: tuple[TensorPlan, ...]) -> None:
    """Every planned tensor must be there, and nothing else: a dropped weight would make a wrong model silently."""
    used = set()
    for plan in plans:
        for source in plan.sources:
            checkpoint.require(source.name, source.stored_shape)
            used.add(source.name)
    # A tied checkpoint may store the head's copy of the embedding.
    ignorable = (*family.ignorable, family.naming.head)
    unused = sorted(
        name for name in checkpoint.names - used if not any(fnmatch.fnmatchcase(name, p) for p in ignorable)
    )
    if unused:
        shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        message = f"{checkpoint.folder} has tensors that the architecture does not use: {shown}."
        raise CheckpointError(message, "Check that config.json names the right architecture and biases.")
