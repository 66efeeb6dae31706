"""Tries a device: a small model runs on it and on the CPU, and both must say the same; then the model's first pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeinfer.bundle.protobuf import length_delimited, number
from edgeinfer.core.errors import BackendError, DeviceError, EdgeInferError
from edgeinfer.runtime.backends.contract import Backend, Pass
from edgeinfer.runtime.backends.onnx.adapters import write_attribute, write_node
from edgeinfer.runtime.backends.onnx.session import Binding, OrtSession
from edgeinfer.runtime.devices.arrays import DeviceArray
from edgeinfer.runtime.devices.providers import CPU, Device, device_error

# Of the ordinary model: heads and their size, rows of the cache; and the width of both.
HEADS, HEAD_SIZE, ROOM = 2, 16, 8
WIDTH = HEADS * HEAD_SIZE

_IR_VERSION, _OPSET = 10, 21
_MICROSOFT = "com.microsoft"
_TYPES = {"float32": 1, "uint8": 2, "int8": 3, "int32": 6}
_BLOCK = 32


def static_model() -> bytes:
    """Standard operators and fixed shapes: y = softmax(x w), (2, W) -> (2, W), w of 8 bits."""
    weights = _numbers((WIDTH, WIDTH), np.int8, 127)
    nodes = [
        write_node("DequantizeLinear", ["w", "scale"], ["floats"]),
        write_node("MatMul", ["x", "floats"], ["scores"]),
        write_node("Softmax", ["scores"], ["y"]),
    ]
    constants = [_tensor("w", weights), _tensor("scale", np.array(0.01, np.float32))]
    return _model(nodes, constants, [_value("x", (2, WIDTH))], [_value("y", (2, WIDTH))])


def ordinary_model() -> bytes:
    """Attention over a cache that may be updated in place, of a product with weights of 4 bits; one new row a run."""
    packed = _numbers((WIDTH, 1, _BLOCK // 2), np.uint8, 255)
    scales = np.full(WIDTH, 0.02, np.float32)
    cache = (1, HEADS, ROOM, HEAD_SIZE)
    sizes = {"K": WIDTH, "N": WIDTH, "bits": 4, "block_size": _BLOCK, "accuracy_level": 4}
    attention = ["q", "x", "x", "past_key", "past_value", "seqlens_k", "total"]
    nodes = [
        write_node(
            "MatMulNBits", ["x", "w", "scales"], ["q"], [write_attribute(*each) for each in sizes.items()], _MICROSOFT
        ),
        write_node(
            "GroupQueryAttention",
            attention,
            ["y", "present_key", "present_value"],
            [write_attribute(name, HEADS) for name in ("num_heads", "kv_num_heads")],
            _MICROSOFT,
        ),
    ]
    row = (1, 1, WIDTH)
    inputs = [_value("x", row), _value("past_key", cache), _value("past_value", cache)]
    inputs += [_value("seqlens_k", (1,), "int32"), _value("total", (), "int32")]
    outputs = [_value("y", row), _value("present_key", cache), _value("present_value", cache)]
    return _model(nodes, [_tensor("w", packed), _tensor("scales", scales)], inputs, outputs)


def _numbers(shape: tuple[int, ...], kind: type, most: int) -> NDArray[Any]:
    return np.random.default_rng(0).integers(-most if kind is np.int8 else 0, most, shape).astype(kind)


def _model(
    nodes: Sequence[bytes], constants: Sequence[bytes], inputs: Sequence[bytes], outputs: Sequence[bytes]
) -> bytes:
    graph = b"".join(nodes) + _text(2, "check")
    graph += b"".join(length_delimited(5, constant) for constant in constants)
    graph += b"".join(length_delimited(11, value) for value in inputs)
    graph += b"".join(length_delimited(12, value) for value in outputs)
    opsets = (("", _OPSET), (_MICROSOFT, 1))
    imports = b"".join(length_delimited(8, _text(1, domain) + number(2, version)) for domain, version in opsets)
    return number(1, _IR_VERSION) + length_delimited(7, graph) + imports


def _tensor(name: str, array: NDArray[Any]) -> bytes:
    dims = b"".join(number(1, size) for size in array.shape)
    kind = number(2, _TYPES[array.dtype.name])
    return dims + kind + _text(8, name) + length_delimited(9, array.tobytes())


def _value(name: str, shape: tuple[int, ...], kind: str = "float32") -> bytes:
    dims = b"".join(length_delimited(1, number(1, size)) for size in shape)
    tensor = number(1, _TYPES[kind]) + length_delimited(2, dims)
    return _text(1, name) + length_delimited(2, length_delimited(1, tensor))


def _text(field: int, text: str) -> bytes:
    return length_delimited(field, text.encode())


# Devices may compute in half precision, and the CPU rounds what it multiplies 4-bit weights with to 8 bits.
_TOLERANCE = 0.02
_TOKENS = 3


def check_device(device: Device) -> None:
    models = [_static] + ([_ordinary] if device.traits.dynamic_shapes else [])
    for run in models:
        try:
            found = run(device)
        except DeviceError:
            raise
        except EdgeInferError as error:
            raise device_error(device, error.message) from error
        wanted = run(CPU)
        if not np.isfinite(found).all() or float(np.abs(found - wanted).max()) > _TOLERANCE:
            raise device_error(device, "it computes something else than the CPU")


def _static(device: Device) -> NDArray[np.float32]:  # (2, W)
    session = OrtSession(static_model(), 1, device=device)
    binding = session.binding()
    output = np.zeros((2, WIDTH), np.float32)
    _bind(binding, {"x": _states(2)})
    binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(output))
    session.run(binding)
    return output


def _ordinary(device: Device) -> NDArray[np.float32]:  # (tokens, W)
    session = OrtSession(ordinary_model(), 1, device=device)
    shape = (1, HEADS, ROOM, HEAD_SIZE)
    caches = [DeviceArray(shape, np.float32, device) for _ in range(2)]
    states, found = _states(_TOKENS), np.zeros((_TOKENS, WIDTH), np.float32)
    output = np.zeros((1, 1, WIDTH), np.float32)
    for token in range(_TOKENS):
        binding = session.binding()
        total = np.array(token + 1, np.int32)
        _bind(binding, {"x": states[token].reshape(1, 1, -1), "seqlens_k": total.reshape(1) - 1, "total": total})
        for name, cache in zip(("key", "value"), caches, strict=True):
            binding.bind_ortvalue_input(f"past_{name}", cache.value)
            binding.bind_ortvalue_output(f"present_{name}", cache.written)
        binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(output))
        session.run(binding)
        found[token] = output[0, 0]
        if not device.traits.in_place_kv:
            for cache in caches:
                cache.swap()
    return found


def _bind(binding: Binding, inputs: dict[str, NDArray[np.generic]]) -> None:
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)))


def _states(rows: int) -> NDArray[np.float32]:  # (rows, W)
    return np.random.default_rng(1).uniform(-1, 1, (rows, WIDTH)).astype(np.float32)


_CHECKED = (0, 0)


def check_first_pass(backend: Backend, device: Device) -> None:
    """Runs a prompt of two tokens and a token after it."""
    try:
        cache = backend.new_sequence(len(_CHECKED) + 1)
        for tokens in (_CHECKED, _CHECKED[:1]):
            ids = np.array(tokens, np.int64)
            positions = cache.length + np.arange(len(ids), dtype=np.int64)
            (result,) = backend.forward([(cache, Pass(ids, positions, np.array([len(ids) - 1], np.int64)))])
            logits = result.logits
            if not np.isfinite(logits).all():
                raise device_error(device, "its first pass gave logits that are no numbers")
        cache.clear()
    except (BackendError, DeviceError) as error:
        backend.close()
        raise error if isinstance(error, DeviceError) else device_error(device, error.message) from error
