"""Less compute as a caller meets it: what is labelled, refused, planned for, calibrated and kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.additions import Heads, add_heads
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import BundleError, CapabilityError, UsageError
from edgeinfer.core.results import Result
from tests.compute import even_costs
from tests.factories import make_bigram_bundle
from tests.speculation import known_costs, plain, random_bundle
from tests.tables import each_row

WAYS: dict[str, dict[str, Any]] = {
    "unified": {"compute": "unified", "compute_speedup": 1.4},
    "importance": {"compute": "importance", "compute_speedup": 1.2},
    "calibrated": {"compute": "calibrated", "compute_speedup": 1.2},
    "exit": {"compute": "exit", "exit_confidence": 0.02},
    "below": {"compute": "exit", "exit_confidence": 0.02, "skip_cache": "below"},
    "entropy": {"compute": "entropy", "compute_share": 0.4},
}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 5}
IDS = [5, 17, 80, 3, 44, 210, 9, 9, 101, 33]


@pytest.fixture(scope="module", autouse=True)
def costs() -> Iterator[None]:
    with even_costs(), known_costs():
        yield


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A large and a small random model with one tokenizer."""
    settings = {"num_hidden_layers": 5, "hidden_size": 128, "max_position_embeddings": 512}
    large = random_bundle(tmp_path_factory.mktemp("large"), **settings)
    return large, random_bundle(tmp_path_factory.mktemp("small"), seed=3, num_hidden_layers=2, hidden_size=128)


@pytest.fixture(scope="module")
def model(bundles: tuple[Path, Path]) -> Iterator[edgeinfer.Model]:
    large, small = bundles
    with edgeinfer.load(large, draft_model=small, context=160, threads=1, remember=False) as model:
        edgeinfer.tools.tune_skips(model, [IDS], evaluations=60)
        yield model


def asked(model: edgeinfer.Model, way: str, **options: Any) -> Result:
    return model.generate(IDS, **{"max_tokens": 40, "ignore_eos": True} | WAYS[way] | options)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_left_out_is_said(model: edgeinfer.Model, way: str) -> None:
    result = asked(model, way)
    use = result.compute
    assert use is not None and use.compute == WAYS[way]["compute"]
    assert not use.lossless and 0 < use.reduced <= use.tokens == 39 == len(result.token_ids) - 1
    assert result.speculation.rounds == 0
    told = result.to_dict()["compute"]
    assert told["lossless"] is False and told["reduced"] == use.reduced
    # The next reply rests on nothing that was left out.
    again = plain(model, [*IDS, *result.token_ids, 7], max_tokens=8)
    model.generate([1, 2, 3], max_tokens=1)
    assert plain(model, [*IDS, *result.token_ids, 7], max_tokens=8).token_ids == again.token_ids


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "way",
    [
        {"compute": "unified", "compute_speedup": 1.0},
        {"compute": "importance", "compute_speedup": 1.0},
        {"compute": "calibrated", "compute_speedup": 1.0},
        {"compute": "exit", "exit_confidence": 1.0},
        {"compute": "entropy", "compute_share": 1.0},
        {"compute": "entropy", "entropy_threshold": 0.0},
        {"compute": "unified", "compute_speedup": 3.0, "quality_floor": 0.0},
    ],
    ids=str,
)
def test_where_nothing_is_left_out_the_text_is_the_plain_one(
    model: edgeinfer.Model, way: dict[str, Any], options: dict[str, Any]
) -> None:
    expected = plain(model, IDS, max_tokens=30, **options)
    result = model.generate(IDS, max_tokens=30, **way, **options)
    assert result.token_ids == expected.token_ids and result.finish_reason == expected.finish_reason
    assert result.compute is not None and result.compute.lossless


@pytest.mark.parametrize("way", WAYS)
def test_other_options_go_with_it(model: edgeinfer.Model, way: str) -> None:
    seeded = [asked(model, way, **SAMPLED | {"seed": seed}).token_ids for seed in (1, 2)]
    assert seeded[0] != seeded[1]
    chosen = asked(model, way, choices=("a dog", "a cat"), ignore_eos=False)
    assert chosen.text in ("a dog", "a cat")
    chunks = list(model.stream(IDS, max_tokens=6, logprobs=2, ignore_eos=True, **WAYS[way]))
    assert sum(len(chunk.logprobs) for chunk in chunks) == 6
    stopped = asked(model, way, max_tokens=None)
    assert stopped.usage.total_tokens == model.context + 1


@each_row("way", WAYS)
def test_a_reply_that_is_cut_short_leaves_a_sound_cache(model: edgeinfer.Model, way: str) -> None:
    expected = plain(model, IDS, max_tokens=12).token_ids
    with model.stream(IDS, max_tokens=40, ignore_eos=True, **WAYS[way]) as stream:
        for _ in range(7):
            next(stream)
    assert plain(model, IDS, max_tokens=12).token_ids == expected


def test_a_paused_reply_goes_on(bundles: tuple[Path, Path]) -> None:
    large, small = bundles
    with edgeinfer.load(large, draft_model=small, context=96, threads=1, remember=False, prefix_cache="2MB") as model:
        for way in ("unified", "exit", "entropy"):
            with model.stream(IDS, max_tokens=20, ignore_eos=True, **WAYS[way]) as stream:
                for _ in range(5):
                    next(stream)
                assert stream.pause()
                other = plain(model, IDS[::-1], max_tokens=4)
                result = stream.complete()
            assert len(result.token_ids) == 20 and result.compute is not None and result.compute.tokens == 18
            assert plain(model, IDS[::-1], max_tokens=4).token_ids == other.token_ids


def test_texts_that_outgrow_the_context(bundles: tuple[Path, Path]) -> None:
    large, small = bundles
    with edgeinfer.load(large, draft_model=small, context=48, threads=1, remember=False, overflow="window") as model:
        for way in ("unified", "exit", "below", "entropy"):
            result = asked(model, way, max_tokens=90)
            assert len(result.token_ids) == 90 and result.overflow.events > 0
            assert result.compute is not None and result.compute.reduced > 20


@each_row(
    ("options", "message"),
    [
        ({"compute": "unified", "speculation": "copy"}, "cannot be combined"),
        ({"compute": "routers"}, "no routers"),
        ({"compute": "exit", "exit_layer": 5}, "no exit after layer 5"),
        ({"compute": "entropy", "compute_share": 2}, "out of range"),
        ({"compute": "half"}, "Unknown compute"),
    ],
)
def test_what_cannot_be_had_is_refused(model: edgeinfer.Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        model.generate(IDS, **options)
    assert caught.value.hint
    assert len(plain(model, IDS, max_tokens=3).token_ids) == 3  # the model is free again


def test_a_model_without_what_it_takes(bundles: tuple[Path, Path], tmp_path: Path) -> None:
    with edgeinfer.load(bundles[0], context=64, threads=1, remember=False) as model:
        with pytest.raises(UsageError, match="draft model"):
            model.generate(IDS, compute="entropy")
        with pytest.raises(UsageError, match="no calibrated sets"):
            model.generate(IDS, compute="calibrated")
        with pytest.raises(UsageError):
            edgeinfer.tools.tune_entropy(model, [IDS])
    with edgeinfer.load(make_bigram_bundle(tmp_path / "bigram"), threads=1, remember=False) as model:
        for way in ("unified", "exit"):
            with pytest.raises(CapabilityError, match="cannot skip layers"):
                model.generate(IDS, **WAYS[way])


def test_any_pair_of_backends_takes_turns(bundles: tuple[Path, Path], tmp_path: Path) -> None:
    """Also a target that can neither skip layers nor resume."""
    large = make_bigram_bundle(tmp_path / "bigram")
    with edgeinfer.load(large, draft_model=bundles[1], context=100, threads=1, remember=False) as model:
        result = model.generate(IDS, max_tokens=40, ignore_eos=True, compute="entropy", entropy_stay=2)
        assert result.compute is not None and 0 < result.compute.reduced < 39 and result.compute.switches > 1


def test_the_draft_model_is_planned_for_where_nobody_drafts(bundles: tuple[Path, Path]) -> None:
    large, small = bundles
    options: dict[str, Any] = {"context": 64, "threads": 1, "remember": False, "speculation": "off"}
    with edgeinfer.load(large, draft_model=small, **options) as model:
        assert model.plan.terms["draft_model"] > 0 and model.plan.draft_max == 0
        assert asked(model, "entropy", max_tokens=20).compute is not None
    assert "draft_model" not in edgeinfer.plan(large, **options).terms


def test_routers_of_the_bundle_choose(tmp_path: Path) -> None:
    bundle = random_bundle(tmp_path, num_hidden_layers=5, hidden_size=64)
    sizes = open_bundle(bundle).manifest.geometry
    bias = np.array([-5, 5, -5, 5, -5], np.float32)
    weight = np.zeros((sizes.num_layers, sizes.hidden_size), np.float32)
    add_heads(bundle, Heads("routers", {"weight": weight, "bias": bias}))
    with edgeinfer.load(bundle, context=64, threads=1, remember=False) as model:
        use = model.generate(IDS, max_tokens=6, ignore_eos=True, compute="routers", compute_speedup=4.0).compute
        assert use is not None
        # First and last stay.
        assert use.layer_mask == (True,) * 4 + (False,) * 2 + (True,) * 4
    with pytest.raises(BundleError):
        add_heads(bundle, Heads("routers", {"weight": weight[:2], "bias": bias}))


def test_sets_are_ordered_and_kept(bundles: tuple[Path, Path], own_cache: Path) -> None:
    large, small = bundles
    options: dict[str, Any] = {"context": 128, "threads": 1}
    with edgeinfer.load(large, draft_model=small, **options) as model:
        levels = edgeinfer.tools.tune_skips(model, [IDS, IDS[::-1]], evaluations=60)
        facts = edgeinfer.tools.tune_entropy(model, [IDS])
        expected = asked(model, "calibrated", max_tokens=8)
    assert all(levels[0].layer_mask) and levels[0].divergence == 0
    assert [level.divergence for level in levels] == sorted(level.divergence for level in levels)
    assert [level.speedup for level in levels] == sorted(level.speedup for level in levels)
    assert facts.tokens == 48
    thresholds = [facts.thresholds[share] for share in sorted(facts.thresholds)]
    assert thresholds == sorted(thresholds, reverse=True)
    with edgeinfer.load(large, draft_model=small, **options) as model:
        again = asked(model, "calibrated", max_tokens=8)
        assert again.compute is not None and expected.compute is not None
        assert again.compute.layer_mask == expected.compute.layer_mask
        assert again.token_ids == expected.token_ids


def test_readings_compare_with_the_whole_model(model: edgeinfer.Model) -> None:
    reply = plain(model, IDS, max_tokens=30).token_ids
    whole = edgeinfer.tools.read_reply(model, IDS, reply)
    assert whole.use is None and not whole.divergences.any() and len(whole.logprobs) == 29
    scores = model.score([*IDS, *reply])
    np.testing.assert_allclose(whole.logprobs, scores.logprobs[len(IDS) :], atol=1e-6)
    for way in ("unified", "entropy"):
        reading = edgeinfer.tools.read_reply(model, IDS, reply, **WAYS[way])
        assert reading.use is not None and reading.use.tokens == 29
        assert reading.divergences.mean() > 0.01
        assert np.count_nonzero(reading.divergences > 1e-9) <= reading.use.reduced
    with pytest.raises(UsageError):
        edgeinfer.tools.read_reply(model, IDS, reply[:1])


@each_row("way", ["unified", "calibrated", "exit", "entropy"])
def test_a_floor_is_kept_on_other_texts(model: edgeinfer.Model, way: str) -> None:
    """Random models diverge by nats: a floor far above that is met with everything reduced, one far below with
    nothing."""
    random = np.random.default_rng(7)
    texts = [random.integers(2, 300, 60).tolist() for _ in range(4)]
    kept = {}
    for floor in (1e-3, 50.0):
        readings = [
            edgeinfer.tools.read_reply(model, text[:20], text[20:], quality_floor=floor, **WAYS[way]) for text in texts
        ]
        assert np.concatenate([reading.divergences for reading in readings]).mean() <= floor
        kept[floor] = sum(reading.use.reduced for reading in readings if reading.use is not None)
    assert kept[1e-3] < kept[50.0]


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> tuple[str, str]:
    assert main([*map(str, arguments)]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_command_line(bundles: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    large, small = bundles
    model = ("-m", large, "--draft-model", small, "-c", "128", "-t", "1")
    out, _ = run(capsys, "tune", *model, "--skip", "--entropy", "--evaluations", "20", "--json")
    found = json.loads(out)
    assert found["skip"][0]["divergence"] == 0 and found["entropy"]["tokens"] > 0
    out, _ = run(capsys, "tune", *model, "--skip", "--entropy", "--evaluations", "20")
    assert "blocks to skip" in out and "#####" in out and "50%" in out
    text = ("run", *model, "-p", "Once upon", "-n", "12", "-v")
    _, err = run(capsys, *text, "--compute", "calibrated", "--compute-speedup", "1.3", "--quality-floor", "90")
    assert "lossy" in err and "by calibrated" in err and "nats" in err
    _, err = run(capsys, *text, "--compute", "exit", "--exit-layer", "2", "--exit-confidence", "1")
    assert "lossy" not in err
    _, err = run(capsys, *text, "--compute", "entropy", "--speculation", "copy", code=2)
    assert "speculation cannot be combined" in err
    _, err = run(capsys, "tune", "-m", large, "--entropy", code=2)
    assert "--draft-model" in err
