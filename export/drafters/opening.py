"""Finds the draft module that goes into a bundle: the one that an export names, or the model's own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from edgeinfer.bundle import NATIVE
from edgeinfer.errors import CheckpointError, UnsupportedArchitectureError
from edgeinfer.export.architectures import Architecture
from edgeinfer.export.drafters.described import DescribedModule, ModuleSource
from edgeinfer.export.drafters.eagle import describe_eagle
from edgeinfer.export.drafters.mtp import describe_mtp
from edgeinfer.export.options.config import ExportConfig
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import read_config

__all__ = ["OpenedModule", "open_module"]

_log = logging.getLogger("edgeinfer")


@dataclass(frozen=True)
class OpenedModule:
    """A module and the checkpoint with its tensors."""

    described: DescribedModule
    checkpoint: Checkpoint


@contextmanager
def open_module(config: ExportConfig, family: Architecture, own: ModuleSource) -> Iterator[OpenedModule | None]:
    """The module for a target, its checkpoint open; None where there is none.

    Args:
        family: of the target, by the names that its tensors have.
        own: the target's checkpoint. A module that it ships with is left out where it is incomplete, with a warning.

    Raises:
        UnsupportedArchitectureError: a target of this kind has no states that a module can read.
        CheckpointError: the module that is asked for is damaged, or is for another model.
    """
    if config.drafter is None:
        yield _shipped(config, family, own)
        return
    target = own.target
    if target.carried_size != target.hidden_size:
        message = "A drafter of a model whose layers compute with several streams of hidden states is not supported."
        raise UnsupportedArchitectureError(message, "Leave --drafter out.")
    hf_config = read_config(config.drafter)
    with Checkpoint(config.drafter) as checkpoint:
        yield OpenedModule(describe_eagle(ModuleSource(hf_config, checkpoint, target)), checkpoint)


def _shipped(config: ExportConfig, family: Architecture, own: ModuleSource) -> OpenedModule | None:
    if config.layout != NATIVE:
        return None
    try:
        described = describe_mtp(own, family)
    except CheckpointError as error:
        _log.warning("The model is exported without its module for multi-token prediction: %s", error.message)
        return None
    return None if described is None else OpenedModule(described, own.checkpoint)
