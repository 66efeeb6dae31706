"""Passes that read only the high plane of the layers' 8-bit weights: as the reference does, and refused elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.bundle.layouts import NATIVE, PORTABLE, Layout
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import BackendError, CapabilityError
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, ForwardInput
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from tests.kernel import require_kernel
from tests.runtime.models import bundle_of, make_graph_backend
from tests.tables import each_row

TEXT = np.array([0, 40, 41, 42, 43, 44, 45])


def export(layout: Layout = NATIVE, *, bits: int = 8, symmetric: bool = False) -> Bundle:
    config = ExportConfig(bits=bits, keep_small=False, symmetric=symmetric, layout=layout)
    return bundle_of("qwen2", config, hidden_size=128)


def logits(backend: Backend, planes: int) -> Floats:  # (S, V)
    """Logits of a text, from an empty cache."""
    backend.cache.trim(0)
    step = backend.forward(ForwardInput(TEXT, np.arange(len(TEXT)), np.arange(len(TEXT)), planes=planes))
    return step.logits.copy()


def rms(values: Floats) -> float:
    """Root of the mean square."""
    return float(np.sqrt(np.mean(values * values)))


@each_row("symmetric", [False, True])
def test_one_plane_equals_the_reference(symmetric: bool) -> None:
    require_kernel()
    bundle = export(symmetric=symmetric)
    onnx, reference = make_graph_backend(bundle, 64), ReferenceBackend(bundle, 64)
    assert onnx.capabilities.high_planes
    assert reference.capabilities.high_planes
    whole, high = (logits(reference, planes) for planes in (2, 1))
    # Activations are rounded to int8, the reference's are not.
    rounding = rms(logits(onnx, 2) - whole)
    assert rounding < 0.05 * rms(whole)
    assert rms(logits(onnx, 1) - high) < 2 * rounding
    assert rms(whole - high) > 4 * rounding
    for backend, planes in ((onnx, 0), (onnx, 3), (reference, 0), (reference, 3)):
        with pytest.raises(BackendError, match=f"cannot read {planes} planes"):
            logits(backend, planes)
    # Nothing of a pass with one plane stays behind.
    np.testing.assert_array_equal(logits(onnx, 2), logits(make_graph_backend(bundle, 64), 2))


def test_backends_without_planes_refuse() -> None:
    portable = make_graph_backend(export(PORTABLE), 64)
    four = ReferenceBackend(export(PORTABLE, bits=4), 64)
    for backend in (portable, four):
        assert not backend.capabilities.high_planes
        with pytest.raises(CapabilityError, match="cannot read one plane of its weights"):
            logits(backend, 1)
        assert backend.cache.length == 0
        logits(backend, 2)
