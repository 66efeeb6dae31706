"""Which experts the layers to come will choose, as their own routers say of the hidden states before them.

As "Fast Inference of Mixture-of-Experts Language Models with Offloading" (arXiv:2312.17238) does: hidden states change
little from layer to layer. A guess decides what is read early, never what is computed, so biases, groups and other
rules of routers are left out of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Self

import numpy as np

from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.weights.weight_pages import WeightPages

_NORM, _ROUTER = "layers.{}.mlp_norm", "layers.{}.mlp.router"


class RouterGuess:
    """The routers of a model.

    Args:
        routers: of layers that have one, what they multiply hidden states by. (D, E)
        top_k: experts that each token chooses.
    """

    def __init__(self, routers: Mapping[int, Floats], top_k: int) -> None:
        self._routers = routers
        self._top_k = top_k

    @classmethod
    def of(cls, pages: WeightPages, tensors: Iterable[TensorEntry], top_k: int) -> Self:
        """Reads them from the file; layers whose router or norm is stored in another way have none."""
        known = {tensor.name: tensor for tensor in tensors if tensor.bits == 32}
        routers = {}
        for layer in range(len(known)):
            norm, router = known.get(_NORM.format(layer)), known.get(_ROUTER.format(layer))
            if norm is not None and router is not None and router.shape[1:] == norm.shape:
                weights = pages.floats(router.name).reshape(router.data.shape)
                weights = weights if router.transposed else weights.T
                # The norm's divisor is left out: it changes no order.
                routers[layer] = np.ascontiguousarray(pages.floats(norm.name)[:, None] * weights)
        return cls(routers, top_k)

    def experts(self, layer: int, hidden: Floats) -> Ints:  # (S, D) -> (n,)
        """Those that the tokens will choose in a layer; none where nothing is known."""
        router = self._routers.get(layer)
        if router is None:
            return np.zeros(0, np.int64)
        best = np.argpartition(hidden @ router, -self._top_k, axis=1)[:, -self._top_k :]  # (S, k)
        return np.unique(best)
