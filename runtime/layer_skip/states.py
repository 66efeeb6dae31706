"""Hidden states of a prompt's last tokens at every layer, by passes of one layer each; knows nothing of policies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, ForwardInput
from edgeinfer.runtime.speculation.drafters.self_drafter import require

__all__ = ["PromptStates"]

# Tokens that are looked at, the last ones: of longer prompts the request itself, which stands at their end.
_MOST = 128


class PromptStates:
    """Implements `contract.Prompt`.

    The passes write the rows that are there anew, which stay what they are: layer by layer or at once is the same.

    Args:
        backend: whose cache holds the prompt and nothing else; must skip layers and resume from hidden states.
        prompt: its tokens.
        chunk: most tokens of a pass.

    Raises:
        CapabilityError: the backend can do neither.
    """

    def __init__(self, backend: Backend, prompt: Sequence[int], chunk: int) -> None:
        self._backend = backend
        self._prompt = prompt
        self._chunk = chunk

    @property
    def layers(self) -> int:
        """L."""
        return self._backend.geometry.num_layers

    def states(self) -> Floats:  # (L + 1, S, D)
        """Of the last tokens; L + 1 passes over them, without a head."""
        can = self._backend.capabilities
        hint = "Use a natively exported bundle, or another way to compute less."
        require(can.layer_skip and can.hidden, self._backend, "tell the states between its layers", hint)
        end = self._backend.cache.length
        begin = end - min(end, len(self._prompt), _MOST)
        tokens = np.array(self._prompt[len(self._prompt) - (end - begin) :], np.int64)
        states = np.empty((self.layers + 1, end - begin, self._backend.geometry.hidden_size), np.float32)
        for at in range(0, len(tokens), self._chunk):
            part = slice(at, min(at + self._chunk, len(tokens)))
            self._backend.cache.trim(begin + at)
            self._fill(states[:, part], tokens[part], begin + at)
        return states

    def _fill(self, states: Floats, tokens: np.ndarray[tuple[int], np.dtype[np.int64]], start: int) -> None:
        """One chunk, of which the cache lacks the rows. (L + 1, S, D), (S,)"""
        positions, nothing = start + np.arange(len(tokens)), np.zeros(0, np.int64)
        for layer in range(-1, self.layers):
            mask = np.arange(2 * self.layers) // 2 == layer
            entering = None if layer < 0 else states[layer]
            self._backend.cache.trim(start)
            output = self._backend.forward(ForwardInput(tokens, positions, nothing, layer_mask=mask, hidden=entering))
            assert output.hidden is not None, "a backend that resumes gives hidden states"
            states[layer + 1] = output.hidden
