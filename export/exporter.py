"""From a checkpoint directory to a bundle, checked before anything is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from edgeinfer.bundle.embedding import EMBEDDING, ENCODER
from edgeinfer.bundle.layouts import LAYOUT_VERSIONS, PORTABLE, WEIGHTS, Layout
from edgeinfer.bundle.manifest import Capabilities, Manifest, QualityRecord, TensorEntry, capabilities_in
from edgeinfer.bundle.opening import NESTED
from edgeinfer.bundle.tables import Outline, lay_out
from edgeinfer.bundle.writing import MANIFEST, seal, write_bundle
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options.load import FLOAT_BITS
from edgeinfer.core.results import Progress
from edgeinfer.export.architectures import find_architecture
from edgeinfer.export.architectures.described import Described, describe, pad_heads, read_spec, require_graphs
from edgeinfer.export.architectures.encoders import use_of, with_modules
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.architectures.tensors import adaptable_modules
from edgeinfer.export.drafters.described import ModuleSource
from edgeinfer.export.drafters.opening import ModuleTarget, OpenedModule, open_module, write_module
from edgeinfer.export.graph.decoder import decoder_graphs
from edgeinfer.export.graph.encoder import encoder_graphs
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import read_config
from edgeinfer.export.source.sentence_transformers import read_modules
from edgeinfer.export.source.sidecar import Sidecar, read_sidecar
from edgeinfer.export.weights.calibrated import write_weights
from edgeinfer.export.weights.float_model import FloatModel
from edgeinfer.export.weights.planning import Costs, outline, plan_weights, with_defaults
from edgeinfer.quant.policy import QuantPlan


def export_checkpoint(
    source: Path,
    out: Path,
    config: ExportConfig | None = None,
    progress: Progress | None = None,
    check: Check | None = None,
) -> Path:
    """Exports a Hugging Face checkpoint directory to a bundle at `out` and returns `out`; `progress` gets step names
    and counts. With a `check`, a bundle whose bits are chosen here is written again where it is found too far from the
    float model."""
    config = config or ExportConfig()
    if source.suffix.lower() == ".gguf":
        message = f"{source} is a GGUF file, whose weights a bundle keeps as they are."
        raise UsageError(message, f"Make the bundle with edgeinfer convert {source} OUT, or run the file itself.")
    if config.format == "gguf":
        from edgeinfer.export.gguf.route import export_gguf

        return export_gguf(source, out, config, progress)
    if config.exporter == "optimum":
        from edgeinfer.export.optimum_route import export_optimum

        return export_optimum(source, out, config, progress)
    if config.static is not None:
        from edgeinfer.export.static import export_static

        return export_static(source, out, config, progress)
    return export_native(source, out, config, progress, check)


def export_native(
    source: Path, out: Path, config: ExportConfig, progress: Progress | None = None, check: Check | None = None
) -> Path:
    hf_config = read_config(source)
    family = find_architecture(hf_config)
    sidecar = read_sidecar(source, hf_config)
    with ExitStack() as opened:
        checkpoint = opened.enter_context(Checkpoint(source))
        family = family.placed(checkpoint.names)
        spec = read_spec(hf_config, family, checkpoint)
        modules = read_modules(source)
        family, spec = with_modules(family, spec, checkpoint, modules)
        if (use := use_of(hf_config, spec, modules)) is not None:
            sidecar.files[EMBEDDING] = use.to_json()
        require_graphs(spec, config.layout)
        stored = describe(spec, hf_config, family, checkpoint)
        embed_scale = next(plan for plan in stored.plans if plan.name == "embed").sources[0].scale
        own = ModuleSource(hf_config, checkpoint, spec, embed_scale)
        module = opened.enter_context(open_module(config, family, own))
        described = pad_heads(stored)
        planned = PlannedTensors(checkpoint, described.plans)
        name = config.name or source.resolve().name
        architecture = hf_config.architecture or hf_config.model_type
        check = check if spec.encoder is None else None
        conversion = _Conversion(
            config, name, architecture, sidecar, described, planned, stored.parameters, module, progress, check
        )
        with write_bundle(out, replace_existing=config.force) as work:
            conversion.write(work)
            if check is not None:
                conversion.compare(work, check)
    return out


# Called with a bundle, the model that it was made of, and progress; None where they cannot be compared.
Measure = Callable[[Path, FloatModel, Progress | None], QualityRecord | None]


@dataclass(frozen=True)
class Check:
    """How a bundle is compared with the model that it was made of, and who hears what comes of it."""

    measure: Measure
    note: Callable[[str], None]


# What the measured divergence may be over the one that was allowed: it is of another text, and of few tokens.
_TOLERANCE = 1.5
# Of the allowed divergence, where the model is converted again.
_MARGIN = 0.9
# Bits of a model that is converted again without a text, which predicts nothing.
_MORE_BITS = (6, 8)
_STEPS = 10_000  # of progress
# About how long planning, writing and checking take, of all.
_CALIBRATED, _PLAIN = (0.6, 0.3, 0.1), (0.0, 0.4, 0.6)


@dataclass
class _Conversion:
    """A checkpoint that was read, and the bundle that is made of it, once or twice."""

    asked: ExportConfig
    name: str
    architecture: str
    sidecar: Sidecar
    described: Described
    tensors: PlannedTensors
    parameters: int
    module: OpenedModule | None
    progress: Progress | None
    check: Check | None
    costs: Costs | None = None  # of an earlier plan

    @property
    def config(self) -> ExportConfig:
        """What is asked for, with what follows from the model."""
        return with_defaults(self.asked, self.described)

    def write(self, work: Path) -> None:
        """Plans the weights, and writes the bundle."""
        spec, plans, config, module = self.described.spec, self.described.plans, self.config, self.module
        stages = self._stages()
        weights = plan_weights(
            config, self.sidecar, self.described, self.tensors, self.parameters, stages["probing"], self.costs
        )
        self.costs = weights.costs
        tensors, layout = _table(self.described, weights.quant, config.layout, native=module is not None)
        manifest = Manifest(
            name=self.name,
            architecture=self.architecture,
            backend="onnx" if spec.encoder is None else ENCODER,
            geometry=spec.geometry,
            parameters=self.parameters,
            capabilities=capabilities_in(Capabilities(*(spec.encoder is None,) * 3), tensors, layout, spec.moe),
            decoder=spec,
            tensors=tensors,
            layout=layout,
            layout_version=LAYOUT_VERSIONS[layout],
            exits=tuple(range(1, spec.num_layers + 1)) if spec.encoder is None else (),
            drafters=() if module is None else (NESTED,),
            export=config.options,
            plan=weights.record(),
            taps=() if module is None else module.described.taps,
        )
        self.sidecar.write(work)
        with (work / WEIGHTS).open("wb") as file:
            write_weights(file, spec, self.tensors, tensors[: len(plans)], weights, stages["rounding"])
        if spec.encoder is not None:
            graphs = encoder_graphs(spec, tensors, layout)
        else:
            graphs = decoder_graphs(spec, tensors, layout, manifest.taps)
        for name, graph in graphs.items():
            (work / name).write_bytes(graph)
        if module is not None:
            borrowed = {own: self.tensors.of(name) for own, name in module.described.borrowed.items()}
            write_module(work, ModuleTarget(manifest, self.sidecar, borrowed), module, config, self.progress)
        self.manifest = seal(work, manifest)

    def compare(self, work: Path, check: Check) -> None:
        """Measures the bundle, writes one with more bits in its place where it is too far from the float model and its
        bits were chosen here, and notes what was measured."""
        quality = self._measure(work, check)
        if quality is not None and (closer := self._closer(quality)) is not None:
            text = f"Its divergence from the float model is {quality.divergence:.3g} nats a token, more than the "
            check.note(f"{text}{self.asked.max_divergence:g} that are allowed: converting it again with more bits.")
            self.asked = closer
            for path in work.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self.write(work)
            quality = self._measure(work, check)
        if quality is not None:
            (work / MANIFEST).write_text(replace(self.manifest, quality=quality).to_json(), "utf-8")

    def _measure(self, work: Path, check: Check) -> QualityRecord | None:
        if all(tensor.bits == FLOAT_BITS for tensor in self.manifest.tensors):
            return None
        model = FloatModel(self.described.spec, self.tensors, self.parameters)
        return check.measure(work, model, self._stages()["checking"])

    def _closer(self, quality: QualityRecord) -> ExportConfig | None:
        """The configuration that makes a model closer to the float one, where a worse one may not be meant."""
        asked, allowed = self.asked, self.asked.max_divergence
        if asked.bits is not None or asked.target_size is not None or quality.divergence <= _TOLERANCE * allowed:
            return None
        predicted = None if self.manifest.plan is None else self.manifest.plan.predicted_kl
        if not self.config.is_calibrated or predicted is None:
            more = next((bits for bits in _MORE_BITS if bits > self.manifest.bits_per_weight), None)
            return None if more is None else replace(asked, bits=more, calibration="none")
        if predicted > allowed:  # all that there is room for
            return None
        return replace(asked, max_divergence=_MARGIN * allowed * max(predicted, 1e-9) / quality.divergence)

    def _stages(self) -> dict[str, Progress | None]:
        """Progress of each stage, as of the whole."""
        progress, start = self.progress, 0.0
        shares = np.array(_CALIBRATED if self.config.is_calibrated else _PLAIN)
        shares /= shares[: 2 if self.check is None else 3].sum()
        stages: dict[str, Progress | None] = {}
        for stage, share in zip(("probing", "rounding", "checking"), shares, strict=True):
            stages[stage] = None if progress is None else partial(_report, progress, stage, start, share)
            start += share
        return stages


def _report(progress: Progress, stage: str, start: float, share: float, _: str, done: int, total: int) -> None:
    progress(stage, round(_STEPS * (start + share * done / max(total, 1))), _STEPS)


def _table(
    described: Described, quant: QuantPlan, requested: Layout, *, native: bool
) -> tuple[tuple[TensorEntry, ...], Layout]:
    """The tensor table and its layout; portable also where nothing is quantized and that graph can be written."""
    outlines = [outline(plan, quant.scheme(plan.name)) for plan in described.plans]
    native = native or any(o.quantized for o in outlines) or described.spec.native_only
    layout = requested if native else PORTABLE
    if described.spec.tied:
        outlines.append(Outline("head", outlines[0].shape, shares="embed"))
    modules = {plan.name: adaptable_modules(plan) for plan in described.plans}
    entries = lay_out(outlines, layout)
    return tuple(replace(entry, modules=modules.get(entry.name, ())) for entry in entries), layout
