"""Finds the draft module that goes into a bundle: the one that an export names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from edgeinfer.bundle import DecoderSpec
from edgeinfer.errors import UnsupportedArchitectureError
from edgeinfer.export.drafters.described import DescribedModule, ModuleSource
from edgeinfer.export.drafters.eagle import describe_eagle
from edgeinfer.export.options.config import ExportConfig
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import read_config

__all__ = ["OpenedModule", "open_module"]


@dataclass(frozen=True)
class OpenedModule:
    """A module and the checkpoint with its tensors."""

    described: DescribedModule
    checkpoint: Checkpoint


@contextmanager
def open_module(config: ExportConfig, target: DecoderSpec) -> Iterator[OpenedModule | None]:
    """The module for a target, its checkpoint open; None where there is none.

    Raises:
        UnsupportedArchitectureError: a target of this kind has no states that a module can read.
        CheckpointError: it is damaged, or is for another model.
    """
    if config.drafter is None:
        yield None
        return
    if target.carried_size != target.hidden_size:
        message = "A drafter of a model whose layers compute with several streams of hidden states is not supported."
        raise UnsupportedArchitectureError(message, "Leave --drafter out.")
    hf_config = read_config(config.drafter)
    with Checkpoint(config.drafter) as checkpoint:
        yield OpenedModule(describe_eagle(ModuleSource(hf_config, checkpoint, target)), checkpoint)
