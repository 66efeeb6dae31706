"""Memory that backends declare, term by term, as recorded: small models in configurations of every kind."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.bundle.layouts import NATIVE, PORTABLE
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.export.options import ExportConfig, StaticOptions
from edgeinfer.runtime.backends.onnx.memory import OnnxMemory
from edgeinfer.runtime.backends.static.memory import StaticMemory
from edgeinfer.runtime.planning.plan_input import Configuration, Footprint, ModelMemory
from tests.cache import export_checkpoint
from tests.recorded import check_recorded

pytest.importorskip("torch")
from tests.factories import make_checkpoint

FEW_BITS: dict[str, Any] = {"bits": 4, "keep_small": False, "group_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama-tied", {}),
    "few bits": ("qwen2", FEW_BITS),
    "experts": ("qwen3-moe", FEW_BITS),
    "windows": ("phi3-window", FEW_BITS),
    "static": ("llama", {"static": StaticOptions(48, 16, (1, 4))}),
}


def made(folder: Path, name: str) -> Bundle:
    arch, options = MODELS[name]
    make_checkpoint(folder / "checkpoint" / name, arch)
    return open_bundle(export_checkpoint(folder / "checkpoint" / name, folder / name, ExportConfig(**options)))


def memories(bundle: Bundle) -> dict[str, ModelMemory]:
    """The memory of each way to run a bundle."""
    found: dict[str, ModelMemory] = {}
    for layout, floats in product((NATIVE, PORTABLE), (False, True)):
        found[f"{layout} {floats}"] = OnnxMemory(bundle, layout, True, floats, 3)
    if bundle.manifest.static is not None:
        ordinary = OnnxMemory(bundle, NATIVE, False)
        found |= {f"static {exact} {cpu}": StaticMemory(bundle, ordinary, exact, cpu) for exact, cpu in BOTH}
    return found


BOTH = tuple(product((True, False), (True, False)))
CONFIGURATIONS = (
    Configuration(40, 16, "float32", "packed", 0, (), 0, "kept"),
    Configuration(128, 64, "int8", "mapped", 0, ("ngram",), 4, "mapped"),
    Configuration(100, 8, "int4", "streamed", 2, (), 0, "kept"),
    Configuration(64, 32, "float16", "experts", 0, (), 6, "model", expert_bytes=9000, expert_count=1),
)


def terms(footprint: Footprint) -> list[Mapping[str, float]]:
    return [
        {name: float(size) for name, size in part.items()}
        for part in (footprint.anonymous, footprint.file, footprint.device)
    ]


def test_memory_is_as_recorded(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for name in MODELS:
        for way, memory in memories(made(tmp_path, name)).items():
            for place, configuration in enumerate(CONFIGURATIONS):
                weights, running = memory.weights(configuration), memory.running(configuration)
                tokenizer = [terms(memory.tokenizer(configuration.tokenizer, used=used)) for used in (True, False)]
                phases = memory.phases(Footprint({"process": 7}, {}), weights + running, configuration)
                found[f"{name} {way} {place}"] = [terms(weights), terms(running), tokenizer, list(map(terms, phases))]
    # The tokenizer's file is as long as its library writes it.
    check_recorded("memory", found, rel=1e-2)


def test_a_graph_of_onnxruntimes_operators_holds_the_scores_of_all_heads(tmp_path: Path) -> None:
    bundle = made(tmp_path, "plain")
    decoder = bundle.manifest.decoder
    assert decoder is not None
    memory, rows = OnnxMemory(bundle, PORTABLE, False), 64

    def activations(context: int) -> float:
        configuration = Configuration(context, rows, "float32", "packed", 0, (), 0, "kept")
        return memory.running(configuration).anonymous["activations"]

    assert activations(2048) - activations(1024) >= 4 * (decoder.num_heads + 1) * rows * 1024
