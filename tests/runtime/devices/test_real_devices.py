"""Devices that are not the CPU, where they are installed: in most environments nothing here runs.

Needs neither torch nor the fixtures of other tests: `pytest --noconftest` runs it in an environment with one of the
packages that come in place of onnxruntime.
"""

from __future__ import annotations

import numpy as np
import pytest

import edgeinfer
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import DeviceError
from edgeinfer.hub import resolve
from edgeinfer.runtime.backends.onnx.backend import OnnxBackend
from edgeinfer.runtime.backends.onnx.selfcheck import check_device, check_first_pass
from edgeinfer.runtime.devices.providers import CPU, Device, is_installed
from edgeinfer.runtime.devices.registry import ENTRIES, find_device
from tests.alone import Alone
from tests.devices import talk
from tests.tables import each_row

pytestmark = pytest.mark.openvino

CAPACITY = 300
OTHERS = [device.name for entry in ENTRIES for device in entry.devices if not device.on_cpu]


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return open_bundle(resolve(None))


def there(name: str) -> Device:
    """The device; skips where it is not."""
    entry, device = find_device(name)
    if not is_installed(device):
        pytest.skip(f"{entry.package} is not installed")
    if not entry.hardware(device):
        pytest.skip(f"there is no hardware for {name}")
    return device


@each_row("name", OTHERS)
def test_small_models_reply_as_on_the_cpu(name: str) -> None:
    check_device(there(name))


def test_webgpu_runs_the_ordinary_graphs(bundle: Bundle) -> None:
    device = there("webgpu")
    check_first_pass(OnnxBackend(bundle, CAPACITY, exact=False, device=device), device)
    other, here = (Alone(OnnxBackend(bundle, CAPACITY, exact=False, device=each), CAPACITY) for each in (device, CPU))
    for found, wanted in zip(talk(other), talk(here), strict=True):
        # Both round what they multiply quantized weights with to 8 bits, each in its way.
        assert np.abs(found - wanted).max() < 0.1 * np.abs(wanted).max()
        assert (found.argmax(1) == wanted.argmax(1)).mean() > 0.8
    other.close()
    here.close()


def test_webgpu_tells_a_story() -> None:
    there("webgpu")
    with edgeinfer.load(device="webgpu", threads=1, context=128, remember=False, profile="off") as model:
        result = model.generate("Once upon a time", max_tokens=4, speculation="off")
        assert (model.info.device, model.info.device_note, model.info.kernel) == ("webgpu", "", "MatMulNBits")
        assert model.plan.footprint.device["kv"] > 0
    with edgeinfer.load(device="cpu", native=False, context=128, remember=False, profile="off") as model:
        assert model.generate("Once upon a time", max_tokens=4, speculation="off").text == result.text


def test_openvino_does_not_read_the_ordinary_graphs(bundle: Bundle) -> None:
    """Should it some day, its traits have to change."""
    device = there("openvino:CPU")
    with pytest.raises(DeviceError, match="openvino:CPU"):
        Alone(OnnxBackend(bundle, CAPACITY, exact=False, device=device), CAPACITY)
    with pytest.raises(DeviceError, match=r"only graphs of fixed shapes.*--static"):
        edgeinfer.load(device="openvino:CPU")


def test_a_processor_that_is_not_there_is_no_openvino_device() -> None:
    entry, device = find_device("openvino:NPU")
    if not is_installed(device) or entry.hardware(device):
        pytest.skip("needs OpenVINO on a machine without such a processor")
    with pytest.raises(DeviceError, match="could not make its provider"):
        check_device(device)
