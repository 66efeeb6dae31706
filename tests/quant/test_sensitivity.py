"""What probes measure, against models whose weights are rounded for real; and plans made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.architectures import find_architecture
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import read_config
from edgeinfer.nn.arithmetic import rms_norm
from edgeinfer.quant import probing
from edgeinfer.quant.calibration_layers import LayerWalk
from edgeinfer.quant.policy import QuantScheme
from edgeinfer.quant.probing import expert_group, joint_factor, probe_decoder, rounded
from edgeinfer.quant.sensitivity import _error_ratios, measure_costs
from tests.factories import make_checkpoint
from tests.recorded import check_recorded
from tests.tables import each_row

Floats = NDArray[np.float32]
Tensors = Callable[[str], Floats]

TEXTS = [np.array(ids, np.int64) for ids in ([0, 17, 300, 5, 5, 42, 99, 123, 7, 250, 31], [8, 1, 2, 319])]


@contextmanager
def opened(folder: Path) -> Iterator[tuple[DecoderSpec, Tensors, list[str]]]:
    config = read_config(folder)
    family = find_architecture(config)
    with Checkpoint(folder) as checkpoint:
        spec = family.read(config, config.flag("tie_word_embeddings"))
        plans = family.tensors(config, spec, checkpoint.names)
        planned = PlannedTensors(checkpoint, plans)

        def tensor(name: str) -> Floats:
            return planned.tensor("embed" if name == "head" and spec.tied else name)

        yield spec, tensor, [plan.name for plan in plans]


def log_probabilities(logits: Any) -> NDArray[np.float64]:
    shifted = np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found


def divergence(reference: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float((np.exp(reference) * (reference - other)).sum(axis=-1).mean())


def walked(spec: DecoderSpec, tensors: Tensors) -> NDArray[np.float64]:
    """Log probabilities after every token, computed with given weights one matrix after the other."""
    walk = LayerWalk(spec, tensors, [len(text) for text in TEXTS], lambda _, w, __: w, (False,), hessian=False)
    states: tuple[Floats, ...] = (tensors("embed")[np.concatenate(TEXTS)].copy(),)
    for layer in range(spec.num_layers):
        states = walk.run(layer, states)
    final = rms_norm(states[0], tensors("final_norm"), spec.norm_eps)
    return log_probabilities(final @ tensors("head").T)


@each_row("arch", ["llama-tied", "qwen2", "qwen2-moe", "qwen3-moe-tied-odd"])
def test_probes_measure_what_rounding_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    monkeypatch.setattr(probing, "_LIKELY", 1 << 20)  # the whole vocabulary
    monkeypatch.setattr(probing, "_HUGE", 1.0)  # every column is rounded
    make_checkpoint(tmp_path / "tiny", arch)
    with opened(tmp_path / "tiny") as (spec, tensors, names):
        probes = probe_decoder(spec, tensors, TEXTS, lambda *_: None)
        reference = walked(spec, tensors)
        for group, probe in probes.items():

            def coarse(name: str, group: str = group) -> Floats:
                weight = tensors(name)
                return rounded(weight) if expert_group(name) == group else weight

            assert probe.kl == pytest.approx(divergence(reference, walked(spec, coarse)), rel=2e-3, abs=1e-7), group
        assert {name for probe in probes.values() for name in probe.errors} <= {*names, "head"}
        whole = divergence(reference, walked(spec, lambda name: all_rounded(tensors(name))))
        said = sum(probe.kl for probe in probes.values()) * (7 / 15) ** 2
        assert joint_factor(spec, tensors, TEXTS, probes) == pytest.approx(whole / said, rel=2e-3)


def all_rounded(tensor: Floats) -> Floats:
    return rounded(tensor, 15.0) if tensor.ndim == 2 and len(tensor) > 8 else tensor


def test_a_sample_of_the_vocabulary_stands_for_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "tiny", "qwen2", vocab_size=4096)
    with opened(tmp_path / "tiny") as (spec, tensors, _):
        some = probe_decoder(spec, tensors, TEXTS, lambda *_: None)
        monkeypatch.setattr(probing, "_LIKELY", 1 << 20)
        for name, probe in probe_decoder(spec, tensors, TEXTS, lambda *_: None).items():
            assert some[name].kl == pytest.approx(probe.kl, rel=0.3), name


def test_probes_agree_with_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_LIKELY", 1 << 20)
    monkeypatch.setattr(probing, "_HUGE", 1.0)
    model = make_checkpoint(tmp_path / "tiny", "llama-tied")
    with opened(tmp_path / "tiny") as (spec, tensors, _):
        probe = probe_decoder(spec, tensors, TEXTS, lambda *_: None)["layers.1.mlp.down"]

    def logits() -> NDArray[np.float64]:
        with torch.no_grad():
            return np.concatenate([model(torch.from_numpy(text)[None]).logits[0].numpy() for text in TEXTS])

    before = log_probabilities(logits())
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = torch.from_numpy(rounded(weight.detach().numpy()))
    assert probe.kl == pytest.approx(divergence(before, log_probabilities(logits())), rel=2e-3)


def test_costs_fall_with_bits(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "tiny", "llama-tied", hidden_size=128, intermediate_size=160)
    schemes = [QuantScheme(2, 32), QuantScheme(4, 32), QuantScheme(8, 32), None]
    steps: list[tuple[str, int, int]] = []
    with opened(tmp_path / "tiny") as (spec, tensors, names):
        matrices = [name for name in names if tensors(name).ndim == 2]
        costs = measure_costs(spec, tensors, TEXTS, dict.fromkeys(matrices, schemes), lambda *step: steps.append(step))
    for found in costs.values():
        assert [c.scheme for c in found] == schemes
        assert found[0].cost > found[1].cost > found[2].cost > found[3].cost == 0
    assert [(done, total) for _, done, total in steps] == [(1, 3), (2, 3), (3, 3)]
    # Where a text decides, another CPU's matrix product may move a weight by a step of its grid.
    check_recorded("sensitivity", {name: [c.cost for c in found] for name, found in costs.items()}, rel=5e-2)


def test_costs_do_not_hang_on_one_column_of_huge_inputs() -> None:
    chance = np.random.default_rng(0)
    rows, x = chance.standard_normal((24, 256)).astype(np.float32), chance.standard_normal((64, 256)).astype(np.float32)
    schemes = [QuantScheme.of_kind(kind) for kind in ("Q3_K", "Q4_K", "Q5_K", "Q6_K")]
    usual = _error_ratios(rows, x, schemes, 1.0)
    x[0, 3] = 3000  # a first token's
    assert _error_ratios(rows, x, schemes, 1.0) == pytest.approx(usual, rel=1)


def test_an_expert_that_no_token_reaches_costs_nothing(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "tiny", "qwen3-moe")
    with opened(tmp_path / "tiny") as (spec, tensors, names):
        matrices = [name for name in names if tensors(name).ndim == 2 and not name.endswith(".router")]
        # One token at the most reaches some of six experts only.
        costs = measure_costs(spec, tensors, [TEXTS[0][:1]], {name: [QuantScheme(2, 32)] for name in matrices})
    experts = [found[0].cost for name, found in costs.items() if ".experts." in name]
    assert 0 < sum(cost == 0 for cost in experts) < len(experts)
