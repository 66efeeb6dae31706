"""A decoder over whole texts in several versions at once. A version, a stream, computes with the weights as they are or
with what quantizing made of them, layer after layer; every matrix is shown with what enters it before it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import UnsupportedArchitectureError
from edgeinfer.nn.decoder import Decoder, DecoderRun, Multiplied, Tensors, WholeTexts
from edgeinfer.quant.statistics import InputStatistics, StatisticsAccumulator

Floats = NDArray[np.float32]
# The same tokens in every stream, (N, width) each.
Signal = tuple[Floats, ...]
# What a matrix becomes, given its name, its values (R, C) and what enters it; None: no token of the texts does.
Visit = Callable[[str, Floats, InputStatistics | None], Floats]

_UNCOMPUTED = ("kv_sources", "per_layer", "encoder")  # parts of a decoder


def uncomputed(spec: DecoderSpec) -> list[str]:
    """Parts of a decoder that calibration does not know."""
    found = ["experts next to an MLP"] if spec.moe is not None and spec.moe.with_mlp else []
    return [*found, *(name for name in _UNCOMPUTED if getattr(spec, name))]


def require_computed(spec: DecoderSpec) -> None:
    for name in uncomputed(spec):
        what = f"Calibration of a decoder with {name}"
        raise UnsupportedArchitectureError(f"{what} is not supported yet.", "Export it without a calibration text.")


@dataclass(frozen=True)
class ExpertTokens:
    """Use of a layer's experts by the tokens of the texts."""

    layer: int
    # Tokens that chose each expert.
    counts: NDArray[np.int64]  # (E,)
    # Mean factor of its result over all tokens; 0 for tokens that did not choose it.
    weights: Floats  # (E,)

    @property
    def reached(self) -> NDArray[np.bool_]:  # (E,)
        """Experts that any token chose."""
        return self.counts > 0


@dataclass(frozen=True)
class _Routed:
    """The rows of an expert's products."""

    ends: list[int]  # of each stream but the last
    # Those of each stream that the last one has too, and the factors they are shown multiplied by.
    shown: list[NDArray[np.bool_]]
    factors: Floats | np.float32


class StreamWalk(Decoder):
    """Runs the layers of a decoder, one after the other, over texts, which do not see each other. Subclasses choose
    what each stream multiplies by. Where `weigh_experts`, an expert's inputs are shown multiplied by its result's
    factor."""

    def __init__(self, spec: DecoderSpec, tensors: Tensors, lengths: Sequence[int]) -> None:
        require_computed(spec)
        super().__init__(spec, tensors, max(lengths))
        self.uses: list[ExpertTokens] = []
        self.weigh_experts = True
        self._lengths = list(lengths)
        self._streams = 1
        self._routed: _Routed | None = None

    def weights(self, name: str, inputs: Signal) -> Signal:
        """A matrix as each stream multiplies by it, (R, C) each, from what enters it."""
        raise NotImplementedError

    def run(self, layer: int, states: Signal) -> Signal:
        """The hidden states after a layer, from those before it, which may be overwritten."""
        self._streams = len(states)
        rows = states[0] if len(states) == 1 else np.concatenate(states)
        texts = WholeTexts(self.spec, self._lengths * len(states))
        return tuple(np.split(self.layer(layer, rows, DecoderRun(texts)), len(states)))

    def matrices(self, name: str, x: Floats) -> Multiplied:
        routed = self._routed
        ends = self._ends(x) if routed is None else routed.ends
        inputs = tuple(np.split(x, ends))
        if routed is not None:
            inputs = tuple(rows[shown] * routed.factors for rows, shown in zip(inputs, routed.shown, strict=True))
        parts = map(slice, (0, *ends), (*ends, len(x)))
        return tuple(zip(parts, self.weights(name, inputs), strict=True))

    def small(self, name: str, x: Floats) -> Multiplied:
        weight, ends = self.tensor(name), self._ends(x)
        return [(slice(*part), weight) for part in zip((0, *ends), (*ends, len(x)), strict=True)]

    def _ends(self, x: Floats) -> list[int]:
        """Where the rows of each stream but the last end."""
        return [len(x) // self._streams * stream for stream in range(1, self._streams)]

    @contextmanager
    def routed(self, share: Floats) -> Iterator[NDArray[np.bool_]]:  # (S,)
        shares = np.split(share, self._streams)
        leading = shares[-1] != 0
        # The statistics relate streams token by token, so each stream also computes the tokens of the last one.
        used = [(each != 0) | leading for each in shares]
        ends: list[int] = np.cumsum([rows.sum() for rows in used])[:-1].tolist()
        factors = shares[-1][leading, None] if self.weigh_experts else np.float32(1)
        self._routed = _Routed(ends, [leading[rows] for rows in used], factors)
        yield np.concatenate(used)
        self._routed = None

    def experts(self, layer: int, shares: Floats) -> Sequence[int]:  # (S, E)
        """All of them: those that no token uses are shown too."""
        last = np.split(shares, self._streams)[-1]
        self.uses.append(ExpertTokens(layer, (last != 0).sum(axis=0), last.mean(axis=0)))
        return range(shares.shape[1])


class LayerWalk(StreamWalk):
    """Calls `visit` for every matrix of a layer, in the order of computation; what it returns replaces the matrix in
    quantized streams. Statistics are of the last stream; with two streams they relate it to the first. With `hessian`
    they have second moments between inputs."""

    def __init__(
        self,
        spec: DecoderSpec,
        tensors: Tensors,
        lengths: Sequence[int],
        visit: Visit,
        quantized: tuple[bool, ...],
        *,
        hessian: bool,
    ) -> None:
        super().__init__(spec, tensors, lengths)
        self._visit = visit
        self._quantized = quantized
        self._hessian = hessian

    def statistics(self, inputs: Signal) -> InputStatistics | None:
        """Statistics of a matrix's inputs; None without inputs."""
        if not len(inputs[-1]):
            return None
        *float_inputs, x = inputs
        gathered = StatisticsAccumulator(x.shape[1], self._hessian, self._hessian and bool(float_inputs))
        gathered.add(x, *float_inputs)
        return gathered.result()

    def weights(self, name: str, inputs: Signal) -> Signal:
        weight = self.tensor(name)
        replacement = self._visit(name, weight, self.statistics(inputs))
        return tuple(replacement if quantized else weight for quantized in self._quantized)
