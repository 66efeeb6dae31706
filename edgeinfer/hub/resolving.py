"""From whatever names a model to its files on this machine, fetched and converted where they are not here yet."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.config import CONVERTED_BITS
from edgeinfer.errors import ModelError, UsageError, one_of
from edgeinfer.hub.cache import (
    BUILTIN,
    builtin,
    cached_gguf,
    cached_models,
    cached_snapshot,
    existing,
    is_bundle,
    is_checkpoint,
)
from edgeinfer.hub.catalog_models import catalog_model, similar_names
from edgeinfer.hub.client import Progress
from edgeinfer.hub.conversion import Choose, FetchJob, fetch
from edgeinfer.hub.download import pull
from edgeinfer.hub.folder import CheckpointSource, converted_models, find_converted
from edgeinfer.hub.ids import GGUF, HubName, parse_name

if TYPE_CHECKING:
    from edgeinfer.hub.placing import Place


_FILES = (GGUF, ".safetensors", ".onnx", ".bin")


def resolve(
    model: str | Path | None,
    *,
    bits: int | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
    choose: Choose | None = None,
) -> Path:
    """The local path of a bundle or GGUF file: the built-in model, an existing path, or one that is fetched.

    What is on this machine is used as it is, so that loading needs no network; `update` brings it up to date. A
    checkpoint is converted once, into the user's folder of models.

    Args:
        model: None, a path, a catalog name, ORG/NAME, ORG/NAME:TYPE for one GGUF file of a repository, such as
            ORG/NAME:Q4_K_M, ORG/NAME:4bit for a conversion, or a short name of what is on this machine.
        bits: of a checkpoint's conversion; None takes what is there, or what goes into memory.
        memory: budget that the model is to run in, by which bits or a type are chosen; None is this machine's.
        progress: called with a stage, and bytes or steps done and in all; None draws bars on a terminal.
        cancelled: asked several times a second whether to stop.
        choose: asked which of the types of a repository of GGUF files to take; None takes the one that fits best.

    Raises:
        ModelError: no such path or name.
        HubError: the repository could not be fetched.
        UnsupportedArchitectureError, CheckpointError: the checkpoint cannot be converted.
        StorageError: the disk has too little room.
        UsageError: `bits` of what is no checkpoint.
    """
    if bits not in (None, *CONVERTED_BITS):
        raise UsageError(f"{bits} bits are not supported.", f"Choose {one_of(CONVERTED_BITS)}.")
    path = _found(model, bits)
    if path is None:
        path = fetch(_job(model, bits, memory, progress), progress, cancelled, choose)
    if bits is not None and not _is_converted(model, path):
        what = "a GGUF file" if path.is_file() else "a bundle"
        message = f"{'The built-in model' if model is None else model} is {what}, whose weights have their bits."
        raise UsageError(message, "Leave bits out; they are for checkpoints, which are converted.")
    return path


def update(
    model: str | Path,
    *,
    revision: str | None = None,
    bits: int | None = None,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
    choose: Choose | None = None,
) -> Path:
    """As `resolve`, and what is here of a hub model is brought up to date first.

    Args:
        revision: branch, tag or commit; None is the main branch.
    """
    if existing(model) is not None or hub_name(model) is None:
        return resolve(model, bits=bits, progress=progress, cancelled=cancelled)
    job = _job(model, bits, None, progress)
    return fetch(dataclasses.replace(job, revision=revision, refresh=True), progress, cancelled, choose)


def local(model: str | Path | None) -> Path | None:
    """Where a model is on this machine; None where it would have to be fetched or converted first.

    Args:
        model: as `resolve` takes it.

    Raises:
        ModelError: no such path or name.
    """
    return _found(model, None)


def find(source: str | Path) -> Path:
    """The local directory of a bundle or checkpoint: an existing path, the built-in model by its name, or a hub id,
    fetched unless it is cached.

    Raises:
        ModelError: no such path.
        HubError: the repository could not be fetched.
    """
    path = existing(source)
    if path is not None:
        return path
    if source == BUILTIN:
        return builtin()
    name = name_of(source)
    return cached_snapshot(name.repo_id) or pull(name.repo_id)


def find_checkpoint(source: str | Path) -> Path:
    """The local directory of a checkpoint: an existing path, or a hub id, fetched unless it is cached.

    Raises:
        ModelError: no such path, or the source is a bundle already.
        HubError: the repository could not be fetched.
    """
    path = find(source)
    if is_bundle(path):
        raise ModelError(f"{source} is already a bundle.", f"Run it: edgeinfer run -m {source}")
    return path


def hub_name(model: str | Path | None) -> HubName | None:
    """The hub's name that a name means, also one of the catalog; None where it means none."""
    if not isinstance(model, str):
        return None
    entry = catalog_model(model)
    return parse_name(model) if entry is None else entry.hub_name


def name_of(model: str | Path) -> HubName:
    """As `hub_name`, of what is no path."""
    text = os.fspath(model)
    name = hub_name(model)
    if name is not None and not text.endswith(_FILES):
        return name
    if text.endswith(_FILES):
        raise ModelError(f"No such file: {text}.", "Check the path.")
    if isinstance(model, os.PathLike) or any(sign in text for sign in "/\\~:") or text.startswith(".") or not text:
        hint = "Give a bundle directory, a .gguf file, OWNER/NAME, or a short name of edgeinfer models --catalog."
        raise ModelError(f"No model at {text!r}.", hint)
    from edgeinfer.hub.placing import places

    similar = similar_names(text, [place.name for place in places()])
    shown = f"Did you mean {' or '.join(similar)}? " if similar else "See edgeinfer models --catalog for names. "
    message = f"No model at {text!r}, which is neither in the catalog nor a Hugging Face id."
    raise ModelError(message, f"{shown}Others are OWNER/NAME, such as Qwen/Qwen3-0.6B.")


def _found(model: str | Path | None, bits: int | None) -> Path | None:
    """What is on this machine."""
    if model is None:
        return builtin()
    path = existing(model)
    if path is not None:
        if path.is_file() or is_bundle(path) or not is_checkpoint(path):
            return path
        converted = find_converted(CheckpointSource.of_directory(path), bits)
        return None if converted is None else converted.path
    if model == BUILTIN:
        return builtin()
    name = hub_name(model)
    path = None if name is None else _of_hub(name, bits)
    # Only now is the whole machine looked through, so that a short name hides none of the hub that is here.
    place = _place(model, bits) if path is None else None
    if place is not None and (place.converted is None or bits in (None, place.converted.bits)):
        path = place.path
    elif place is None and path is None:
        name_of(model)  # raises where it is none
    return path


def _place(model: str | Path, bits: int | None = None) -> Place | None:
    """The model that a short name means on this machine."""
    if not isinstance(model, str) or "/" in model or "\\" in model:
        return None
    from edgeinfer.hub.placing import find_place

    return find_place(model, bits)


def _of_hub(name: HubName, bits: int | None) -> Path | None:
    """What is here of a model of the hub."""
    if name.tag is not None:
        return cached_gguf(name.repo_id, name.tag)
    converted = find_converted(CheckpointSource(name.repo_id), name.bits if bits is None else bits)
    if converted is not None:
        return converted.path
    path = cached_snapshot(name.repo_id)
    if path is not None:
        return path if is_bundle(path) else None
    # Of a repository of GGUF files the type that was chosen before, if that is clear.
    ggufs = [model.path for model in cached_models() if model.repo_id == name.repo_id and model.kind == "gguf"]
    return ggufs[0] if len(ggufs) == 1 and name.bits is None else None


def _is_converted(model: str | Path | None, path: Path) -> bool:
    if model is None or model == BUILTIN or existing(model) == path:
        return False
    return any(converted.path == path for converted in converted_models())


def _job(model: str | Path | None, bits: int | None, memory: int | None, progress: Progress | None) -> FetchJob:
    assert model is not None, "the built-in model is here"
    bars = progress is None and sys.stderr is not None and sys.stderr.isatty()
    path = existing(model)
    if path is not None:
        return FetchJob(directory=str(path), bits=bits, memory=memory, bars=bars)
    place = None if hub_name(model) is not None else _place(model)
    if place is not None and place.converted is not None and place.converted.source.directory is not None:
        return FetchJob(directory=str(place.converted.source.directory), bits=bits, memory=memory, bars=bars)
    name = name_of(model)
    plain = name.repo_id if name.tag is None else str(name)
    return FetchJob(name=plain, bits=name.bits if bits is None else bits, memory=memory, bars=bars)
