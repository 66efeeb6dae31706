"""Finds the draft module that goes into a bundle, and writes it as a bundle inside its target's. The module's graph
reads embedding and head from the target's files."""

from __future__ import annotations

import dataclasses
import logging
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from edgeinfer.bundle.additions import DRAFT_TOKENS, encode_draft_tokens
from edgeinfer.bundle.layouts import LAYOUT_VERSIONS, NATIVE, WEIGHTS, model_name, weights_name
from edgeinfer.bundle.manifest import Capabilities, Manifest, capabilities_in
from edgeinfer.bundle.opening import NESTED
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import Outline, lay_out
from edgeinfer.bundle.writing import seal, write_bundle
from edgeinfer.core.errors import CheckpointError, UnsupportedArchitectureError, UsageError
from edgeinfer.core.options.load import CONVERTED_BITS
from edgeinfer.core.results import Progress
from edgeinfer.export.architectures.base import Architecture
from edgeinfer.export.architectures.described import Described, pad_heads
from edgeinfer.export.architectures.planned_tensors import PlannedRows, PlannedTensors
from edgeinfer.export.architectures.refused import ASSISTANTS, refusal
from edgeinfer.export.drafters.described import DescribedModule, ModuleSource
from edgeinfer.export.drafters.dflash import describe_dflash, is_dflash
from edgeinfer.export.drafters.eagle import describe_eagle
from edgeinfer.export.drafters.hydra import describe_hydra, is_hydra
from edgeinfer.export.drafters.mtp import describe_mtp
from edgeinfer.export.graph.decoder import decoder_graphs
from edgeinfer.export.graph.draft_module import BlockGraph, HeadsGraph, ModuleGraph, StepGraph, module_graph
from edgeinfer.export.options import NO_TEXT, ExportConfig
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import read_config
from edgeinfer.export.source.sidecar import Sidecar
from edgeinfer.export.weights.calibrated import write_plain
from edgeinfer.export.weights.planning import outline
from edgeinfer.quant.policy import QuantPlan

_log = logging.getLogger("edgeinfer")


@dataclass(frozen=True)
class OpenedModule:
    described: DescribedModule
    checkpoint: Checkpoint


@contextmanager
def open_module(config: ExportConfig, family: Architecture, own: ModuleSource) -> Iterator[OpenedModule | None]:
    """The module for a target, with its checkpoint open; None where there is none, or where the target's `own` is
    incomplete or would share a head that the method changes, with a warning."""
    if config.drafter is None:
        yield _shipped(config, family, own)
        return
    target = own.target
    if target.carried_size != target.hidden_size:
        message = "A drafter of a model whose layers compute with several streams of hidden states is not supported."
        raise UnsupportedArchitectureError(message, "Leave --drafter out.")
    with open_drafter(config.drafter, target, own.embed_scale) as opened:
        yield opened


@contextmanager
def open_drafter(folder: Path, target: DecoderSpec, embed_scale: float = 1.0) -> Iterator[OpenedModule]:
    config = read_config(folder)
    if config.model_type in ASSISTANTS:
        raise refusal(config)
    describe = describe_dflash if is_dflash(config) else describe_hydra if is_hydra(config) else describe_eagle
    with Checkpoint(folder) as checkpoint:
        yield OpenedModule(describe(ModuleSource(config, checkpoint, target, embed_scale)), checkpoint)


def _shipped(config: ExportConfig, family: Architecture, own: ModuleSource) -> OpenedModule | None:
    if config.layout != NATIVE:
        return None
    try:
        described = describe_mtp(own, family)
    except CheckpointError as error:
        _log.warning("The model is exported without its module for multi-token prediction: %s", error.message)
        return None
    return None if described is None else OpenedModule(described, own.checkpoint)


_SMALL = ("tokenizer.json", "special_tokens.json", "chat_template.jinja", "generation_config.json")


def require_attachable(bundle: Bundle) -> None:
    """Refuses bundles whose graphs cannot give the states that a module reads."""
    manifest = bundle.manifest
    if manifest.module is not None:
        raise UsageError(f"{bundle.path} is itself a drafter.", "Give the model that it drafts for.")
    if manifest.decoder is None or not manifest.tensors or manifest.layout != NATIVE:
        message = f"{bundle.path} cannot contain a drafter that reads its states, as its layout is not native."
        raise UsageError(message, "Export its checkpoint again.")


def attach_drafter(
    bundle: Bundle, drafter: Path, out: Path, config: ExportConfig, progress: Progress | None = None
) -> Path:
    """Writes a copy of a bundle with a draft module, of the bits of `config`, in place of any drafter it had."""
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


@dataclass(frozen=True)
class ModuleTarget:
    """The parts of a target's bundle that a module in it needs."""

    manifest: Manifest  # with its tensors in the stored layout
    sidecar: Sidecar
    # Tensors of its checkpoint that the module has copies of, by their names in the module.
    borrowed: Mapping[str, PlannedRows] = field(default_factory=dict)

    @property
    def weights(self) -> str:
        quantized = any(t.bits < 32 for t in self.manifest.tensors)
        return weights_name(self.manifest.layout, NATIVE, quantized=quantized)


def write_module(
    work: Path, target: ModuleTarget, opened: OpenedModule, config: ExportConfig, progress: Progress | None = None
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
        capabilities=capabilities_in(capabilities, tensors, NATIVE, padded.spec.moe),
        decoder=padded.spec,
        tensors=tensors,
        layout=NATIVE,
        layout_version=LAYOUT_VERSIONS[NATIVE],
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
    """The plan by bits alone: budgets and patterns are meant for the target."""
    bits = config.bits if config.bits in CONVERTED_BITS else None
    plain = dataclasses.replace(config, bits=bits, target_size=None, calibration=NO_TEXT, method="rtn")
    complete = plain.with_defaults(
        sum(math.prod(shape) for shape in shapes.values()), math.prod(shapes.get("head", (1,)))
    )
    return QuantPlan.from_policy(complete.policy, shapes)


def _graph(manifest: Manifest, target: ModuleTarget) -> bytes:
    module, spec = manifest.module, manifest.decoder
    assert module is not None and spec is not None, "they were just put in"
    shared = {name: target.manifest.tensor(name) for name in module.shares}
    own = {t.name: t for t in manifest.tensors}
    kind: type[ModuleGraph] = BlockGraph if module.block else HeadsGraph if module.heads else StepGraph
    return module_graph(kind, spec, module, own | shared, f"{NESTED}/{WEIGHTS}", dict.fromkeys(shared, target.weights))
