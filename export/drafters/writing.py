"""Writes a draft module as the bundle inside its target's, whose embedding and head its graph reads where they lie."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgeinfer.bundle.draft_tokens import DRAFT_TOKENS, encode_draft_tokens
from edgeinfer.bundle.layouts import LAYOUT_VERSIONS, NATIVE, WEIGHTS, model_name, weights_name
from edgeinfer.bundle.manifest import Capabilities, Manifest, capabilities_in
from edgeinfer.bundle.nesting import NESTED
from edgeinfer.bundle.tables import Outline, lay_out
from edgeinfer.bundle.writing import seal
from edgeinfer.export.architectures.described import Described, pad_heads
from edgeinfer.export.architectures.planned_tensors import PlannedRows, PlannedTensors
from edgeinfer.export.drafters.opening import OpenedModule
from edgeinfer.export.graph.block_module import BlockGraph
from edgeinfer.export.graph.draft_module import ModuleGraph, StepGraph, module_graph
from edgeinfer.export.graph.heads_module import HeadsGraph
from edgeinfer.export.options.config import ExportConfig
from edgeinfer.export.source.sidecar import Sidecar
from edgeinfer.export.weights.calibrated import write_plain
from edgeinfer.export.weights.writer import outline
from edgeinfer.quant.plan import QuantPlan
from edgeinfer.results import Progress


@dataclass(frozen=True)
class ModuleTarget:
    """The target's bundle as far as a module in it needs it.

    Attributes:
        manifest: with its tensors in the layout that is stored.
        sidecar: its tokenizer, which is the module's.
        borrowed: tensors as its checkpoint has them that the module has copies of, by their names in the module.
    """

    manifest: Manifest
    sidecar: Sidecar
    borrowed: Mapping[str, PlannedRows] = field(default_factory=dict)

    @property
    def weights(self) -> str:
        """Name of the file that its native graph reads."""
        quantized = any(t.bits < 32 for t in self.manifest.tensors)
        return weights_name(self.manifest.layout, NATIVE, quantized=quantized)


def write_module(
    work: Path,
    target: ModuleTarget,
    opened: OpenedModule,
    config: ExportConfig,
    progress: Progress | None = None,
) -> None:
    """Writes the bundle of a module into the folder of its target's."""
    described, checkpoint = opened.described, opened.checkpoint
    module = described.module
    padded = pad_heads(Described(described.spec, described.plans))
    for plan in described.plans:
        for source in plan.sources:
            checkpoint.require(source.name, source.stored_shape)
    borrowed = target.borrowed
    shapes = {plan.name: plan.shape for plan in padded.plans} | {name: rows.shape for name, rows in borrowed.items()}
    quant = _quantized(shapes, config)
    outlines = [outline(plan, quant.scheme(plan.name)) for plan in padded.plans]
    outlines += [Outline(name, rows.shape) for name, rows in borrowed.items()]
    tensors = lay_out(outlines, NATIVE)
    capabilities = Capabilities(True, True, True)
    manifest = Manifest(
        name=f"{target.manifest.name}-{module.drafter}",
        architecture=target.manifest.architecture,
        backend="onnx",
        geometry=padded.spec.geometry,
        parameters=sum(plan.parameters for plan in described.plans),
        capabilities=capabilities_in(capabilities, tensors, NATIVE, padded.spec.moe, paged=True),
        decoder=padded.spec,
        tensors=tensors,
        layout=NATIVE,
        layout_version=LAYOUT_VERSIONS[NATIVE],
        paged=True,
        export=config.options,
        plan=quant.record(),
        module=module,
    )
    folder = work / NESTED
    folder.mkdir()
    target.sidecar.write(folder, table=False)
    if described.tokens is not None:
        (folder / DRAFT_TOKENS).write_bytes(encode_draft_tokens(described.tokens))
    with (folder / WEIGHTS).open("wb") as file:
        write_plain(file, PlannedTensors(checkpoint, padded.plans, borrowed), tensors, quant, progress)
    (folder / model_name(NATIVE, NATIVE)).write_bytes(_graph(manifest, target))
    seal(folder, manifest)


def _quantized(shapes: Mapping[str, tuple[int, ...]], config: ExportConfig) -> QuantPlan:
    """The plan by bits alone: what a budget or a pattern says is meant for the target."""
    plain = dataclasses.replace(config, budget_bits=None, target_size=None)
    resolved = plain.resolve(sum(math.prod(shape) for shape in shapes.values()), math.prod(shapes.get("head", (1,))))
    return QuantPlan.from_policy(resolved.policy, shapes)


def _graph(manifest: Manifest, target: ModuleTarget) -> bytes:
    module, spec = manifest.module, manifest.decoder
    assert module is not None and spec is not None, "they were just put in"
    shared = {name: target.manifest.tensor(name) for name in module.shares}
    own = {t.name: t for t in manifest.tensors}
    kind: type[ModuleGraph] = BlockGraph if module.block else HeadsGraph if module.heads else StepGraph
    return module_graph(kind, spec, module, own | shared, f"{NESTED}/{WEIGHTS}", dict.fromkeys(shared, target.weights))
