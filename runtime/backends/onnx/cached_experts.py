"""A backend that keeps only some of a model's experts in memory and reads the others when they are chosen.

Knows whose pages are whose. What is not of an expert stays in memory. A pass
that could fetch more than there is room for is cut into windows of layers, and room is made before each of them, so
that no more than the limit is ever in memory. Every row of the result is the same bits as without.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.errors import CapabilityError, Setting
from edgeinfer.runtime.backends.contract import ForwardInput, ForwardOutput
from edgeinfer.runtime.backends.onnx.graph_backend import GraphBackend
from edgeinfer.runtime.backends.onnx.windowed import Window, WindowedBackend
from edgeinfer.runtime.experts.expert_cache import ExpertCache
from edgeinfer.runtime.experts.router_guess import RouterGuess
from edgeinfer.runtime.weights.disk_rate import DiskMeter

# Share of the limit that a window may fetch where its pass needs several: what is made room for is lost to experts that
# could have stayed, but every further window costs a run of the graph.
_WINDOW_SHARE = 0.25


class CachedExpertsBackend(WindowedBackend):
    """Implements `contract.Backend` around a backend that reads its weights in place.

    Args:
        inner: whose passes can skip layers and resume from hidden states; this closes it.
        decoder: of the model.
        limit: bytes of experts that may be in memory at once.
        meter: as of `WindowedBackend`.
        guess: what the layers of the next window will choose, so that it is read while they begin.

    Attributes:
        expert_cache: of the experts.

    Raises:
        CapabilityError: its experts do not lie on pages of their own, it cannot skip layers or resume, or the limit is
            less than the experts that one layer may need.
    """

    def __init__(
        self,
        inner: GraphBackend,
        decoder: DecoderSpec,
        limit: int,
        meter: DiskMeter | None = None,
        guess: RouterGuess | None = None,
    ) -> None:
        can = inner.capabilities
        parts = None if inner.pages is None else inner.pages.experts()
        if not parts or not (can.layer_skip and can.hidden):
            hint = "Export it in the native layout with quantized experts, or load it with other weights."
            raise CapabilityError("The experts of this model cannot be loaded on demand.", hint)
        super().__init__(inner, meter)
        assert decoder.moe is not None and inner.pages is not None, "there are experts"
        self._pages = inner.pages
        sizes = np.zeros((decoder.num_layers, decoder.moe.experts), np.int64)
        for (layer, expert), part in parts.items():
            sizes[layer, expert] = part.nbytes
        self.expert_cache = ExpertCache(parts, sizes, limit)
        self._moe, self._guess = decoder.moe, guess
        least = max(self.expert_cache.need(layer, decoder.moe.experts) for layer in range(decoder.num_layers))
        if limit < least:
            message = f"The experts of one layer take {least} bytes, only {limit} may be in memory."
            raise CapabilityError(
                message, "Stream the weights with " + Setting("weights", "streamed") + ", or use more memory."
            )
        self._pages.small_pages()
        self._pages.release()

    def _windows(self, batch: ForwardInput) -> Sequence[Window]:
        """As many layers at a time as surely fit."""
        layers = self.geometry.num_layers
        count = self._moe.top_k if batch.experts is None else batch.experts.count
        # Padding is a copy of a real row, and chooses the same but for rounding.
        most = len(batch.tokens) * count
        runs = np.ones(2 * layers, np.bool_) if batch.layer_mask is None else batch.layer_mask
        needs = [self.expert_cache.need(layer, most) if runs[2 * layer + 1] else 0 for layer in range(layers)]
        starts, size = [0], 0
        for layer, need in enumerate(needs):
            if layer > starts[-1] and size + need > _WINDOW_SHARE * self.expert_cache.limit:
                starts.append(layer)
                size = 0
            size += need
        bounds = [*starts, layers, layers]
        # A prompt's tokens need nearly all experts; those of a few tokens can be guessed from what enters their layers.
        ahead = most >= self._moe.experts
        found = []
        for first, stop, after in zip(bounds, bounds[1:], bounds[2:], strict=False):
            mask = np.zeros(2 * layers, np.bool_)  # (2 L,)
            mask[2 * first : 2 * stop] = True
            prepare = partial(self._prepare, range(first, stop), most, range(stop, after) if ahead else ())
            found.append(Window(mask, prepare, partial(self._ran, () if ahead else range(stop, after))))
        return found

    def _prepare(self, layers: range, most: int, ahead: Iterable[int]) -> None:
        self.expert_cache.make_room(layers, most)
        for layer in ahead:
            self.expert_cache.fetch(layer)

    def _ran(self, following: Iterable[int], output: ForwardOutput) -> None:
        assert output.experts is not None, "a model with experts tells which it used"
        self.expert_cache.used(output.experts)
        if self._guess is not None and output.hidden is not None:
            for layer in following:
                self.expert_cache.fetch(layer, self._guess.experts(layer, output.hidden))
