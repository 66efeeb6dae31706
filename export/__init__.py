"""From a checkpoint to a bundle; knows nothing of decoding."""

from __future__ import annotations

from importlib.util import find_spec

from edgeinfer.core.errors import UsageError

if find_spec("onnx") is None:
    raise UsageError("Converting a checkpoint needs the onnx package, which is not there.", "pip install onnx")
