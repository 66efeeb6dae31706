"""From a checkpoint directory to a static bundle, whole or not at all."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from edgeinfer.bundle.codecs import CODECS
from edgeinfer.bundle.layouts import LAYOUT_VERSIONS, PORTABLE, STATIC, WEIGHTS
from edgeinfer.bundle.manifest import Capabilities, Manifest, TensorEntry
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.static_graph import BACKEND, StaticGraphs
from edgeinfer.bundle.tables import Outline, lay_out
from edgeinfer.bundle.writing import seal, write_bundle
from edgeinfer.errors import UsageError
from edgeinfer.export.architectures import find_architecture
from edgeinfer.export.architectures.described import Described, describe, read_spec, require_plain
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.options.config import ExportConfig
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import read_config
from edgeinfer.export.source.sidecar import read_sidecar
from edgeinfer.export.static.graph import build_static_graph
from edgeinfer.export.weights.calibrated import write_weights
from edgeinfer.export.weights.planning import plan_weights, resolve
from edgeinfer.export.weights.writer import outline
from edgeinfer.quant.plan import QuantPlan
from edgeinfer.quant.policy import QuantScheme
from edgeinfer.results import Progress

_log = logging.getLogger("edgeinfer")
_LAYER = re.compile(r"layers\.(\d+)\.")


def export_static(source: Path, out: Path, config: ExportConfig, progress: Progress | None = None) -> Path:
    """Exports graphs of fixed shapes; as `edgeinfer.export.export_checkpoint` otherwise."""
    assert config.static is not None, "what is asked for here"
    hf_config = read_config(source)
    family = find_architecture(hf_config)
    sidecar = read_sidecar(source, hf_config)
    with Checkpoint(source) as checkpoint:
        family = family.placed(checkpoint.names)
        spec = read_spec(hf_config, family, checkpoint)
        require_plain(spec, "Static bundles", "Leave out --static.")
        if spec.moe is not None:
            message = "Mixtures of experts cannot be exported with static shapes: which experts run is not fixed."
            raise UsageError(message, "Leave --static out.")
        stored = describe(spec, hf_config, family, checkpoint)
        graphs = config.static.graphs(spec)
        described = _keep_layers(stored, graphs)
        spec, plans = described.spec, described.plans
        config = resolve(config, plans)
        planned = PlannedTensors(checkpoint, plans)
        weights = plan_weights(config, sidecar, described, planned, described.parameters, progress)
        weights = dataclasses.replace(weights, quant=_storable(described, weights.quant))
        tensors = _table(described, weights.quant)
        manifest = Manifest(
            name=config.name or source.resolve().name,
            architecture=hf_config.architecture or hf_config.model_type,
            backend=BACKEND,
            geometry=spec.geometry,
            parameters=described.parameters,
            capabilities=Capabilities(layer_skip=False, hidden=False, tree=True),
            decoder=spec,
            tensors=tensors,
            layout=STATIC,
            layout_version=LAYOUT_VERSIONS[STATIC],
            export=config.options,
            plan=weights.record(),
            static=graphs,
        )
        with write_bundle(out, replace_existing=config.force) as work:
            sidecar.write(work)
            with (work / WEIGHTS).open("wb") as file:
                write_weights(file, spec, planned, tensors[: len(plans)], weights, progress)
                _write_tied_head(file, work / WEIGHTS, {t.name: t for t in tensors}, spec)
            _write_graphs(work, spec, tensors, graphs)
            seal(work, manifest)
    return out


def _keep_layers(described: Described, graphs: StaticGraphs) -> Described:
    """The decoder of the kept layers, renumbered, for the context that the graphs have."""
    spec = described.spec
    place = {layer: index for index, layer in enumerate(graphs.layers)}
    windows = tuple(spec.windows[layer] for layer in graphs.layers) if spec.windows else ()
    kept = []
    for plan in described.plans:
        found = _LAYER.match(plan.name)
        if found is None:
            kept.append(plan)
        elif (layer := int(found[1])) in place:
            name = f"layers.{place[layer]}.{plan.name[found.end() :]}"
            kept.append(dataclasses.replace(plan, name=name))
    fixed = dataclasses.replace(spec, num_layers=len(place), windows=windows, max_positions=graphs.context)
    return Described(fixed, tuple(kept))


def _storable(described: Described, quant: QuantPlan) -> QuantPlan:
    """The same plan with wider matrices where the static layout has none so narrow: rows of (K, N) end with bytes, and
    K is a multiple of the block, as OpenVINO asks."""
    schemes: dict[str, QuantScheme | None] = dict(quant.schemes)
    # An embedding is stored by rows; a tied one by columns besides.
    by_columns = {plan.name: plan.shape for plan in described.plans if plan.name != "embed" or described.spec.tied}
    for name, shape in by_columns.items():
        scheme = schemes.get(name)
        if scheme is not None and shape[1] % scheme.block_size:
            _log.warning("%s has %d columns, which is not a multiple of 32; it stays float32.", name, shape[1])
            schemes[name] = None
        elif scheme is not None and scheme.bits == 4 and shape[0] % 2:
            _log.warning("%s has an odd number of rows, %d; it gets 8 bits instead of 4.", name, shape[0])
            schemes[name] = dataclasses.replace(scheme, bits=8)
    return dataclasses.replace(quant, schemes=schemes, kept=frozenset())


def _table(described: Described, quant: QuantPlan) -> tuple[TensorEntry, ...]:
    """The tensor table. A tied head that is quantized is stored by columns besides the embedding's rows."""
    outlines = [outline(plan, quant.scheme(plan.name)) for plan in described.plans]
    if described.spec.tied:
        embedding = next(o for o in outlines if o.name == "embed")
        shares = "" if embedding.quantized else "embed"
        outlines.append(Outline("head", embedding.shape, embedding.quantized, shares=shares))
    return lay_out(outlines, STATIC)


def _write_tied_head(file: BinaryIO, path: Path, tensors: Mapping[str, TensorEntry], spec: DecoderSpec) -> None:
    embedding, head = tensors["embed"], tensors["head"]
    if spec.tied and embedding.bits < 32:
        file.flush()
        CODECS[STATIC].write(file, head, lambda start, stop: CODECS[PORTABLE].read(path, embedding, start, stop))


def _write_graphs(work: Path, spec: DecoderSpec, tensors: tuple[TensorEntry, ...], graphs: StaticGraphs) -> None:
    by_name = {t.name: t for t in tensors}
    for shape in graphs.all:
        model = build_static_graph(spec, by_name, shape)
        (work / shape.file).write_bytes(model.SerializeToString(deterministic=True))
