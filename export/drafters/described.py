"""A draft module as a checkpoint describes it, and what all kinds of them are read with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.additions import tokens_fault
from edgeinfer.bundle.spec import DecoderSpec, DraftModule
from edgeinfer.core.errors import BundleError, CheckpointError
from edgeinfer.export.architectures.base import Architecture
from edgeinfer.export.architectures.tensors import Source, TensorPlan, plan
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import HFConfig

_AGAIN = "Download the drafter again, or choose another one."
_ANOTHER = "It was made for another model: choose a drafter of this one, or leave --drafter out."


@dataclass(frozen=True)
class ModuleSource:
    """A checkpoint with a draft module, and its target."""

    config: HFConfig
    checkpoint: Checkpoint
    target: DecoderSpec  # the target's decoder, with heads as wide as in its checkpoint
    embed_scale: float = 1.0  # factor of the target's embedding in its bundle

    def require_same(self, name: str, own: int, targets: int) -> None:
        """Refuses a module of another size than its target."""
        if own != targets:
            message = f"The drafter {self.checkpoint.folder} has a {name} of {own}, the model one of {targets}."
            raise CheckpointError(message, _ANOTHER)


@dataclass(frozen=True)
class DescribedModule:
    spec: DecoderSpec
    module: DraftModule
    plans: tuple[TensorPlan, ...]  # of its own tensors
    taps: tuple[int, ...] = ()  # as `Manifest.taps` of the target
    # The target's tensors that it has copies of, by their names in the module.
    borrowed: Mapping[str, str] = field(default_factory=dict)
    # The target's token of each of its own; None where it drafts all of them. (Vd,).
    tokens: NDArray[np.int64] | None = None


def module_spec(source: ModuleSource, family: Architecture, *, tied: bool) -> DecoderSpec:
    """The decoder of a module's config.json, with its target's vocabulary and positions."""
    config, target = source.config, source.target
    source.require_same("hidden size", config.integer("hidden_size"), target.hidden_size)
    source.require_same("vocabulary", config.integer("vocab_size"), target.vocab_size)
    try:
        spec = family.read(config, tied)
    except BundleError as error:
        hint = "Check that the drafter's config.json is complete."
        raise CheckpointError(f"{source.checkpoint.folder}/config.json: {error.message}", hint) from error
    return dataclasses.replace(spec, max_positions=target.max_positions)


def own_plans(
    source: ModuleSource, family: Architecture, spec: DecoderSpec, left_out: tuple[str, ...], width: int
) -> list[TensorPlan]:
    """Plans of the tensors that a module shares with decoders, without `left_out`."""
    plans = family.tensors(source.config, spec, source.checkpoint.names)
    kept = [each for each in plans if each.name not in left_out]
    return [_widened(each, width) if each.name == "layers.0.attn.qkv" else each for each in kept]


def _widened(planned: TensorPlan, width: int) -> TensorPlan:
    sources: list[Source] = [dataclasses.replace(each, shape=(each.shape[0], width)) for each in planned.sources]
    return TensorPlan(planned.name, tuple(sources))


def joined_plans(source: ModuleSource, shape: tuple[int, int]) -> list[TensorPlan]:
    """Plans of the product of a module's inputs, and of its bias, if any."""
    plans = [plan("fc", ("fc.weight", shape))]
    if "fc.bias" in source.checkpoint:
        plans.append(plan("fc_bias", ("fc.bias", shape[:1])))
    return plans


def drafted_by(source: ModuleSource, drafted: int) -> NDArray[np.int64] | None:  # (Vd,)
    """The target's token of each of a module's, from the maps d2t and t2d; None where they are the same."""
    folder, names = source.checkpoint.folder, source.checkpoint
    if "d2t" not in names:
        source.require_same("vocabulary of drafts", drafted, source.target.vocab_size)
        return None
    added = names.read_integers("d2t").reshape(-1)
    if len(added) != drafted:
        message = f"The map d2t of {folder} has {len(added)} tokens, config.json says {drafted}."
        raise CheckpointError(message, _AGAIN)
    tokens: NDArray[np.int64] = added + np.arange(drafted)
    if fault := tokens_fault(tokens, source.target.vocab_size):
        raise CheckpointError(f"The tokens of the map d2t of {folder} {fault}.", _AGAIN)
    if "t2d" in names:
        known = np.zeros(source.target.vocab_size, np.bool_)
        known[tokens] = True
        if not np.array_equal(names.read_integers("t2d").reshape(-1) != 0, known):
            raise CheckpointError(f"The maps d2t and t2d of {folder} disagree.", _AGAIN)
    return tokens
