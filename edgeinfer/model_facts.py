"""What a model's files say of it before it is loaded, and whether they are what they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.errors import HubError, UsageError
from edgeinfer.hub import local, resolve
from edgeinfer.records import dataclass
from edgeinfer.runtime.weights.verification import Outcome, accept_file, check_file, files_of
from edgeinfer.runtime.weights.verified_files import VerifiedFiles
from edgeinfer.tokenizing import recommended_sampling


@dataclass(frozen=True)
class ModelFacts:
    """A model as its files describe it.

    Attributes:
        bytes: of all its files.
        context: tokens it can hold at most.
        sampling: generation options that its makers recommend.
        vocabulary: tokens that it knows.
        width: numbers of a hidden state.
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
    """The facts of a model on this machine; nothing is fetched.

    Args:
        model: as `edgeinfer.load` takes it.

    Raises:
        ModelError: it is missing or damaged.
        HubError: it would have to be fetched first.
    """
    path = local(model)
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
    model: str | Path | None = None,
    *,
    accept: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Outcome]:
    """Reads every file of a model and compares it with its digest; a plain GGUF file, with what it was at first use.

    Args:
        model: as `edgeinfer.load` takes it.
        accept: takes a plain GGUF file as the right one from now on.
        progress: called with a file's name, how many are done and how many there are.

    Returns:
        By the file's name, "now" where it matches, "first" where it is taken as the right one.

    Raises:
        BundleError: a file is damaged or missing.
        UsageError: `accept`, and the files come with digests.
    """
    bundle = open_bundle(resolve(model))
    notes, checks = VerifiedFiles(), files_of([bundle])
    found: dict[str, Outcome] = {}
    for index, check in enumerate(checks):
        if progress is not None:
            progress(check.name, index, len(checks))
        if accept and check.sha256 is not None:
            raise UsageError(f"{check.path} comes with a digest, which it has to match.", "Leave out --accept.")
        found[check.name] = accept_file(check, notes) if accept else check_file(check, notes, again=True)
    return found
