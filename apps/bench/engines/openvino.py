"""OpenVINO on a model of openvino_model.py; knows nothing of other engines."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from edgeinfer.apps.bench.engines.stepped import SteppedEngine

__all__ = ["OpenVinoEngine"]


class OpenVinoEngine(SteppedEngine):
    """With its default options matrices take int8 activations."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        super().__init__()
        lib = self._lib = import_module("openvino")
        self._np = import_module("numpy")
        self.version = str(lib.get_version())
        core = lib.Core()
        options = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
        compiled = core.compile_model(core.read_model(str(Path(path, "model.xml"))), "CPU", options)
        # Two, in turns: the keys and values that one put out are what the other takes in, without a copy.
        self._requests = [compiled.create_infer_request() for _ in range(2)]
        self._past = {
            port.any_name: port.partial_shape for port in compiled.inputs if port.any_name.startswith("past.")
        }
        # Tokens before the last pass, whose request still has what it took in.
        self._before = 0
        self._forget()

    def take(self, tokens: list[int], rows: int) -> None:
        """See SteppedEngine."""
        np, size, past = self._np, len(tokens), len(self._taken)
        done, after = self._requests
        mask = np.zeros((1, 1, size, past + size), np.float32)
        mask[0, 0, :, past:][np.triu(np.ones((size, size), np.bool_), 1)] = -np.inf
        inputs = {
            "input_ids": np.array([tokens], np.int64),
            "position_ids": np.arange(past, past + size)[None],
            "mask": mask,
            "rows": np.arange(size - rows, size),
        }
        for name, array in inputs.items():
            done.set_tensor(name, self._lib.Tensor(array))
        done.infer()
        for name in self._past:
            after.set_tensor(name, done.get_tensor(name.replace("past", "present")))
        self._requests.reverse()
        self._before = past

    def choices(self, rows: int) -> list[int]:
        """See SteppedEngine."""
        found: list[int] = self._requests[1].get_tensor("logits").data[0].argmax(axis=-1).tolist()
        return found

    def truncate(self, length: int) -> None:
        """See SteppedEngine."""
        if length == len(self._taken):
            return
        if length == self._before:
            self._requests.reverse()
            return
        kept = self._taken[:length]
        self._forget()
        self._taken = []
        if kept:
            self._take(kept, 0)

    def _forget(self) -> None:
        for name, shape in self._past.items():
            sizes = [size.get_length() if size.is_static else 0 for size in shape]
            self._requests[0].set_tensor(name, self._lib.Tensor(self._np.zeros(sizes, self._np.float32)))
        self._before = -1
