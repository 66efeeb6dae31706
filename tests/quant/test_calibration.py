"""Calibration against transformers' own layers, watched by hooks, and against experts computed token by token."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.bundle.parts import MoESpec, RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import UnsupportedArchitectureError, UsageError
from edgeinfer.export.architectures import find_architecture
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import read_config
from edgeinfer.quant.calibration import Calibration, CalibrationOptions, calibrate
from edgeinfer.quant.calibration_layers import LayerWalk
from edgeinfer.quant.statistics import InputStatistics, StatisticsAccumulator, output_error
from tests.factories import make_checkpoint
from tests.quant.samples import correlated_inputs, random_matrix, statistics_of
from tests.tables import each_row

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

TEXTS = [np.array(ids, np.int64) for ids in ([0, 17, 300, 5, 5, 42, 99, 123, 7, 250, 31], [8, 1, 2, 319], [42])]
FAMILIES = ["llama-biases", "llama-head-dim", "mistral", "qwen2-windows", "qwen3-tied-biases", "phi3-partial-rotary"]
# Which of transformers' modules multiply by ours; the first that a layer has.
MODULES = {
    "attn.qkv": ("self_attn.q_proj", "self_attn.qkv_proj"),
    "attn.out": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.gate_up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


class Recorder:
    """A visitor that keeps what it is shown and returns weights changed by a function."""

    def __init__(self, change: Callable[[Floats], Floats] = lambda weight: weight) -> None:
        self.change = change
        self.seen: dict[str, InputStatistics | None] = {}

    def embedding(self, rows: Floats) -> Floats:
        return self.change(rows)

    def matrix(self, name: str, weight: Floats, statistics: InputStatistics | None) -> Floats:
        self.seen[name] = statistics
        return self.change(weight)


class Tensors:
    """A reader of a dictionary."""

    def __init__(self, tensors: dict[str, Floats]) -> None:
        self.tensors = tensors

    def tensor(self, name: str) -> Floats:
        return self.tensors[name]

    def rows(self, name: str, rows: Ints) -> Floats:
        return self.tensors[name][rows]


def coarse(weight: Floats) -> Floats:
    """Weights rounded to sixteenths: far enough from their values to tell the streams apart."""
    return np.asarray(np.rint(weight * 16) / 16, np.float32)


def inputs_of(model: Any) -> Iterator[tuple[str, Floats]]:
    """What enters each of transformers' matrices, by our names, over all texts."""
    found: dict[str, list[Floats]] = {}

    def watch(module: torch.nn.Module, name: str) -> Any:
        return module.register_forward_hook(
            lambda _, given, __: found.setdefault(name, []).append(given[0][0].numpy().copy())
        )

    handles = [watch(model.lm_head, "head")]
    for index, layer in enumerate(model.model.layers):
        modules = dict(layer.named_modules())
        for ours, theirs in MODULES.items():
            handles.append(watch(next(modules[t] for t in theirs if t in modules), f"layers.{index}.{ours}"))
    with torch.no_grad():
        for text in TEXTS:
            model(torch.from_numpy(text)[None])
    for handle in handles:
        handle.remove()
    return ((name, np.concatenate(parts)) for name, parts in found.items())


def run(
    folder: Path, options: CalibrationOptions, change: Callable[[Floats], Floats] = lambda w: w
) -> tuple[Recorder, Calibration]:
    config = read_config(folder)
    family = find_architecture(config)
    with Checkpoint(folder) as checkpoint:
        spec = family.read(config, config.flag("tie_word_embeddings"))
        tensors = PlannedTensors(checkpoint, family.tensors(config, spec, checkpoint.names))
        recorder = Recorder(change)
        return recorder, calibrate(spec, tensors, TEXTS, recorder, options)


def assert_close(found: InputStatistics | None, inputs: Floats) -> None:
    assert found is not None and found.hessian is not None and found.count == len(inputs)
    moments = inputs.T.astype(np.float64) @ inputs / len(inputs)
    np.testing.assert_allclose(found.hessian, moments, atol=2e-5 * np.abs(moments).max())
    np.testing.assert_allclose(found.mean_square, np.diagonal(moments), atol=2e-5 * np.diagonal(moments).max())
    np.testing.assert_allclose(found.mean, inputs.mean(axis=0), atol=2e-5 * np.abs(inputs).max())


@each_row("name", FAMILIES)
def test_statistics_are_of_what_enters_transformers_matrices(tmp_path: Path, name: str) -> None:
    model = make_checkpoint(tmp_path, name)
    recorder, found = run(tmp_path, CalibrationOptions(streams="float"))
    seen = recorder.seen | {"head": found.head}
    theirs = dict(inputs_of(model))
    assert seen.keys() == theirs.keys()
    for matrix, inputs in theirs.items():
        assert_close(seen[matrix], inputs)
    assert found.tokens == 16


def round_weights(model: Any) -> None:
    """Rounds all matrices of a model of transformers; of a tied pair only once."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.from_numpy(coarse(parameter.numpy())))


@each_row("streams", ["quantized", "paired"])
def test_quantized_streams_see_what_quantized_layers_before_make(tmp_path: Path, streams: str) -> None:
    model = make_checkpoint(tmp_path, "llama")
    recorder, found = run(tmp_path, CalibrationOptions(streams), coarse)
    plain = dict(inputs_of(model))
    round_weights(model)
    for matrix, inputs in inputs_of(model):
        statistics = found.head if matrix == "head" else recorder.seen[matrix]
        assert_close(statistics, inputs)
        assert statistics is not None
        if streams == "quantized":
            assert statistics.cross is None
            continue
        cross = plain[matrix].T @ inputs / len(inputs)
        assert statistics.cross is not None and np.abs(inputs - plain[matrix]).max() > 1e-3
        np.testing.assert_allclose(statistics.cross, cross, atol=2e-5 * np.abs(cross).max())


def test_a_float_run_ignores_what_matrices_become(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    plain, changed = (run(tmp_path, CalibrationOptions("float"), change)[1] for change in (lambda w: w, np.zeros_like))
    np.testing.assert_array_equal(plain.head.mean_square, changed.head.mean_square)


def moe_model(moe: MoESpec, seed: int = 0) -> tuple[DecoderSpec, Tensors]:
    """One random layer with experts, whose attention adds nothing."""
    chance = np.random.default_rng(seed)
    width = 24

    def draw(*shape: int) -> Floats:
        return chance.normal(0, 0.3, shape).astype(np.float32)

    rope = RopeSpec("default", 1e4, 8)
    spec = DecoderSpec(320, width, 40, 1, 3, 3, 8, 64, 1e-6, rope, tied=True, moe=moe)
    inner = 2 * moe.expert_size if moe.gated else moe.expert_size
    tensors = {"embed": draw(320, width), "final_norm": draw(width), "layers.0.attn_norm": draw(width)}
    tensors |= {"layers.0.attn.qkv": draw(3 * width, width), "layers.0.attn.out": np.zeros((width, width), np.float32)}
    prefix = "layers.0.mlp"
    tensors |= {f"{prefix}_norm": 1 + draw(width), f"{prefix}.router": draw(moe.experts, width)}
    tensors |= {f"{prefix}.router_norm": 1 + draw(moe.experts), f"{prefix}.shared.gate": draw(1, width)}
    tensors |= {f"{prefix}.shared.gate_up": draw(2 * moe.shared_size, width)}
    tensors |= {f"{prefix}.shared.down": draw(width, moe.shared_size)}
    for expert in range(moe.experts):
        part = "gate_up" if moe.gated else "up"
        tensors[f"{prefix}.experts.{expert}.{part}"] = draw(inner, width)
        tensors[f"{prefix}.experts.{expert}.down"] = draw(width, moe.expert_size)
    return spec, Tensors(tensors)


def silu(x: Floats) -> Floats:
    return np.asarray(x / (1 + np.exp(-x)), np.float32)


def by_token(spec: DecoderSpec, tensors: Tensors) -> tuple[Floats, dict[str, list[Floats]]]:
    """States after the layer, and what enters each expert's matrices times its weight, token by token."""
    moe, prefix = spec.moe, "layers.0.mlp."
    assert moe is not None
    states, seen = [], dict[str, list[Floats]]()

    def feed(name: str, x: Floats, weight: np.float32, *, gated: bool) -> Floats:
        part = "gate_up" if gated else "up"
        product = tensors.tensors[f"{prefix}{name}.{part}"] @ x
        gate, up = np.split(product, 2) if gated else (product, np.float32(1))
        inner = silu(gate) * up
        seen.setdefault(f"{prefix}{name}.{part}", []).append(weight * x)
        seen.setdefault(f"{prefix}{name}.down", []).append(weight * inner)
        return np.asarray(weight * (tensors.tensors[f"{prefix}{name}.down"] @ inner))

    for token in np.concatenate(TEXTS):
        x = tensors.tensors["embed"][token]
        normed = x / np.sqrt(np.mean(x * x) + 1e-6) * tensors.tensors["layers.0.mlp_norm"]
        scores = tensors.tensors[f"{prefix}router"] @ normed
        if moe.router == "relu":
            kept = np.maximum(scores, 0)
            weights = kept / np.sqrt(np.mean(kept * kept) + 1e-6) * tensors.tensors[f"{prefix}router_norm"]
        else:
            powers = np.exp(scores) / np.exp(scores).sum()
            weights = np.where(powers >= np.sort(powers)[-moe.top_k], powers, 0)
            weights = weights / weights.sum() if moe.renormalize else weights
        state = x.copy()
        for expert in np.flatnonzero(weights):
            state += feed(f"experts.{expert}", normed, weights[expert], gated=moe.gated)
        if moe.shared_size:
            gate = 1 / (1 + np.exp(-tensors.tensors[f"{prefix}shared.gate"][0] @ normed)) if moe.shared_gate else 1
            state += feed("shared", normed, np.float32(gate), gated=True)
        states.append(state)
    return np.stack(states), seen


MIXTURES = {
    "renormalized": MoESpec(experts=6, top_k=2, expert_size=12),
    "not-renormalized-shared": MoESpec(5, 3, 12, shared_size=16, shared_gate=True, renormalize=False),
    "shared-without-gate": MoESpec(4, 1, 12, shared_size=8),
    "relu": MoESpec(7, 7, 12, router="relu", gated=False),
}


@each_row("name", MIXTURES)
def test_experts_are_shown_what_reaches_them(name: str) -> None:
    moe = MIXTURES[name]
    spec, tensors = moe_model(moe)
    recorder = Recorder()
    found = calibrate(spec, tensors, TEXTS, recorder, CalibrationOptions("paired"))
    states, seen = by_token(spec, tensors)
    for matrix, parts in seen.items():
        assert_close(recorder.seen[matrix], np.stack(parts))
    normed = states / np.sqrt(np.mean(states**2, axis=1, keepdims=True) + 1e-6) * tensors.tensors["final_norm"]
    assert_close(found.head, normed)
    (use,) = found.experts
    part = "gate_up" if moe.gated else "up"
    counts = [len(seen.get(f"layers.0.mlp.experts.{e}.{part}", [])) for e in range(moe.experts)]
    assert use.counts.tolist() == counts
    assert (use.weights[use.reached] != 0).all() and (use.weights[~use.reached] == 0).all()


def test_streams_that_choose_other_experts_are_related_on_the_quantized_ones_tokens() -> None:
    spec, tensors = moe_model(MIXTURES["renormalized"])
    recorder, plain = Recorder(coarse), Recorder()
    calibrate(spec, tensors, TEXTS, recorder, CalibrationOptions("paired"))
    calibrate(spec, tensors, TEXTS, plain, CalibrationOptions("float"))
    rounded = Tensors({n: coarse(t) if t.ndim == 2 and "router" not in n else t for n, t in tensors.tensors.items()})
    _, seen = by_token(spec, rounded)
    for matrix, parts in seen.items():
        if ".experts." in matrix:
            assert_close(recorder.seen[matrix], np.stack(parts))
    counts = [[s.count for n, s in r.seen.items() if s is not None and "expert" in n] for r in (recorder, plain)]
    assert counts[0] != counts[1], "the test is of no use where routing is the same"
    crosses = [s.cross for s in recorder.seen.values() if s is not None]
    assert all(c is not None and np.isfinite(c).all() for c in crosses)


def test_experts_that_no_token_reaches_are_named_and_shown_without_statistics() -> None:
    spec, tensors = moe_model(MIXTURES["renormalized"])
    tensors.tensors["layers.0.mlp.router"][4] = 0
    tensors.tensors["layers.0.mlp_norm"][:] = 1
    # Every other expert's score is above zero for every token.
    tensors.tensors["embed"][:, 0] = 100
    tensors.tensors["layers.0.mlp.router"][[0, 1, 2, 3, 5], 0] = 5
    recorder = Recorder()
    found = calibrate(spec, tensors, TEXTS, recorder)
    assert found.unused == ("layers.0.mlp.experts.4",)
    unseen = [name for name, statistics in recorder.seen.items() if statistics is None]
    assert unseen == ["layers.0.mlp.experts.4.gate_up", "layers.0.mlp.experts.4.down"]


@each_row("texts", [[], [np.zeros(0, np.int64)], [np.array([3, 320])], [np.array([-1])]])
def test_texts_that_cannot_be_run(texts: list[Ints]) -> None:
    spec, tensors = moe_model(MIXTURES["relu"])
    with pytest.raises(UsageError):
        calibrate(spec, tensors, texts, Recorder())


def test_impossible_streams() -> None:
    with pytest.raises(UsageError, match="paired"):
        CalibrationOptions("both")


class Generated:
    """A reader that makes a dense model's weights when they are asked for."""

    def __init__(self, spec: DecoderSpec) -> None:
        width, inner = spec.hidden_size, spec.intermediate_size
        self.shapes = {"qkv": (3 * width, width), "out": (width, width), "gate_up": (2 * inner, width)}
        self.shapes |= {"down": (width, inner), "embed": (spec.vocab_size, width)}
        self.width = width

    def tensor(self, name: str) -> Floats:
        shape = self.shapes.get(name.rpartition(".")[2], (self.width,))
        return np.full(shape, 1 / 64, np.float32)

    def rows(self, name: str, rows: Ints) -> Floats:
        return self.tensor(name)[rows]


def test_memory_does_not_grow_with_layers() -> None:
    def peak(layers: int) -> int:
        rope = RopeSpec("default", 1e4, 32)
        spec = DecoderSpec(320, 128, 512, layers, 4, 4, 32, 64, 1e-6, rope, tied=True)
        tracemalloc.start()
        calibrate(spec, Generated(spec), TEXTS, Forgetful())
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    # A layer has 1 MB of weights.
    assert peak(8) < peak(2) + 200_000


class Forgetful(Recorder):
    """A visitor that keeps nothing."""

    def matrix(self, name: str, weight: Floats, statistics: InputStatistics | None) -> Floats:
        return weight


def test_parts_that_calibration_would_leave_out_are_refused_by_name() -> None:
    spec = DecoderSpec(32, 16, 24, 2, 2, 1, 8, 64, 1e-6, RopeSpec("default", 1e4, 8), kv_sources=(0, 0))
    with pytest.raises(UnsupportedArchitectureError, match="with kv_sources"):
        LayerWalk(spec, Tensors({}).tensor, [4], lambda _, weight, __: weight, (False,), hessian=False)


@settings(max_examples=30, deadline=None)
@given(portions=st.lists(st.integers(0, 1500), min_size=1, max_size=4), k=st.integers(1, 40))
def test_moments_do_not_depend_on_portions(portions: list[int], k: int) -> None:
    x, other = correlated_inputs(sum(portions), k), correlated_inputs(sum(portions), k, 1)
    accumulator, start = StatisticsAccumulator(k, hessian=True, cross=True), 0
    for count in portions:
        accumulator.add(x[start : start + count], other[start : start + count])
        start += count
    result, count = accumulator.result(), max(len(x), 1)
    assert result.count == len(x)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(result.mean, exact.sum(axis=0) / count, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.mean_square, np.square(exact).sum(axis=0) / count, rtol=1e-4)
    assert result.hessian is not None and result.cross is not None
    np.testing.assert_allclose(result.hessian, exact.T @ exact / count, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(result.cross, other.T.astype(np.float64) @ exact / count, rtol=1e-3, atol=1e-3)


def test_small_inputs_count_beside_many_large_ones() -> None:
    accumulator = StatisticsAccumulator(1, hessian=True)
    accumulator.add(np.full((1, 1), 1e4, np.float32))
    for _ in range(1000):
        accumulator.add(np.ones((1, 1), np.float32))
    # A float32 sum would stay at 1e8, where its steps are 8.
    assert accumulator.result().mean_square[0] * 1001 == pytest.approx(1e8 + 1000, abs=20)


@each_row("bad", [np.nan, np.inf])
def test_activations_that_are_not_finite_are_refused(bad: float) -> None:
    accumulator, x = StatisticsAccumulator(3, hessian=False), np.ones((4, 3), np.float32)
    x[2, 1] = bad
    with pytest.raises(UsageError, match="not finite"):
        accumulator.add(x)
    with pytest.raises(UsageError, match="not finite"):
        accumulator.add(np.ones_like(x), x)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 20), k=st.integers(1, 30), seed=st.integers(0, 99))
def test_output_error_is_the_mean_over_tokens(n: int, k: int, seed: int) -> None:
    x, weight = correlated_inputs(200, k, seed), random_matrix(n, k, seed)
    other = weight + 0.1 * random_matrix(n, k, seed + 1)
    direct = np.square(x.astype(np.float64) @ (weight - other).T.astype(np.float64)).sum(axis=1).mean()
    assert output_error(weight, other, statistics_of(x)) == pytest.approx(direct, rel=1e-2)
    assert output_error(weight, weight, statistics_of(x)) == 0


def test_output_error_without_a_hessian_takes_inputs_as_uncorrelated() -> None:
    weight, other, x = random_matrix(5, 8), random_matrix(5, 8, 1), correlated_inputs(100, 8)
    difference = np.square(weight - other)
    assert output_error(weight, other) == pytest.approx(float(difference.sum()), rel=1e-5)
    diagonal = statistics_of(x, hessian=False)
    assert output_error(weight, other, diagonal) == pytest.approx(
        float((difference * diagonal.mean_square).sum()), rel=1e-5
    )


@each_row(
    ("change", "message"),
    [
        ({"mean_square": np.full(8, np.nan, np.float32)}, "not finite"),
        ({"mean_square": np.full(8, -1, np.float32)}, "not finite"),
        ({"hessian": np.full((8, 8), np.inf, np.float32)}, "not finite"),
        ({"cross": np.full((8, 8), np.nan, np.float32)}, "not finite"),
        ({"mean": np.zeros(7, np.float32)}, "do not fit"),
        ({"hessian": np.eye(9, dtype=np.float32)}, "do not fit"),
    ],
)
def test_wrong_statistics_are_refused(change: dict[str, np.ndarray], message: str) -> None:
    moments = {"mean_square": np.ones(8, np.float32), "mean": np.zeros(8, np.float32)}
    with pytest.raises(UsageError, match=message):
        InputStatistics(**{"count": 3, **moments, **change}).check(8)  # type: ignore[arg-type]
