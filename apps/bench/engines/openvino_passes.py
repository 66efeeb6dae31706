"""Single passes of the model that OpenVINO GenAI's pipeline runs, through OpenVINO's runtime; knows no pipeline."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from edgeinfer.apps.bench.engines.stepped import SteppedEngine

__all__ = ["OpenVinoPassesEngine"]


class OpenVinoPassesEngine(SteppedEngine):
    """The model keeps keys and values in a state of its own, which can be emptied but not cut."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        super().__init__()
        lib = import_module("openvino")
        self._np = import_module("numpy")
        self.version = str(lib.get_version())
        core = lib.Core()
        model = core.read_model(str(Path(path, "openvino_model.xml")))
        options = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
        self._request = core.compile_model(model, "CPU", options).create_infer_request()

    def take(self, tokens: list[int], rows: int) -> None:
        """See SteppedEngine; the head computes every row, whatever is asked for."""
        np, past, size = self._np, len(self._taken), len(tokens)
        inputs = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, past + size), np.int64),
            "position_ids": np.arange(past, past + size)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        self._request.infer(inputs)

    def choices(self, rows: int) -> list[int]:
        """See SteppedEngine."""
        found: list[int] = self._request.get_tensor("logits").data[0, -rows:].argmax(axis=-1).tolist()
        return found

    def truncate(self, length: int) -> None:
        """See SteppedEngine."""
        if length == len(self._taken):
            return
        kept, self._taken = self._taken[:length], []
        self._request.reset_state()
        if kept:
            self._take(kept, 0)
