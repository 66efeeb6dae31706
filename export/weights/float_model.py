"""The float model of a checkpoint over texts, one layer and one run of the vocabulary in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import UsageError
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.nn.arithmetic import softcapped
from edgeinfer.nn.decoder import Decoder, DecoderRun, WholeTexts
from edgeinfer.quant.calibration_layers import require_computed

Floats = NDArray[np.float32]

# Rows of the vocabulary's matrix that are read at a time.
_RUN = 8192


class FloatModel:
    """The model that a bundle was made of."""

    def __init__(self, spec: DecoderSpec, tensors: PlannedTensors, parameters: int) -> None:
        self.parameters = parameters
        self._spec = spec
        self._tensors = tensors

    def states(
        self, texts: Sequence[NDArray[np.int64]], report: Callable[[int, int], None]
    ) -> list[Floats]:  # (N,) each -> (N, D) each
        """What enters the vocabulary's matrix after each token of each text; reports layers and all layers."""
        spec, lengths = self._spec, [len(text) for text in texts]
        require_computed(spec)
        decoder = Decoder(spec, self._tensors.tensor, max(lengths))
        distinct, places = np.unique(np.concatenate(texts), return_inverse=True)
        x, run = self._tensors.rows("embed", distinct)[places], DecoderRun(WholeTexts(spec, lengths))
        for layer in range(spec.num_layers):
            x = decoder.layer(layer, x, run)
            report(layer + 1, spec.num_layers)
        final = decoder.norm("final_norm", x)
        if not np.isfinite(final).all():
            raise UsageError("The float model's activations are not finite.", "Check the checkpoint.")
        return np.split(final, np.cumsum(lengths)[:-1])

    def logits(self, states: Floats) -> Floats:  # (N, D) -> (N, V)
        head = self._tensors.of("embed" if self._spec.tied else "head")
        out = np.empty((len(states), self._spec.vocab_size), np.float32)
        for start in range(0, self._spec.vocab_size, _RUN):
            stop = min(start + _RUN, self._spec.vocab_size)
            out[:, start:stop] = states @ head(start, stop).T
        if self._spec.head_bias:
            out += self._tensors.tensor("head_bias")
        return softcapped(out, self._spec.logit_softcap)
