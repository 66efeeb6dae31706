"""Finds the draft module that goes into a bundle: the one that an export names, or the model's own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.errors import CheckpointError, UnsupportedArchitectureError, UsageError
from edgeinfer.export.architectures.base import Architecture
from edgeinfer.export.architectures.refused import ASSISTANTS, refusal
from edgeinfer.export.drafters.described import DescribedModule, ModuleSource
from edgeinfer.export.drafters.dflash import describe_dflash, is_dflash
from edgeinfer.export.drafters.eagle import describe_eagle
from edgeinfer.export.drafters.hydra import describe_hydra, is_hydra
from edgeinfer.export.drafters.mtp import describe_mtp
from edgeinfer.export.options.config import ExportConfig
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import read_config
from edgeinfer.quant.methods import METHODS

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
        own: the target's checkpoint. A module that it ships with is left out with a warning where it is incomplete or
            would share a head that the method changes.
    """
    if config.drafter is None:
        yield _shipped(config, family, own)
        return
    target = own.target
    if target.carried_size != target.hidden_size:
        message = "A drafter of a model whose layers compute with several streams of hidden states is not supported."
        raise UnsupportedArchitectureError(message, "Leave --drafter out.")
    with open_drafter(config.drafter, target, own.embed_scale) as opened:
        if (reason := _changed_head(opened.described, config)) is not None:
            raise UsageError(reason, "Choose another --method, such as gptq, or leave the drafter out.")
        yield opened


@contextmanager
def open_drafter(folder: Path, target: DecoderSpec, embed_scale: float = 1.0) -> Iterator[OpenedModule]:
    """A module in a checkpoint of its own."""
    config = read_config(folder)
    if config.model_type in ASSISTANTS:
        raise refusal(config)
    describe = describe_dflash if is_dflash(config) else describe_hydra if is_hydra(config) else describe_eagle
    with Checkpoint(folder) as checkpoint:
        yield OpenedModule(describe(ModuleSource(config, checkpoint, target, embed_scale)), checkpoint)


def _shipped(config: ExportConfig, family: Architecture, own: ModuleSource) -> OpenedModule | None:
    if config.layout != NATIVE:
        return None
    try:
        described = describe_mtp(own, family)
        reason = None if described is None else _changed_head(described, config)
    except CheckpointError as error:
        described, reason = None, error.message
    if reason is not None:
        _log.warning("The model is exported without its module for multi-token prediction: %s", reason)
        return None
    return None if described is None else OpenedModule(described, own.checkpoint)


def _changed_head(described: DescribedModule, config: ExportConfig) -> str | None:
    """Why a module cannot share the target's head, where it would."""
    if "head" not in described.module.shares or not METHODS[config.method or "rtn"].folds:
        return None
    return f"The drafter reads the model's head, whose columns the method {config.method} scales."
