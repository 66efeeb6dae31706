"""Runs static bundles on OpenVINO's CPU and on onnxruntime's own, and prints how they differ, as JSON.

Run by an interpreter that has onnxruntime-openvino, which need not be the one of the tests: bundle directories as
arguments, this checkout on PYTHONPATH.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.static.backend import StaticBackend
from edgeinfer.runtime.devices.providers import CPU, Device
from edgeinfer.runtime.devices.registry import find_device
from tests.alone import Alone

_TEXT = [0, 17, 30, 5, 5, 42, 99, 123, 7, 250, 31, 64, 8, 201, 19, 77, 10, 2, 146, 90]
_STEPS = 24
_TREE = [-1, -1, 0, 1, 0, 2]


def main(folders: list[str]) -> None:
    """Prints one object per bundle."""
    print(json.dumps([compare(open_bundle(Path(folder))) for folder in folders]))


def compare(bundle: Bundle) -> dict[str, Any]:
    """Differences of logits, and greedy tokens, of one bundle."""
    _, device = find_device("openvino:CPU")
    ours, theirs = (Alone(StaticBackend(bundle, 64, device=each), 64) for each in (CPU, device))
    logits = [passes(backend) for backend in (ours, theirs)]
    tokens = [greedy(backend) for backend in (ours, theirs)]
    parted = next((i for i, pair in enumerate(zip(*(t for t, _ in tokens), strict=True)) if len(set(pair)) > 1), None)
    return {
        "graphs": [graph.file for graph in theirs.graphs.all],
        "whole": [taken_whole(bundle, graph.file, device) for graph in theirs.graphs.all],
        "difference": float(np.abs(logits[0] - logits[1]).max()),
        "mean": float(np.abs(logits[0] - logits[1]).mean()),
        "exact": bool(np.array_equal(logits[1], passes(theirs, single=True))),
        "parted": parted,
        "gap": None if parted is None else tokens[0][1][parted],
        "finite": bool(np.isfinite(logits[1]).all()),
    }


def passes(backend: Alone[StaticBackend], *, single: bool = False) -> NDArray[np.float32]:
    """All logits of a text, its passes of one token each or of all, and of a draft tree behind it."""
    backend.cache.clear()
    sizes = [1] * len(_TEXT) if single else [len(_TEXT)]
    found = []
    for size in sizes:
        rows, start = np.arange(size), backend.cache.length
        found.append(backend.forward(Pass(np.array(_TEXT[start : start + size]), start + rows, rows)).logits.copy())
    depths = [0, 0, 1, 1, 1, 2]
    rows = np.arange(len(_TREE))
    positions = backend.cache.length + np.array(depths)
    found.append(backend.forward(Pass(10 + rows, positions, rows, tree=np.array(_TREE))).logits.copy())
    return np.concatenate(found)


def greedy(backend: Alone[StaticBackend]) -> tuple[list[int], list[float]]:
    """What the model goes on with, and how far each choice was from the next best."""
    backend.cache.clear()
    feed, tokens, gaps = list(_TEXT), list[int](), list[float]()
    for _ in range(_STEPS):
        rows = np.array([len(feed) - 1])
        row = backend.forward(Pass(np.array(feed), backend.cache.length + np.arange(len(feed)), rows)).logits[0]
        best = np.sort(row)[-2:]
        tokens.append(int(row.argmax()))
        gaps.append(float(best[1] - best[0]))
        feed = tokens[-1:]
    return tokens, gaps


def taken_whole(bundle: Bundle, file: str, device: Device) -> bool:
    """Whether the provider takes every node of a graph: onnxruntime refuses the session otherwise."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    providers = [(device.provider, dict(device.options))]
    try:
        ort.InferenceSession(str(bundle.path / file), options, providers=providers)
    except Exception as error:
        # onnxruntime raises a family of exceptions without a common base of its own.
        if "fallback" in str(error):
            return False
        raise
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
