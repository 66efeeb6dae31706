"""Puts a draft module into a copy of a bundle, whose weights stay as they are."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.nesting import NESTED
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import seal, write_bundle
from edgeinfer.errors import UsageError
from edgeinfer.export.drafters.opening import open_drafter
from edgeinfer.export.drafters.writing import ModuleTarget, write_module
from edgeinfer.export.graph.decoder import decoder_graphs
from edgeinfer.export.options.config import ExportConfig
from edgeinfer.export.source.sidecar import Sidecar
from edgeinfer.results import Progress

_SMALL = ("tokenizer.json", "special_tokens.json", "chat_template.jinja", "generation_config.json")


def require_attachable(bundle: Bundle) -> None:
    """Refuses bundles whose graphs cannot give the states that a module reads."""
    manifest = bundle.manifest
    if manifest.module is not None:
        raise UsageError(f"{bundle.path} is itself a drafter.", "Give the model that it drafts for.")
    if manifest.decoder is None or not manifest.tensors or manifest.layout != NATIVE or not manifest.paged:
        message = f"{bundle.path} cannot contain a drafter that reads its states, as its layout is not native."
        raise UsageError(message, "Export its checkpoint again.")


def attach_drafter(
    bundle: Bundle, drafter: Path, out: Path, config: ExportConfig, progress: Progress | None = None
) -> Path:
    """Writes a copy of a bundle with a draft module in it, in the place of any drafter that it had, and returns `out`.

    Args:
        config: the bits of the module.
    """
    require_attachable(bundle)
    manifest, spec = bundle.manifest, bundle.manifest.decoder
    assert spec is not None, "it was just required"
    bundle.verify()
    with open_drafter(drafter, spec) as opened:
        if opened.described.borrowed:
            hint = "Export that with it: edgeinfer export CHECKPOINT OUT --drafter HEAD."
            raise UsageError(f"{drafter} copies tensors of the model's checkpoint.", hint)
        taps = opened.described.taps
        manifest = dataclasses.replace(manifest, taps=taps, drafters=(NESTED,))
        with write_bundle(out) as work:
            for name in manifest.files:
                if not name.startswith(f"{NESTED}/"):
                    (work / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(bundle.path / name, work / name)
            for name, graph in decoder_graphs(spec, manifest.tensors, manifest.layout, taps).items():
                (work / name).write_bytes(graph)
            small = {name: bundle.file(name).read_bytes() for name in _SMALL if name in manifest.files}
            write_module(work, ModuleTarget(manifest, Sidecar(small)), opened, config, progress)
            seal(work, manifest)
    return out
