"""Decoders as embedders, which pool the states of a text, and as rerankers, which are asked for a yes or no."""

from __future__ import annotations

from collections import abc

import numpy as np

from edgeinfer.bundle.embedding import EmbeddingUse, embedding_use
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import CapabilityError
from edgeinfer.nn.arithmetic import normed
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import Sequence, run_alone

_NO_ROWS = np.zeros(0, np.int64)


class DecoderEmbedder:
    """Pools the states of a decoder after its last norm, of one text after the other; the cache is emptied."""

    def __init__(self, sequence: Sequence, bundle: Bundle) -> None:
        decoder, backend = bundle.manifest.decoder, sequence.backend
        if decoder is None or not bundle.manifest.tensors or not backend.capabilities.hidden or decoder.streams:
            message = f"{bundle.manifest.name} gives no hidden states here, which embeddings are made of."
            raise CapabilityError(message, "Load a model that embeds, such as all-MiniLM or Qwen3-Embedding.")
        self.use: EmbeddingUse = embedding_use(bundle)
        self._sequence, self._spec = sequence, decoder
        self._weight = bundle.tensor("final_norm")
        self._bias = bundle.tensor("final_norm_bias") if decoder.norm_bias else None

    def vectors(self, texts: abc.Sequence[abc.Sequence[int]]) -> Floats:  # (N, D)
        found = np.zeros((len(texts), self._spec.hidden_size), np.float32)
        for place, text in enumerate(texts):
            found[place] = self._vector(text)
        self._sequence.forget()
        return found

    def _vector(self, text: abc.Sequence[int]) -> Floats:  # (D,)
        sequence, pooling = self._sequence, self.use.pooling
        sequence.check(text)
        sequence.forget()
        sequence.begin(len(text))
        total = np.zeros(self._spec.hidden_size, np.float64)
        for start in range(0, len(text), sequence.chunk):
            hidden = run_alone(sequence.feed(list(text[start : start + sequence.chunk]), _NO_ROWS)).hidden
            assert hidden is not None, "its backend gives them"
            states = normed(hidden, self._weight, self._bias, kind=self._spec.norm, eps=self._spec.norm_eps)
            if pooling == "mean":
                total += states.sum(axis=0, dtype=np.float64) / len(text)
            elif pooling == "last" or start == 0:
                total[:] = states[-1 if pooling == "last" else 0]
        return total.astype(np.float32)


def judged(sequence: Sequence, prompt: abc.Sequence[int], yes: int, no: int) -> float:
    """The probability of "yes" after a prompt, against "no"; the beginning that prompts share is read once."""
    sequence.check(prompt)
    run_alone(sequence.prepare(prompt, len(prompt)))
    logits = run_alone(sequence.feed(list(prompt[-1:]), np.zeros(1, np.int64))).logits[0]
    return float(1 / (1 + np.exp(np.float64(logits[no]) - np.float64(logits[yes]))))
