"""Mean squared inputs of a checkpoint's linear layers over token sequences, for llama.cpp's quantizer.

Runs the checkpoint with transformers; knows nothing of how anything is quantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.apps.bench.gguf_checkpoint import gguf_name
from edgeinfer.errors import UsageError

__all__ = ["importance_of"]


def importance_of(checkpoint: Path, texts: Iterable[Sequence[int]]) -> dict[str, npt.NDArray[np.float32]]:
    """What llama-imatrix gathers: of every linear layer but the head, the mean square of each input column.

    Experts of a layer follow one another in one array, each with the mean over the tokens it got; one that got none
    has ones.

    Raises:
        UsageError: torch or transformers is not installed.
    """
    try:
        torch, transformers = import_module("torch"), import_module("transformers")
    except ModuleNotFoundError as error:
        raise UsageError(f"Importance data needs {error.name}.", "Install the dev extra: edgeinfer[dev].") from error
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    sums = _Sums(torch)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(sums.of_layer(name))
        elif name.endswith(".mlp.experts"):
            module.register_forward_pre_hook(sums.of_experts(name))
    with torch.no_grad():
        for ids in texts:
            model(torch.tensor([list(ids)]))
    config = model.config.to_dict()
    return {gguf_name(f"{name}.weight", config): values for name, values in sums.means().items()}


class _Sums:
    """Sums of squares and counts by layer; of experts with a row for each."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._squares: dict[str, Any] = {}  # (K,) or (E, K), float64
        self._counts: dict[str, Any] = {}  # (1,) or (E, 1)

    def of_layer(self, name: str) -> Any:
        """A hook before a linear layer."""

        def hook(module: Any, inputs: tuple[Any, ...]) -> None:
            rows = inputs[0].reshape(-1, inputs[0].shape[-1]).double()
            self._add(name, rows.square().sum(0), self._torch.tensor([float(len(rows))]))

        return hook

    def of_experts(self, name: str) -> Any:
        """A hook before the experts of a layer, which get hidden states (T, D), choices and weights (T, k)."""

        def hook(module: Any, inputs: tuple[Any, ...]) -> None:
            states, choices = inputs[0], inputs[1]
            for expert in range(module.num_experts):
                rows = states[(choices == expert).any(dim=1)]
                gate, up = (rows @ module.gate_up_proj[expert].T).chunk(2, dim=-1)
                for part, given in (("gate_proj", rows), ("up_proj", rows), ("down_proj", module.act_fn(gate) * up)):
                    squares = self._torch.zeros(module.num_experts, given.shape[-1], dtype=self._torch.float64)
                    squares[expert] = given.double().square().sum(0)
                    counts = self._torch.zeros(module.num_experts, 1)
                    counts[expert] = len(rows)
                    self._add(f"{name}.{part}", squares, counts)

        return hook

    def _add(self, name: str, squares: Any, counts: Any) -> None:
        self._squares[name] = self._squares.get(name, 0) + squares
        self._counts[name] = self._counts.get(name, 0) + counts

    def means(self) -> dict[str, npt.NDArray[np.float32]]:
        """By layer, in one dimension."""
        means = {}
        for name, squares in self._squares.items():
            counts = self._counts[name]
            mean = self._torch.where(counts > 0, squares / counts.clamp(min=1), 1.0)
            means[name] = np.ascontiguousarray(mean.reshape(-1).float().numpy())
        return means
