"""The resolver: from a model's name to its files on this machine, fetched and converted where they are not here yet."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from edgeinfer.bundle.opening import is_gguf
from edgeinfer.core.errors import ModelError, UnsupportedArchitectureError, UsageError, one_of
from edgeinfer.core.options.load import CONVERTED_BITS
from edgeinfer.core.records import dataclass
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
from edgeinfer.hub.catalog_models import CatalogModel, catalog_model, similar_names
from edgeinfer.hub.client import Progress
from edgeinfer.hub.conversion import Choose, FetchJob, fetch, unread_because
from edgeinfer.hub.download import pull
from edgeinfer.hub.folder import ModelSource, bits_of, find_converted, refusal_of
from edgeinfer.hub.ids import GGUF, Bits, HubName, parse_name
from edgeinfer.runtime.native.library import is_usable

_FILES = (GGUF, ".safetensors", ".onnx", ".bin")
_NO_KERNEL = "the native kernel does not run on this machine"


@dataclass(frozen=True)
class Found:
    path: Path | None  # the bundle or GGUF file on this machine; None where it must be fetched or converted first
    # What it is fetched or converted from where there is no path: a checkpoint's directory or a GGUF file, a hub name,
    # or a model of the catalog that a package holds.
    source: Path | HubName | CatalogModel | None = None

    @property
    def file(self) -> Path | None:
        """The GGUF file on this machine, whether or not it was prepared; None for other models."""
        return next((path for path in (self.source, self.path) if isinstance(path, Path) and is_gguf(path)), None)

    @property
    def here(self) -> Path | None:
        """Where it is on this machine, a GGUF file also before it is prepared for the native kernel; None where it
        would have to be fetched or converted first."""
        return self.path or self.file


def find_model(model: str | Path | None, bits: int | None = None, *, llamacpp: bool = False) -> Found:
    """Looks a name up on this machine, without asking the hub.

    Args:
        bits: of a conversion; None takes any.
        llamacpp: find a GGUF file itself, for llama.cpp, instead of the bundle that was made of it.
    """
    if model is None:
        return Found(builtin())
    path = existing(model)
    if path is not None:
        return _at(path, bits, llamacpp)
    if model == BUILTIN:
        return Found(builtin())
    entry = catalog_model(model) if isinstance(model, str) else None
    packed = entry is not None and entry.package is not None and bits is None and not llamacpp and is_usable()
    if packed:
        assert entry is not None and entry.package is not None, "it is packed"
        converted = find_converted(ModelSource(entry.name, "package"), revision=entry.package.sha256)
        if converted is not None:
            return Found(converted.path)
    name = hub_name(model)
    path = None if name is None else _cached(name, bits)
    if path is not None:
        return _at(path, bits, llamacpp)
    # Short names come last, so that they do not hide a hub name that is on this machine.
    if isinstance(model, str) and not set(model) & {"/", "\\"}:
        from edgeinfer.hub.placing import find_place

        place = find_place(model, bits)
        if place is not None and (place.converted is None or bits in (None, place.converted.bits)):
            return _at(place.path, bits, llamacpp)
        if place is not None and place.converted is not None and name is None:
            # The same checkpoint in other bits.
            source = place.converted.source
            return Found(None, source.path or HubName(source.name))
    return Found(None, entry if packed else name_of(model))


def _at(path: Path, bits: int | None, llamacpp: bool) -> Found:
    """What a path means."""
    source = ModelSource.of_path(path)
    if is_gguf(path):
        if llamacpp or not is_usable():
            return Found(path)
        converted = find_converted(source)
        if converted is not None:
            return Found(converted.path, path)
        return Found(None if refusal_of(source) is None else path, path)
    if path.is_file() or is_bundle(path) or not is_checkpoint(path):
        return Found(path)
    converted = find_converted(source, bits)
    return Found(None if converted is None else converted.path, path)


def resolve(
    model: str | Path | None,
    *,
    bits: int | None = None,
    memory: int | None = None,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
    choose: Choose | None = None,
    llamacpp: bool = False,
    calibrated: bool = True,
) -> Path:
    """The local path of a bundle or GGUF file: the built-in model, an existing path, or one that is fetched.

    What is on this machine is used as it is, so that loading needs no network; `update` brings it up to date. A
    checkpoint is converted, and a GGUF file prepared for the native kernel, once, into the user's folder of models.

    Args:
        model: None, a path, a catalog name, ORG/NAME, ORG/NAME:TYPE for one GGUF file of a repository, such as
            ORG/NAME:Q4_K_M, ORG/NAME:4bit or ORG/NAME:auto for a conversion, or a short name of a model on this
            machine.
        bits: of a checkpoint's conversion; None takes the one that is there, or as many as the model needs and memory
            has room for.
        memory: budget that the model is to run in, by which bits or a type are chosen; None is this machine's.
        progress: called with a stage, and bytes or steps done and in all; None draws bars on a terminal.
        cancelled: asked several times a second whether to stop.
        choose: asked which type of a repository of GGUF files to take; None takes the one that fits best.
        llamacpp: leave a GGUF file as it is, for llama.cpp.
        calibrated: round a checkpoint's weights for the text that ships, which takes minutes; without, it takes seconds
            and loses more.

    Raises:
        ModelError: no such path or name.
        HubError: the repository could not be fetched.
        UnsupportedArchitectureError, CheckpointError: the checkpoint cannot be converted.
        StorageError: the disk has too little room.
        UsageError: `bits` of a model that is no checkpoint.
    """
    if bits not in (None, *CONVERTED_BITS):
        raise UsageError(f"{bits} bits are not supported.", f"Choose {one_of(CONVERTED_BITS)}.")
    found = find_model(model, bits, llamacpp=llamacpp)
    if found.file is not None:
        _require_own_bits(found.file, bits)
    path = found.path
    if path is None:
        job = _job(found.source, bits, memory, progress, llamacpp=llamacpp, calibrated=calibrated)
        path = fetch(job, progress, cancelled, choose)
    if bits_of(path) is None or existing(model or path) == path:
        _require_own_bits("The built-in model" if model is None else model, bits)
    if is_gguf(path) and not llamacpp:
        _require_llamacpp(path)
    return path


def _require_own_bits(model: str | Path, bits: int | None) -> None:
    """Refuses bits of a model that has its own."""
    if bits is not None:
        message = f"{model} is a bundle or a GGUF file, whose weights have their bits."
        raise UsageError(message, "Leave bits out; they are for checkpoints, which are converted.")


def _require_llamacpp(path: Path) -> None:
    """Refuses a GGUF file that the native kernel does not run where llama.cpp is not installed."""
    reason = refusal_of(ModelSource.of_path(path)) if is_usable() else _NO_KERNEL
    if reason is not None and find_spec("llama_cpp") is None:
        hint = "Install it: pip install 'edgeinfer[gguf]'. Or convert the checkpoint that the file was made from."
        raise UnsupportedArchitectureError(f"{path.name} needs llama.cpp: {reason}.", hint)


def update(
    model: str | Path,
    *,
    revision: str | None = None,
    bits: int | None = None,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
    choose: Choose | None = None,
    calibrated: bool = True,
) -> Path:
    """Resolves a name as `resolve` does, and brings a hub model that is here up to date first: to a branch, tag or
    commit, or None for the main branch."""
    if existing(model) is not None or hub_name(model) is None:
        return resolve(model, bits=bits, progress=progress, cancelled=cancelled, calibrated=calibrated)
    entry = catalog_model(model) if isinstance(model, str) else None
    if entry is not None and entry.package is not None and bits is None and revision is None:
        return resolve(model, progress=progress, cancelled=cancelled)
    job = _job(name_of(model), bits, None, progress, calibrated=calibrated)
    return fetch(dataclasses.replace(job, revision=revision, refresh=True), progress, cancelled, choose)


def runs_gguf() -> bool:
    """Whether GGUF files run on this machine, on the native kernel or on llama.cpp."""
    return is_usable() or find_spec("llama_cpp") is not None


def refusal(path: Path) -> str | None:
    """Why the native kernel does not run a GGUF file, naming the tensor or key; None where it does. Reads its header,
    in another process, and converts nothing."""
    if not is_usable():
        return _NO_KERNEL
    source = ModelSource.of_path(path)
    return refusal_of(source) if find_converted(source) or refusal_of(source) else unread_because(path)


@contextlib.contextmanager
def sketched(
    model: str | Path | None, bits: int | None = None, *, llamacpp: bool = False
) -> Iterator[str | Path | None]:
    """What a model is planned by: itself, or, until the block ends, the bundle without weights of a GGUF file that was
    not prepared yet. Arguments as of `find_model`."""
    found = find_model(model, bits, llamacpp=llamacpp)
    file = found.file
    if found.path is not None or file is None:
        yield model
        return
    _require_own_bits(file, bits)
    with tempfile.TemporaryDirectory(prefix="edgeinfer-") as folder:
        yield folder if unread_because(file, Path(folder)) is None else model


def find(source: str | Path) -> Path:
    """The local directory of a bundle or checkpoint: an existing path (else ModelError), the built-in model by its
    name, or a hub id, fetched unless it is cached."""
    path = existing(source)
    if path is not None or source == BUILTIN:
        return path or builtin()
    name = name_of(source)
    return cached_snapshot(name.repo_id) or pull(name.repo_id)


def find_checkpoint(source: str | Path) -> Path:
    """The local directory of a checkpoint: an existing path, or a hub id, fetched unless it is cached; ModelError where
    it is a bundle already."""
    path = find(source)
    if is_bundle(path):
        raise ModelError(f"{source} is already a bundle.", f"Run it: edgeinfer run -m {source}")
    return path


def hub_name(model: str | Path) -> HubName | None:
    """The hub name that a name means, of the hub or of the catalog; None for other names."""
    if not isinstance(model, str):
        return None
    entry = catalog_model(model)
    return parse_name(model) if entry is None else entry.hub_name


def name_of(model: str | Path) -> HubName:
    """The hub name that a name means, which is not an existing path; ModelError where it means none."""
    text = os.fspath(model)
    if text.endswith(_FILES):
        raise ModelError(f"No such file: {text}.", "Check the path.")
    name = hub_name(model)
    if name is not None:
        return name
    if isinstance(model, os.PathLike) or any(sign in text for sign in "/\\~:") or text.startswith(".") or not text:
        hint = "Give a bundle directory, a .gguf file, OWNER/NAME, or a short name of edgeinfer models --catalog."
        raise ModelError(f"No model at {text!r}.", hint)
    from edgeinfer.hub.placing import places

    similar = similar_names(text, [place.name for place in places()])
    shown = f"Did you mean {' or '.join(similar)}? " if similar else "See edgeinfer models --catalog for names. "
    message = f"No model at {text!r}, which is neither in the catalog nor a Hugging Face id."
    raise ModelError(message, f"{shown}Others are OWNER/NAME, such as Qwen/Qwen3-0.6B.")


def _cached(name: HubName, bits: Bits | None) -> Path | None:
    """A model of the hub as it is on this machine, converted where it is a checkpoint."""
    if name.tag is not None:
        return cached_gguf(name.repo_id, name.tag)
    converted = find_converted(ModelSource(name.repo_id), name.bits if bits is None else bits)
    if converted is not None:
        return converted.path
    path = cached_snapshot(name.repo_id)
    if path is not None:
        return path if is_bundle(path) else None
    # The type of a repository of GGUF files that was chosen before, if there is only one.
    ggufs = [model.path for model in cached_models() if model.repo_id == name.repo_id and model.kind == "gguf"]
    return ggufs[0] if len(ggufs) == 1 and name.bits is None else None


def _job(
    source: Path | HubName | CatalogModel | None,
    bits: Bits | None,
    memory: int | None,
    progress: Progress | None,
    *,
    llamacpp: bool = False,
    calibrated: bool = True,
) -> FetchJob:
    assert source is not None, "a model without a path has a source"
    bars = progress is None and sys.stderr is not None and sys.stderr.isatty()
    engine = llamacpp or not is_usable()
    job = FetchJob(bits=bits, memory=memory, bars=bars, llamacpp=engine, calibrated=calibrated)
    if isinstance(source, Path):
        return dataclasses.replace(job, path=str(source))
    if isinstance(source, CatalogModel):
        return dataclasses.replace(job, package=source.name)
    name = source.repo_id if source.tag is None else str(source)
    return dataclasses.replace(job, name=name, bits=source.bits if bits is None else bits)
