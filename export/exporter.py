"""From a checkpoint directory to a bundle, checked before anything is written."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from edgeinfer.bundle.layouts import LAYOUT_VERSIONS, PORTABLE, WEIGHTS, Layout
from edgeinfer.bundle.manifest import Capabilities, Manifest, TensorEntry, capabilities_in
from edgeinfer.bundle.opening import NESTED
from edgeinfer.bundle.tables import Outline, lay_out
from edgeinfer.bundle.writing import seal, write_bundle
from edgeinfer.errors import UsageError
from edgeinfer.export.architectures import find_architecture
from edgeinfer.export.architectures.described import Described, describe, pad_heads, read_spec, require_graphs
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.architectures.tensors import adaptable_modules
from edgeinfer.export.drafters.described import ModuleSource
from edgeinfer.export.drafters.opening import ModuleTarget, open_module, write_module
from edgeinfer.export.graph.decoder import decoder_graphs
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import read_config
from edgeinfer.export.source.sidecar import read_sidecar
from edgeinfer.export.weights.calibrated import write_weights
from edgeinfer.export.weights.planning import outline, plan_weights, with_defaults
from edgeinfer.quant.methods import METHODS
from edgeinfer.quant.policy import QuantPlan
from edgeinfer.results import Progress


def export_checkpoint(
    source: Path, out: Path, config: ExportConfig | None = None, progress: Progress | None = None
) -> Path:
    """Exports a Hugging Face checkpoint directory to a bundle at `out` and returns `out`; `progress` gets step names
    and counts."""
    config = config or ExportConfig()
    if source.suffix.lower() == ".gguf":
        message = f"{source} is a GGUF file, whose weights a bundle keeps as they are."
        raise UsageError(message, f"Make the bundle with edgeinfer convert {source} OUT, or run the file itself.")
    if config.is_calibrated and find_spec("scipy") is None:
        message = "Calibrated rounding, and bits within a budget, need the scipy package."
        raise UsageError(message, "pip install 'edgeinfer[export]'")
    if config.format == "gguf":
        from edgeinfer.export.gguf.route import export_gguf

        return export_gguf(source, out, config, progress)
    if config.exporter == "optimum":
        from edgeinfer.export.optimum_route import export_optimum

        return export_optimum(source, out, config, progress)
    if config.static is not None:
        from edgeinfer.export.static import export_static

        return export_static(source, out, config, progress)
    return export_native(source, out, config, progress)


def export_native(source: Path, out: Path, config: ExportConfig, progress: Progress | None = None) -> Path:
    hf_config = read_config(source)
    family = find_architecture(hf_config)
    sidecar = read_sidecar(source, hf_config)
    with ExitStack() as opened:
        checkpoint = opened.enter_context(Checkpoint(source))
        family = family.placed(checkpoint.names)
        spec = read_spec(hf_config, family, checkpoint)
        require_graphs(spec, config.layout)
        stored = describe(spec, hf_config, family, checkpoint)
        embed_scale = next(plan for plan in stored.plans if plan.name == "embed").sources[0].scale
        own = ModuleSource(hf_config, checkpoint, spec, embed_scale)
        module = opened.enter_context(open_module(config, family, own))
        taps = () if module is None else module.described.taps
        described = pad_heads(stored)
        spec, plans = described.spec, described.plans
        config = with_defaults(config, described)
        planned = PlannedTensors(checkpoint, plans)
        weights = plan_weights(config, sidecar, described, planned, stored.parameters, progress)
        tensors, layout = _table(described, weights.quant, config.layout, native=module is not None)
        manifest = Manifest(
            name=config.name or source.resolve().name,
            architecture=hf_config.architecture or hf_config.model_type,
            backend="onnx",
            geometry=spec.geometry,
            parameters=stored.parameters,
            capabilities=capabilities_in(Capabilities(True, True, True), tensors, layout, spec.moe),
            decoder=spec,
            tensors=tensors,
            layout=layout,
            layout_version=LAYOUT_VERSIONS[layout],
            exits=tuple(range(1, spec.num_layers + 1)),
            drafters=() if module is None else (NESTED,),
            export=config.options,
            plan=weights.record(),
            taps=taps,
        )
        with write_bundle(out, replace_existing=config.force) as work:
            sidecar.write(work)
            with (work / WEIGHTS).open("wb") as file:
                write_weights(file, spec, planned, tensors[: len(plans)], weights, progress)
            for name, graph in decoder_graphs(spec, tensors, layout, taps).items():
                (work / name).write_bytes(graph)
            if module is not None:
                borrowed = {own: planned.of(name) for own, name in module.described.borrowed.items()}
                write_module(work, ModuleTarget(manifest, sidecar, borrowed), module, config, progress)
            seal(work, manifest)
    return out


def _table(
    described: Described, quant: QuantPlan, requested: Layout, *, native: bool
) -> tuple[tuple[TensorEntry, ...], Layout]:
    """The tensor table and its layout; portable also where nothing is quantized and that graph can be written."""
    outlines = [outline(plan, quant.scheme(plan.name)) for plan in described.plans]
    native = native or any(o.quantized for o in outlines) or described.spec.native_only
    layout = requested if native else PORTABLE
    if described.spec.tied:
        outlines.append(Outline("head", outlines[0].shape, shares="embed"))
    modules = {plan.name: adaptable_modules(plan) for plan in described.plans if not METHODS[quant.method].folds}
    entries = lay_out(outlines, layout)
    return tuple(dataclasses.replace(entry, modules=modules.get(entry.name, ())) for entry in entries), layout
