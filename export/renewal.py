"""Bundles of earlier versions with the graphs of today; weights and everything else stay as they are."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from edgeinfer.bundle.layouts import NATIVE, STATIC
from edgeinfer.bundle.manifest import Manifest
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import seal, write_bundle
from edgeinfer.errors import UsageError
from edgeinfer.export.graph.decoder import decoder_graphs


def renew_bundle(bundle: Bundle, out: Path, *, replace_existing: bool = False) -> None:
    """Writes a bundle of the same weights with the graphs that an export would write today, drafters inside included.

    What nothing reads any more (`Bundle.superseded`) is left out.
    """
    parts = {"": bundle} | {name: open_bundle(bundle.path / name) for name in bundle.manifest.drafters}
    renewed = {name: _graphs_of_today(part) for name, part in parts.items()}
    old = {name for name, part in parts.items() if renewed[name].keys() and not _has(part, renewed[name])}
    if not old:
        raise UsageError(f"{bundle.path} has no graphs of an earlier edgeinfer.", "Use it as it is.")
    bundle.verify()
    left = {(Path(name) / file).as_posix() for name in old for file in (*parts[name].graphs, *parts[name].superseded)}
    with write_bundle(out, replace_existing=replace_existing) as work:
        for file in bundle.manifest.files.keys() - left:
            (work / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.path / file, work / file)
        # The digests of a drafter's files stand in the manifest of the bundle around it, which comes first here.
        for name, part in reversed(parts.items()):
            manifest = part.manifest
            if name in old:
                manifest = _renewed(manifest)
                for file, graph in renewed[name].items():
                    (work / name / file).write_bytes(graph)
            seal(work / name, manifest)


def _graphs_of_today(bundle: Bundle) -> dict[str, bytes]:
    """What an export would write, by name; nothing for bundles that have others, and for draft modules."""
    manifest = bundle.manifest
    if manifest.decoder is None or not manifest.tensors or manifest.layout == STATIC or manifest.module is not None:
        return {}
    return decoder_graphs(manifest.decoder, manifest.tensors, manifest.layout, manifest.taps)


def _has(bundle: Bundle, graphs: dict[str, bytes]) -> bool:
    """Whether these are all the graphs of a bundle."""
    same = bundle.graphs.keys() == graphs.keys()
    return same and all(bundle.file(name).read_bytes() == graph for name, graph in graphs.items())


def _renewed(manifest: Manifest) -> Manifest:
    capabilities = replace(manifest.capabilities, paged=manifest.layout == NATIVE)
    return replace(manifest, paged=True, capabilities=capabilities)
