"""The experts of a float model in memory, and what ways to quantize them make of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.packing import BLOCK_SIZES, packed_bytes
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.config import BITS
from edgeinfer.errors import BudgetError, UsageError
from edgeinfer.export.architectures import find_architecture
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import read_config
from edgeinfer.quant.allocation import Choice, PricedOption, allocate
from edgeinfer.quant.blocks import Grid
from edgeinfer.quant.budget import Candidate, candidate_schemes
from edgeinfer.quant.calibration import CalibrationOptions, calibrate, default_streams
from edgeinfer.quant.methods import METHODS, approximate
from edgeinfer.quant.policy import QuantScheme, make_scheme
from edgeinfer.quant.probing import expert_group, probe_tokens
from edgeinfer.quant.sensitivity import choose_texts, measure_costs
from edgeinfer.quant.statistics import InputStatistics
from tests.tools.research.spectral import Heterogeneity, heterogeneity, quantize_spectral, share_space

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Schemes = Mapping[str, QuantScheme]
_SCALE_BYTES, _ZERO_BYTES = 2, 1


def grid_bytes(shape: tuple[int, ...], grid: Grid) -> int:
    """Packed codes, and a bfloat16 scale and a zero point of a byte per block, as our own layout has them."""
    rows, columns = shape
    blocks = -(-columns // grid.size)
    per_block = _SCALE_BYTES + (0 if grid.symmetric else _ZERO_BYTES)
    return rows * (packed_bytes(columns, grid.bits) + per_block * blocks)


class ExpertModel:
    """A float32 model in memory and the experts of it; reader of edgeinfer.quant.calibration."""

    def __init__(self, spec: DecoderSpec, tensors: dict[str, Floats]) -> None:
        self.spec, self._tensors = spec, tensors
        found = candidate_schemes({name: tensor.shape for name, tensor in tensors.items()})
        self.matrices = list(found)
        self.schemes = {name: [s for s in found[name] if s] for name in found if expert_group(name) != name}
        self.groups: dict[str, list[str]] = {}
        for name in self.schemes:
            self.groups.setdefault(expert_group(name), []).append(name)
        self.parameters = sum(tensor.size for tensor in tensors.values())
        self.weights = sum(tensors[name].size for name in self.schemes)

    @classmethod
    def read(cls, folder: Path) -> ExpertModel:
        """The model of a checkpoint."""
        config = read_config(folder)
        family = find_architecture(config)
        with Checkpoint(folder) as checkpoint:
            silent = config.get("tie_word_embeddings") is None
            tied = family.naming.head not in checkpoint if silent else config.flag("tie_word_embeddings")
            spec = family.read(config, tied)
            if spec.moe is None:
                raise UsageError(f"{folder} has no experts.", "Give a checkpoint with a mixture of experts.")
            plans = family.tensors(config, spec, checkpoint.names)
            for source in (source for plan in plans for source in plan.sources):
                checkpoint.require(source.name, source.stored_shape)
            planned = PlannedTensors(checkpoint, plans)
            model = cls(spec, {plan.name: planned.tensor(plan.name) for plan in plans})
        if not model.schemes:
            hint = "Give one whose experts' sizes are multiples of 32."
            raise UsageError(f"No expert of {folder} can be quantized.", hint)
        return model

    def share_space(self, directions: int) -> None:
        """Leaves of the experts of a layer what lies in one space that they read, and in one that they write."""
        for members in self.groups.values():
            experts = [self._tensors[name] for name in members]
            shared = share_space(experts, directions, writes=members[0].endswith(".down"))
            self._tensors |= dict(zip(members, shared, strict=True))

    def tensor(self, name: str) -> Floats:
        """A whole tensor."""
        return self._tensors[name]

    def rows(self, name: str, rows: Ints) -> Floats:  # (M,) -> (M, D)
        """Some rows of a matrix."""
        return self._tensors[name][rows]

    def budget(self, bits: float) -> int:
        """Bytes of all experts at so many bits per weight."""
        return int(self.weights * bits / 8)

    def check(self, bits: float) -> None:
        """Refuses what the smallest schemes do not fit.

        Raises:
            BudgetError: so it is.
        """
        least = sum(
            min(grid_bytes(self.tensor(name).shape, Grid.of(scheme)) for scheme in found)
            for name, found in self.schemes.items()
        )
        if least > self.budget(bits):
            hint = f"Ask for at least {math.ceil(least * 8000 / self.weights) / 1000:g}."
            raise BudgetError(f"Experts do not fit {bits:g} bits per weight.", hint, minimum_bytes=least)

    def nbytes(self, schemes: Schemes) -> int:
        """What experts take."""
        return sum(grid_bytes(self.tensor(name).shape, Grid.of(scheme)) for name, scheme in schemes.items())

    def uniform(self, scheme: QuantScheme) -> dict[str, QuantScheme]:
        """One scheme for all experts; narrow matrices have smaller blocks."""
        size, plain = scheme.block_size, scheme.symmetric
        return {
            n: make_scheme(self.tensor(n).shape, scheme.bits, size, symmetric=plain) or scheme for n in self.schemes
        }

    def fitting(self, budget: int) -> list[QuantScheme]:
        """Schemes that all experts can have within so many bytes, of the widest bits that any of those has."""
        every = [QuantScheme(b, size, plain) for b in BITS for size in BLOCK_SIZES for plain in (True, False)]
        # Where no row is long enough for large blocks, they are the same as smaller ones.
        distinct = {tuple(self.uniform(scheme).values()): scheme for scheme in reversed(every)}.values()
        found = [scheme for scheme in distinct if self.nbytes(self.uniform(scheme)) <= budget]
        return [scheme for scheme in found if scheme.bits == max(other.bits for other in found)]


class _Rounding:
    """Rounds the experts that calibration shows, or keeps the statistics of what enters them."""

    def __init__(self, schemes: Schemes, method: str) -> None:
        self._schemes, self._method = schemes, method
        self.weights: dict[str, Floats] = {}
        self.statistics: dict[str, InputStatistics] = {}

    def layer(self, layer: int, statistics: dict[str, InputStatistics]) -> None:
        """Nothing is moved between matrices."""

    def embedding(self, rows: Floats) -> Floats:  # (M, D) -> (M, D)
        """Stays as it is."""
        return rows

    def matrix(self, name: str, weight: Floats, statistics: InputStatistics | None) -> Floats:  # (R, C) -> (R, C)
        """An expert's matrix as its scheme has it; others as they are."""
        if statistics is not None:
            self.statistics[name] = statistics
        scheme = self._schemes.get(name)
        if scheme is None:
            return weight
        self.weights[name] = approximate(weight, Grid.of(scheme), statistics, self._method)
        return self.weights[name]


@dataclass(frozen=True)
class Made:
    """Quantized experts.

    Attributes:
        weights: as floats, by name, (R, C) each.
        nbytes: that they take.
        allocation: seconds of a processor for probing and the integer programme; None where rounding has them in one.
        rounding: seconds of a processor for running texts, where that is needed, and for rounding.
    """

    weights: dict[str, Floats]
    nbytes: int
    allocation: float | None
    rounding: float


class Forms:
    """Quantizes the experts of a model by a text. What several forms need of it is found once.

    Args:
        texts: token ids of each.
    """

    def __init__(self, model: ExpertModel, texts: Sequence[Ints]) -> None:
        self.model, self._texts = model, texts

    @cached_property
    def costs(self) -> tuple[dict[str, list[Candidate]], float]:
        """What every scheme of every expert is predicted to cost, and the seconds of finding out."""
        started, model = time.process_time(), self.model
        texts = choose_texts(self._texts, probe_tokens(model.spec, model.parameters), model.spec.vocab_size)
        candidates = {name: model.schemes.get(name, [None]) for name in model.matrices}
        found = measure_costs(model.spec, model.tensor, texts, candidates)
        return {name: found[name] for name in model.schemes}, time.process_time() - started

    @cached_property
    def inputs(self) -> tuple[dict[str, InputStatistics], float]:
        """What enters the experts of the float model, and the seconds of finding out."""
        started, visitor = time.process_time(), _Rounding({}, "rtn")
        calibrate(self.model.spec, self.model, self._texts, visitor, CalibrationOptions("float", hessian=False))
        return visitor.statistics, time.process_time() - started

    def differs(self, members: Sequence[str]) -> Heterogeneity:
        """How much experts differ."""
        return heterogeneity([self.model.tensor(name) for name in members], self._counts(members))

    def _counts(self, members: Sequence[str]) -> Floats:  # (E,)
        """Tokens that chose each."""
        seen = (self.inputs[0].get(name) for name in members)
        return np.array([0 if found is None else found.count for found in seen], np.float32)

    def allocate(self, budget: int) -> tuple[Schemes, float]:
        """A scheme for each expert, and the seconds of choosing."""
        (costs, probing), started = self.costs, time.process_time()
        shapes = {name: self.model.tensor(name).shape for name in costs}
        choices = [
            Choice(tuple(PricedOption(grid_bytes(shapes[n], Grid.of(c.scheme)), c.cost) for c in found if c.scheme))
            for n, found in costs.items()
        ]
        chosen = allocate(choices, budget).chosen
        schemes = {name: self.model.schemes[name][index] for name, index in zip(costs, chosen, strict=True)}
        return schemes, probing + time.process_time() - started

    def round(self, schemes: Schemes, method: str, allocation: float) -> Made:
        """Experts quantized layer by layer for what will enter them, as an export does it."""
        started, hessian, model = time.process_time(), METHODS[method].needs == "hessian", self.model
        streams = default_streams(model.parameters) if hessian else "quantized"
        visitor = _Rounding(schemes, method)
        calibrate(model.spec, model, self._texts, visitor, CalibrationOptions(streams, hessian=hessian))
        return Made(visitor.weights, model.nbytes(schemes), allocation, time.process_time() - started)

    def spectral(self, budget: int, *, weighted: bool) -> Made:
        """Experts by a basis that they share; each projection of a layer has the same share of the bytes.

        Raises:
            BudgetError: a basis alone takes more.
        """
        statistics, spent = self.inputs if weighted else ({}, 0.0)
        started, nbytes = time.process_time(), 0
        weights: dict[str, Floats] = {}
        for members in self.model.groups.values():
            experts = [self.model.tensor(name) for name in members]
            share = budget * sum(expert.size for expert in experts) // self.model.weights
            writes, squares, importance = members[0].endswith(".down"), None, None
            if weighted:
                # Experts that no token of this text reached are not free.
                importance = self._counts(members) + 1
                found = [statistics[name] for name in members if name in statistics]
                mean = np.average([s.mean_square for s in found], axis=0, weights=[s.count for s in found])
                # Each expert's down reads a space of its own.
                own = [statistics[name].mean_square if name in statistics else mean for name in members]
                squares = np.stack(own) if writes else mean
            made = quantize_spectral(experts, share, importance, squares, writes=writes)
            weights |= dict(zip(members, made.weights, strict=True))
            nbytes += made.nbytes
        return Made(weights, nbytes, None, spent + time.process_time() - started)
