"""The models on this machine: listed, described, verified, fetched and removed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from edgeinfer import hub
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import EdgeInferError, HubError, ModelError, UsageError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.records import dataclass
from edgeinfer.hub import resolve
from edgeinfer.hub.catalog_models import gguf_memory
from edgeinfer.hub.placing import Origin
from edgeinfer.loading import open_model, plan_of
from edgeinfer.runtime.weights.verification import Outcome, VerifiedFiles, accept_file, check_file, files_of
from edgeinfer.tokenizing import recommended_sampling


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine.

    Attributes:
        name: name to load it by: a short name, or its path where others have that name.
        title: name for people, such as Qwen3 0.6B.
        path: the bundle's directory or the GGUF file.
        bytes: size of its files, with the bundle that was prepared of a GGUF file.
        memory: the smallest budget it runs in, in bytes, estimated for a GGUF file before it is prepared; None where
            it cannot be planned here.
        format: format of its files.
        origin: built in, converted here, in the hub's cache, in the user's folder of models, Ollama's or LM Studio's.
        hub_id: ORG/NAME of its source on the hub; None where it came from elsewhere.
        source_bytes: size of the checkpoint it was converted from, if that is still in the hub's cache.
        last_used: when it was last loaded; None where it is unknown.
        error: why it cannot run here; None where no reason is known.
        bits_per_weight: stored bits of a weight, on average; None where its files cannot be read.
        divergence: from the float model that it was made of, in nats per token, as measured after converting; None
            where it was not.
    """

    name: str
    title: str
    path: Path
    bytes: int
    memory: int | None
    format: Literal["bundle", "gguf"]
    origin: Origin
    hub_id: str | None = None
    source_bytes: int = 0
    last_used: datetime | None = None
    error: str | None = None
    bits_per_weight: float | None = None
    divergence: float | None = None


def list_models() -> list[LocalModel]:
    """List the models on this machine, the built-in one first, then by name.

    The user's own files elsewhere are not searched.
    """
    uses = hub.last_uses()
    found = [_describe(place, uses) for place in hub.places()]
    return sorted(found, key=lambda model: (model.origin != "built-in", model.name.lower()))


def pull(
    name: str,
    *,
    bits: int | None = None,
    calibrated: bool = True,
    revision: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> LocalModel:
    """Fetch or update a model; a checkpoint is converted, once, into the user's folder of models.

    Args:
        name: of the catalog, ORG/NAME, ORG/NAME:TYPE for one GGUF file of a repository, or a checkpoint's directory.
        bits: bits per weight of the conversion: 2 to 6, 8 or 32; None is as many as the model needs, or
            as fit into this machine's memory.
        calibrated: round weights for a text, which takes minutes; without, it takes seconds and loses more.
        revision: branch, tag or commit; None is the main branch.
        progress: called with a stage, and bytes or steps done and in all; None draws bars on a terminal.
        cancelled: called several times a second; stops where it returns True.

    Raises:
        ModelError: there is no such model, or it cannot be converted.
        HubError: offline, unknown, private or gated repository, one without a model, or it was cancelled.
        StorageError: the disk has too little room; nothing was written.
    """
    path = hub.update(name, bits=bits, revision=revision, progress=progress, cancelled=cancelled, calibrated=calibrated)
    uses = hub.last_uses()
    for place in hub.places():
        if place.path == path:
            return _describe(place, uses)
    # A revision that is not the main branch's, or a path that was given.
    return _describe(hub.Place(name, path, "folder"), uses)


def remove_model(name: str, *, confirm: Callable[[], bool] | None = None) -> int:
    """Remove a model from the user's folder of models or the hub's cache.

    The checkpoint of a converted model is removed too, if it is in the hub's cache.

    Args:
        name: as `list_models` names it, or a catalog name.
        confirm: called once the model was found; if it returns False, nothing is removed.

    Returns:
        Bytes that were freed.

    Raises:
        ModelError: there is no such model, or edgeinfer did not put it there.
        StorageError: its files cannot be removed.
    """
    short = hub.catalog_model(name)
    wanted = {name.casefold()} if short is None else {name.casefold(), short.repo.casefold()}
    here = hub.places()
    paths = {place.path: (place.path, place.converted and place.converted.path) for place in here}
    places = [place for place in here if place.name.casefold() in wanted or Path(name) in paths[place.path]]
    if not places:
        # Without the bits, all conversions of a checkpoint.
        also = {place.path: {each.casefold() for each in place.also} for place in here}
        places = [place for place in here if place.converted is not None and not wanted.isdisjoint(also[place.path])]
    cached = [model for model in hub.cached_models() if model.name.casefold() in wanted and model.kind == "checkpoint"]
    if not places and not cached:
        raise ModelError(
            f"There is no model {name} on this machine.", "Their names: edgeinfer models, or edgeinfer.list_models()."
        )
    for place in places:
        if not place.files:
            if place.origin == "built-in":
                raise UsageError(f"{name} comes with edgeinfer and stays.", "It goes when edgeinfer is uninstalled.")
            message = f"{name} was not put there by edgeinfer, so it is not removed."
            raise UsageError(message, f"Delete {place.path} yourself if you want to.")
    if confirm is not None and not confirm():
        return 0
    freed = 0
    for each in (*(file for place in places for file in place.files), *cached):
        freed += hub.remove_cached(each) if isinstance(each, hub.CachedModel) else hub.remove_converted(each)
    return freed


def _describe(place: hub.Place, uses: dict[str, float]) -> LocalModel:
    size, memory, error, runs, bits, quality = 0, None, None, None, None, None
    try:
        manifest = open_bundle(place.path).manifest
        size = sum(entry.bytes for entry in manifest.files.values())
        bits, quality = round(manifest.bits_per_weight, 3), manifest.quality
        runs, config = hub.find_model(place.path).path, LoadOptions()
        if runs not in (None, place.path):
            size += sum(entry.bytes for entry in open_bundle(runs).manifest.files.values())
        # A file that was not prepared yet cannot be planned.
        memory = gguf_memory(size) if runs is None else plan_of(open_model(runs, config), config).minimum_bytes
    except EdgeInferError as problem:
        error = str(problem)
    # A GGUF file is used where the bundle that was prepared of it is.
    used = max(
        (uses[str(path.resolve())] for path in (place.path, runs) if path and str(path.resolve()) in uses), default=None
    )
    return LocalModel(
        name=place.name,
        title=hub.shown_name(place.path),
        path=place.path,
        bytes=size,
        memory=memory,
        format="gguf" if place.path.is_file() else "bundle",
        origin=place.origin,
        hub_id=place.hub_id,
        source_bytes=place.source_bytes,
        last_used=None if used is None else datetime.fromtimestamp(used, UTC),
        error=error,
        bits_per_weight=bits,
        divergence=None if quality is None else quality.divergence,
    )


@dataclass(frozen=True)
class ModelFacts:
    """A model as its files describe it.

    Attributes:
        bytes: size of all its files.
        context: maximum tokens of its context.
        sampling: generation options that its makers recommend.
        vocabulary: number of its tokens.
        width: size of a hidden state.
        chats: whether it has a chat template.
    """

    name: str
    architecture: str
    parameters: int
    bits_per_weight: float
    backend: str
    bytes: int
    context: int
    sampling: Mapping[str, Any]
    vocabulary: int
    width: int
    chats: bool


def describe(model: str | Path | None = None) -> ModelFacts:
    """Describe a model on this machine; nothing is fetched.

    Args:
        model: as `edgeinfer.load` takes it.

    Raises:
        ModelError: it is missing or damaged.
        HubError: it would have to be fetched first.
    """
    path = hub.find_model(model).here
    if path is None:
        raise HubError(f"{model} is not on this machine yet.", f"Fetch it first: edgeinfer pull {model}")
    bundle = open_bundle(path)
    manifest = bundle.manifest
    return ModelFacts(
        name=manifest.name,
        architecture=manifest.architecture,
        parameters=manifest.parameters,
        bits_per_weight=round(manifest.bits_per_weight, 3),
        backend=manifest.backend,
        bytes=sum(entry.bytes for entry in manifest.files.values()),
        context=manifest.geometry.max_positions,
        sampling=recommended_sampling(bundle),
        vocabulary=manifest.geometry.vocab_size,
        width=manifest.geometry.hidden_size,
        chats=bundle.has("chat_template.jinja"),
    )


def verify(
    model: str | Path | None = None, *, accept: bool = False, progress: Callable[[str, int, int], None] | None = None
) -> dict[str, Outcome]:
    """Read every file of a model and compare it with its digest; a plain GGUF file, with its contents at first use,
    and the bundle that was prepared of it.

    Args:
        model: as `edgeinfer.load` takes it.
        accept: trust the current contents of a plain GGUF file from now on.
        progress: called with a file's name, how many are done and how many there are.

    Returns:
        By file name, "now" where it matches, "first" where it is trusted from now on.

    Raises:
        BundleError: a file is damaged or missing.
        UsageError: `accept`, and the files come with digests.
    """
    file = hub.find_model(model).file
    prepared = None if accept or file is None else hub.find_model(file).path
    bundles = [open_bundle(path) for path in (file or resolve(model), prepared) if path is not None]
    notes, checks = VerifiedFiles(), files_of(bundles)
    found: dict[str, Outcome] = {}
    for index, check in enumerate(checks):
        if progress is not None:
            progress(check.name, index, len(checks))
        if accept and check.sha256 is not None:
            raise UsageError(f"{check.path} comes with a digest, which it has to match.", "Leave out --accept.")
        found[check.name] = accept_file(check, notes) if accept else check_file(check, notes, again=True)
    return found
