"""Puts a drafter into a copy of its target's bundle."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from edgeinfer.bundle.manifest import Manifest
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import MANIFEST, seal, write_bundle, write_file
from edgeinfer.errors import BundleError, UsageError
from edgeinfer.wording import Setting

# The folder of the drafter that a target loads with.
NESTED = "drafter"


def nest_drafter(target: Path, drafter: Path, out: Path) -> Bundle:
    """Writes a copy of the target's bundle with the drafter in it, in the place of any that it had.

    What nothing reads of the drafter any more (`Bundle.superseded`) is left out.
    """
    ours, theirs = open_bundle(target), open_bundle(drafter)
    if theirs.manifest.module is not None:
        raise UsageError(f"{drafter} is made for one model.", "Export that with it: edgeinfer export --drafter HEAD.")
    for bundle in (ours, theirs):
        if bundle.header is not None:
            hint = "Load it beside the model with " + Setting("draft_model") + "."
            raise UsageError(
                f"{bundle.path} is a GGUF model, which can neither contain a drafter nor be one in a bundle.", hint
            )
    if theirs.manifest.drafters:
        raise UsageError(f"{drafter} itself contains a drafter.", "Use the model that it was made from.")
    with write_bundle(out) as work:
        for name in ours.manifest.files:
            if not name.startswith(f"{NESTED}/"):
                _copy(ours, name, work)
        for name in theirs.manifest.files.keys() - theirs.superseded:
            _copy(theirs, name, work / NESTED)
        _require_copied(theirs, seal(work / NESTED, theirs.manifest))
        drafters = tuple(dict.fromkeys((*ours.manifest.drafters, NESTED)))
        _require_copied(ours, seal(work, replace(ours.manifest, drafters=drafters)))
    return open_bundle(out)


def nested_drafter(target: Bundle) -> Bundle | None:
    """The drafter inside of a bundle; None where there is none. Errors as `open_bundle`."""
    names = target.manifest.drafters
    return open_bundle(target.path / names[0]) if names else None


def _require_copied(source: Bundle, sealed: Manifest) -> None:
    """Raises BundleError where a file was damaged before it was copied, which its new digest would hide."""
    for name, entry in source.manifest.files.items():
        if not name.startswith(f"{NESTED}/") and sealed.files.get(name, entry) != entry:
            message = f"{source.path / name} does not match its sha256 in the manifest."
            raise BundleError(message, "Export or download the bundle again.")


def _copy(bundle: Bundle, name: str, folder: Path) -> None:
    assert name != MANIFEST, "a manifest does not list itself"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(bundle.path / name, folder / name)


_PREFIX = "exit_agreement."


def exit_figure(depth: int) -> str:
    """The figure of how often a guess after so many layers is the target's, which only trained depths have."""
    return f"{_PREFIX}{depth}"


def trained_depths(manifest: Manifest) -> tuple[int, ...]:
    """Depths with such a figure, ascending, fewer than all layers."""
    layers = manifest.geometry.num_layers
    return tuple(depth for depth in range(1, layers) if exit_figure(depth) in manifest.quality)


def add_figures(bundle: Bundle, figures: Mapping[str, float]) -> None:
    """Writes figures beside those that the manifest has."""
    manifest = replace(bundle.manifest, quality=bundle.manifest.quality | dict(figures))
    write_file(bundle.path / MANIFEST, manifest.to_json().encode())
