"""Predicts what each way to quantize each matrix costs the model. The cost of a scheme is the KL divergence that the
matrix's probe caused, times how much smaller the scheme's error is than the probe's: both measured at the matrix's
output, on the inputs that a text gives it, of the same length for all tokens. Part of the scheme's error is that
kernels round the inputs to int8, in its blocks. Costs add up."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.results import Progress
from edgeinfer.nn.decoder import Tensors
from edgeinfer.quant.blocks import Grid
from edgeinfer.quant.budget import Candidate
from edgeinfer.quant.calibration import ModelReader
from edgeinfer.quant.methods import approximate
from edgeinfer.quant.policy import QuantScheme
from edgeinfer.quant.probing import Probe, coarse, expert_group, joint_factor, probe_decoder, rounded
from edgeinfer.quant.statistics import StatisticsAccumulator

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

# Weights of a matrix whose errors stand for all: schemes and probe are compared on the same rows. Experts of one layer
# share them out.
_SAMPLE, _LEAST_SAMPLE = 1 << 15, 1 << 13
# What all matrices of a kind cost together, in nats for a relative squared error of one that is small: geometric means
# of SmolLM2-135M and Qwen2.5-Coder-0.5B, whose linear layers of 4 bits cost 0.35 and 0.08 nats.
_USUAL_COSTS = {"qkv": 5.0, "out": 1.0, "gate_up": 4.0, "up": 4.0, "down": 4.0, "embed": 4.0, "head": 4.0}
# What feeding errors forward leaves of the squared error on other text, whatever the format: means of five layers of
# SmolLM2-135M and Qwen2.5-Coder-0.5B, calibrated with 4096 tokens; of SmolLM2's embedding as its head.
_GAINS = {"qkv": 0.5, "out": 0.45, "gate_up": 0.65, "up": 0.65, "down": 0.7, "head": 0.7}
# Levels of inputs, and how many share a scale, by the format of what multiplies them. What their errors cost next to
# those of weights: each token's go their own way, so that attention averages them. At 8 bits, where no others count,
# SmolLM2-135M loses 0.0069 nats and Gemma-3-270M 0.0067, where weights' errors of that energy cost 0.0099 and 0.0127.
_INT8, _INPUT_BLOCKS, _INPUT_COST = 127.0, (32, 64, 128), 0.6
_LAYER = re.compile(r"layers\.(\d+)\.")
_ROWS = 8  # of each matrix, where no text is read
# Tokens of a text that probes read: with more texts for as many tokens, more of the subject matter is there. Where all
# matrices are rounded together, texts are longer, as what models read is; so many tokens where time allows.
_LENGTH, _JOINT_LENGTH, _JOINT_TOKENS = 48, 96, 1152


def measure_costs(
    spec: DecoderSpec,
    tensors: Tensors,
    texts: Sequence[Ints],
    candidates: Mapping[str, Sequence[QuantScheme | None]],
    progress: Progress | None = None,
    *,
    tokens: int = _JOINT_TOKENS,
    fed_forward: bool = False,
) -> dict[str, list[Candidate]]:
    """Predicts the cost of each candidate of each matrix, from one run of all probes through the model over so many
    tokens of the texts, and one of all of them together over more. `fed_forward`: errors will be, by a Hessian."""
    shared = Counter(map(expert_group, candidates))
    ratios: dict[str, list[float]] = {}

    def look(name: str, weight: Floats, x: Floats | None) -> None:
        rows = spread_rows(weight, sample_size(shared[expert_group(name)]))
        schemes = candidates["embed" if name == "head" and spec.tied else name]
        ratios[name] = _error_ratios(rows, x, schemes, _GAINS.get(kind_of(name), 1.0) if fed_forward else 1.0)

    probes = probe_decoder(spec, tensors, choose_texts(texts, tokens), look, progress)
    joint = choose_texts(texts, max(2 * tokens, min(6 * tokens, _JOINT_TOKENS)), _JOINT_LENGTH)
    factor = joint_factor(spec, tensors, joint, probes)
    costs = {
        name: [factor * share_of(probes[expert_group(name)], name) * ratio for ratio in found]
        for name, found in ratios.items()
    }
    if spec.tied:
        costs["embed"] = [sum(each) for each in zip(costs["embed"], costs["head"], strict=True)]
    return {name: list(map(Candidate, schemes, costs[name])) for name, schemes in candidates.items()}


def kind_of(name: str) -> str:
    """What a matrix is in its layer."""
    return name.rpartition(".")[2]


def expected_costs(
    reader: ModelReader, counts: Mapping[str, int], candidates: Mapping[str, Sequence[QuantScheme | None]]
) -> dict[str, list[Candidate]]:
    """Costs where no text is read: the relative squared error of some rows, times what matrices of a kind usually
    cost; `counts` are of all rows."""
    kinds = {name: kind_of(name) for name in candidates}
    alike = Counter(kinds.values())
    last = max((int(found[1]) for name in candidates if (found := _LAYER.match(name))), default=0)
    costs = {}
    for name, schemes in candidates.items():
        rows = reader.rows(name, np.linspace(0, counts[name] - 1, min(_ROWS, counts[name])).round().astype(np.int64))
        each = (
            _USUAL_COSTS.get(kinds[name], 3.0)
            * _place_factor(name, last)
            / (alike[kinds[name]] * max(output_energy(rows, None), 1e-30))
        )
        costs[name] = [
            Candidate(s, 0.0 if s is None else output_energy(approximate(rows, Grid.of(s)) - rows, None) * each)
            for s in schemes
        ]
    return costs


def _place_factor(name: str, last: int) -> float:
    """How much more than others a matrix of the first or the last layers costs."""
    found = _LAYER.match(name)
    return 1.0 if found is None else {0: 2.0, last - 1: 2.0, last: 3.0}.get(int(found[1]), 1.0)


def sample_size(experts: int) -> int:
    """Weights of a matrix to look at, one of so many experts of a layer."""
    return max(_SAMPLE // max(experts, 1), _LEAST_SAMPLE)


def share_of(probe: Probe, name: str) -> float:
    """The part of a probe's divergence that comes from one of its matrices."""
    total = sum(probe.errors.values())
    return probe.kl * probe.errors[name] / total if total else 0.0


def spread_rows(weight: Floats, sample: int) -> Floats:  # (N, K) -> (n, K)
    """Rows evenly spread over a matrix, about `sample` weights of it."""
    count = min(max(sample // weight.shape[1], 1), len(weight))
    rows: Floats = weight[np.linspace(0, len(weight) - 1, count).round().astype(np.int64)]
    return rows


def _error_ratios(
    rows: Floats,  # (n, K)
    x: Floats | None,  # (T, K)
    schemes: Sequence[QuantScheme | None],
    gain: float,
) -> list[float]:
    """Squared output error of each scheme relative to the probe's; `gain` is what rounding leaves of the weights'."""
    statistics, moved, shown = None, dict[int, float](), x
    if x is not None and len(x):
        shown, lengths = even(x), _lengths(x)
        moved = {size: output_energy(rows, (rounded(x, _INT8, size) - x) / lengths) for size in _INPUT_BLOCKS}
        gathered = StatisticsAccumulator(x.shape[1], hessian=False)
        gathered.add(x)
        statistics = gathered.result()
    whole = max(output_energy(coarse(rows, x) - rows, shown), 1e-30)

    def energy(scheme: QuantScheme) -> float:
        error = output_energy(approximate(rows, Grid.of(scheme), statistics) - rows, shown)
        return gain * error + _INPUT_COST * moved.get(scheme.block_size, 0.0)

    return [0.0 if scheme is None else energy(scheme) / whole for scheme in schemes]


def output_energy(error: Floats, x: Floats | None) -> float:  # (n, K), (T, K)
    """Squared output error, as of inputs that go without each other: on four matrices of three layers of SmolLM2, that
    is 0.95 to 1.05 of the true one on other text for all formats, and few rows and tokens tell it."""
    squares = np.einsum("nk,nk->k", error, error, dtype=np.float64)
    if x is None or not len(x):
        return float(squares.sum())
    return float(squares @ np.einsum("tk,tk->k", x, x, dtype=np.float64))


def even(x: Floats) -> Floats:  # (T, K) -> (T, K)
    """Inputs of the same length for all tokens: a few have some of thousands of times the others' energy, which drown
    all errors but those of a column or two."""
    scaled: Floats = x / _lengths(x)
    return scaled


def _lengths(x: Floats) -> Floats:  # (T, K) -> (T, 1)
    lengths: Floats = np.maximum(np.sqrt(np.einsum("tk,tk->t", x, x, dtype=np.float64)), 1e-30).astype(np.float32)
    return lengths[:, None]


def choose_texts(texts: Sequence[Ints], tokens: int, length: int = _LENGTH) -> list[Ints]:
    """The texts of probes: parts spread over the given ones."""
    count = min(max(tokens // length, 1), len(texts))
    places = np.linspace(0, len(texts) - 1, count).round().astype(int)
    return [texts[place][: max(tokens // count, 1)] for place in places]
