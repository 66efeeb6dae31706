"""What exports of small checkpoints hold, as recorded: every tensor's place and form, and what its values come to."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import MANIFEST
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig, StaticOptions
from tests.factories import make_checkpoint
from tests.recorded import check_recorded

WORDS = ["cat", "dog", "sun", "moon", "tree", "house", "runs", "sleeps", "sees", "the", "a", "red", "big"]
# Checkpoints with what only they have, and options that take them through every quantizer, layout and kind of plan.
EXPORTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama-tied", {}),
    "portable": ("qwen2", {"bits": 4, "keep_small": False, "layout": "portable", "group_size": 32}),
    "symmetric": ("qwen3-moe-tied-odd", {"bits": 2, "keep_small": False, "symmetric": True}),
    "patterns": ("phi3-window", {"bits": 8, "keep_small": False, "bits_for": (("layers.1.*", 4), ("embed", 32))}),
    "awq": ("qwen3-tied-biases", {"bits": 4, "keep_small": False, "calibration": True, "method": "awq"}),
    "gptq": ("qwen2-moe", {"bits": 2, "keep_small": False, "calibration": True}),
    "budget": ("llama-tied", {"budget_bits": 5.1, "calibration": True, "method": "rtn"}),
    "size": ("granite-moe", {"target_size": 150_000}),
    "static": ("llama", {"static": StaticOptions(48, 16, (1, 4))}),
}


def text_of(folder: Path) -> Path:
    """A text by which weights are weighed."""
    chance = np.random.default_rng(0)
    path = folder / "text.txt"
    path.write_text("".join(" ".join(chance.choice(WORDS, 12)) + ".\n" for _ in range(60)), "utf-8")
    return path


def operators(path: Path) -> dict[str, int]:
    """How often a graph has each operator with its attributes."""
    found: Counter[str] = Counter()
    for node in onnx.load(path, load_external_data=False).graph.node:
        values = ((a.name, onnx.helper.get_attribute_value(a)) for a in node.attribute)
        # What is zero an operator does not have, and operators learn of more.
        shown = (f"{name}={value}" for name, value in values if isinstance(value, int | float | list | tuple) and value)
        found[f"{node.domain} {node.op_type} {' '.join(sorted(shown))}".strip()] += 1
    return dict(sorted(found.items()))


def described(bundle: Bundle) -> dict[str, Any]:
    """A bundle as a record has it."""
    manifest = bundle.manifest
    tensors = {}
    for entry in manifest.tensors:
        values = bundle.tensor(entry.name).astype(np.float64)
        sums = [np.square(values).sum()]
        # Where a text decides, another CPU's matrix product may move a weight by a step of its grid.
        if manifest.plan is None or not manifest.plan.calibration_tokens:
            # Neither an exchange of rows nor one of columns leaves the last sum as it was.
            sums += [values.sum(), (values.reshape(-1) * np.cos(np.arange(values.size))).sum()]
        blobs = [[blob.offset, blob.nbytes] for blob in entry.blobs]
        form = [entry.shape, entry.bits, entry.block_size, blobs, entry.paired, entry.interleaved]
        tensors[entry.name] = [*form, *sums]
    written = json.loads((bundle.path / MANIFEST).read_text("utf-8"))
    return {
        **{part: written.get(part) for part in ("decoder", "geometry", "exits", "capabilities", "plan")},
        "export": {key: value for key, value in manifest.export.items() if isinstance(value, bool | int | float)},
        "graphs": {name: operators(bundle.file(name)) for name in manifest.files if name.endswith(".onnx")},
        "tensors": tensors,
    }


def test_exports_hold_what_they_held(tmp_path: Path) -> None:
    for name, (arch, options) in EXPORTS.items():
        make_checkpoint(tmp_path / name / "tiny", arch)
        if options.get("calibration"):
            options = options | {"calibration": text_of(tmp_path), "calibration_tokens": 256}
        bundle = open_bundle(
            export_checkpoint(tmp_path / name / "tiny", tmp_path / name / "out", ExportConfig(**options))
        )
        check_recorded(
            f"export-{name}", described(bundle), rel=0.05 if options.get("calibration") else 5e-4, least=1e-3
        )
